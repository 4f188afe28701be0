//! The files of a machine's state: one into which a VMM saves it, and one from which VMMs go on.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::{Error, Result};

/// The most bytes of a machine's state without its memory.
const MOST_STATE: u64 = slipway_machine::MAX_STATE_BYTES as u64;

/// A file for the state of a machine. A VMM cannot make it grow beyond what a state may have.
pub(crate) struct StateFile(File);

impl StateFile {
    /// Makes an empty file.
    pub(crate) fn new() -> Result<Self> {
        let failed = |errno| Error::system("making a file for a machine's state", errno);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"machine-state", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, MOST_STATE).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        Ok(Self(file.into()))
    }

    /// Returns a descriptor for the VMM, which writes from the beginning of the file on.
    pub(crate) fn descriptor(&self) -> Result<OwnedFd> {
        let copy = self.0.try_clone().map(OwnedFd::from);
        copy.map_err(|source| Error::system("duplicating a descriptor", source))
    }

    /// Returns the first `bytes` bytes, as many as the VMM says that it has written.
    pub(crate) fn read(&self, bytes: u64) -> Result<Vec<u8>> {
        let len = usize::try_from(bytes).ok().filter(|_| bytes <= MOST_STATE);
        let len = len.ok_or_else(|| {
            Error::Control(format!("a machine's state of {bytes} bytes: at most {MOST_STATE}"))
        })?;
        let mut state = vec![0; len];
        let read = self.0.read_exact_at(&mut state, 0);
        read.map_err(|source| Error::system("reading a machine's state", source))?;
        Ok(state)
    }
}

/// Returns a file in memory with a machine's state, for
/// [`VmSpec::restore`](crate::VmSpec::restore). The caller has checked the state. Nobody can change
/// the file, so a VMM does not compute its checksum.
///
/// # Errors
/// [`Error::System`]: memory or descriptors are missing.
pub fn checked_state(state: &[u8]) -> Result<File> {
    let made = || -> io::Result<File> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut file = File::from(rustix::fs::memfd_create(c"machine-state", flags)?);
        file.write_all(state)?;
        let seals = SealFlags::SHRINK | SealFlags::WRITE | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok(file)
    };
    made().map_err(|error| Error::system("keeping a machine's state", error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_has_room_and_no_more() {
        let file = StateFile::new().unwrap();
        let mut theirs = File::from(file.descriptor().unwrap());
        theirs.write_all(b"state").unwrap();
        assert_eq!(file.read(5).unwrap(), b"state");
        assert_eq!(file.read(MOST_STATE).unwrap().len() as u64, MOST_STATE);
        assert!(file.read(MOST_STATE + 1).is_err() && file.read(u64::MAX).is_err());
        assert!(theirs.write_at(b"x", MOST_STATE).is_err());
    }

    #[test]
    fn a_checked_state_stays_as_it_is() {
        let file = checked_state(b"state").unwrap();
        let mut bytes = [0; 5];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!((&bytes, file.metadata().unwrap().len()), (b"state", 5));
        assert!(file.write_all_at(b"S", 0).is_err() && file.set_len(4).is_err());
    }
}
