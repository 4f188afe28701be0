//! Copies files of an image to a folder of the host.
//!
//! The image is hostile: its links are followed within the image only ([`pick`]), none is followed
//! below the folder, and the copies are bounded ([`BOUNDS`]).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use slipway_lazy_spec::Extent;

use super::budget::Budget;
use super::partial::{Partial, Settings};
use crate::root::erofs::pick::{Bounds, Content, PathNames, Picked, pick};
use crate::root::tree::FileRun;
use crate::source::blocking;
use crate::{Access, Cache, Digest, Error, Image, Reference, Result, Silent};

/// The bounds of one call of [`Cache::extract`].
const BOUNDS: Bounds = Bounds { entries: 10_000, bytes: 64 << 20, names: 256 << 20 };
/// The most bytes that are copied at a time.
const PIECE: usize = 128 << 10;

impl Cache {
    /// Copies files of an image below the folder `into`, where they have the paths of the image.
    /// Folders among `paths` are copied with all that is in them. Parts of these files that a
    /// lazily pulled image lacks are fetched first.
    ///
    /// Regular files are copied with their content, and links as links. All keep their owners, and
    /// files and folders their modes. Extended attributes, times, devices, FIFOs and sockets are
    /// left out. A path is followed through links within the image, and these links are copied,
    /// too. A path that is missing in the image is skipped.
    ///
    /// A file or a link replaces a file or a link with its path below `into`; a folder of the image
    /// is merged with a folder. A file in the place of a folder, or the reverse, is an error. No
    /// link below `into` is followed.
    ///
    /// A call copies at most 10,000 files, folders and links, with 64 MiB in all, and reads at most
    /// 256 MiB of names to find them. `access` returns the access to a registry: the image may have
    /// been pulled from another registry than the caller knows.
    ///
    /// # Errors
    /// - [`Error::Unknown`]: there is no such image.
    /// - [`Error::TooLarge`]: a bound is exceeded, or the image is broken.
    /// - [`Error::Io`]: a file cannot be read or written. Files that were copied before stay.
    /// - The errors of [`pull`](Self::pull), for missing parts.
    pub async fn extract(
        &self,
        digest: &Digest,
        paths: &[&str],
        into: &Path,
        access: impl Fn(&Reference) -> Access + Send + 'static,
    ) -> Result<()> {
        let image = self.get_aside(&digest.to_string()).await?;
        let image = image.ok_or_else(|| Error::Unknown(digest.to_string()))?;
        let paths: Vec<Vec<u8>> = paths.iter().map(|path| path.as_bytes().to_vec()).collect();
        let at = image.erofs_path.clone();
        let (file, picked) = blocking(move || {
            let file = File::open(&at).map_err(|e| Error::io("open", &at, e))?;
            let picked = pick(&file, &paths, BOUNDS);
            let picked = picked.map_err(|reason| Error::too_large(at.display(), reason))?;
            Ok((file, picked))
        })
        .await?;
        if image.lazy {
            self.fetch_pieces(image, &picked, access).await?;
        }
        let into = into.to_owned();
        blocking(move || copy(&file, &picked, &into)).await
    }

    /// Fetches the missing parts of chosen files.
    async fn fetch_pieces(
        &self,
        image: Image,
        picked: &BTreeMap<PathNames, Picked>,
        access: impl Fn(&Reference) -> Access + Send + 'static,
    ) -> Result<()> {
        let extents: Vec<Extent> = picked.values().flat_map(extents).collect();
        let cache = self.clone();
        let missing = blocking(move || {
            let (budget, progress) = (Budget::of_one(), Arc::new(Silent));
            let settings = Settings { have_dir: None, access: &access, budget, progress };
            let partial = match Partial::open(&cache, &image, settings) {
                Ok(partial) => partial,
                // The node's fetcher may have completed the image meanwhile.
                Err(error) => match cache.get(&image.digest.to_string())? {
                    Some(image) if !image.lazy => return Ok(None),
                    _ => return Err(error),
                },
            };
            let spans = extents.iter().flat_map(|extent| partial.overlapping(*extent));
            let spans: Vec<usize> = spans.collect();
            // The node's fetcher may have written some of the spans. Its presence bitmap is
            // elsewhere, so they are looked for in the image.
            partial.find(spans.iter().copied())?;
            let members = spans.iter().map(|span| partial.members.of_span(*span));
            let mut members: Vec<u32> = members.collect();
            members.sort_unstable();
            members.dedup();
            Ok(Some((Arc::new(partial), members)))
        })
        .await?;
        match missing {
            Some((partial, members)) => partial.fetch_all(&members).await,
            None => Ok(()),
        }
    }
}

/// Returns the ranges of the image that hold a file's content. They are empty for folders and
/// links.
fn extents(picked: &Picked) -> Vec<Extent> {
    let Content::File(_, pieces) = &picked.content else { return Vec::new() };
    pieces.iter().map(|piece| Extent { offset: piece.from, bytes: piece.len }).collect()
}

