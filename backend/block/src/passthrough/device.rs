//! The namespace behind a disk.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use slipway_nvme_spec::identify::{IdentifyController, IdentifyNamespace};

use super::command;
use crate::check::is_block_size;
use crate::file::{failed, file_type};
use crate::{FileOptions, Geometry, OpenError};

/// The largest command in bytes, whatever the drive takes: bounds the memory pinned for a command.
const MOST_BYTES: u64 = 512 << 10;
/// MDTS counts the controller's smallest pages (CAP.MPSMIN), which the kernel does not report. No
/// drive has smaller pages than this; on a drive with larger ones, commands stay below its limit.
const PAGE: u64 = 4096;

/// An open namespace.
pub(super) struct Device {
    pub file: OwnedFd,
    pub nsid: u32,
    /// Bytes of a block of the drive; the disk's blocks are as large or larger.
    pub lba_size: u32,
    /// The largest command in bytes.
    pub most_bytes: u64,
    /// The drive has a volatile write cache.
    pub caches: bool,
    /// The drive has Write Zeroes.
    pub zeroes: bool,
    /// Write Zeroes may deallocate, since deallocated blocks read as zeros.
    pub deallocates: bool,
    pub geometry: Geometry,
    /// The options with which the disk was opened.
    options: FileOptions,
    /// The block device of the same namespace, opened exclusively.
    _claim: Option<OwnedFd>,
}

impl Device {
    pub fn open(path: &Path, options: &FileOptions) -> Result<Self, OpenError> {
        if !is_block_size(options.block_size) {
            return Err(OpenError::BlockSize(options.block_size));
        }
        let access = if options.read_only { OFlags::RDONLY } else { OFlags::RDWR };
        let file = rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty());
        let file = file.map_err(failed(path, "open"))?;
        if file_type(&file, path)? != FileType::CharacterDevice {
            return Err(OpenError::Kind(path.to_owned()));
        }
        let nsid = match command::namespace_id(&file) {
            Ok(nsid) => nsid,
            Err(_) => return Err(OpenError::Kind(path.to_owned())),
        };
        let claim = if options.read_only { None } else { claim(path)? };
        lock(&file, path, options.read_only)?;
        let controller = command::identify_controller(&file).map_err(asked(path))?;
        let namespace = command::identify_namespace(&file, nsid).map_err(asked(path))?;
        let geometry = shape(&namespace, options).map_err(unusable(path))?;
        Ok(Self {
            file,
            nsid,
            lba_size: namespace.block_size(),
            most_bytes: most_bytes(&controller),
            caches: controller.write_cache & 1 != 0,
            zeroes: controller.nvm_commands.get() & IdentifyController::WRITE_ZEROES != 0,
            deallocates: namespace.deallocated & 0xf == IdentifyNamespace::READS_ZEROES,
            geometry,
            options: FileOptions { witness: None, ..options.clone() },
            _claim: claim,
        })
    }

    /// Returns the shape that a disk opened now would have.
    pub fn shape(&self, path: &Path) -> Result<Geometry, OpenError> {
        let namespace = command::identify_namespace(&self.file, self.nsid).map_err(asked(path))?;
        if namespace.block_size() != self.lba_size {
            return Err(unusable(path)("it was formatted".to_owned()));
        }
        shape(&namespace, &self.options).map_err(unusable(path))
    }
}

#[cfg(test)]
impl Device {
    /// Returns a fake drive of 1,000 blocks of 512 bytes that takes two pages at a time; its
    /// commands go nowhere.
    pub fn nowhere() -> Self {
        let file = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty()).unwrap();
        Self {
            file,
            nsid: 7,
            lba_size: 512,
            most_bytes: 2 * PAGE,
            caches: true,
            zeroes: true,
            deallocates: true,
            geometry: Geometry { block_size: 512, blocks: 1000, read_only: false },
            options: FileOptions::default(),
            _claim: None,
        }
    }
}

fn asked(path: &Path) -> impl Fn(std::io::Error) -> OpenError {
    |source| OpenError::File { path: path.to_owned(), action: "identify", source }
}

fn unusable(path: &Path) -> impl Fn(String) -> OpenError {
    |why| OpenError::Namespace { path: path.to_owned(), why }
}

/// Returns the shape of a disk on a namespace, or the reason why there can be none.
fn shape(namespace: &IdentifyNamespace, options: &FileOptions) -> Result<Geometry, String> {
    // FLBAS bits 6:5 are the format index's upper bits since NVMe 2.0: the table here has no
    // entries for such formats.
    if namespace.format & 0x60 != 0 {
        return Err("its format is none of the first 16".to_owned());
    }
    let format = namespace.lba_formats[usize::from(namespace.format & 15)].get();
    if format & 0xffff != 0 {
        return Err("its blocks have metadata".to_owned());
    }
    // LBADS, a power of two; 0 means an unused format.
    let lba_size = match format >> 16 & 0xff {
        shift @ 9..=12 => 1_u32 << shift,
        shift => return Err(format!("its blocks have 2^{shift} bytes")),
    };
    let block_size = options.block_size;
    if block_size < lba_size {
        let text = format!("its blocks have {lba_size} bytes, those of the disk {block_size}");
        return Err(format!("{text}: a block size of {lba_size} fits"));
    }
    let blocks = namespace.size.get() / u64::from(block_size / lba_size);
    if blocks == 0 || blocks.checked_mul(u64::from(block_size)).is_none() {
        return Err(format!("it has {} blocks of {lba_size} bytes", namespace.size.get()));
    }
    let protected = namespace.attributes & IdentifyNamespace::WRITE_PROTECTED != 0;
    Ok(Geometry { block_size, blocks, read_only: options.read_only || protected })
}

