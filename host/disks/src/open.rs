//! Opens disks from their descriptions.
//!
//! A new kind of disk is a [`Disk`] in `backend/block`, a `kind` in `plane.proto`, and an arm in
//! `of_kind` here. If endpoints and lanes may share it, it is also a [`SharedDisk`], with an arm in
//! `spread` here and in `NamedDisk::make`. The command line names it in
//! `front/cli/src/args/disk.rs`.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use slipway_block::{
    Budget, Disk, FileContent, FileDisk, FileOptions, Geometry, LazyDisk, NullDisk, OverlayContent,
    OverlayDisk, RamDisk, SharedDisk, open_file, overlay_file,
};
use slipway_plane_api::v1;

use crate::Error;
use crate::device;
use crate::file_options::file_options;
use crate::named::{Disks, NamedDisk, block_size};
use crate::place::Lasts;

/// An open disk with the properties that a host needs.
pub struct Opened {
    /// The disk, for the endpoint's own thread.
    pub disk: Box<dyn Disk>,
    /// The same disk, opened once more for each lane of the endpoint.
    pub lanes: Vec<Box<dyn Disk>>,
    /// The kind in one word: ram, null, file, overlay, lazy.
    pub kind: &'static str,
    /// The named disk, if the disk is one.
    pub named: Option<NamedDisk>,
    /// The content of a disk in memory, which a keeper holds if the disk is to outlive the process.
    pub content: Option<Content>,
    /// The content of a regular file, for copies.
    pub file: Option<FileContent>,
}

impl Opened {
    /// Describes a disk without lanes, name, or content that a host could use.
    fn new(kind: &'static str, disk: Box<dyn Disk>) -> Self {
        Self { disk, lanes: Vec::new(), kind, named: None, content: None, file: None }
    }
}

/// The content of a disk in memory.
pub enum Content {
    /// The memory file of a RAM disk that is to outlive the process.
    Ram(OwnedFd),
    /// The content of an overlay, whose disk always has a memory file: it can be copied from
    /// there.
    Overlay(OverlayContent),
}

impl Content {
    /// Returns the memory file.
    pub fn file(&self) -> &OwnedFd {
        match self {
            Self::Ram(file) => file,
            Self::Overlay(content) => content.memory(),
        }
    }

    /// Returns the content of an overlay, or `None` for another disk.
    pub fn into_overlay(self) -> Option<OverlayContent> {
        match self {
            Self::Ram(_) => None,
            Self::Overlay(content) => Some(content),
        }
    }
}

/// Opens the disk that `disk` describes, and once more for each of the `lanes` lanes besides the
/// home. A named disk is one of `disks`. The memory of an overlay counts in `overlays`.
///
/// # Errors
/// [`Error::Invalid`] for a description that is no disk's, or a path that leads to another device;
/// [`Error::UnknownDisk`]; [`Error::Open`]; [`Error::Resources`].
pub fn open(
    disk: &v1::Disk,
    (disks, overlays): (&Disks, &Budget),
    lasts: Option<Lasts>,
    lanes: usize,
) -> Result<Opened, Error> {
    let missing = || Error::Invalid("the description of a disk has no kind".to_owned());
    let kind = disk.kind.as_ref().ok_or_else(missing)?;
    if let v1::disk::Kind::Named(reference) = kind {
        let named = disks.get(&reference.name)?;
        let (disk, lanes) = open_all(&named.shared, reference.read_only, lanes)?;
        let (kind, file) = (named.kind, named.shared.content());
        return Ok(Opened { disk, lanes, kind, named: Some(named), content: None, file });
    }
    let kept = lasts.as_ref().and_then(|lasts| lasts.device);
    let meant = kept.or_else(|| device::described(disk));
    let opened = match lanes {
        0 => of_kind(kind, block_size(disk), lasts, overlays)?,
        lanes => spread(kind, block_size(disk), lasts, lanes)?,
    };
    meant.map_or(Ok(()), |meant| device::check(meant, disk))?;
    Ok(opened)
}

