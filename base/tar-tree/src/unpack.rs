//! The files of an archive, made below a directory.
//!
//! The writer of the archive may be hostile; the head of the crate says what keeps it in.

#[cfg(feature = "fuzz")]
pub mod fuzz;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Timespec, Timestamps, UTIME_OMIT, Uid,
};
use rustix::io::Errno;
use tar::{Archive, Entry, EntryType, Header};

use crate::place::{Place, Top, again};
use crate::{Error, LeftOut, TOP};

/// The most bytes of the headers of one entry: its path, the target of a link, PAX records. The
/// library buffers them.
const HEADERS: u64 = 1 << 20;
/// The longest path of an entry, bytes: no program could open a longer one.
const LONGEST: usize = 4095;
/// The most names of an entry's path. Attributes of all directories on the way are held.
const DEEPEST: usize = 512;
/// The most bytes behind the end of an archive: tar(1) fills its last record with zeros.
const TRAILER: u64 = 1 << 20;
const BUFFER: usize = 64 << 10;

/// The part of an archive that is believed.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// The bits of a mode that files get.
    mode: u32,
    /// Files have the owners that the archive says; otherwise they are the process's own.
    owners: bool,
    /// Hard links are made; otherwise they are refused.
    hard_links: bool,
}

impl Rules {
    /// Returns the rules for an archive that a guest has sent.
    pub fn of_guest(owners: bool) -> Self {
        Self { mode: 0o777, owners, hard_links: false }
    }

    /// Returns the rules for an archive of the host's user, in a container.
    pub fn of_host(owners: bool) -> Self {
        Self { mode: 0o7777, owners, hard_links: true }
    }
}

/// Makes the files of an archive at `place`. A file replaces a file or a symbolic link that is
/// there; a directory that is there stays, with what the archive does not have. Devices, pipes and
/// sockets that are there stay, too, and are an error. Returns the files that were left out. What
/// follows the end of the archive is not read ([`read_end`]).
///
/// # Errors
/// The first failure; files before it are there. The file that failed is removed.
pub fn unpack(archive: impl Read, place: &Place, rules: Rules) -> Result<LeftOut, Error> {
    let left = Rc::new(Cell::new(HEADERS));
    let mut archive = Archive::new(Metered { inner: archive, left: Rc::clone(&left) });
    let mut unpacker = Unpacker {
        place,
        rules,
        open: Vec::new(),
        left_out: LeftOut::default(),
        buffer: vec![0; BUFFER].into_boxed_slice(),
    };
    let mut entries = archive.entries().map_err(Error::Archive)?;
    loop {
        left.set(HEADERS);
        let Some(entry) = entries.next() else { break };
        left.set(u64::MAX);
        let mut entry = entry.map_err(Error::Archive)?;
        unpacker.add(&mut entry)?;
        // The rest of it is no header of the next one.
        io::copy(&mut entry, &mut io::sink()).map_err(Error::Archive)?;
    }
    unpacker.leave(&[])?;
    Ok(unpacker.left_out)
}

/// Reads what follows the end of an archive, which is little.
///
/// # Errors
/// [`Error::Archive`], also if there is too much.
pub fn read_end(archive: impl Read) -> Result<(), Error> {
    let read = io::copy(&mut archive.take(TRAILER + 1), &mut io::sink()).map_err(Error::Archive)?;
    match read <= TRAILER {
        true => Ok(()),
        false => Err(Error::Archive(io::Error::other("it goes on behind its end"))),
    }
}

/// A reader that ends with an error after `left` bytes.
struct Metered<R> {
    inner: R,
    left: Rc<Cell<u64>>,
}

impl<R: Read> Read for Metered<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other("a header is too long"));
        }
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.inner.read(&mut buffer[..most])?;
        self.left.set(left - read as u64);
        Ok(read)
    }
}

struct Unpacker<'a> {
    place: &'a Place,
    rules: Rules,
    /// Directories that were made, each in the one before, whose attributes are set once entries
    /// of other directories follow: a mode may let nobody write.
    open: Vec<(Vec<OsString>, Attributes)>,
    left_out: LeftOut,
    buffer: Box<[u8]>,
}

