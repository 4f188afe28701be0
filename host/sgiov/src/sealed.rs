//! Texts that come with a message, in a memfd that nobody can change any more.
//!
//! Reading such a text never waits. Another kind of file may belong to a server that never answers,
//! and unsealed memory could be truncated or changed, so both are refused before a byte is read.

use std::io::{Error, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags};
use serde::de::DeserializeOwned;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::WRITE);

/// Makes a sealed memfd with `text`.
///
/// # Errors
/// An error of the system.
pub fn write(name: &str, text: &[u8]) -> std::io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = std::fs::File::from(rustix::fs::memfd_create(name, flags)?);
    file.write_all(text)?;
    rustix::fs::fcntl_add_seals(&file, SEALS | SealFlags::SEAL)?;
    Ok(file.into())
}

/// Decodes the JSON in the first `bytes` bytes of a sealed memfd.
///
/// # Errors
/// The errors of [`read`]; `InvalidData`: the text is no JSON of this type.
pub fn decode<T: DeserializeOwned>(file: impl AsFd, bytes: u64, most: u64) -> std::io::Result<T> {
    let json = read(file, bytes, most)?;
    serde_json::from_slice(&json).map_err(|error| Error::new(ErrorKind::InvalidData, error))
}

/// Returns the first `bytes` bytes of a sealed memfd.
///
/// # Errors
/// `InvalidData`: `file` is no sealed memfd, has fewer bytes, or `bytes` is more than `most`.
pub fn read(file: impl AsFd, bytes: u64, most: u64) -> std::io::Result<Vec<u8>> {
    let wrong = |text: &str| Error::new(ErrorKind::InvalidData, text);
    // Other kinds of files have no seals, and only the kernel answers this call, never a file's
    // server.
    let seals = rustix::fs::fcntl_get_seals(&file).map_err(|_| wrong("it is no memfd"))?;
    if !seals.contains(SEALS) {
        return Err(wrong("it is not sealed against changes"));
    }
    let length = usize::try_from(bytes.min(most.saturating_add(1))).unwrap_or(usize::MAX);
    let held = u64::try_from(rustix::fs::fstat(&file)?.st_size).unwrap_or(0);
    if bytes > most || bytes > held {
        return Err(wrong("it is too long, or not all there"));
    }
    let mut text = vec![0; length];
    let mut done = 0;
    while done < text.len() {
        match rustix::io::pread(&file, &mut text[done..], done as u64)? {
            0 => return Err(wrong("it is not all there")),
            count => done += count,
        }
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_read_and_nothing_else_is() {
        let file = write("test", b"a text").unwrap();
        assert_eq!(read(&file, 6, 10).unwrap(), b"a text");
        assert_eq!(read(&file, 1, 10).unwrap(), b"a");
        for (bytes, most) in [(7, 10), (6, 5), (u64::MAX, u64::MAX)] {
            assert!(read(&file, bytes, most).is_err(), "{bytes} {most}");
        }
    }

    /// Reading a pipe whose writer stays open would wait, and so would files that others serve.
    #[test]
    fn what_may_wait_or_change_is_refused_without_a_look() {
        let (reader, _writer) = std::io::pipe().unwrap();
        assert!(read(&reader, 1, 10).is_err());
        assert!(read(std::fs::File::open("/proc/self/exe").unwrap(), 1, 10).is_err());
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let open = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::io::write(&open, b"a text").unwrap();
        assert!(read(&open, 6, 10).is_err());
        rustix::fs::fcntl_add_seals(&open, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert!(read(&open, 6, 10).is_err(), "its bytes may change");
    }
}
