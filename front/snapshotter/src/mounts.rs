//! Mounts of a snapshot, in the forms of containerd's overlayfs snapshotter.

use std::path::{Path, PathBuf};

use crate::folders::Folders;
use crate::record::{Chain, SnapshotKind};
use crate::v1::Mount;

/// The file that is there if the kernel's overlayfs knows the option `index`.
const INDEX: &str = "/sys/module/overlay/parameters/index";

/// Returns the options that all overlays have.
pub fn common() -> Vec<String> {
    let knows = Path::new(INDEX).exists();
    knows.then(|| "index=off".to_owned()).into_iter().collect()
}

/// Returns the mounts of an active snapshot or a view: a bind mount of one directory, or an overlay
/// of several, with the options `common` beside its own.
pub fn mounts(folders: &Folders, chain: &Chain, common: &[String]) -> Vec<Mount> {
    let is_view = chain.kind != SnapshotKind::Active;
    let mount = match chain.parents.as_slice() {
        [] => bind(&folders.files(chain.id), is_view),
        [only] if is_view => bind(&folders.files(*only), true),
        parents => overlay(folders, chain, parents, common),
    };
    vec![mount]
}

fn bind(source: &Path, is_read_only: bool) -> Mount {
    let access = if is_read_only { "ro" } else { "rw" };
    Mount {
        r#type: "bind".to_owned(),
        source: text(source),
        target: String::new(),
        options: vec![access.to_owned(), "rbind".to_owned()],
    }
}

fn overlay(folders: &Folders, chain: &Chain, parents: &[u64], common: &[String]) -> Mount {
    let mut options = Vec::new();
    if chain.kind == SnapshotKind::Active {
        options.push(format!("workdir={}", text(&folders.work(chain.id))));
        options.push(format!("upperdir={}", text(&folders.files(chain.id))));
    }
    let lower: Vec<_> = parents.iter().map(|id| text(&folders.files(*id))).collect();
    options.push(format!("lowerdir={}", lower.join(":")));
    options.extend_from_slice(common);
    Mount {
        r#type: "overlay".to_owned(),
        source: "overlay".to_owned(),
        target: String::new(),
        options,
    }
}

/// Returns a path as text: the root is UTF-8, and the rest are numbers and names.
fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

/// Checks that the directories below `root` can be named in mount options.
///
/// # Errors
/// One line.
pub fn check_root(root: &Path) -> Result<PathBuf, String> {
    let root = std::path::absolute(root).map_err(|error| error.to_string())?;
    let shown = root.display();
    match root.to_str() {
        Some(text) if !text.contains([',', ':', '\\']) => Ok(root),
        Some(_) => Err(format!("--root {shown}: overlayfs takes no path with ',', ':' or '\\'")),
        None => Err(format!("--root {shown}: the path is not UTF-8")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_directory_is_bound_and_several_are_an_overlay() {
        let root = tempfile::tempdir().unwrap();
        let folders = Folders::open(root.path()).unwrap();
        let common = ["index=off".to_owned()];
        let at = |id: u64, name: &str| {
            format!("{}/snapshots/{id}/{name}", root.path().to_str().unwrap())
        };
        let of = |kind, parents: &[u64]| {
            let chain = Chain { id: 9, kind, parents: parents.to_vec() };
            let mut mounts = mounts(&folders, &chain, &common);
            assert_eq!(mounts.len(), 1);
            mounts.remove(0)
        };
        let first = of(SnapshotKind::Active, &[]);
        assert_eq!((first.r#type.as_str(), first.source), ("bind", at(9, "fs")));
        assert_eq!(first.options, ["rw", "rbind"]);
        let view = of(SnapshotKind::View, &[3]);
        assert_eq!((view.r#type.as_str(), view.source), ("bind", at(3, "fs")));
        assert_eq!(view.options, ["ro", "rbind"]);
        let lower = format!("lowerdir={}:{}", at(3, "fs"), at(1, "fs"));
        assert_eq!(
            of(SnapshotKind::View, &[3, 1]).options,
            [lower.clone(), "index=off".to_owned()]
        );
        let writable = of(SnapshotKind::Active, &[3, 1]);
        assert_eq!(writable.r#type, "overlay");
        let upper = [format!("workdir={}", at(9, "work")), format!("upperdir={}", at(9, "fs"))];
        let [work, upper] = upper;
        assert_eq!(writable.options, [work, upper, lower, "index=off".to_owned()]);
    }

    #[test]
    fn roots_that_mount_options_cannot_name_are_refused() {
        assert!(check_root(Path::new("/var/lib/x")).is_ok());
        for bad in ["/a,b", "/a:b", "/a\\b"] {
            assert!(check_root(Path::new(bad)).unwrap_err().contains("overlayfs"), "{bad}");
        }
    }
}
