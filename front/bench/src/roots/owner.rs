//! The owner of a root, in place of a VMM and its guest.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use slipway_nvme::driver::{Arena, Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::offset;
use slipway_ram::{DmaMap, Permissions, Region};
use slipway_vfio_user_client::{Client, Registers, sealed_memory};

/// Bytes of a block that is read, and of the first blocks of the files.
pub(super) const BLOCK: usize = 4096;
/// Bytes of a logical block of the namespaces.
const LOGICAL: u32 = 512;
/// The bytes of the image's first block, and those of the template's.
pub(super) const IMAGE: u8 = 0x11;
pub(super) const LAYER: u8 = 0x22;
/// Bytes of an owner's memory, and of the part that its driver uses.
const MEMORY: u64 = 128 << 20;
const ARENA: u64 = 1 << 20;
/// Entries of a queue.
const ENTRIES: u16 = 16;
/// The longest wait for a function.
const PATIENCE: Duration = Duration::from_secs(60);

/// Makes an owner's memory: sparse, and sealed as a guest's is.
pub(super) fn memory() -> Result<OwnedFd> {
    sealed_memory(MEMORY).context("no memory to share")
}

/// A root whose function is connected and brought up.
pub(super) struct Connected {
    driver: Driver<Registers>,
    /// Keeps the memory that the function accesses.
    _map: DmaMap,
}

impl Connected {
    /// Connects to a function, hands it memory and brings it up.
    pub(super) fn to(socket: &Path, memory: &OwnedFd) -> Result<Self> {
        let mut client = Client::connect(socket, PATIENCE)?;
        client.map(0, MEMORY, memory.as_fd(), 0, true)?;
        let mut map = DmaMap::new();
        map.add(0, Region::mapped(memory.as_fd(), 0, ARENA, Permissions::READ_WRITE)?)?;
        let registers = Registers::new(client, PATIENCE).with_doorbells(offset::DOORBELLS)?;
        let mut driver = Driver::new(registers, Arena::new(map.memory(), 0, ARENA), ENTRIES)?;
        driver.create_pair(1, ENTRIES, None)?;
        Ok(Self { driver, _map: map })
    }

    /// Reads the first block of the image and that of the layer, and checks them.
    pub(super) fn read(&mut self) -> Result<()> {
        for (nsid, expected) in [(1, IMAGE), (2, LAYER)] {
            let buffer = self.driver.arena.allocate(BLOCK)?;
            let command = io(NvmOpcode::Read, nsid, 0, BLOCK as u32 / LOGICAL);
            self.driver.transfer(1, command, (buffer, BLOCK))?;
            let mut byte = [0];
            self.driver.arena.memory().read(buffer, &mut byte)?;
            ensure!(byte == [expected], "namespace {nsid} of a root begins with {byte:x?}");
        }
        Ok(())
    }
}
