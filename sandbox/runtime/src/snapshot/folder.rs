//! A directory of the host with the files of a snapshot. Others may own it, and change it
//! meanwhile.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, Mode, OFlags};

use crate::{Error, Result};

/// An open directory.
pub(super) struct Folder {
    dir: OwnedFd,
    path: PathBuf,
    /// The names of the files that were created in it.
    made: Vec<String>,
}

impl Folder {
    /// Opens the directory at `path`.
    ///
    /// # Errors
    /// [`Error::File`].
    pub(super) fn open(path: &Path) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(io::Error::from);
        let dir = opened.map_err(Error::file("cannot open", path))?;
        Ok(Self { dir, path: path.to_owned(), made: Vec::new() })
    }

    /// Returns the directory's path.
    pub(super) fn own_path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the file `name`.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Makes an error of the file `name`.
    pub(super) fn wrong(&self, name: &str, why: &str) -> Error {
        Error::Invalid(format!("{} {why}", self.path(name).display()))
    }

    /// Checks that nothing is in the directory.
    ///
    /// # Errors
    /// [`Error::Invalid`] if something is, [`Error::File`].
    pub(super) fn check_empty(&self) -> Result<()> {
        // Not by its path, at which another directory may be by now.
        let entries = Dir::read_from(&self.dir).map_err(io::Error::from);
        let entries = entries.map_err(Error::file("cannot read", &self.path))?;
        for entry in entries {
            let entry = entry.map_err(io::Error::from);
            let entry = entry.map_err(Error::file("cannot read", &self.path))?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                return Err(self.not_empty());
            }
        }
        Ok(())
    }

    fn not_empty(&self) -> Error {
        let what = format!("{} is not empty: name a directory that is", self.path.display());
        Error::Invalid(what)
    }

    /// Opens the regular file `name` to be read. Returns its length too.
    ///
    /// # Errors
    /// [`Error::Invalid`] if it is something else; [`Error::File`], also for a symbolic link.
    pub(super) fn file(&self, name: &str) -> Result<(File, u64)> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&self.dir, name, flags, Mode::empty());
        let opened = opened.map_err(io::Error::from).and_then(|file| {
            let file = File::from(file);
            Ok((file.metadata()?, file))
        });
        let (status, file) = opened.map_err(Error::file("cannot read", self.path(name)))?;
        if !status.is_file() {
            return Err(self.wrong(name, "is no regular file"));
        }
        Ok((file, status.len()))
    }

    /// Creates the file `name`, for its owner's eyes only.
    ///
    /// # Errors
    /// [`Error::File`], also if there is one.
    pub(super) fn create(&mut self, name: &str) -> Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let created = rustix::fs::openat(&self.dir, name, flags, Mode::RUSR | Mode::WUSR);
        let created = created.map_err(io::Error::from);
        let file = created.map_err(Error::file("cannot create", self.path(name)))?;
        self.made.push(name.to_owned());
        Ok(File::from(file))
    }

    /// Removes the files that were created.
    pub(super) fn undo(&self) {
        for name in &self.made {
            // Without it the directory is not empty, as the caller's error lets expect.
            let _ = rustix::fs::unlinkat(&self.dir, name.as_str(), AtFlags::empty());
        }
    }
}

impl AsFd for Folder {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_directory_that_was_opened_is_the_one_that_is_empty() {
        let dir = tempfile::tempdir().unwrap();
        let [one, moved] = ["one", "moved"].map(|name| dir.path().join(name));
        std::fs::create_dir(&one).unwrap();
        let folder = Folder::open(&one).unwrap();
        folder.check_empty().unwrap();
        std::fs::rename(&one, &moved).unwrap();
        std::fs::create_dir(&one).unwrap();
        std::fs::write(one.join("file"), "").unwrap();
        folder.check_empty().unwrap();
        std::fs::write(moved.join("file"), "").unwrap();
        assert!(matches!(folder.check_empty(), Err(Error::Invalid(_))));
    }
}
