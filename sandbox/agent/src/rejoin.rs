//! A container of a machine that was saved gets the names of the sandbox that it goes on in.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::fs::{AtFlags, FileType, Stat, statat};
use rustix::io::Errno;
use rustix::thread::{ThreadNameSpaceType, move_into_thread_name_spaces};
use slipway_agent_protocol::v1::{File, RejoinRequest};

use crate::{copies, init};

/// The permission bits of a file that the container has no more.
const MODE: u32 = 0o644;

/// Sets the host name of a container, and writes the files of /etc with its names and its machine
/// id as for a new container: those that exist and are no regular files stay, and so do those in
/// `others`. `process` is a pidfd of one of the container's.
///
/// # Errors
/// The kernel refuses the name, or the first file that could not be written. All others were.
pub async fn rename(process: OwnedFd, request: RejoinRequest, others: Vec<String>) -> Result<()> {
    copies::within(move || {
        let uts = ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME;
        move_into_thread_name_spaces(process.as_fd(), uts)
            .context("joining the container's UTS namespace")?;
        if !request.hostname.is_empty() {
            rustix::system::sethostname(request.hostname.as_bytes())
                .with_context(|| format!("hostname {:?}", request.hostname))?;
        }
        let root = copies::writable_root(&process)?;
        let names = init::files_of_etc(request.names.as_ref());
        let names = names.map(|(path, content)| (path, content, Absent::Made));
        let id = (init::MACHINE_ID, init::machine_id()?, Absent::Stays);
        let written = names
            .into_iter()
            .chain([id])
            .filter(|(path, ..)| others.iter().all(|other| other != path))
            .map(|(path, content, absent)| write(root.as_fd(), path, &content, absent));
        // All are tried before the first failure is returned.
        written.fold(Ok(()), Result::and)
    })
    .await
}

/// The handling of a file that a container does not have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Absent {
    Made,
    Stays,
}

/// Writes a file in a directory of the root, if it is a regular file or absent and to be made, with
/// the owner and the permission bits that it has.
fn write(root: BorrowedFd<'_>, path: &str, content: &str, absent: Absent) -> Result<()> {
    let failed = || format!("writing {path}");
    let (directory, name) = copies::split(path)?;
    let is = |kind, stat: &Stat| FileType::from_raw_mode(stat.st_mode) == kind;
    let there = match status(root, directory).with_context(failed)? {
        Some(stat) if !is(FileType::Directory, &stat) => return Ok(()),
        Some(_) => {
            let open = copies::open_directory(root, directory).with_context(failed)?;
            status(open.as_fd(), name).with_context(failed)?
        }
        None => None,
    };
    let (mode, uid, gid) = match there {
        Some(stat) if !is(FileType::RegularFile, &stat) => return Ok(()),
        Some(stat) => (stat.st_mode, stat.st_uid, stat.st_gid),
        None if absent == Absent::Stays => return Ok(()),
        None => (MODE, 0, 0),
    };
    let (path, content, link) = (path.to_owned(), content.as_bytes().to_vec(), String::new());
    copies::put(root, &File { path, content, mode, uid, gid, link })
}

/// Returns the status of a file, of a link itself. Returns `None` if there is no such file.
fn status(directory: BorrowedFd<'_>, name: &str) -> rustix::io::Result<Option<Stat>> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(None),
        status => status.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use rustix::fs::{Mode, OFlags};

    use super::*;

    #[test]
    fn regular_files_are_replaced_and_others_stay_as_root() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: regular_files_are_replaced_and_others_stay_as_root: needs root");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let root = rustix::fs::open(dir.path(), flags, Mode::empty()).unwrap();
        let write_one = |path: &str, absent| write(root.as_fd(), path, "new", absent).unwrap();
        let write = |path: &str| write_one(path, Absent::Made);
        let read = |name: &str| std::fs::read_to_string(at(name)).unwrap();
        write("/etc/hosts");
        assert_eq!(read("etc/hosts"), "new");
        std::fs::write(at("etc/hostname"), "old").unwrap();
        std::fs::set_permissions(at("etc/hostname"), PermissionsExt::from_mode(0o600)).unwrap();
        std::os::unix::fs::chown(at("etc/hostname"), Some(7), Some(8)).unwrap();
        for _ in 0..2 {
            write("/etc/hostname");
            assert_eq!(read("etc/hostname"), "new");
            let metadata = std::fs::metadata(at("etc/hostname")).unwrap();
            assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o777), (7, 8, 0o600));
        }
        for id in ["no/machine-id", "etc/machine-id"] {
            write_one(&format!("/{id}"), Absent::Stays);
            assert!(!at(id).exists(), "{id} is made");
        }
        std::fs::write(at("etc/machine-id"), "old").unwrap();
        write_one("/etc/machine-id", Absent::Stays);
        assert_eq!(read("etc/machine-id"), "new");
        std::fs::write(at("target"), "old").unwrap();
        symlink("../target", at("etc/resolv.conf")).unwrap();
        write("/etc/resolv.conf");
        assert_eq!(read("target"), "old");
        assert!(at("etc/resolv.conf").is_symlink());
        std::fs::create_dir(at("etc/directory")).unwrap();
        write("/etc/directory");
        assert!(at("etc/directory").is_dir());
        symlink("etc", at("link")).unwrap();
        write("/link/hosts2");
        assert!(!at("etc/hosts2").exists(), "not through a link in place of the directory");
    }
}
