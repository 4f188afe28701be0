//! Links on the way to archives and to the files of layouts. No tool is needed.

use std::os::unix::fs::{lchown, symlink};
use std::path::Path;
use std::sync::Arc;

use super::support::*;
use crate::{Cache, Image, Limits, NameConflict, Result, Silent, Source};

const NOBODY: u32 = 65534;

async fn import(cache: &Cache, source: Source) -> Result<Image> {
    cache.import(&source, None, NameConflict::Refuse, Arc::new(Silent)).await
}

async fn refusal(cache: &Cache, source: Source) -> String {
    import(cache, source).await.unwrap_err().to_string()
}

/// Moves the file at `path` away and leaves a link to it.
fn link_to(path: &Path) {
    let moved = path.with_extension("moved");
    std::fs::rename(path, &moved).unwrap();
    symlink(&moved, path).unwrap();
}

#[tokio::test]
async fn archives_and_layouts_are_reached_through_no_link_of_other_users_as_root() {
    const NAME: &str = "archives_and_layouts_are_reached_through_no_link_of_other_users_as_root";
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("c"), Limits::default()).unwrap();
    let layout = Layout::of(&[gzip(&Tar::new().file("f", "1").end())]);
    let at = |name: &str| layout.path().join(name);
    let folder = dir.path().join("folder");
    symlink(layout.path(), &folder).unwrap();
    link_to(&at("index.json"));
    link_to(&at("blobs"));
    let oci = || Source::OciLayout(folder.clone(), None);
    import(&cache, oci()).await.unwrap();
    let archive = dir.path().join("archive");
    std::fs::write(&archive, Tar::new().file("f", "1").end()).unwrap();
    link_to(&archive);
    let archives = || {
        [Source::OciArchive(archive.clone(), None), Source::DockerArchive(archive.clone(), None)]
    };
    for source in archives() {
        let said = refusal(&cache, source).await;
        assert!(said.contains("is missing"), "{said}");
    }
    if !rustix::process::geteuid().is_root() {
        return skip(NAME, "root to act as another user");
    }
    lchown(&archive, Some(NOBODY), None).unwrap();
    for source in archives() {
        let said = refusal(&cache, source).await;
        assert!(said.contains("a link of user 65534"), "{said}");
    }
    for link in [at("index.json"), at("blobs"), folder.clone()] {
        lchown(&link, Some(NOBODY), None).unwrap();
        let said = refusal(&cache, oci()).await;
        assert!(said.contains("a link of user 65534") && !said.contains('\n'), "{said}");
        lchown(&link, Some(0), None).unwrap();
    }
    import(&cache, oci()).await.unwrap();
}
