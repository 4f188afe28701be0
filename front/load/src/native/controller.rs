//! A controller that our driver has brought up, by any access to its registers.

use anyhow::{Context, Result, ensure};
use slipway_nvme::driver::{Arena, Driver, RegisterAccess, doorbell_buffer_config, io};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_ram::Access;

use super::bell::{Bell, Shadow};
use super::cpus::Cpus;
use super::load::{self, Lane, Taker};
use crate::{Measured, Workload};

/// The address of shared memory in the target's address space.
pub const BASE: u64 = 1 << 32;
/// Entries of the admin queues.
const ADMIN_ENTRIES: u16 = 32;
/// The id of the namespace under load.
const NSID: u32 = 1;
/// The number of places whose content is checked after filling the disk.
const CHECKED: u64 = 32;
/// The number of places that are written and read if the disk is not filled.
const TRIED: u64 = 4;
/// Bytes of a memory page.
const PAGE: usize = 4096;

/// Our driver with a controller, and the properties of namespace 1 that loads need.
pub struct Controller<R> {
    /// The driver, with the controller's registers and memory.
    pub driver: Driver<R>,
    /// The way in which the threads of a load ring.
    pub bell: Bell,
    /// The controller's model name.
    pub model: String,
    /// Logical blocks of the namespace.
    blocks: u64,
    /// Bytes of a logical block.
    block_size: u32,
    /// Most bytes of a command.
    largest: u32,
}

impl<R: RegisterAccess> Controller<R> {
    /// Brings the controller up. Queues and data lie in `arena`. The threads of loads ring `bell`.
    ///
    /// # Errors
    /// The controller does not answer, it refuses a command, or it has no namespace 1.
    pub fn bring_up(registers: R, bell: Bell, arena: Arena) -> Result<Self> {
        let mut driver = Driver::new(registers, arena, ADMIN_ENTRIES)?;
        driver.set_queue_count(Workload::MOST_THREADS as u16)?;
        let controller = driver.identify_controller()?;
        let namespace = driver.identify_namespace(NSID)?;
        let (blocks, block_size) = (namespace.size.get(), namespace.block_size());
        ensure!(blocks > 0 && block_size.is_power_of_two(), "the controller has no namespace 1");
        // MDTS: a power of two in pages, 0 for no limit.
        let largest = match controller.max_transfer {
            0 => Workload::LARGEST_BLOCK,
            pages => (PAGE as u64)
                .checked_shl(pages.into())
                .map_or(u32::MAX, |most| u32::try_from(most).unwrap_or(u32::MAX)),
        };
        let model = String::from_utf8_lossy(&controller.model).trim().to_owned();
        let largest = largest.min(Workload::LARGEST_BLOCK);
        Ok(Self { driver, bell, model, blocks, block_size, largest })
    }

    /// Returns whether commands can have the workload's block size.
    pub fn takes(&self, workload: &Workload) -> bool {
        (self.block_size..=self.largest).contains(&workload.block_size)
    }

    /// Makes loads ring shadow doorbells (Doorbell Buffer Config), as Linux' driver does where a
    /// controller's doorbells are trapped. Registers are still written where the controller asks
    /// for it.
    ///
    /// # Errors
    /// The controller does not support them, or the arena is full.
    pub fn shadow_doorbells(&mut self) -> Result<()> {
        let arena = &mut self.driver.arena;
        let pages = (arena.allocate(PAGE)?, arena.allocate(PAGE)?);
        let [doorbells, events] = [pages.0, pages.1].map(|page| {
            let mut spans = Vec::new();
            arena.memory().pin(page, PAGE, Access::Write, &mut spans)?;
            spans.pop().context("a page is one span")
        });
        let command = doorbell_buffer_config(pages.0, pages.1);
        self.driver.admin(command).context("the controller has no shadow doorbells")?;
        let (doorbells, events, beneath) = (doorbells?, events?, Box::new(self.bell.clone()));
        self.bell = Bell::Shadow(Shadow { doorbells, events, beneath });
        Ok(())
    }

