//! What QEMU prints: the guest's console into a bounded file, errors into a bounded tail.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use crate::{Error, Result};

/// How much of QEMU's standard error is kept, in bytes: its end.
pub const STDERR_TAIL: usize = 8 << 10;

/// A log file that never grows past its cap: when it is full, its older half goes.
#[derive(Debug)]
pub(super) struct CappedLog {
    file: File,
    length: u64,
    cap: u64,
}

impl CappedLog {
    /// Makes the file anew, readable by its owner only: a console may show secrets.
    pub(super) fn create(path: &Path, cap: u64) -> Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)
            .map_err(|source| Error::file("open", path, source))?;
        Ok(Self { file, length: 0, cap })
    }

    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.length + bytes.len() as u64 > self.cap {
            self.drop_older_half()?;
        }
        let room = usize::try_from(self.cap - self.length).unwrap_or(usize::MAX);
        let bytes = &bytes[bytes.len().saturating_sub(room)..];
        self.file.write_all(bytes)?;
        self.length += bytes.len() as u64;
        Ok(())
    }

    fn drop_older_half(&mut self) -> io::Result<()> {
        let keep = self.length.min(self.cap / 2);
        self.file.seek(SeekFrom::Start(self.length - keep))?;
        let mut newer = Vec::new();
        (&self.file).take(keep).read_to_end(&mut newer)?;
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(&newer)?;
        self.length = newer.len() as u64;
        Ok(())
    }
}

/// Copies a pipe into a log until it closes. A log that cannot be written (a full disk) loses
/// text; the pipe is emptied all the same, so that the guest never waits for it.
pub(super) async fn copy_to_log(pipe: OwnedFd, mut log: CappedLog) -> io::Result<()> {
    let mut pipe = pipe::Receiver::from_owned_fd(pipe)?;
    let mut buffer = vec![0; 16 << 10];
    loop {
        match pipe.read(&mut buffer).await? {
            0 => return Ok(()),
            length => {
                if let Err(error) = log.append(&buffer[..length]) {
                    tracing::debug!(%error, "console text lost");
                }
            }
        }
    }
}

/// Reads a pipe until it closes and returns its end.
pub(super) async fn read_tail(pipe: OwnedFd) -> io::Result<String> {
    let mut pipe = pipe::Receiver::from_owned_fd(pipe)?;
    let mut tail = Vec::new();
    let mut buffer = vec![0; 4 << 10];
    loop {
        let length = pipe.read(&mut buffer).await?;
        if length == 0 {
            return Ok(String::from_utf8_lossy(&tail).into_owned());
        }
        tail.extend_from_slice(&buffer[..length]);
        let excess = tail.len().saturating_sub(STDERR_TAIL);
        tail.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logged(cap: u64, writes: &[&[u8]]) -> Vec<u8> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console");
        let mut log = CappedLog::create(&path, cap).unwrap();
        for bytes in writes {
            log.append(bytes).unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() <= cap);
        }
        std::fs::read(&path).unwrap()
    }

    #[test]
    fn a_full_log_keeps_what_is_newer() {
        assert_eq!(logged(8, &[b"abcd", b"efgh"]), b"abcdefgh");
        assert_eq!(logged(8, &[b"abcd", b"efgh", b"ij"]), b"efghij");
        assert_eq!(logged(8, &[b"abcdefgh", b"0123456789"]), b"efgh6789");
        assert_eq!(logged(8, &[b"0123456789"]), b"23456789");
    }

    #[tokio::test]
    async fn only_the_end_of_much_text_is_kept() {
        let (reader, mut writer) = io::pipe().unwrap();
        let text = "x".repeat(3 * STDERR_TAIL) + "the end";
        let write = std::thread::spawn(move || writer.write_all(text.as_bytes()));
        let tail = read_tail(reader.into()).await.unwrap();
        write.join().unwrap().unwrap();
        assert_eq!(tail.len(), STDERR_TAIL);
        assert!(tail.ends_with("xthe end"));
    }
}