impl Unpacker<'_> {
    fn add<R: Read>(&mut self, entry: &mut Entry<'_, R>) -> Result<(), Error> {
        let kind = entry.header().entry_type();
        let path = PathBuf::from(OsString::from_vec(entry.path_bytes().into_owned()));
        let refuse = |reason| Err(Error::refused(&path, reason));
        if kind == EntryType::XGlobalHeader {
            // Defaults for entries, which programs that run containers skip, too.
            return Ok(());
        }
        let is_file = matches!(kind, EntryType::Regular | EntryType::Continuous);
        if kind == EntryType::GNUSparse || (is_file && is_sparse(entry)?) {
            return refuse(SPARSE);
        }
        let is_old_directory =
            entry.header().as_old().linkflag == [0] && path.as_os_str().as_bytes().ends_with(b"/");
        let is_directory = kind == EntryType::Directory || is_old_directory;
        let way = self.way(&path, is_directory)?;
        self.leave(&way)?;
        if way.is_empty() {
            return if is_directory { Ok(()) } else { refuse("it is no directory") };
        }
        let attributes = Attributes::of(entry.header(), self.rules).ok_or_else(|| {
            Error::refused(&path, "its mode or its owner is no number of 32 bits")
        })?;
        match kind {
            _ if is_directory => self.add_directory(way, attributes),
            _ if is_file => self.add_file(entry, &way, attributes),
            EntryType::Symlink => {
                let target = target(entry);
                self.add_symlink(&target, &way, attributes)
            }
            EntryType::Link if self.rules.hard_links => {
                let target = PathBuf::from(target(entry));
                let target = self.way(&target, false)?;
                self.add_hard_link(&target, &way)
            }
            EntryType::Link => refuse("it is a hard link, which is not made"),
            _ => {
                self.left_out.add(&path);
                Ok(())
            }
        }
    }

    /// Returns the names from the place's directory to that of an entry.
    fn way(&self, path: &Path, is_directory: bool) -> Result<Vec<OsString>, Error> {
        let refuse = |reason| Err(Error::refused(path, reason));
        let bytes = path.as_os_str().as_bytes();
        if bytes.len() > LONGEST {
            return refuse("its path is too long");
        }
        if bytes.first() == Some(&b'/') {
            return refuse("its path is absolute");
        }
        let parts = bytes.split(|byte| *byte == b'/');
        let parts = parts.filter(|part| !part.is_empty() && *part != b".");
        let mut way: Vec<_> = parts.map(|part| OsString::from_vec(part.to_vec())).collect();
        if way.iter().any(|part| part == "..") {
            return refuse("its path leads upwards");
        }
        if way.len() > DEEPEST {
            return refuse("more than 512 directories are in each other");
        }
        if let Top::Tree { name, is_directory: is_tree } = &self.place.top {
            if way.first().is_none_or(|first| first != TOP) {
                return refuse("nobody asked for it");
            }
            if way.len() == 1 && is_directory != *is_tree {
                return refuse("it is a directory where a file was announced, or the reverse");
            }
            // A directory with the name of a file is not filled in that file's place.
            if way.len() > 1 && !*is_tree {
                return refuse("nobody asked for it");
            }
            drop(way.splice(..1, name.clone()));
        }
        Ok(way)
    }

    /// Sets the attributes of directories in which the entry at `way` is not.
    fn leave(&mut self, way: &[OsString]) -> Result<(), Error> {
        while let Some((last, attributes)) =
            self.open.pop_if(|(open, _)| way.is_empty() || !way.starts_with(open))
        {
            let directory = self.open_below(&last, OFlags::RDONLY)?;
            attributes.set(&directory, &last)?;
        }
        Ok(())
    }

    /// Opens the directory at `way`, to which no link leads.
    fn open_below(&self, way: &[OsString], flags: OFlags) -> Result<OwnedFd, Error> {
        let path: PathBuf = if way.is_empty() { ".".into() } else { way.iter().collect() };
        let flags = flags | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let beneath = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let directory = self.place.directory.as_fd();
        let open = || rustix::fs::openat2(directory, path.as_path(), flags, Mode::empty(), beneath);
        again(open).map_err(|errno| match errno {
            Errno::LOOP => Error::refused(&path, "a symbolic link is there, which is not followed"),
            errno => Error::file(&path, errno),
        })
    }

    /// Opens the directory of the entry at `way`, and returns its name there. Directories that an
    /// archive without a tree does not have are made.
    fn above<'w>(&self, way: &'w [OsString]) -> Result<(OwnedFd, &'w OsStr), Error> {
        let Some((name, above)) = way.split_last() else {
            return Err(Error::refused(Path::new("."), "it has no name"));
        };
        let directory = match self.open_below(above, OFlags::PATH) {
            Err(error) if is_missing(&error) && matches!(self.place.top, Top::Entries) => {
                for end in 1..=above.len() {
                    let directory = self.open_below(&above[..end - 1], OFlags::PATH)?;
                    let (name, mode) = (&above[end - 1], Mode::from_raw_mode(0o755));
                    match rustix::fs::mkdirat(&directory, name, mode) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(errno) => return Err(failed(&above[..end], errno)),
                    }
                }
                self.open_below(above, OFlags::PATH)?
            }
            opened => opened?,
        };
        Ok((directory, name.as_os_str()))
    }

    /// Opens the directory of the entry at `way`, from which a file or link with its name is
    /// removed.
    fn room<'w>(&self, way: &'w [OsString]) -> Result<(OwnedFd, &'w OsStr), Error> {
        let (directory, name) = self.above(way)?;
        let refuse = |reason| Err(Error::refused(&path_of(way), reason));
        let stat = match rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok((directory, name)),
            stat => stat.map_err(|errno| failed(way, errno))?,
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile | FileType::Symlink => {}
            FileType::Directory => return refuse("a directory is there, which no file replaces"),
            // Such as /dev/null of the host, which a copy by root would replace.
            _ => return refuse("a device, a pipe or a socket is there, which is not replaced"),
        }
        match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok((directory, name)),
            Err(errno) => Err(failed(way, errno)),
        }
    }

    fn add_directory(&mut self, way: Vec<OsString>, attributes: Attributes) -> Result<(), Error> {
        let (above, name) = self.above(&way)?;
        match rustix::fs::mkdirat(&above, name, Mode::from_raw_mode(0o700)) {
            Ok(()) => {
                self.open.push((way, attributes));
                Ok(())
            }
            Err(Errno::EXIST) => self.open_below(&way, OFlags::PATH).map(drop),
            Err(errno) => Err(failed(&way, errno)),
        }
    }

    fn add_file<R: Read>(
        &mut self,
        entry: &mut Entry<'_, R>,
        way: &[OsString],
        attributes: Attributes,
    ) -> Result<(), Error> {
        let (directory, name) = self.room(way)?;
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&directory, name, flags, Mode::from_raw_mode(0o600));
        let mut file = File::from(file.map_err(|errno| failed(way, errno))?);
        let filled = self.fill(&mut file, entry, way);
        let made = filled.and_then(|()| attributes.set(&file, way));
        if made.is_err() {
            // A part of it could be taken for the whole.
            let _ = rustix::fs::unlinkat(&directory, name, AtFlags::empty());
        }
        made
    }

    /// Writes the content of an entry, which is at `way`, to a file.
    fn fill<R: Read>(
        &mut self,
        file: &mut File,
        entry: &mut Entry<'_, R>,
        way: &[OsString],
    ) -> Result<(), Error> {
        let mut left = entry.size();
        while left > 0 {
            let read = match entry.read(&mut self.buffer) {
                Ok(0) => return Err(Error::Archive(ErrorKind::UnexpectedEof.into())),
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(Error::Archive(error)),
            };
            let written = file.write_all(&self.buffer[..read]);
            written.map_err(|cause| Error::file(&path_of(way), cause))?;
            left = left.saturating_sub(read as u64);
        }
        Ok(())
    }

    fn add_symlink(
        &self,
        target: &OsStr,
        way: &[OsString],
        attributes: Attributes,
    ) -> Result<(), Error> {
        let (directory, name) = self.room(way)?;
        let made = rustix::fs::symlinkat(target, &directory, name);
        made.map_err(|errno| failed(way, errno))?;
        let Attributes { owner, times, .. } = attributes;
        if let Some(owner) = owner {
            give_link(directory.as_fd(), way, owner)?;
        }
        // Not all file systems have times of links.
        let _ = rustix::fs::utimensat(&directory, name, &times, AtFlags::SYMLINK_NOFOLLOW);
        Ok(())
    }

    fn add_hard_link(&self, target: &[OsString], way: &[OsString]) -> Result<(), Error> {
        if target == way {
            return Ok(());
        }
        let (from, old) = self.above(target)?;
        let (directory, name) = self.room(way)?;
        // Without flags a link at `old` is not followed.
        let made = rustix::fs::linkat(&from, old, &directory, name, AtFlags::empty());
        made.map_err(|errno| failed(way, errno))
    }
}

