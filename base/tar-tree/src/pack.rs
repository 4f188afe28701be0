//! A file or directory as an archive.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, PROC_SUPER_MAGIC, Stat};
use rustix::io::Errno;
use tar::{Builder, EntryType, Header};

use crate::place::Found;
use crate::{Error, LeftOut};

/// The most directories within each other: each holds a descriptor.
const DEPTH: usize = 128;
/// The largest target of a link that a header holds itself.
const LINK_NAME: usize = 100;
/// The kernel's own file systems, whose sizes say nothing: `PROC_SUPER_MAGIC`, `SYSFS_MAGIC` and
/// `CGROUP2_SUPER_MAGIC` (statfs(2)).
const KERNEL: [u64; 3] = [PROC_SUPER_MAGIC as u64, 0x6265_6572, 0x6367_7270];

/// Writes an archive of `source`, which has the path `name` in it, to `out`, and flushes that.
/// Files that go while they are looked for are no error. A file that becomes shorter while it is
/// read is filled with zeros. Returns the files that were left out.
///
/// # Errors
/// [`Error::File`] if a file cannot be read, or `out` takes no more; [`Error::Refused`] if
/// directories are too deep.
pub fn pack(source: &Found, name: &Path, out: impl Write) -> Result<LeftOut, Error> {
    let mut packer = Packer { builder: Builder::new(out), left_out: LeftOut::default() };
    packer.add_tree(source, name)?;
    let Packer { builder, left_out } = packer;
    let finished = builder.into_inner().and_then(|mut out| out.flush());
    finished.map_err(|cause| Error::file(name, cause))?;
    Ok(left_out)
}

struct Packer<W: Write> {
    builder: Builder<W>,
    left_out: LeftOut,
}

impl<W: Write> Packer<W> {
    fn add_tree(&mut self, source: &Found, name: &Path) -> Result<(), Error> {
        let first = self.add(source.directory.as_fd(), &source.name, name)?;
        let mut levels: Vec<(Dir, PathBuf)> = Vec::new();
        levels.extend(first.map(|dir| (dir, name.to_owned())));
        while let Some((dir, at)) = levels.last_mut() {
            let Some(entry) = dir.read() else {
                levels.pop();
                continue;
            };
            let entry = entry.map_err(|errno| Error::file(at, errno))?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if name == "." || name == ".." {
                continue;
            }
            let path = at.join(name);
            let parent = dir.fd().map_err(|errno| Error::file(at, errno))?;
            match self.add(parent, name, &path) {
                Ok(None) => {}
                Ok(Some(_)) if levels.len() == DEPTH => {
                    return Err(Error::refused(
                        &path,
                        "more than 128 directories are in each other",
                    ));
                }
                Ok(Some(below)) => levels.push((below, path)),
                // It is gone.
                Err(Error::File { cause, .. }) if cause.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Adds the file `name` of the directory `parent`, with the path `path`. Returns it if it is a
    /// directory, whose files are to be added next.
    fn add(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
    ) -> Result<Option<Dir>, Error> {
        let failed = |errno: Errno| Error::file(path, errno);
        let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.add_directory(parent, name, path),
            FileType::RegularFile => self.add_file(parent, name, path).map(|()| None),
            FileType::Symlink => {
                let link =
                    rustix::fs::readlinkat(parent, name, Vec::<u8>::new()).map_err(failed)?;
                self.add_link(&stat, path, link.as_bytes()).map(|()| None)
            }
            _ => {
                self.left_out.add(path);
                Ok(None)
            }
        }
    }

    fn add_directory(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &OsStr,
        path: &Path,
    ) -> Result<Option<Dir>, Error> {
        let failed = |errno: Errno| Error::file(path, errno);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(failed)?;
        let kind = rustix::fs::fstatfs(&directory).map_err(failed)?.f_type;
        if KERNEL.contains(&(kind as u64)) {
            self.left_out.add(path);
            return Ok(None);
        }
        let mut header = header(&rustix::fs::fstat(&directory).map_err(failed)?);
        header.set_entry_type(EntryType::Directory);
        // A slash at the end, as directories have it.
        let added = self.builder.append_data(&mut header, path.join(""), io::empty());
        added.map_err(|cause| Error::file(path, cause))?;
        Dir::new(directory).map(Some).map_err(failed)
    }

    fn add_file(&mut self, parent: BorrowedFd<'_>, name: &OsStr, path: &Path) -> Result<(), Error> {
        let failed = |errno: Errno| Error::file(path, errno);
        // Another file may have its place by now: a pipe would be waited for.
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(failed)?;
        let stat = rustix::fs::fstat(&file).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            self.left_out.add(path);
            return Ok(());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let mut header = header(&stat);
        header.set_entry_type(EntryType::Regular);
        header.set_size(size);
        // Exactly as many bytes as the header says, whatever becomes of the file meanwhile.
        let data = File::from(file).take(size).chain(io::repeat(0)).take(size);
        let added = self.builder.append_data(&mut header, path, data);
        added.map_err(|cause| Error::file(path, cause))
    }

    fn add_link(&mut self, stat: &Stat, path: &Path, target: &[u8]) -> Result<(), Error> {
        let mut header = header(stat);
        header.set_entry_type(EntryType::Symlink);
        let added = match target.len() <= LINK_NAME {
            // As it is: the other way rewrites it.
            true => header
                .set_link_name_literal(target)
                .and_then(|()| self.builder.append_data(&mut header, path, io::empty())),
            false => self.builder.append_link(&mut header, path, OsStr::from_bytes(target)),
        };
        added.map_err(|cause| Error::file(path, cause))
    }
}

/// Returns the header of a file without its kind, path and size.
fn header(stat: &Stat) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(stat.st_mode & 0o7777);
    header.set_uid(stat.st_uid.into());
    header.set_gid(stat.st_gid.into());
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
    header.set_size(0);
    header
}
