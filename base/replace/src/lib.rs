//! Files that are replaced as a whole, and often: whatever ends the process, the old content or the
//! new one is there.
//!
//! The content is written to a second file, `FILE.new`, which then takes the first one's place. The
//! usual rename(2) makes an inode and deletes one each time. That is slow on ext4, where a new
//! inode looks at every one that was deleted in the last minutes: with 200 sandboxes that start and
//! end, 3 of 10 ms of processor time for each start. Here the two files exchange their names
//! (`RENAME_EXCHANGE`), so that both inodes stay.
//!
//! Without a flush, the kernel is asked to begin writing (`POSIX_FADV_DONTNEED`), as ext4 does of
//! its own for a file that rename(2) puts in another's place. Without that, a machine that loses
//! power half a minute later could have the exchanged names and not the bytes.
//!
//! Both files are their owner's alone (mode 0600).
//!
//! The second file has the content before the last one. A reader that is not the writer and still
//! reads a content while two newer ones are written sees a mixture: only for files that their
//! owner alone reads.
//!
//! # Dependencies
//!
//! `rustix` (renameat2 without a C library).

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, CWD, RenameFlags, renameat_with};
use rustix::io::Errno;

/// Returns the path of the second file of `path`.
fn second(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

/// Gives the file at `path`, which need not exist, the bytes `content`. With `is_flushed` they are
/// on the disk before they are in place. The caller is the only one that replaces this file.
///
/// # Errors
/// The errors of open(2), write(2), fsync(2) and renameat2(2). The file keeps its old content.
pub fn replace(path: &Path, content: &[u8], is_flushed: bool) -> io::Result<()> {
    let second = second(path);
    let mut options = File::options();
    let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&second)?;
    file.write_all(content)?;
    if is_flushed {
        file.sync_all()?;
    } else {
        let _ = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    }
    drop(file);
    match renameat_with(CWD, &second, CWD, path, RenameFlags::EXCHANGE) {
        // The first content, or a file system that cannot exchange names.
        Err(Errno::NOENT | Errno::INVAL | Errno::NOSYS) => std::fs::rename(&second, path),
        exchanged => Ok(exchanged?),
    }
}

/// Removes the file at `path` and its second file. Returns `false` if there is no file at `path`.
///
/// # Errors
/// The errors of unlink(2).
pub fn remove(path: &Path) -> io::Result<bool> {
    let remove = |path: &Path| match std::fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        removed => removed.map(|()| true),
    };
    remove(&second(path))?;
    remove(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_replaced_file_has_the_new_content_whatever_its_length() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for (content, is_flushed) in [("first", false), ("a longer second", true), ("3", false)] {
            replace(&path, content.as_bytes(), is_flushed).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
        }
        assert!(remove(&path).unwrap());
        assert!(!remove(&path).unwrap());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn no_inode_is_made_from_the_third_content_on() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let inodes = || {
            let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
            let mut both = [inode(&path), inode(&second(&path))];
            both.sort_unstable();
            both
        };
        replace(&path, b"1", false).unwrap();
        replace(&path, b"2", false).unwrap();
        let made = inodes();
        replace(&path, b"3", false).unwrap();
        assert_eq!(inodes(), made);
    }

    #[test]
    fn a_content_that_cannot_be_written_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace(&path, b"old", false).unwrap();
        std::fs::create_dir(second(&path)).unwrap();
        assert!(replace(&path, b"new", false).is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn the_rest_of_a_writer_that_was_killed_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        replace(&path, b"old", false).unwrap();
        std::fs::write(second(&path), "half of a long con").unwrap();
        replace(&path, b"new", false).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }
}