/// Gives the symbolic link at `way`, in the open directory `directory`, an owner. By its name the
/// owner of another file could change: someone who may write in the directory can put a hard link
/// to any file in the place of the symbolic link.
fn give_link(
    directory: BorrowedFd<'_>,
    way: &[OsString],
    (uid, gid): (Uid, Gid),
) -> Result<(), Error> {
    let failed = |errno| failed(way, errno);
    let name = way.last().map(OsString::as_os_str).unwrap_or_default();
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let link = rustix::fs::openat(directory, name, flags, Mode::empty()).map_err(failed)?;
    let stat = rustix::fs::fstat(&link).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
        return Err(Error::refused(&path_of(way), "another file has taken the place of this link"));
    }
    let flags = AtFlags::EMPTY_PATH | AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::chownat(&link, "", Some(uid), Some(gid), flags).map_err(failed)
}

const SPARSE: &str = "it is a sparse file, which is not unpacked: make the archive without them";

/// Returns whether a regular file is a sparse one in PAX format (GNU tar manual, *Sparse Formats*).
fn is_sparse<R: Read>(entry: &mut Entry<'_, R>) -> Result<bool, Error> {
    let Some(records) = entry.pax_extensions().map_err(Error::Archive)? else { return Ok(false) };
    // The library cannot read records whose values have line breaks: some attributes have.
    let mut records = records.filter_map(Result::ok);
    Ok(records.any(|record| record.key_bytes().starts_with(b"GNU.sparse.")))
}

