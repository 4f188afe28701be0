//! Termination messages: a file in a container in which its program says why it ends, as Kubernetes
//! has them.
//!
//! The file is the agent's, so that it is there after the container's file systems have gone. It is
//! mounted on the container's path: programs write to it in place.

use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::machine;

/// The most bytes of a message, as in Kubernetes: of more, the last ones count.
const MOST: u64 = 4096;

/// A container's termination message. Its file goes with it.
pub struct Message {
    file: File,
    path: PathBuf,
}

impl Message {
    /// Makes the empty file of the container `id`, which must be a file name.
    pub fn make(id: &str) -> Result<Self> {
        Self::make_at(PathBuf::from(machine::messages()?).join(id))
    }

    fn make_at(path: PathBuf) -> Result<Self> {
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(true).mode(0o600);
        let failed = || format!("making {}", path.display());
        let file = options.open(&path).with_context(failed)?;
        // Any user of the container may say why it ends.
        file.set_permissions(Permissions::from_mode(0o666)).with_context(failed)?;
        Ok(Self { file, path })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &std::path::Path {
        &self.path
    }

    /// Returns what the container has written so far.
    pub fn read(&self) -> Vec<u8> {
        let Ok(length) = self.file.metadata().map(|metadata| metadata.len()) else {
            return Vec::new();
        };
        let mut bytes = vec![0; length.min(MOST) as usize];
        let read = self.file.read_at(&mut bytes, length.saturating_sub(MOST));
        bytes.truncate(read.unwrap_or(0));
        bytes
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bytes_count_and_the_file_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("one");
        std::fs::write(&path, "an earlier container's").unwrap();
        let message = Message::make_at(path.clone()).unwrap();
        assert_eq!(message.read(), b"");
        std::fs::write(&path, "no disk").unwrap();
        assert_eq!(message.read(), b"no disk");
        std::fs::write(&path, [vec![b'a'; 5000], vec![b'z'; 4000]].concat()).unwrap();
        assert_eq!(message.read(), [vec![b'a'; 96], vec![b'z'; 4000]].concat());
        drop(message);
        assert!(!path.exists());
    }
}
