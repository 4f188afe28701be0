//! An NVMe controller of the VM, driven by Slipway's own driver.

use anyhow::{Context, Result, ensure};
use slipway_nvme::driver::{Arena, Driver, io};
use slipway_nvme_spec::identify::Cns;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_vfio_user_client::Registers;

use crate::place::DriverMemory;

/// Entries of the admin queues, as Linux has them.
const ADMIN_ENTRIES: u16 = 32;
/// The only I/O queue pair, and its entries.
const QUEUE: u16 = 1;
const ENTRIES: u16 = 64;
/// Bytes that are read at the start of a disk.
const BLOCK: usize = 4096;
/// The superblock of EROFS: its offset, and its magic number (*fs/erofs/erofs_fs.h*).
const EROFS: (usize, [u8; 4]) = (1024, 0xe0f5_e1e2_u32.to_le_bytes());
/// The magic number in the superblock of ext4 (*fs/ext4/ext4.h*, `s_magic`).
const EXT4: (usize, [u8; 2]) = (1024 + 0x38, 0xef53_u16.to_le_bytes());

/// The use of a disk, which tells what its first block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The read-only image, a file system of EROFS.
    Image,
    /// The volatile layer, a file system of ext4.
    Volatile,
}

/// An NVMe controller, before or after its driver is in place.
pub enum Disks {
    /// Nobody has looked at it.
    Found(Box<(Registers, DriverMemory)>),
    /// Its driver is in place.
    Driven(Box<Driver<Registers>>),
    /// Its driver has failed.
    Lost,
}

impl Disks {
    /// Makes the disks behind the controller with these registers.
    pub fn new(registers: Registers, place: DriverMemory) -> Self {
        Self::Found(Box::new((registers, place)))
    }

    /// Brings the controller up, with one I/O queue pair, and identifies its namespaces.
    ///
    /// # Errors
    /// The controller does not answer, or refuses a command.
    pub fn bring_up(&mut self) -> Result<()> {
        let Self::Found(found) = std::mem::replace(self, Self::Lost) else { return Ok(()) };
        let (registers, DriverMemory { memory, base, len }) = *found;
        let mut driver = Driver::new(registers, Arena::new(memory, base, len), ADMIN_ENTRIES)?;
        driver.identify_controller()?;
        driver.set_queue_count(1)?;
        driver.create_pair(QUEUE, ENTRIES, None)?;
        let list = driver.identify(Cns::ActiveNamespaces, 0)?;
        let numbers =
            list.chunks_exact(4).map(|one| u32::from_le_bytes([one[0], one[1], one[2], one[3]]));
        for nsid in numbers.take_while(|nsid| *nsid > 0) {
            driver.identify_namespace(nsid)?;
        }
        *self = Self::Driven(Box::new(driver));
        Ok(())
    }

    /// Reads the first block of a namespace, and checks that it is one of what it should have.
    ///
    /// # Errors
    /// The read fails, or the block is none of `content`.
    pub fn check(&mut self, nsid: u32, content: Content) -> Result<()> {
        let Self::Driven(driver) = self else { anyhow::bail!("the controller has no driver") };
        let shape = driver.identify_namespace(nsid)?;
        let blocks = (BLOCK as u32).div_ceil(shape.block_size().max(1));
        let buffer = driver.arena.allocate(BLOCK)?;
        let command = io(NvmOpcode::Read, nsid, 0, blocks);
        let read = driver.transfer(QUEUE, command, (buffer, BLOCK));
        let mut bytes = vec![0; BLOCK];
        driver.arena.memory().read(buffer, &mut bytes)?;
        driver.arena.release(buffer, BLOCK);
        read.with_context(|| format!("namespace {nsid}"))?;
        ensure!(is(&bytes, content), "namespace {nsid} does not begin as {content:?} does");
        Ok(())
    }
}

/// Returns whether the first block of a disk is one of `content`.
fn is(block: &[u8], content: Content) -> bool {
    let has = |offset: usize, magic: &[u8]| {
        block.get(offset..).is_some_and(|rest| rest.starts_with(magic))
    };
    match content {
        Content::Image => has(EROFS.0, &EROFS.1),
        Content::Volatile => has(EXT4.0, &EXT4.1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_known_by_its_magic_number() {
        let mut block = vec![0; BLOCK];
        assert!(!is(&block, Content::Image) && !is(&block, Content::Volatile));
        block[1024..1028].copy_from_slice(&[0xe2, 0xe1, 0xf5, 0xe0]);
        assert!(is(&block, Content::Image) && !is(&block, Content::Volatile));
        block[1080..1082].copy_from_slice(&[0x53, 0xef]);
        assert!(is(&block, Content::Volatile));
        assert!(!is(&block[..1024], Content::Image));
    }
}
