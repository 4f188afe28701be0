//! The files that roots are made of.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::fs::Advice;

use super::disk::Disk;
use super::owner::{BLOCK, IMAGE, LAYER};

/// Bytes of the image, and of the layers' template.
const DISK: u64 = 64 << 20;

/// An image and a layers' template, and the folder that has them and the functions' sockets.
pub struct RootFiles {
    folder: PathBuf,
    pub(super) disk: Disk,
}

impl RootFiles {
    /// Makes the files in `folder`, sparse behind their first block.
    ///
    /// # Errors
    /// The folder cannot be written to.
    pub fn make(folder: &Path) -> Result<Self> {
        let files = Self { folder: folder.to_owned(), disk: Disk::of(folder)? };
        for (path, byte) in [(files.image(), IMAGE), (files.template(), LAYER)] {
            let make = || -> std::io::Result<()> {
                let file = File::create(&path)?;
                file.write_all_at(&[byte; BLOCK], 0)?;
                file.set_len(DISK)?;
                // Pages that are not written yet stay in the page cache.
                file.sync_all()
            };
            make().with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(files)
    }

    /// Returns the path of the image.
    pub fn image(&self) -> PathBuf {
        self.folder.join("image")
    }

    /// Returns the path of the template.
    pub fn template(&self) -> PathBuf {
        self.folder.join("template")
    }

    /// Returns the path for the socket of a function.
    pub(super) fn socket(&self, id: &str) -> PathBuf {
        self.folder.join(id)
    }

    /// Takes the files out of the page cache. On a tmpfs they stay.
    pub(super) fn cool(&self) -> Result<()> {
        for path in [self.image(), self.template()] {
            rustix::fs::fadvise(File::open(path)?, 0, None, Advice::DontNeed)?;
        }
        Ok(())
    }
}