type Spread = (Box<dyn Disk>, Vec<Box<dyn Disk>>);

/// Opens a shared disk for the home, and once more for each lane.
fn open_all(shared: &SharedDisk, read_only: bool, lanes: usize) -> Result<Spread, Error> {
    let lanes = (0..lanes).map(|_| shared.open(read_only)).collect::<Result<_, _>>()?;
    Ok((shared.open(read_only)?, lanes))
}

/// Opens a disk of one endpoint, whose lanes share it as endpoints share a named one.
fn spread(
    kind: &v1::disk::Kind,
    block_size: u32,
    lasts: Option<Lasts>,
    lanes: usize,
) -> Result<Opened, Error> {
    use v1::disk::Kind;
    let mut content = None;
    let (kind, shared, read_only) = match kind {
        Kind::Ram(ram) => {
            let shared;
            (shared, content) = share_ram(ram, block_size, lasts)?;
            ("ram", shared, false)
        }
        Kind::Null(null) => ("null", SharedDisk::null(null.size_bytes, block_size)?, false),
        Kind::File(file) => {
            let options = file_options(file, block_size, lasts.map(|lasts| lasts.witness));
            ("file", SharedDisk::file(Path::new(&file.path), &options)?, file.read_only)
        }
        Kind::Overlay(_) => {
            let text = "an overlay is one thread's: its endpoint has one lane";
            return Err(Error::Invalid(text.to_owned()));
        }
        Kind::Lazy(lazy) => {
            let Lazy { path, digest, socket, options } = Lazy::check(lazy, block_size, lasts)?;
            ("lazy", SharedDisk::lazy(&path, digest, socket, &options)?, true)
        }
        // Named disks are opened in [`open`], where their names are known.
        Kind::Named(named) => return Err(Error::UnknownDisk(named.name.clone())),
    };
    let (disk, lanes) = open_all(&shared, read_only, lanes)?;
    Ok(Opened { lanes, content, file: shared.content(), ..Opened::new(kind, disk) })
}

/// Makes a RAM disk that the lanes of an endpoint share. Returns it with its content if that is to
/// outlive the process.
fn share_ram(
    ram: &v1::RamDisk,
    block_size: u32,
    lasts: Option<Lasts>,
) -> Result<(SharedDisk, Option<Content>), Error> {
    let Some(lasts) = lasts else {
        return Ok((SharedDisk::ram(ram.size_bytes, block_size, None)?, None));
    };
    let file = ram_file(ram.size_bytes, lasts.content)?;
    let its = file.try_clone().map_err(|error| Error::Resources(error.to_string()))?;
    let shared = SharedDisk::ram(ram.size_bytes, block_size, Some(its))?;
    Ok((shared, Some(Content::Ram(file))))
}

/// Opens a disk that one endpoint has for itself.
fn of_kind(
    kind: &v1::disk::Kind,
    block_size: u32,
    lasts: Option<Lasts>,
    overlays: &Budget,
) -> Result<Opened, Error> {
    use v1::disk::Kind;
    Ok(match kind {
        Kind::Ram(ram) => {
            let (disk, content) = open_ram(ram, block_size, lasts)?;
            Opened { content, ..Opened::new("ram", Box::new(disk)) }
        }
        Kind::Null(null) => {
            Opened::new("null", Box::new(NullDisk::new(null_shape(null, block_size)?)))
        }
        Kind::File(file) => {
            let options = file_options(file, block_size, lasts.map(|lasts| lasts.witness));
            let (disk, content) = open_file(Path::new(&file.path), &options)?;
            Opened { file: content, ..Opened::new("file", disk) }
        }
        Kind::Overlay(overlay) => {
            let (disk, content) = open_overlay(overlay, block_size, lasts)?;
            let disk = Box::new(disk.counted_in(overlays));
            Opened { content: Some(Content::Overlay(content)), ..Opened::new("overlay", disk) }
        }
        Kind::Lazy(lazy) => {
            let Lazy { path, digest, socket, options } = Lazy::check(lazy, block_size, lasts)?;
            Opened::new("lazy", Box::new(LazyDisk::open(&path, digest, socket, &options)?))
        }
        // Named disks are opened in [`open`], where their names are known.
        Kind::Named(named) => return Err(Error::UnknownDisk(named.name.clone())),
    })
}

