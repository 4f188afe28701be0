//! The identity of an image's files.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::Digest;
use crate::digest::DigestReader;

/// The inodes of an image's files. They are others if the image was removed and pulled again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stamp {
    image: (u64, u64),
    map: (u64, i64, i64),
}

impl Stamp {
    pub(crate) fn of(image: &Path, map: &Path) -> io::Result<Self> {
        Self::with(&std::fs::metadata(image)?, map)
    }

    /// Returns the stamp of an open file of the image, and of a map.
    pub(crate) fn with(image: &Metadata, map: &Path) -> io::Result<Self> {
        let map = std::fs::metadata(map)?;
        Ok(Self { image: Self::file(image), map: (map.ino(), map.mtime(), map.mtime_nsec()) })
    }

    /// Returns the device and the inode of a file.
    pub(crate) fn file(meta: &Metadata) -> (u64, u64) {
        (meta.dev(), meta.ino())
    }

    /// Returns whether the image's file is the one with this device and inode.
    pub(crate) fn is_of(&self, image: (u64, u64)) -> bool {
        self.image == image
    }

    /// Returns a digest of the map's content, of this stamp and of the system's boot, to which the
    /// bits of `have` belong: a power cut may lose data, and leave bits in a run directory that is
    /// no tmpfs.
    pub(crate) fn identity(&self, map: &Path) -> io::Result<Digest> {
        let mut reader = DigestReader::new(File::open(map)?);
        io::copy(&mut reader, &mut io::sink())?;
        let boot = slipway_peer::boot_id()?;
        // The line feed is a part of identities that earlier builds have written.
        Ok(Digest::of(format!("{} {self:?} {boot}\n", reader.digest()).as_bytes()))
    }
}
