//! The identity of an image's files.

use std::fs::File;
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
        let (image, map) = (std::fs::metadata(image)?, std::fs::metadata(map)?);
        Ok(Self {
            image: (image.dev(), image.ino()),
            map: (map.ino(), map.mtime(), map.mtime_nsec()),
        })
    }

    /// Returns a digest of the map's content and of this stamp, to which the bits of `have`
    /// belong.
    pub(crate) fn identity(&self, map: &Path) -> io::Result<Digest> {
        let mut reader = DigestReader::new(File::open(map)?);
        io::copy(&mut reader, &mut io::sink())?;
        Ok(Digest::of(format!("{} {self:?}", reader.digest()).as_bytes()))
    }
}
