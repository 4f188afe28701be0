//! Copies of an image's files on the host.

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

/// The most that is copied.
const BOUNDS: Bounds = Bounds { entries: 10_000, bytes: 64 << 20, names: 256 << 20 };
/// The bytes that are copied at once.
const PIECE: usize = 128 << 10;

impl Cache {
    /// Copies files of an image below the folder `into`, where they have the paths of the image.
    /// Folders among `paths` are copied with all that is in them. What is there already is replaced
    /// if it is no folder. Of a lazily pulled image, what is missing of these files is fetched
    /// first.
    ///
    /// Copied are the content of regular files, links as links, modes and owners; extended
    /// attributes, times, devices, FIFOs and sockets are left out. A path is followed through links
    /// within the image, and these links are copied, too. A path that is missing in the image is
    /// skipped. No link below `into` is followed. In all at most 10,000 files of 64 MiB are copied,
    /// and at most 256 MiB of names are read to find them.
    /// `access` returns the access to a registry: the image may have been pulled from another one
    /// than the caller knows.
    ///
    /// # Errors
    /// [`Error::Unknown`] if there is no such image, [`Error::TooLarge`], [`Error::Io`]; the errors
    /// of [`pull`](Self::pull) for what is missing. Files that were copied stay.
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

    /// Fetches what is missing of these files.
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
                // Somebody has fetched the rest of it meanwhile.
                Err(error) => match cache.get(&image.digest.to_string())? {
                    Some(image) if !image.lazy => return Ok(None),
                    _ => return Err(error),
                },
            };
            let spans = extents.iter().flat_map(|extent| partial.overlapping(*extent));
            let spans: Vec<usize> = spans.collect();
            // The node's fetcher may have written some of them. Its presence bitmap is elsewhere.
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

/// Returns the ranges of the image with a file's data.
fn extents(picked: &Picked) -> Vec<Extent> {
    let Content::File(_, pieces) = &picked.content else { return Vec::new() };
    pieces.iter().map(|piece| Extent { offset: piece.from, bytes: piece.len }).collect()
}

/// Copies what was chosen in `image` below the folder `into`.
fn copy(image: &File, picked: &BTreeMap<PathNames, Picked>, into: &Path) -> Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(into, flags, Mode::empty());
    let root = root.map_err(|e| Error::io("open", into, e.into()))?;
    let target = Target { root, image };
    let shown = |way: &PathNames| into.join(path(way));
    for (way, picked) in picked {
        target.make(way, picked).map_err(|e| Error::io("copy to", &shown(way), e))?;
    }
    // The mode of a folder may keep its owner from making files in it.
    for (way, picked) in picked.iter().rev() {
        if matches!(picked.content, Content::Folder) {
            let set = target.open(&path(way), OFlags::RDONLY | OFlags::DIRECTORY);
            let set = set.and_then(|folder| give(&folder, picked));
            set.map_err(|e| Error::io("copy to", &shown(way), e))?;
        }
    }
    Ok(())
}

fn path(way: &[Vec<u8>]) -> PathBuf {
    way.iter().map(|name| std::ffi::OsStr::from_bytes(name)).collect()
}

/// Sets the owner and the mode of an open file.
fn give(file: impl AsFd, picked: &Picked) -> io::Result<()> {
    let (user, group) = (Uid::from_raw(picked.uid), Gid::from_raw(picked.gid));
    rustix::fs::fchown(&file, Some(user), Some(group))?;
    // After the owner, whose change removes set-id bits.
    rustix::fs::fchmod(&file, Mode::from_raw_mode(picked.mode.into()))?;
    Ok(())
}

/// The folder that files are copied below.
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

    fn make(&self, way: &[Vec<u8>], picked: &Picked) -> io::Result<()> {
        let Some((name, above)) = way.split_last() else { return Ok(()) };
        let folder = self.open(&path(above), OFlags::PATH | OFlags::DIRECTORY)?;
        match &picked.content {
            Content::Folder => {
                match rustix::fs::mkdirat(&folder, name.as_slice(), Mode::RWXU) {
                    // It is opened as a folder later, and is no link.
                    Err(Errno::EXIST) => Ok(()),
                    made => Ok(made?),
                }
            }
            Content::Link(to) => {
                replace(&folder, name, || {
                    rustix::fs::symlinkat(to.as_slice(), &folder, name.as_slice())
                })?;
                let (user, group) = (Uid::from_raw(picked.uid), Gid::from_raw(picked.gid));
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                let (user, group) = (Some(user), Some(group));
                Ok(rustix::fs::chownat(&folder, name.as_slice(), user, group, flags)?)
            }
            Content::File(bytes, pieces) => {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let file = replace(&folder, name, || {
                    let mode = Mode::RUSR | Mode::WUSR;
                    rustix::fs::openat(&folder, name.as_slice(), flags, mode)
                })?;
                let file = File::from(file);
                self.write(&file, *bytes, pieces)?;
                give(&file, picked)
            }
        }
    }

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

/// Makes a file by `make`. If its name is taken by what is no folder, that is removed first.
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