    /// Returns the bytes of the namespace.
    pub fn disk_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// Writes the whole disk, with different content at each place, and checks some of it. So the
    /// disk that is measured afterwards has real blocks.
    ///
    /// # Errors
    /// A command fails, or data differs from what was written.
    pub fn fill(&mut self) -> Result<()> {
        let chunks = self.chunks();
        self.with_buffer(|this, buffer| {
            (0..chunks).try_for_each(|number| this.write_chunk(number, buffer))?;
            spread(chunks, CHECKED).try_for_each(|number| this.check_chunk(number, buffer))
        })
    }

    /// Writes some places and reads them again, to check that data arrives at its address.
    ///
    /// # Errors
    /// A command fails, or data differs from what was written.
    pub fn check(&mut self) -> Result<()> {
        let chunks = self.chunks();
        self.with_buffer(|this, buffer| {
            spread(chunks, TRIED).try_for_each(|number| this.write_chunk(number, buffer))?;
            spread(chunks, TRIED).try_for_each(|number| this.check_chunk(number, buffer))
        })
    }

    /// Calls `work` with a queue and a buffer of the size of the largest command.
    fn with_buffer(&mut self, work: impl FnOnce(&mut Self, u64) -> Result<()>) -> Result<()> {
        self.driver.create_pair(1, 16, None)?;
        let buffer = self.driver.arena.allocate(self.largest as usize)?;
        let done = work(self, buffer);
        self.driver.arena.release(buffer, self.largest as usize);
        self.driver.delete_pair(1)?;
        done
    }

    /// Returns the blocks of the largest command.
    fn chunk(&self) -> u64 {
        u64::from(self.largest / self.block_size)
    }

    fn chunks(&self) -> u64 {
        self.blocks.div_ceil(self.chunk())
    }

    fn write_chunk(&mut self, number: u64, buffer: u64) -> Result<()> {
        let content = self.content(number);
        self.driver.arena.memory().write(buffer, &content)?;
        self.move_chunk(NvmOpcode::Write, number, (buffer, content.len()))
    }

    fn check_chunk(&mut self, number: u64, buffer: u64) -> Result<()> {
        let content = self.content(number);
        let mut seen = vec![0; content.len()];
        self.driver.arena.memory().write(buffer, &seen)?;
        self.move_chunk(NvmOpcode::Read, number, (buffer, content.len()))?;
        self.driver.arena.memory().read(buffer, &mut seen)?;
        ensure!(seen == content, "the disk does not hold what was written to it");
        Ok(())
    }

    fn move_chunk(&mut self, opcode: NvmOpcode, number: u64, data: (u64, usize)) -> Result<()> {
        let lba = number * self.chunk();
        let command = io(opcode, NSID, lba, (data.1 / self.block_size as usize) as u32);
        let (_, list) = self.driver.arena.point(data.0, data.1)?;
        release_list(&mut self.driver.arena, list, data.1);
        Ok(self.driver.transfer(1, command, data)?)
    }

    /// Returns the content of chunk `number`.
    fn content(&self, number: u64) -> Vec<u8> {
        let chunk = self.chunk();
        let blocks = chunk.min(self.blocks - number * chunk);
        let words = blocks * u64::from(self.block_size) / 8;
        let word = |at: u64| (number << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..words).flat_map(|at| word(at).to_le_bytes()).collect()
    }