/// Returns the target of a link; an empty one, which no call makes, if there is none.
fn target<R: Read>(entry: &Entry<'_, R>) -> OsString {
    let target = entry.link_name_bytes().map(|target| target.into_owned());
    OsString::from_vec(target.unwrap_or_default())
}

fn is_missing(error: &Error) -> bool {
    matches!(error, Error::File { cause, .. } if cause.kind() == ErrorKind::NotFound)
}

fn path_of(way: &[OsString]) -> PathBuf {
    way.iter().collect()
}

fn failed(way: &[OsString], errno: Errno) -> Error {
    Error::file(&path_of(way), errno)
}

/// The attributes of a file in an archive, as far as they are believed.
struct Attributes {
    mode: Mode,
    /// `None`: the process's own.
    owner: Option<(Uid, Gid)>,
    times: Timestamps,
}

impl Attributes {
    /// Returns the attributes in a header. Returns `None` if they are no numbers.
    fn of(header: &Header, rules: Rules) -> Option<Self> {
        // The greatest number stands for no change (chown(2)).
        let id = |id: u64| u32::try_from(id).ok().filter(|id| *id != u32::MAX);
        let owner = match rules.owners {
            true => {
                let (uid, gid) = (id(header.uid().ok()?)?, id(header.gid().ok()?)?);
                Some((Uid::from_raw(uid), Gid::from_raw(gid)))
            }
            false => None,
        };
        let seconds = header.mtime().ok().and_then(|time| i64::try_from(time).ok()).unwrap_or(0);
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: seconds, tv_nsec: 0 },
        };
        let mode = Mode::from_raw_mode(header.mode().ok()? & rules.mode);
        Some(Self { mode, owner, times })
    }

    /// Gives an open file or directory its attributes.
    fn set(&self, file: impl AsFd, way: &[OsString]) -> Result<(), Error> {
        let set = || -> rustix::io::Result<()> {
            if let Some((uid, gid)) = self.owner {
                rustix::fs::fchown(&file, Some(uid), Some(gid))?;
            }
            // After the owner, with whom some bits go.
            rustix::fs::fchmod(&file, self.mode)?;
            rustix::fs::futimens(&file, &self.times)
        };
        set().map_err(|errno| failed(way, errno))
    }
}
