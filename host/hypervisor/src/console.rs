//! A VMM's output: the guest's console into a bounded file, errors into a bounded tail.
//!
//! A VMM prints into FIFOs in the VM's directory, and holds each of them open at both ends. So a
//! FIFO keeps unread text, up to a pipe's capacity, when the launcher is gone; its successor opens
//! the FIFO by name and continues. Neither a file that the VMM writes itself (a guest would fill
//! the disk) nor another process is needed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;

use crate::{Error, Result};

/// The number of bytes that are kept of the end of a VMM's standard error.
pub const STDERR_TAIL: usize = 8 << 10;

/// A log file that never exceeds its cap: when it is full, its older half is dropped.
#[derive(Debug)]
pub(crate) struct CappedLog {
    file: File,
    length: u64,
    cap: u64,
}

impl CappedLog {
    /// Makes the file anew, readable by its owner only, since a console may show secrets.
    pub(crate) fn create(path: &Path, cap: u64) -> Result<Self> {
        let mut log = Self::go_on(path, cap)?;
        log.file.set_len(0).map_err(|source| Error::file("empty", path, source))?;
        log.length = 0;
        Ok(log)
    }

    /// Opens the file to append to its present content.
    pub(crate) fn go_on(path: &Path, cap: u64) -> Result<Self> {
        let failed = |source| Error::file("open", path, source);
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = options.open(path).map_err(failed)?;
        let length = file.seek(SeekFrom::End(0)).map_err(failed)?;
        Ok(Self { file, length, cap })
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

/// Makes a FIFO at `path`, in place of any existing file. Returns the end for the VMM.
pub(crate) fn make_fifo(path: &Path) -> Result<OwnedFd> {
    let failed = |source: io::Error| Error::file("make", path, source);
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let private = Mode::RUSR | Mode::WUSR;
    rustix::fs::mknodat(CWD, path, FileType::Fifo, private, 0).map_err(|e| failed(e.into()))?;
    // Nonblocking: the VMM never waits, a full FIFO loses text. Open for reading as well: the FIFO
    // stays open without a launcher.
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed(e.into()))
}

/// Opens the launcher's end of a FIFO that a VMM holds open.
pub(crate) fn open_fifo(path: &Path) -> Result<pipe::Receiver> {
    let failed = |source: io::Error| Error::file("open", path, source);
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let end = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
    pipe::Receiver::from_owned_fd(end).map_err(failed)
}

/// Copies a pipe into a log until the pipe closes. The log is written on threads that may wait for
/// a disk, since the guest controls the amount of text. A log that cannot be written (a full disk)
/// loses text; the pipe is emptied nevertheless, so that the guest never waits for it.
pub(crate) async fn copy_to_log(mut pipe: pipe::Receiver, mut log: CappedLog) -> io::Result<()> {
    let mut buffer = vec![0; 16 << 10];
    loop {
        match pipe.read(&mut buffer).await? {
            0 => return Ok(()),
            length => {
                let text = buffer[..length].to_vec();
                let write = tokio::task::spawn_blocking(move || {
                    if let Err(error) = log.append(&text) {
                        tracing::debug!(%error, "console text lost");
                    }
                    log
                });
                log = write.await.map_err(io::Error::other)?;
            }
        }
    }
}

/// The task that reads the end of a VMM's standard error.
pub(crate) type StderrTail = tokio::task::JoinHandle<io::Result<String>>;

/// Returns the end of the standard error of a VMM that has ended. The pipe closes with the VMM; the
/// limit is for a descriptor that another process holds.
pub(crate) async fn last_words(tail: &mut StderrTail) -> String {
    match tokio::time::timeout(Duration::from_secs(2), tail).await {
        Ok(Ok(Ok(text))) => text,
        _ => String::new(),
    }
}

/// Reads a pipe until it closes, and returns the end of the text.
pub(crate) async fn read_tail(mut pipe: pipe::Receiver) -> io::Result<String> {
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
        let reader = pipe::Receiver::from_owned_fd(reader.into()).unwrap();
        let tail = read_tail(reader).await.unwrap();
        write.join().unwrap().unwrap();
        assert_eq!(tail.len(), STDERR_TAIL);
        assert!(tail.ends_with("xthe end"));
    }

    #[tokio::test]
    async fn a_fifo_holds_what_is_written_between_two_readers() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("fifo");
        std::fs::write(&path, "in the way").unwrap();
        let mut writer = File::from(make_fifo(&path).unwrap());
        let mut first = open_fifo(&path).unwrap();
        writer.write_all(b"one").unwrap();
        let mut bytes = [0; 8];
        assert_eq!(first.read(&mut bytes).await.unwrap(), 3);
        drop(first);
        writer.write_all(b"two").unwrap();
        let second = open_fifo(&path).unwrap();
        drop(writer);
        assert_eq!(read_tail(second).await.unwrap(), "two");
    }

    #[test]
    fn a_log_goes_on_where_another_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("console");
        CappedLog::create(&path, 8).unwrap().append(b"abcd").unwrap();
        let mut log = CappedLog::go_on(&path, 8).unwrap();
        log.append(b"efgh").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"abcdefgh");
        log.append(b"ij").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"efghij");
    }
}
