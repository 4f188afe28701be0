//! NVMe commands in the format that Linux takes from user space.

use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{opcode, squeue};
use slipway_nvme_spec::identify::{Cns, IDENTIFY_SIZE, IdentifyController, IdentifyNamespace};
use slipway_nvme_spec::opcode::AdminOpcode;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::uring::uring_fd;
use crate::vectors::IoVectors;

/// A command and the address of its data: `struct nvme_uring_cmd`, and `struct nvme_passthru_cmd`,
/// whose last word is the result. Integers have the machine's byte order.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Command {
    pub opcode: u8,
    pub flags: u8,
    pub reserved1: u16,
    pub nsid: u32,
    pub cdw2: u32,
    pub cdw3: u32,
    pub metadata: u64,
    /// The address of the data, or of an array of I/O vectors.
    pub address: u64,
    pub metadata_len: u32,
    /// The number of bytes of data, or of I/O vectors.
    pub len: u32,
    /// Command dwords 10 to 15.
    pub cdw10: [u32; 6],
    /// Milliseconds; 0 for the driver's own timeout.
    pub timeout: u32,
    /// Reserved in `nvme_uring_cmd`; in `nvme_passthru_cmd` the result, which the kernel writes.
    pub last: u32,
}

const _: () = assert!(size_of::<Command>() == 72);

/// Returns an ioctl(2) number of type 'N', as `_IO` (`dir` 0) and `_IOWR` (`dir` 3) do.
const fn number(dir: u32, nr: u32) -> u32 {
    let size = if dir == 0 { 0 } else { size_of::<Command>() as u32 };
    dir << 30 | size << 16 | (b'N' as u32) << 8 | nr
}

/// `NVME_IOCTL_ID`: returns the namespace's number.
const ID: u32 = number(0, 0x40);
/// `NVME_IOCTL_ADMIN_CMD`.
const ADMIN: u32 = number(3, 0x41);
/// `NVME_URING_CMD_IO`.
const IO: u32 = number(3, 0x80);
/// `NVME_URING_CMD_IO_VEC`.
const IO_VEC: u32 = number(3, 0x81);

impl Command {
    /// Returns a command on `blocks` logical blocks, 1 to 65,536, from `lba` on, with nothing else
    /// set.
    pub fn of_blocks(opcode: u8, nsid: u32, lba: u64, blocks: u32) -> Self {
        let mut command = Self { opcode, nsid, ..Self::new_zeroed() };
        command.cdw10[0] = lba as u32;
        command.cdw10[1] = (lba >> 32) as u32;
        // NLB, 0's based, in the lower half of dword 12; flags are in the upper half.
        command.cdw10[2] = (blocks - 1) & 0xffff;
        command
    }

    /// Returns a submission entry of double length with the command. `vectors`, and the memory that
    /// they name, must stay until the kernel has answered.
    pub fn entry(mut self, file: &OwnedFd, vectors: &IoVectors) -> squeue::Entry128 {
        let number = match vectors.as_slice() {
            [] => IO,
            [one] => {
                (self.address, self.len) = (one.iov_base as u64, one.iov_len as u32);
                IO
            }
            many => {
                (self.address, self.len) = (many.as_ptr() as u64, many.len() as u32);
                IO_VEC
            }
        };
        let mut bytes = [0; 80];
        bytes[..size_of::<Self>()].copy_from_slice(self.as_bytes());
        opcode::UringCmd80::new(uring_fd(file), number).cmd(bytes).build()
    }
}

/// Returns the number of the namespace whose generic device `file` is.
///
/// # Errors
/// ENOTTY if `file` is no such device.
pub(super) fn namespace_id(file: &OwnedFd) -> std::io::Result<u32> {
    // SAFETY: takes no argument.
    let id = unsafe { libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(ID)) };
    u32::try_from(id).map_err(|_| std::io::Error::last_os_error())
}

/// Identify (section 5.15) of the controller.
///
/// # Errors
/// The errors of [`identify`].
pub(super) fn identify_controller(file: &OwnedFd) -> std::io::Result<IdentifyController> {
    let bytes = identify(file, Cns::Controller, 0)?;
    IdentifyController::read_from_bytes(&bytes).map_err(|_| std::io::ErrorKind::InvalidData.into())
}

/// Identify (section 5.15) of a namespace.
///
/// # Errors
/// The errors of [`identify`].
pub(super) fn identify_namespace(file: &OwnedFd, nsid: u32) -> std::io::Result<IdentifyNamespace> {
    let bytes = identify(file, Cns::Namespace, nsid)?;
    IdentifyNamespace::read_from_bytes(&bytes).map_err(|_| std::io::ErrorKind::InvalidData.into())
}

/// Sends Identify for the data structure `cns`, and returns its data.
///
/// # Errors
/// The errors of ioctl(2), and EIO if the drive refused the command.
fn identify(file: &OwnedFd, cns: Cns, nsid: u32) -> std::io::Result<[u8; IDENTIFY_SIZE]> {
    let mut data = [0_u8; IDENTIFY_SIZE];
    let mut command = Command {
        opcode: AdminOpcode::Identify.0,
        nsid,
        address: data.as_mut_ptr() as u64,
        len: IDENTIFY_SIZE as u32,
        ..Command::new_zeroed()
    };
    command.cdw10[0] = cns.0.into();
    // SAFETY: the kernel reads the command, fills `data`, whose length the command has, and writes
    // the command's last word; both live until the call returns.
    let status = unsafe {
        libc::ioctl(file.as_raw_fd(), libc::Ioctl::from(ADMIN), std::ptr::from_mut(&mut command))
    };
    match status {
        0 => Ok(data),
        1.. => Err(std::io::Error::from_raw_os_error(libc::EIO)),
        _ => Err(std::io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_commands_are_those_of_linux() {
        assert_eq!([ID, ADMIN, IO, IO_VEC], [0x4e40, 0xc048_4e41, 0xc048_4e80, 0xc048_4e81]);
        let command = Command::of_blocks(2, 7, 0x0123_4567_89ab_cdef, 1 << 16);
        let mut expected = [0; 72];
        expected[0] = 2;
        expected[4] = 7;
        expected[40..48].copy_from_slice(&0x0123_4567_89ab_cdef_u64.to_le_bytes());
        expected[48..50].fill(0xff);
        if cfg!(target_endian = "little") {
            assert_eq!(command.as_bytes(), expected);
        }
    }
}
