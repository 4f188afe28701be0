//! Copies of overlays: the layer's blocks, and the base's where the layer has none.
//!
//! An overlay disk belongs to one thread, which a copy leaves alone: the copy reads the layer's
//! file and the base by system calls, in pieces of bounded size, and may wait for the base's
//! medium.

use std::fs::File;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::store::Maps;
use crate::file::{CopyTarget, failed, identity};
use crate::memory::page_size;
use crate::{BaseIdentity, Disk, FileDisk, Geometry, OpenError};

/// The content of an overlay over a file: the memory file that its [`OverlayDisk`] uses, and the
/// open base. The memory and the lock on the base last as long as this value or the disk.
///
/// [`OverlayDisk`]: crate::OverlayDisk
pub struct OverlayContent {
    memory: OwnedFd,
    base: Arc<OwnedFd>,
    /// The path of the base, for errors.
    path: PathBuf,
    identity: BaseIdentity,
    geometry: Geometry,
}

impl OverlayContent {
    /// Describes the content of the overlay over `base` that [`OverlayDisk::of`] opens with the
    /// file `memory` and the base's `identity`. `path` is the base's, which must not be opened
    /// with O_DIRECT.
    ///
    /// [`OverlayDisk::of`]: crate::OverlayDisk::of
    pub fn new(memory: OwnedFd, base: &FileDisk, path: &Path, identity: BaseIdentity) -> Self {
        let (path, geometry) = (path.to_owned(), base.geometry());
        Self { memory, base: base.descriptor(), path, identity, geometry }
    }

    /// Returns the file that [`overlay_file`](crate::overlay_file) made.
    pub fn memory(&self) -> &OwnedFd {
        &self.memory
    }

    /// Returns the size of the disk in bytes.
    pub fn bytes(&self) -> u64 {
        self.geometry.bytes()
    }

    /// Copies what the disk reads at present to `to`, an empty file, which gets the disk's size.
    /// Returns the bytes of data that were written; the rest are holes. `path` is the path of `to`,
    /// for errors. If the disk is written meanwhile, the copy has some of that. The file is not
    /// synchronized.
    ///
    /// # Errors
    /// [`OpenError::Changed`], [`OpenError::Content`], [`OpenError::File`].
    pub fn copy_to(&self, to: &File, path: &Path) -> Result<u64, OpenError> {
        self.check_base()?;
        let mut target = CopyTarget::new(to, path, self.bytes())?;
        let maps = Maps::read(&self.geometry, &self.memory).map_err(OpenError::Content)?;
        let memory = self.memory.try_clone().map(File::from).map_err(OpenError::Content)?;
        let base = self.base.try_clone().map(File::from);
        let base = base.map_err(failed(&self.path, "open"))?;
        let (block, blocks) = (u64::from(self.geometry.block_size), self.geometry.blocks);
        let mut lba = 0;
        while lba < blocks {
            let end = maps.blocks.run(lba, blocks);
            let bytes = lba * block..end * block;
            if maps.blocks.get(lba) {
                copy_layer(&maps, &memory, bytes, &mut target)?;
            } else {
                target.copy_data((&base, &self.path), bytes)?;
            }
            lba = end;
        }
        // Bytes that were read after a change of the base do not belong to this overlay.
        self.check_base()?;
        Ok(target.written)
    }

    fn check_base(&self) -> Result<(), OpenError> {
        let present = identity(&self.base).map_err(failed(&self.path, "look at"))?;
        if present == self.identity { Ok(()) } else { Err(OpenError::Changed(self.path.clone())) }
    }
}

/// Copies `bytes` of the disk, which are the layer's. An unused page reads as zeros.
fn copy_layer(
    maps: &Maps,
    memory: &File,
    bytes: Range<u64>,
    target: &mut CopyTarget<'_>,
) -> Result<(), OpenError> {
    let page = page_size() as u64;
    let pages_end = bytes.end.div_ceil(page);
    let mut at = bytes.start;
    while at < bytes.end {
        let first = at / page;
        let next = (maps.pages.run(first, pages_end) * page).min(bytes.end);
        if maps.pages.get(first) {
            target.copy((memory, maps.data + at), at..next, OpenError::Content)?;
        }
        at = next;
    }
    Ok(())
}