/// Copies the files that were chosen in `image` below the folder `into`.
fn copy(image: &File, picked: &BTreeMap<PathNames, Picked>, into: &Path) -> Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(into, flags, Mode::empty());
    let root = root.map_err(|e| Error::io("open", into, e.into()))?;
    let target = Target { root, image };
    let shown = |way: &PathNames| into.join(path(way));
    for (way, picked) in picked {
        target.make(way, picked).map_err(|e| Error::io("copy to", &shown(way), e))?;
    }
    // Folders get their modes last: a mode may keep a folder's owner from making files in it.
    for (way, picked) in picked.iter().rev() {
        if matches!(picked.content, Content::Folder) {
            let set = target.open(&path(way), OFlags::RDONLY | OFlags::DIRECTORY);
            let set = set.and_then(|folder| give(&folder, picked));
            set.map_err(|e| Error::io("copy to", &shown(way), e))?;
        }
    }
    Ok(())
}

/// Returns the relative path of these names.
fn path(way: &[Vec<u8>]) -> PathBuf {
    way.iter().map(|name| std::ffi::OsStr::from_bytes(name)).collect()
}

/// Returns the user and the group of a file, as calls that set them have them.
fn owner(picked: &Picked) -> (Option<Uid>, Option<Gid>) {
    (Some(Uid::from_raw(picked.uid)), Some(Gid::from_raw(picked.gid)))
}

/// Sets the owner and the mode of an open file.
fn give(file: impl AsFd, picked: &Picked) -> io::Result<()> {
    let (user, group) = owner(picked);
    rustix::fs::fchown(&file, user, group)?;
    // The mode is set after the owner, whose change removes set-id bits.
    rustix::fs::fchmod(&file, Mode::from_raw_mode(picked.mode.into()))?;
    Ok(())
}

/// The image, and the folder below which its files are copied.
struct Target<'a> {
    root: OwnedFd,
    image: &'a File,
}

impl Target<'_> {
    /// Opens a path below the folder. No link is followed.
    fn open(&self, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        Ok(rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve)?)
    }

    /// Copies one file, folder or link. The owner and the mode of a folder are set later.
    fn make(&self, way: &[Vec<u8>], picked: &Picked) -> io::Result<()> {
        let Some((name, above)) = way.split_last() else { return Ok(()) };
        let folder = self.open(&path(above), OFlags::PATH | OFlags::DIRECTORY)?;
        match &picked.content {
            Content::Folder => make_folder(&folder, name),
            Content::Link(to) => make_link(&folder, name, to, picked),
            Content::File(bytes, pieces) => {
                let file = make_file(&folder, name)?;
                self.write(&file, *bytes, pieces)?;
                give(&file, picked)
            }
        }
    }

    /// Writes a file of `bytes` bytes: copies `pieces` of the image, with zeros between them.
    fn write(&self, file: &File, bytes: u64, pieces: &[FileRun]) -> io::Result<()> {
        let mut buffer = vec![0; PIECE];
        file.set_len(bytes)?;
        for piece in pieces {
            let mut done = 0;
            while done < piece.len {
                let room = (piece.len - done).min(PIECE as u64) as usize;
                self.image.read_exact_at(&mut buffer[..room], piece.from + done)?;
                file.write_all_at(&buffer[..room], piece.at + done)?;
                done += room as u64;
            }
        }
        Ok(())
    }
}

/// Makes a folder that only its owner may use. A file of this name is no error here: the folder is
/// opened before it is used, which fails if it is a link or no folder.
fn make_folder(folder: &OwnedFd, name: &[u8]) -> io::Result<()> {
    match rustix::fs::mkdirat(folder, name, Mode::RWXU) {
        Err(Errno::EXIST) => Ok(()),
        made => Ok(made?),
    }
}

/// Makes a link to `to` with its owner.
fn make_link(folder: &OwnedFd, name: &[u8], to: &[u8], picked: &Picked) -> io::Result<()> {
    replace(folder, name, || rustix::fs::symlinkat(to, folder, name))?;
    let (user, group) = owner(picked);
    Ok(rustix::fs::chownat(folder, name, user, group, AtFlags::SYMLINK_NOFOLLOW)?)
}

/// Makes an empty file that only its owner may use, and returns it opened for writing.
fn make_file(folder: &OwnedFd, name: &[u8]) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    Ok(replace(folder, name, || rustix::fs::openat(folder, name, flags, mode))?.into())
}

/// Makes a file by `make`. If a file or a link has its name, that is removed and `make` is called
/// again.
fn replace<T>(
    folder: &OwnedFd,
    name: &[u8],
    make: impl Fn() -> rustix::io::Result<T>,
) -> io::Result<T> {
    match make() {
        Err(Errno::EXIST) => {
            rustix::fs::unlinkat(folder, name, AtFlags::empty())?;
            Ok(make()?)
        }
        made => Ok(made?),
    }
}
