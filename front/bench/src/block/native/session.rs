//! The driver on a vfio-user socket.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use slipway_nvme::driver::{
    Arena, Driver, DriverError, RegisterAccess, doorbell_buffer_config, io,
};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::offset;
use slipway_ram::{Access, Span};
use slipway_vfio_user::client::Client;

use super::bell::{Bell, Shadow};
use super::cpus::Cpus;
use super::load::{self, Lane, Part, Taker};
use super::memory::{BASE, Shared};
use crate::block::{Measured, Subject, Workload};

/// Every wait for the target takes at most this.
const PATIENCE: Duration = Duration::from_secs(10);
/// The region of configuration space, and the Command register in it (PCI Local Bus 3.0, 6.2.2).
const CONFIGURATION: u32 = 7;
const COMMAND: u64 = 4;
/// What a driver sets that polls: Memory Space, Bus Master, Interrupt Disable. The controller need not
/// keep its interrupt pin.
const DRIVER: u16 = 1 << 1 | 1 << 2 | 1 << 10;
/// Entries of the admin queues.
const ADMIN_ENTRIES: u16 = 32;
/// The namespace that takes the load.
const NSID: u32 = 1;
/// Places whose content is looked at before anything is measured.
const CHECKED: u64 = 32;
/// A memory page.
const PAGE: usize = 4096;

/// BAR 0 over the socket.
struct Registers {
    client: Arc<Mutex<Client>>,
    bell: Bell,
    since: Instant,
}

impl Registers {
    fn client<T>(
        &mut self,
        call: impl FnOnce(&mut Client) -> Result<T, slipway_vfio_user::client::ClientError>,
    ) -> Result<T, DriverError> {
        self.since = Instant::now();
        let mut client =
            self.client.lock().map_err(|_| DriverError::Access("a thread panicked".into()))?;
        call(&mut client).map_err(|error| DriverError::Access(error.to_string()))
    }
}

impl RegisterAccess for Registers {
    fn read32(&mut self, offset: u64) -> Result<u32, DriverError> {
        let since = self.since;
        let value = self.client(|client| client.read_u32(0, offset));
        // A driver that waits for a command looks at the status register all the while.
        self.since = since;
        value
    }

    fn write32(&mut self, offset: u64, value: u32) -> Result<(), DriverError> {
        self.client(|client| client.write(0, offset, &value.to_le_bytes()))
    }

    fn ring(&mut self, doorbell: usize, value: u32) -> Result<(), DriverError> {
        self.since = Instant::now();
        let rung = self.bell.ring((doorbell, value));
        rung.map_err(|error| DriverError::Access(error.to_string()))
    }

    fn idle(&mut self) -> Result<(), DriverError> {
        if self.since.elapsed() > PATIENCE {
            return Err(DriverError::Access("the controller does not answer".into()));
        }
        std::thread::yield_now();
        Ok(())
    }
}

/// Our driver, connected to an NVMe controller behind a vfio-user socket.
pub struct Session {
    name: String,
    about: String,
    driver: Driver<Registers>,
    /// How the threads of a load ring.
    bell: Bell,
    cpus: Cpus,
    pid: Option<u32>,
    /// Logical blocks of the namespace.
    blocks: u64,
    /// Bytes of one.
    block_size: u32,
    /// Most bytes of a command.
    largest: u32,
    /// Kept: the controller reaches it.
    _memory: Shared,
}

impl Session {
    /// Connects to the socket at `path` and brings the controller up; makes room for the largest of
    /// `workloads`. Doorbells go through the page that the server lets be mapped, or by messages
    /// where it lets none.
    ///
    /// # Errors
    /// Nobody serves there, or it is no NVMe controller with a namespace 1.
    pub fn connect(
        name: impl Into<String>,
        path: &Path,
        cpus: Cpus,
        workloads: &[Workload],
    ) -> Result<Self> {
        let memory = Shared::new(room(workloads))?;
        let mut client = Client::connect(path, PATIENCE)
            .with_context(|| format!("cannot connect to {}", path.display()))?;
        let pid = client.server_pid();
        client.map(BASE, memory.len, memory.file.as_fd(), 0, true).context("mapping memory")?;
        client.write(CONFIGURATION, COMMAND, &DRIVER.to_le_bytes()).context("PCI Command")?;
        let window = client.window(0, offset::DOORBELLS)?;
        let client = Arc::new(Mutex::new(client));
        let (bell, doorbells) = match window {
            Some(window) => (Bell::Page(Arc::new(window)), "in a mapped page"),
            None => (Bell::Message(client.clone()), "by messages"),
        };
        let registers = Registers { client, bell, since: Instant::now() };
        let arena = Arena::new(memory.memory.clone(), BASE, memory.len);
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
        let bell = driver.registers.bell.clone();
        Ok(Self {
            name: name.into(),
            bell,
            about: format!("our driver over {}, {model}, doorbells {doorbells}", path.display()),
            driver,
            cpus,
            pid,
            blocks,
            block_size,
            largest: largest.min(Workload::LARGEST_BLOCK),
            _memory: memory,
        })
    }