/// Makes a RAM disk. Returns it with its content if that is to outlive the process.
fn open_ram(
    ram: &v1::RamDisk,
    block_size: u32,
    lasts: Option<Lasts>,
) -> Result<(RamDisk, Option<Content>), Error> {
    let Some(lasts) = lasts else { return Ok((RamDisk::new(ram.size_bytes, block_size)?, None)) };
    let file = ram_file(ram.size_bytes, lasts.content)?;
    let disk = RamDisk::of(&file, block_size)?;
    Ok((disk, Some(Content::Ram(file))))
}

/// Opens an overlay, in the memory file that it had under a predecessor or in a new one. Returns it
/// with its content.
fn open_overlay(
    overlay: &v1::OverlayDisk,
    block_size: u32,
    lasts: Option<Lasts>,
) -> Result<(OverlayDisk<FileDisk>, OverlayContent), Error> {
    let (witness, had) = lasts.map_or((None, None), |one| (Some(one.witness), one.content));
    let path = Path::new(&overlay.base_path);
    let base = FileDisk::open(path, &image_options(block_size, witness))?;
    let limit = (overlay.limit_bytes > 0).then_some(overlay.limit_bytes);
    let identity = base.identity().map_err(|error| Error::Resources(error.to_string()))?;
    let file = match had {
        Some(file) => file,
        None => overlay_file(&base.geometry(), &identity)?,
    };
    let content = OverlayContent::new(file, &base, path, identity);
    let disk = OverlayDisk::of(base, limit, content.memory(), &identity)?;
    Ok((disk, content))
}

/// Returns the options for a file that many disks read, through the page cache.
fn image_options(block_size: u32, witness: Option<Arc<OwnedFd>>) -> FileOptions {
    let (read_only, direct) = (true, false);
    FileOptions { read_only, block_size, direct, witness, ..FileOptions::default() }
}

/// The checked description of an image whose blocks are still being fetched.
struct Lazy {
    path: PathBuf,
    digest: [u8; 32],
    socket: PathBuf,
    options: FileOptions,
}

impl Lazy {
    /// Checks a description.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a digest of another length, or a path that is not absolute.
    fn check(lazy: &v1::LazyDisk, block_size: u32, lasts: Option<Lasts>) -> Result<Self, Error> {
        let digest: [u8; 32] = lazy.digest.as_slice().try_into().map_err(|_| {
            let len = lazy.digest.len();
            Error::Invalid(format!("a digest of {len} bytes: that of an image has 32"))
        })?;
        let absolute = |path: &str| match Path::new(path) {
            path if path.is_absolute() => Ok(path.to_owned()),
            path => Err(Error::Invalid(format!("\"{}\" is no absolute path", path.display()))),
        };
        let (path, socket) = (absolute(&lazy.path)?, absolute(&lazy.socket_path)?);
        let options = image_options(block_size, lasts.map(|lasts| lasts.witness));
        Ok(Self { path, digest, socket, options })
    }
}

/// Returns the content of a RAM disk: the file that it had, or a new file of zeros.
fn ram_file(bytes: u64, had: Option<OwnedFd>) -> Result<OwnedFd, Error> {
    let made = had.map_or_else(|| slipway_block::ram_file(bytes), Ok);
    made.map_err(|error| Error::Resources(error.to_string()))
}

fn null_shape(null: &v1::NullDisk, block_size: u32) -> Result<Geometry, Error> {
    let blocks = null.size_bytes / u64::from(block_size);
    if !block_size.is_power_of_two() || !(512..=4096).contains(&block_size) || blocks == 0 {
        return Err(Error::Invalid(format!(
            "a null disk of {} bytes in blocks of {block_size} has no shape",
            null.size_bytes
        )));
    }
    Ok(Geometry { block_size, blocks, read_only: false })
}
