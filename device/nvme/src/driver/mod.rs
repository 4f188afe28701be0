//! A small real NVMe driver, for unit tests, fuzzing and benchmarks.
//!
//! [`Driver`] is generic over [`RegisterAccess`], so that it runs on a controller by direct calls
//! ([`Direct`]) as well as over a socket. Queues and data lie in an [`Arena`] of memory that driver
//! and controller both reach. The driver polls and takes no interrupts. A [`PinnedPair`] is one of
//! its queue pairs on a thread of its own, as fast as the memory.

mod arena;
mod pair;
mod pinned;
mod shadow;

use std::collections::BTreeMap;

use slipway_nvme_spec::command::{CompletionEntry, SubmissionEntry};
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::identify::{Cns, IDENTIFY_SIZE, IdentifyController, IdentifyNamespace};
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{
    AdminQueueAttributes, Capabilities, Configuration, ControllerStatus, offset,
};
use slipway_nvme_spec::status::Status;
use slipway_ram::Fault;
use zerocopy::FromBytes;

pub use arena::Arena;
pub use pair::QueuePair;
pub use pinned::{Ended, PinnedPair};
pub use shadow::{Shadowed, doorbell_buffer_config, passes};
pub use slipway_pci::driver::{AccessError, Direct, RegisterAccess};

