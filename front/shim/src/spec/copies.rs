//! Bind mounts of the host's files. A microVM shares no directories with its host, so it gets
//! copies of what it cannot change anyway: read-only files, and those that tell a container its
//! name and the names of others, which container engines mount writable.

use std::path::Path;

use slipway_sandbox_api::copies::Copies;
use slipway_sandbox_api::v1;

use super::oci::Mount;

/// Files that container engines make for each container, and mount writable.
const NAMES: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];

/// Returns whether `mount` shows a file or a directory of the host.
pub fn is_bind(mount: &Mount) -> bool {
    has(mount, "bind") || has(mount, "rbind") || mount.kind == "bind"
}

/// Checks a bind mount. Reads nothing.
///
/// # Errors
/// One line: the mount is writable.
pub fn check(mount: &Mount) -> Result<(), String> {
    if has(mount, "ro") || NAMES.contains(&mount.destination.as_str()) {
        return Ok(());
    }
    Err(refused(
        mount,
        "a microVM shares no directories with its host; files that are mounted read-only (`ro`) \
         are copied",
    ))
}

/// Reads the files of all bind mounts. A later mount takes the place of an earlier one.
///
/// # Errors
/// One line: a file cannot be read, or they are too large.
pub fn read(mounts: &[Mount]) -> Result<Vec<v1::File>, String> {
    let mut copies = Copies::default();
    for mount in mounts.iter().filter(|mount| is_bind(mount)) {
        let added = copies.add(Path::new(&mount.source), &mount.destination);
        added.map_err(|error| refused(mount, &error.to_string()))?;
    }
    Ok(copies.into_files())
}

fn refused(mount: &Mount, reason: &str) -> String {
    let Mount { source, destination, .. } = mount;
    format!("the host's {source} cannot be mounted at {destination}: {reason}")
}

fn has(mount: &Mount, option: &str) -> bool {
    mount.options.iter().any(|one| one == option)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mount(source: &Path, destination: &str, options: &[&str]) -> Mount {
        let (source, destination) = (source.display().to_string(), destination.to_owned());
        let options = options.iter().map(|&one| one.to_owned()).collect();
        Mount { source, destination, options, kind: "bind".to_owned() }
    }

    #[test]
    fn read_only_files_and_those_of_names_are_copied() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["a", "b"] {
            std::fs::write(path(name), name).unwrap();
        }
        let mounts = [
            mount(&path("a"), "/etc/hosts", &["rbind", "rw"]),
            mount(dir.path(), "/etc/app", &["rbind", "ro"]),
            mount(&path("b"), "/etc/hosts", &["bind", "ro"]),
        ];
        mounts.iter().try_for_each(check).unwrap();
        let files = read(&mounts).unwrap();
        let files: Vec<_> = files.iter().map(|f| (f.path.as_str(), &f.content[..])).collect();
        let expected: [(&str, &[u8]); 3] =
            [("/etc/app/a", b"a"), ("/etc/app/b", b"b"), ("/etc/hosts", b"b")];
        assert_eq!(files, expected);
    }

    #[test]
    fn a_writable_directory_is_refused_with_the_reason() {
        let refused = check(&mount(Path::new("/srv"), "/data", &["rbind"])).unwrap_err();
        assert!(refused.starts_with("the host's /srv cannot be mounted at /data: "), "{refused}");
        let missing = read(&[mount(Path::new("/no/such"), "/etc/hosts", &["ro"])]).unwrap_err();
        assert!(missing.contains("cannot read /no/such"), "{missing}");
    }
}
