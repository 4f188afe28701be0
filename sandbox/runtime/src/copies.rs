//! Files that a container has in place of its image's: copies of its user's.
//!
//! They are in the daemon's memory until the container is created, and never on the host's disk:
//! they may be secrets. A daemon that ends before that takes the start with it.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use slipway_agent_protocol::v1::{File, PutFilesRequest};
use slipway_sandbox_api::copies::{MOST, MOST_BYTES};

use crate::record::SandboxState;
use crate::target::Target;
use crate::{Error, Result, v1};

/// The longest path in bytes.
const LONGEST: usize = 1024;
/// Directories in which the container's own file systems are.
pub(crate) const SYSTEM: [&str; 3] = ["/dev", "/proc", "/sys"];

/// Checks the files of a new sandbox. Returns them for the agent.
///
/// # Errors
/// [`Error::Invalid`], which names the file.
pub(crate) fn check(files: &[v1::File]) -> Result<Vec<File>> {
    let bytes: usize = files.iter().map(|file| file.content.len()).sum();
    if files.len() > MOST || bytes > MOST_BYTES {
        let (count, kib) = (files.len(), bytes.div_ceil(1024));
        return Err(Error::Invalid(format!(
            "{count} files with {kib} KiB are too many to copy into a container: at most {MOST} \
             with {} KiB; a volume holds more",
            MOST_BYTES >> 10
        )));
    }
    let mut paths = BTreeSet::new();
    files.iter().try_for_each(|file| {
        let reason = match is_path(&file.path) {
            Err(reason) => reason,
            Ok(()) if !is_sound(file) => "the link has a content, or is too long",
            Ok(()) if !paths.insert(&file.path) => "there are two with this path",
            Ok(()) => return Ok(()),
        };
        Err(Error::Invalid(format!(
            "cannot copy a file to {:?} in a container: {reason}",
            file.path
        )))
    })?;
    let converted = files.iter().map(|file| File {
        path: file.path.clone(),
        content: file.content.clone(),
        mode: file.mode & 0o777,
        uid: file.uid,
        gid: file.gid,
        link: file.link.clone(),
    });
    Ok(converted.collect())
}

/// Puts files into a container that runs, and then removes files.
///
/// # Errors
/// [`Error::Invalid`], which names the file; [`Error::WrongState`] if the container does not run;
/// [`Error::Agent`] if the guest refuses. Files before the one that was refused are in place.
pub(crate) async fn put(target: &Target, request: &v1::PutFilesRequest) -> Result<()> {
    target.has_process()?;
    if target.container.state() != SandboxState::Running {
        return Err(target.wrong_state("files of a container that runs can be changed"));
    }
    let (files, removed) = (check(&request.files)?, check_removed(&request.removed)?);
    let id = target.container.name.clone();
    let request = PutFilesRequest { id, files, removed };
    let agent = target.sandbox.agent()?;
    agent.call(|mut client| async move { client.put_files(request).await }).await?;
    Ok(())
}

fn check_removed(paths: &[String]) -> Result<Vec<String>> {
    if paths.len() > MOST {
        let count = paths.len();
        return Err(Error::Invalid(format!(
            "{count} files to remove are too many: at most {MOST}"
        )));
    }
    paths.iter().try_for_each(|path| {
        is_path(path).map_err(|reason| {
            Error::Invalid(format!("cannot remove {path:?} from a container: {reason}"))
        })
    })?;
    Ok(paths.to_vec())
}

/// Returns whether the file has a content or is a link, and not both, and the link can exist.
fn is_sound(file: &v1::File) -> bool {
    let link = &file.link;
    link.is_empty() || (file.content.is_empty() && link.len() <= LONGEST && !link.contains('\0'))
}

/// Checks that `path` names a file that is in no file system of the container's own.
pub(crate) fn is_path(path: &str) -> std::result::Result<(), &'static str> {
    is_plain(path)?;
    if SYSTEM.iter().any(|one| Path::new(path).starts_with(one)) {
        return Err("a file system of the container's own is there");
    }
    Ok(())
}

/// Checks that `path` names a file: absolute, with plain names only.
pub(crate) fn is_plain(path: &str) -> std::result::Result<(), &'static str> {
    let mut parts = Path::new(path).components();
    if parts.next() != Some(Component::RootDir) {
        return Err("not an absolute path");
    }
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    let is_file = parts.clone().next().is_some() && !path.ends_with('/');
    if !is_file || !parts.all(plain) || path.contains('\0') || path.len() > LONGEST {
        return Err("not the path of a file");
    }
    Ok(())
}

/// Checks the path of a container's termination message. It may be in the container's own `/dev`,
/// where Kubernetes has it.
pub(crate) fn message_path(path: &str) -> Result<String> {
    let checked = match path.starts_with("/dev/") {
        _ if path.is_empty() => Ok(()),
        true => is_plain(path),
        false => is_path(path),
    };
    let refused =
        |reason| Error::Invalid(format!("a termination message cannot be at {path:?}: {reason}"));
    checked.map(|()| path.to_owned()).map_err(refused)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, bytes: usize) -> v1::File {
        let content = vec![1; bytes];
        v1::File { path: path.to_owned(), content, mode: 0o4755, ..v1::File::default() }
    }

    #[test]
    fn files_keep_path_content_and_permission_bits() {
        let checked = check(&[file("/etc/hosts", 3), file("/a", MOST_BYTES - 3)]).unwrap();
        let (path, content) = ("/etc/hosts".to_owned(), vec![1; 3]);
        let first = File { path, content, mode: 0o755, ..File::default() };
        assert_eq!((checked.len(), &checked[0]), (2, &first));
    }

    #[test]
    fn a_file_that_cannot_be_is_refused_by_its_path() {
        let long = format!("/{}", "a".repeat(LONGEST));
        for path in [
            "",
            "etc",
            "/",
            "/etc/",
            "/etc/../x",
            "/dev/null",
            "/proc/sys/x",
            "/sys",
            "/a\0b",
            &long,
        ] {
            let refused = check(&[file(path, 1)]).unwrap_err().to_string();
            assert!(refused.contains("cannot copy a file to"), "{path}: {refused}");
        }
        check(&[file("/device", 1), file("/etc/a..b", 1)]).unwrap();
        let twice = check(&[file("/a", 1), file("/a", 2)]).unwrap_err().to_string();
        assert!(twice.contains("two with this path"), "{twice}");
    }

    #[test]
    fn what_is_too_much_is_refused_with_the_limit() {
        let much = check(&[file("/a", MOST_BYTES), file("/b", 1)]).unwrap_err().to_string();
        assert!(much.contains("2 files with 1025 KiB") && much.contains("1024 KiB"), "{much}");
        let many: Vec<_> = (0..=MOST).map(|number| file(&format!("/{number}"), 0)).collect();
        assert!(check(&many).unwrap_err().to_string().contains("1025 files"));
    }

    #[test]
    fn a_termination_message_is_in_a_file_of_the_root_or_of_dev() {
        for path in ["", "/dev/termination-log", "/dev/null", "/dev/shm/log", "/var/log/end"] {
            assert_eq!(message_path(path).unwrap(), path);
        }
        let long = format!("/dev/{}", "a".repeat(2000));
        let paths = ["log", "/", "/dev", "/dev/", "/dev/../etc", "/dev/a\0b", "/proc/1/x", &long];
        for path in paths {
            let refused = message_path(path).unwrap_err().to_string();
            assert!(refused.contains("termination message"), "{path}: {refused}");
        }
    }
}