fn most_bytes(controller: &IdentifyController) -> u64 {
    match controller.max_transfer {
        0 => MOST_BYTES,
        shift => PAGE.checked_shl(shift.into()).unwrap_or(MOST_BYTES).clamp(PAGE, MOST_BYTES),
    }
}

/// Opens the namespace's block device exclusively, which fails if it is mounted or in other
/// exclusive use (open(2)). Returns `None` if there is no block device.
fn claim(path: &Path) -> Result<Option<OwnedFd>, OpenError> {
    let Some(block) = sibling(path) else { return Ok(None) };
    let flags = OFlags::RDWR | OFlags::EXCL | OFlags::CLOEXEC;
    match rustix::fs::open(&block, flags, Mode::empty()) {
        Ok(file) => Ok(Some(file)),
        Err(Errno::NOENT) => Ok(None),
        Err(Errno::BUSY) => Err(OpenError::InUse(path.to_owned())),
        Err(errno) => Err(failed(&block, "open")(errno)),
    }
}

/// Returns the path of the block device, e.g. `/dev/nvme0n1` for `/dev/ng0n1`, after following
/// links.
fn sibling(path: &Path) -> Option<PathBuf> {
    let path = path.canonicalize().ok()?;
    let rest = path.file_name()?.to_str()?.strip_prefix("ng")?;
    Some(path.with_file_name(format!("nvme{rest}")))
}

fn lock(file: &OwnedFd, path: &Path, read_only: bool) -> Result<(), OpenError> {
    let mode = match read_only {
        true => FlockOperation::NonBlockingLockShared,
        false => FlockOperation::NonBlockingLockExclusive,
    };
    #[allow(
        clippy::disallowed_methods,
        reason = "other programs look at this lock; it does not wait; an opener may do worse"
    )]
    let locked = rustix::fs::flock(file, mode);
    match locked {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(OpenError::InUse(path.to_owned())),
        Err(errno) => Err(failed(path, "lock")(errno)),
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;

    fn namespace(size: u64, format: u32) -> IdentifyNamespace {
        let mut namespace = IdentifyNamespace::new_zeroed();
        namespace.size.set(size);
        namespace.lba_formats[0].set(format);
        namespace
    }

    fn options(block_size: u32) -> FileOptions {
        FileOptions { block_size, ..FileOptions::default() }
    }

    #[test]
    fn a_disk_has_blocks_as_large_as_the_drives_or_larger() {
        let (small, large) = (namespace(1001, 9 << 16), namespace(100, 12 << 16));
        let found = shape(&small, &options(512)).unwrap();
        assert_eq!((found.blocks, found.block_size, found.read_only), (1001, 512, false));
        assert_eq!(shape(&small, &options(4096)).unwrap().blocks, 125);
        assert_eq!(shape(&large, &options(4096)).unwrap().blocks, 100);
        assert!(shape(&large, &options(512)).unwrap_err().contains("4096 fits"));
    }

    #[test]
    fn a_hostile_or_foreign_format_is_refused() {
        for format in [9 << 16 | 8, 0, 8 << 16, 13 << 16, 0xff << 16] {
            assert!(shape(&namespace(100, format), &options(4096)).is_err(), "{format:#x}");
        }
        assert!(shape(&namespace(0, 9 << 16), &options(512)).is_err());
        assert!(shape(&namespace(7, 9 << 16), &options(4096)).is_err());
        assert!(shape(&namespace(u64::MAX, 9 << 16), &options(512)).is_err());
    }

    #[test]
    fn a_format_of_a_higher_number_is_not_taken_for_another() {
        let mut namespace = namespace(100, 9 << 16);
        for (format, fits) in [(0, true), (0x20, false), (0x40, false), (0x61, false), (0x10, true)]
        {
            namespace.format = format;
            assert_eq!(shape(&namespace, &options(512)).is_ok(), fits, "{format:#x}");
        }
    }

    #[test]
    fn the_drives_transfer_limit_counts() {
        let mut controller = IdentifyController::new_zeroed();
        for (shift, bytes) in [(0, MOST_BYTES), (1, 8192), (5, 128 << 10), (255, MOST_BYTES)] {
            controller.max_transfer = shift;
            assert_eq!(most_bytes(&controller), bytes);
        }
    }
}
