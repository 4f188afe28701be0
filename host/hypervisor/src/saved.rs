//! The state of a machine that was saved.

use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::{Error, Result};

/// The most bytes of a machine's state without its memory. CPUs take some 20 KiB each, functions
/// what they have in flight.
pub(crate) const MOST_STATE: u64 = 64 << 20;

/// The state of a machine without its memory, as [`Vm::save`](crate::Vm::save) has written it.
#[derive(Debug)]
pub struct SavedMachine {
    /// The file, at its beginning. The VMM may still write to it.
    pub file: OwnedFd,
    /// The bytes of the state, at the beginning of the file.
    pub bytes: u64,
}

impl SavedMachine {
    /// Makes an empty file for a state. It cannot grow beyond the most that a state has.
    pub(crate) fn file() -> Result<OwnedFd> {
        let failed = |errno| Error::system("making a file for a machine's state", errno);
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"machine-state", flags).map_err(failed)?;
        rustix::fs::ftruncate(&file, MOST_STATE).map_err(failed)?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(failed)?;
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn a_state_has_room_and_no_more() {
        let file = File::from(SavedMachine::file().unwrap());
        file.write_all_at(b"state", 0).unwrap();
        assert!(file.write_at(b"x", MOST_STATE).is_err());
    }
}