/// The reason why the driver could not go on.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// A register access failed, or waiting for the controller took too long.
    #[error(transparent)]
    Access(#[from] AccessError),
    /// CSTS.CFS is set.
    #[error("the controller reports a fatal error")]
    Fatal,
    /// A command ended with an error.
    #[error("a command failed: {0:?}")]
    Command(Status),
    /// The arena is used up.
    #[error("no memory left for DMA")]
    Memory,
    /// Memory of the arena is gone.
    #[error(transparent)]
    Fault(#[from] Fault),
    /// The controller completed a command that is not in flight.
    #[error("queue {queue}: the controller completed command {id}, which is not in flight")]
    Completion {
        /// The queue.
        queue: u16,
        /// The command's ID, as the controller says it.
        id: u16,
    },
    /// The queue has no free entry, or there is no such queue.
    #[error("queue {0} is full or not there")]
    Queue(u16),
}

/// Doorbell registers.
pub trait RingDoorbells: RegisterAccess {
    /// Writes doorbell register number `doorbell`, without waiting for the end of the write.
    ///
    /// # Errors
    /// [`AccessError`].
    fn ring(&mut self, doorbell: usize, value: u32) -> Result<(), AccessError> {
        self.post(offset::DOORBELLS + 4 * doorbell as u64, &value.to_le_bytes())
    }
}

impl<R: RegisterAccess> RingDoorbells for R {}

/// A driver of one controller.
pub struct Driver<R> {
    /// The access to the registers.
    pub registers: R,
    /// Memory for queues and data.
    pub arena: Arena,
    pairs: BTreeMap<u16, QueuePair>,
    /// Completions of the admin queue that no call waited for: asynchronous events.
    pub unclaimed: Vec<CompletionEntry>,
}

impl<R: RegisterAccess> Driver<R> {
    /// Resets and enables the controller with admin queues of `entries` entries (section 7.6.1).
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn new(registers: R, arena: Arena, entries: u16) -> Result<Self, DriverError> {
        let pairs = BTreeMap::new();
        let mut driver = Self { registers, arena, pairs, unclaimed: Vec::new() };
        driver.enable(entries)?;
        Ok(driver)
    }

    /// Disables the controller, waits, and enables it with fresh admin queues.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn enable(&mut self, entries: u16) -> Result<(), DriverError> {
        self.disable()?;
        let admin = QueuePair::new(0, entries, &mut self.arena)?;
        let attributes = AdminQueueAttributes::new(entries.into());
        self.registers.write32(offset::AQA, attributes.0)?;
        self.write64(offset::ASQ, admin.submission)?;
        self.write64(offset::ACQ, admin.completion)?;
        self.pairs.insert(0, admin);
        self.registers.write32(offset::CC, Configuration::ENABLE.0)?;
        self.wait_status(ControllerStatus::ready)
    }

    /// Clears CC.EN and waits for CSTS.RDY to fall.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn disable(&mut self) -> Result<(), DriverError> {
        self.registers.write32(offset::CC, 0)?;
        self.pairs.clear();
        while ControllerStatus(self.registers.read32(offset::CSTS)?).ready() {
            self.registers.idle()?;
        }
        Ok(())
    }

    /// Carries out a normal shutdown (section 7.6.2).
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn shutdown(&mut self) -> Result<(), DriverError> {
        let configuration = Configuration(self.registers.read32(offset::CC)?);
        let asked = configuration.with_shutdown(Configuration::SHUTDOWN_NORMAL);
        self.registers.write32(offset::CC, asked.0)?;
        self.wait_status(ControllerStatus::shutdown_complete)
    }

    fn wait_status(&mut self, done: fn(ControllerStatus) -> bool) -> Result<(), DriverError> {
        loop {
            let status = ControllerStatus(self.registers.read32(offset::CSTS)?);
            if status.fatal() {
                return Err(DriverError::Fatal);
            }
            if done(status) {
                return Ok(());
            }
            self.registers.idle()?;
        }
    }

    /// Reads CAP.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn capabilities(&mut self) -> Result<Capabilities, DriverError> {
        let low = self.registers.read32(offset::CAP)?;
        let high = self.registers.read32(offset::CAP + 4)?;
        Ok(Capabilities(u64::from(high) << 32 | u64::from(low)))
    }

    fn write64(&mut self, at: u64, value: u64) -> Result<(), DriverError> {
        self.registers.write32(at, value as u32)?;
        Ok(self.registers.write32(at + 4, (value >> 32) as u32)?)
    }

    /// Creates I/O queue pair `id` with `entries` entries, which interrupts by `vector` if any.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn create_pair(
        &mut self,
        id: u16,
        entries: u16,
        vector: Option<u16>,
    ) -> Result<(), DriverError> {
        let pair = QueuePair::new(id, entries, &mut self.arena)?;
        let size = u32::from(entries - 1) << 16 | u32::from(id);
        let interrupts = vector.map_or(0, |vector| u32::from(vector) << 16 | 2);
        let mut command = admin(AdminOpcode::CreateCompletionQueue)
            .with_dword(10, size)
            .with_dword(11, interrupts | 1);
        command.prp1.set(pair.completion);
        self.admin(command)?;
        let mut command = admin(AdminOpcode::CreateSubmissionQueue)
            .with_dword(10, size)
            .with_dword(11, u32::from(id) << 16 | 1);
        command.prp1.set(pair.submission);
        self.admin(command)?;
        self.pairs.insert(id, pair);
        Ok(())
    }

    /// Deletes I/O queue pair `id`.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn delete_pair(&mut self, id: u16) -> Result<(), DriverError> {
        let number = u32::from(id);
        self.admin(admin(AdminOpcode::DeleteSubmissionQueue).with_dword(10, number))?;
        self.admin(admin(AdminOpcode::DeleteCompletionQueue).with_dword(10, number))?;
        self.pairs.remove(&id);
        Ok(())
    }

    /// Deletes an I/O queue pair that was pinned, with nothing in flight, and releases its memory.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn delete_pinned(&mut self, pair: PinnedPair) -> Result<(), DriverError> {
        self.delete_pair(pair.id())?;
        for (at, len) in pair.places() {
            self.arena.release(at, len);
        }
        Ok(())
    }

    /// Returns queue pair `id`.
    pub fn pair(&mut self, id: u16) -> Option<&mut QueuePair> {
        self.pairs.get_mut(&id)
    }

    /// Takes I/O queue pair `id`, which must be unused, for a thread of its own.
    /// [`Driver::delete_pinned`] deletes it.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn pin_pair(&mut self, id: u16) -> Result<PinnedPair, DriverError> {
        let pair = self.pairs.remove(&id).ok_or(DriverError::Queue(id))?;
        pair.pin(self.arena.memory())
    }

    /// Puts `command` into queue `queue` under an ID of the driver's choice, and rings. Returns the
    /// ID. The caller sets the data pointers; see [`Driver::point`].
    ///
    /// # Errors
    /// [`DriverError::Queue`] when the queue is full.
    pub fn submit(&mut self, queue: u16, command: SubmissionEntry) -> Result<u16, DriverError> {
        let pair = self.pairs.get_mut(&queue).ok_or(DriverError::Queue(queue))?;
        let id = pair.push(self.arena.memory(), command)?;
        pair.ring_tail(&mut self.registers)?;
        Ok(id)
    }

    /// Puts `commands` into queue `queue`, one after the other, and rings once for all of them, as
    /// the halves of a fused pair need it. Returns their IDs.
    ///
    /// # Errors
    /// [`DriverError::Queue`] when the queue is full.
    pub fn submit_all(
        &mut self,
        queue: u16,
        commands: &[SubmissionEntry],
    ) -> Result<Vec<u16>, DriverError> {
        let pair = self.pairs.get_mut(&queue).ok_or(DriverError::Queue(queue))?;
        let push = |command: &SubmissionEntry| pair.push(self.arena.memory(), *command);
        let ids = commands.iter().map(push).collect::<Result<_, _>>()?;
        pair.ring_tail(&mut self.registers)?;
        Ok(ids)
    }

    /// Appends all completions that wait in queue `queue` to `into`, and rings when there are any.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn reap(
        &mut self,
        queue: u16,
        into: &mut Vec<CompletionEntry>,
    ) -> Result<usize, DriverError> {
        let pair = self.pairs.get_mut(&queue).ok_or(DriverError::Queue(queue))?;
        let mut count = 0;
        while let Some(entry) = pair.pop(self.arena.memory())? {
            into.push(entry);
            count += 1;
        }
        if count > 0 {
            pair.ring_head(&mut self.registers)?;
        }
        Ok(count)
    }

    /// Submits `command` and waits for its end, whatever its status. Other completions of an I/O
    /// queue that come meanwhile are lost: for use while nothing else is in flight there.
    ///
    /// # Errors
    /// [`DriverError`], but not for the command's own status.
    pub fn run(
        &mut self,
        queue: u16,
        command: SubmissionEntry,
    ) -> Result<CompletionEntry, DriverError> {
        let id = self.submit(queue, command)?;
        let mut entries = Vec::new();
        loop {
            self.reap(queue, &mut entries)?;
            if let Some(at) = entries.iter().position(|entry| entry.id.get() == id) {
                let entry = entries.swap_remove(at);
                if queue == 0 {
                    self.unclaimed.append(&mut entries);
                }
                return Ok(entry);
            }
            if ControllerStatus(self.registers.read32(offset::CSTS)?).fatal() {
                return Err(DriverError::Fatal);
            }
            self.registers.idle()?;
        }
    }

    /// Runs an admin command that must succeed. Returns dword 0 of its completion.
    ///
    /// # Errors
    /// [`DriverError`]; [`DriverError::Command`] when it failed.
    pub fn admin(&mut self, command: SubmissionEntry) -> Result<u32, DriverError> {
        succeeded(self.run(0, command)?)
    }

    /// Runs Identify with this CNS and namespace, and returns its 4096 bytes.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn identify(&mut self, cns: Cns, nsid: u32) -> Result<Vec<u8>, DriverError> {
        let command =
            SubmissionEntry::new(AdminOpcode::Identify.0, nsid).with_dword(10, u32::from(cns.0));
        self.admin_read(command, IDENTIFY_SIZE)
    }

    /// Runs Identify Controller.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn identify_controller(&mut self) -> Result<Box<IdentifyController>, DriverError> {
        let page = self.identify(Cns::Controller, 0)?;
        let page = IdentifyController::read_from_bytes(&page);
        page.map(Box::new).map_err(|_| DriverError::Memory)
    }

    /// Runs Identify Namespace.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn identify_namespace(&mut self, nsid: u32) -> Result<Box<IdentifyNamespace>, DriverError> {
        let page = self.identify(Cns::Namespace, nsid)?;
        let page = IdentifyNamespace::read_from_bytes(&page);
        page.map(Box::new).map_err(|_| DriverError::Memory)
    }

    /// Runs an admin command that returns `len` bytes.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn admin_read(
        &mut self,
        mut command: SubmissionEntry,
        len: usize,
    ) -> Result<Vec<u8>, DriverError> {
        let buffer = self.arena.allocate(len)?;
        (command.prp1, command.prp2) = self.point(buffer, len)?;
        let ended = self.admin(command);
        let mut data = vec![0; len];
        let read = self.arena.memory().read(buffer, &mut data);
        self.arena.release(buffer, len);
        ended?;
        read?;
        Ok(data)
    }

    /// Sets Number of Queues to `pairs`, and returns the number that was granted.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn set_queue_count(&mut self, pairs: u16) -> Result<u16, DriverError> {
        let less_one = u32::from(pairs.max(1) - 1);
        let command = admin(AdminOpcode::SetFeatures)
            .with_dword(10, FeatureId::NumberOfQueues.0.into())
            .with_dword(11, less_one << 16 | less_one);
        Ok((self.admin(command)? as u16).saturating_add(1))
    }

    /// Returns PRP1 and PRP2 for `len` contiguous bytes at `address`; writes a PRP list if one is
    /// needed. The list stays allocated: for tests, and for buffers that are never released.
    ///
    /// # Errors
    /// [`DriverError::Memory`].
    pub fn point(
        &mut self,
        address: u64,
        len: usize,
    ) -> Result<(zerocopy::little_endian::U64, zerocopy::little_endian::U64), DriverError> {
        let (prp1, prp2) = self.arena.point(address, len)?;
        Ok((prp1.into(), prp2.into()))
    }

    /// Runs `command` in queue `queue` with the `len` contiguous bytes at `buffer` as its data, and
    /// waits for its end, which must be a success.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn transfer(
        &mut self,
        queue: u16,
        mut command: SubmissionEntry,
        (buffer, len): (u64, usize),
    ) -> Result<(), DriverError> {
        (command.prp1, command.prp2) = self.point(buffer, len)?;
        succeeded(self.run(queue, command)?).map(|_| ())
    }
}

/// Returns an admin command without a namespace.
pub fn admin(opcode: AdminOpcode) -> SubmissionEntry {
    SubmissionEntry::new(opcode.0, 0)
}

/// Returns a command with a starting LBA and a number of blocks (1 to 65,536): Read, Write, Write
/// Zeroes.
pub fn io(opcode: NvmOpcode, nsid: u32, lba: u64, blocks: u32) -> SubmissionEntry {
    SubmissionEntry::new(opcode.0, nsid)
        .with_dword(10, lba as u32)
        .with_dword(11, (lba >> 32) as u32)
        .with_dword(12, (blocks - 1) & 0xffff)
}

/// Returns dword 0 of a completion with success.
///
/// # Errors
/// [`DriverError::Command`] with any other status.
pub fn succeeded(entry: CompletionEntry) -> Result<u32, DriverError> {
    if entry.status().is_success() {
        Ok(entry.result.get())
    } else {
        Err(DriverError::Command(entry.status()))
    }
}