    /// Makes a lane for each thread of `workload`.
    ///
    /// # Errors
    /// The controller takes no such queues, or the arena is full.
    pub fn lanes(&mut self, workload: &Workload) -> Result<Vec<Lane>> {
        let entries = (workload.depth + 1).next_power_of_two().max(16) as u16;
        let mut lanes = Vec::new();
        for id in 1..=workload.threads as u16 {
            if let Bell::Shadow(shadow) = &self.bell {
                shadow.clear(id)?;
            }
            self.driver.create_pair(id, entries, None).with_context(|| {
                format!("the controller takes no queue {id} of {entries} entries")
            })?;
            let pair = self.driver.pin_pair(id)?;
            let bell = self.bell.clone();
            let commands = (0..workload.depth).map(|slot| self.command(workload, slot as u16));
            lanes.push(Lane { pair, bell, commands: commands.collect::<Result<_>>()? });
        }
        Ok(lanes)
    }

    /// Makes a command with a buffer of its own. Its address on the disk and its direction are set
    /// later.
    fn command(&mut self, workload: &Workload, slot: u16) -> Result<SubmissionEntry> {
        let len = workload.block_size as usize;
        let buffer = self.driver.arena.allocate(len)?;
        let blocks = workload.block_size / self.block_size;
        let mut command = io(NvmOpcode::Read, NSID, 0, blocks.max(1));
        command.id.set(slot);
        (command.prp1, command.prp2) = self.driver.point(buffer, len)?;
        Ok(command)
    }

    /// Releases the lanes' queues and memory. The lanes must be those of `workload`, with nothing
    /// in flight.
    ///
    /// # Errors
    /// The controller refuses to delete a queue.
    pub fn clear(&mut self, lanes: Vec<Lane>, workload: &Workload) -> Result<()> {
        let len = workload.block_size as usize;
        for lane in lanes {
            for command in &lane.commands {
                self.driver.arena.release(command.prp1.get(), len);
                release_list(&mut self.driver.arena, command.prp2.get(), len);
            }
            self.driver.delete_pinned(lane.pair)?;
        }
        Ok(())
    }

    /// Returns the controller's properties for a load. `pid` is the target's process, if it is one
    /// of this machine.
    pub fn taker<'a>(&self, cpus: &'a Cpus, pid: Option<u32>) -> Taker<'a> {
        Taker { cpus, blocks: self.blocks, block_size: self.block_size, pid }
    }

    /// Runs the load for the first of the two times, then for the second one, which is measured.
    /// `pid` is the target's process, if it is one of this machine.
    ///
    /// # Errors
    /// The errors of [`Self::lanes`], [`load::run`] and [`Self::clear`].
    pub fn run(
        &mut self,
        (cpus, pid): (&Cpus, Option<u32>),
        workload: &Workload,
        (warm_up, time): (std::time::Duration, std::time::Duration),
    ) -> Result<Measured> {
        let lanes = self.lanes(workload)?;
        let taker = self.taker(cpus, pid);
        let (lanes, measured) = load::run(lanes, &taker, workload, warm_up, time)?;
        self.clear(lanes, workload)?;
        Ok(measured)
    }
}

/// Returns up to `places` of `chunks`, evenly spaced.
fn spread(chunks: u64, places: u64) -> impl Iterator<Item = u64> {
    let places = places.min(chunks);
    (0..places).map(move |place| place * chunks / places)
}

/// Releases the PRP list at `list` of `len` bytes of data, if they have one: one page of the list
/// covers up to 2 MiB.
fn release_list(arena: &mut Arena, list: u64, len: usize) {
    if len > 2 * PAGE {
        arena.release(list, PAGE);
    }
}

/// Returns the bytes of memory that a session needs for these loads, one after the other.
pub fn room(workloads: &[Workload]) -> u64 {
    // Loads of the same block size and depth share memory, so counting all of them is never too
    // little. The file is sparse: only used parts take memory.
    let of = |load: &Workload| {
        let command = load.block_size.max(PAGE as u32) as u64 + PAGE as u64;
        let queue = u64::from((load.depth + 1).next_power_of_two()) * 80 + 2 * PAGE as u64;
        u64::from(load.threads) * (u64::from(load.depth) * command + queue)
    };
    let loads: u64 = workloads.iter().map(of).sum();
    (loads + (8 << 20)).next_multiple_of(2 << 20)
}