    /// Has loads ring by shadow doorbells (Doorbell Buffer Config), as Linux' driver does where the
    /// doorbells of a controller are trapped.
    ///
    /// # Errors
    /// The controller does not have them.
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
        let client = self.driver.registers.client.clone();
        let (doorbells, events): (Span, Span) = (doorbells?, events?);
        self.bell = Bell::Shadow(Shadow { doorbells, events, client });
        self.about.push_str(", shadowed");
        Ok(())
    }

    /// Bytes of the namespace.
    pub fn disk_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_size)
    }

    /// Writes the whole disk, each place with bytes of its own, and looks at some of them again: what
    /// is measured afterwards is a disk whose blocks exist, and not one that makes things up.
    ///
    /// # Errors
    /// A command fails, or something else is read than was written.
    pub fn fill(&mut self) -> Result<()> {
        self.driver.create_pair(1, 16, None)?;
        let buffer = self.driver.arena.allocate(self.largest as usize)?;
        let filled = self.fill_with(buffer);
        self.driver.arena.release(buffer, self.largest as usize);
        self.driver.delete_pair(1)?;
        filled
    }

    fn fill_with(&mut self, buffer: u64) -> Result<()> {
        let chunk = u64::from(self.largest / self.block_size);
        let chunks = self.blocks.div_ceil(chunk);
        for number in 0..chunks {
            let content = self.content(number, chunk);
            self.driver.arena.memory().write(buffer, &content)?;
            self.move_chunk(NvmOpcode::Write, number * chunk, (buffer, content.len()))?;
        }
        for place in 0..CHECKED.min(chunks) {
            let number = place * chunks / CHECKED.min(chunks);
            let content = self.content(number, chunk);
            let mut seen = vec![0; content.len()];
            self.driver.arena.memory().write(buffer, &seen)?;
            self.move_chunk(NvmOpcode::Read, number * chunk, (buffer, content.len()))?;
            self.driver.arena.memory().read(buffer, &mut seen)?;
            ensure!(seen == content, "the disk does not hold what was written to it");
        }
        Ok(())
    }

    fn move_chunk(&mut self, opcode: NvmOpcode, lba: u64, data: (u64, usize)) -> Result<()> {
        let command = io(opcode, NSID, lba, (data.1 / self.block_size as usize) as u32);
        let (_, list) = self.driver.arena.point(data.0, data.1)?;
        release_list(&mut self.driver.arena, list, data.1);
        Ok(self.driver.transfer(1, command, data)?)
    }

    /// What chunk `number` of `chunk` blocks holds.
    fn content(&self, number: u64, chunk: u64) -> Vec<u8> {
        let blocks = chunk.min(self.blocks - number * chunk);
        let words = blocks * u64::from(self.block_size) / 8;
        let word = |at: u64| (number << 32 | at).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..words).flat_map(|at| word(at).to_le_bytes()).collect()
    }

    /// A lane for each thread of `workload`.
    fn lanes(&mut self, workload: &Workload) -> Result<Vec<Lane>> {
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

    /// A command with a buffer of its own; where it goes and whether it reads is set later.
    fn command(&mut self, workload: &Workload, slot: u16) -> Result<SubmissionEntry> {
        let len = workload.block_size as usize;
        let buffer = self.driver.arena.allocate(len)?;
        let blocks = workload.block_size / self.block_size;
        let mut command = io(NvmOpcode::Read, NSID, 0, blocks.max(1));
        command.id.set(slot);
        (command.prp1, command.prp2) = self.driver.point(buffer, len)?;
        Ok(command)
    }

    /// Gives the lanes' queues and memory back.
    fn clear(&mut self, lanes: Vec<Lane>, workload: &Workload) -> Result<()> {
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
}

/// Gives back the PRP list at `list` of `len` bytes of data, where they took one: one page names up
/// to 2 MiB.
fn release_list(arena: &mut Arena, list: u64, len: usize) {
    if len > 2 * PAGE {
        arena.release(list, PAGE);
    }
}

/// Bytes of memory that a session needs for these loads, one after the other.
fn room(workloads: &[Workload]) -> u64 {
    // Pieces are used again by loads of the same block size and depth; who counts all of them is
    // never short. The file is sparse: only what is used takes memory.
    let of = |load: &Workload| {
        let command = load.block_size.max(PAGE as u32) as u64 + PAGE as u64;
        let queue = u64::from((load.depth + 1).next_power_of_two()) * 80 + 2 * PAGE as u64;
        u64::from(load.threads) * (u64::from(load.depth) * command + queue)
    };
    let loads: u64 = workloads.iter().map(of).sum();
    (loads + (8 << 20)).next_multiple_of(2 << 20)
}

impl Session {
    fn taker(&self) -> Taker<'_> {
        let (blocks, block_size) = (self.blocks, self.block_size);
        Taker { cpus: &self.cpus, blocks, block_size, pid: self.pid }
    }

    /// Puts `workload` on from one thread, and from the same thread, when there is one, the load of a
    /// neighbour on another session. What this one saw is measured.
    ///
    /// # Errors
    /// As for [`Subject::run`].
    pub fn run_beside(
        &mut self,
        workload: &Workload,
        neighbour: Option<(&mut Session, &Workload)>,
        times: (Duration, Duration),
    ) -> Result<Measured> {
        let lanes = self.lanes(workload)?;
        let quiet = Part { lanes, taker: self.taker(), workload };
        let Some((other, loud)) = neighbour else {
            let ([lanes, _], measured) = load::run_beside(quiet, None, times)?;
            self.clear(lanes, workload)?;
            return Ok(measured);
        };
        let lanes = other.lanes(loud)?;
        let part = Part { lanes, taker: other.taker(), workload: loud };
        let ([ours, theirs], measured) = load::run_beside(quiet, Some(part), times)?;
        self.clear(ours, workload)?;
        other.clear(theirs, loud)?;
        Ok(measured)
    }
}

impl Subject for Session {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn takes(&self, workload: &Workload) -> bool {
        (self.block_size..=self.largest).contains(&workload.block_size)
    }

    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        let lanes = self.lanes(workload)?;
        let (lanes, measured) = load::run(lanes, &self.taker(), workload, warm_up, time)?;
        self.clear(lanes, workload)?;
        Ok(measured)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Whoever serves it may be gone by now.
        let _ = self.driver.disable().map_err(|error| anyhow!("{error}"));
    }
}
