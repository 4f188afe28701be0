//! Shadow doorbells (sections 5.7 and 7.13), the host's side.

use std::sync::atomic::{Ordering, fence};

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::AdminOpcode;
use slipway_nvme_spec::registers::{self, Configuration};
use slipway_ram::Memory;

use super::{Driver, DriverError, RegisterAccess, admin};

/// Registers whose doorbells are shadowed after [`Driver::shadow_doorbells`].
pub struct Shadowed<R> {
    /// The registers.
    pub inner: R,
    memory: Memory,
    pages: Option<Pages>,
    /// The number of doorbell registers that were written nevertheless, since the controller asked
    /// for it.
    pub written: u64,
}

struct Pages {
    doorbells: u64,
    events: u64,
    /// The first doorbell that is shadowed: 0, or 2 to leave the admin queue's out, as Linux does.
    first: usize,
}

impl<R> Shadowed<R> {
    /// Wraps registers that are not shadowed yet; the pages will lie in `memory`.
    pub fn new(inner: R, memory: Memory) -> Self {
        Self { inner, memory, pages: None, written: 0 }
    }
}

/// Returns whether a change of a doorbell from `old` to `new` passes `event` (section 7.13). The
/// comparison is modulo 2^16, which also holds across the end of a queue of any size.
pub fn passes(event: u32, old: u32, new: u32) -> bool {
    let (event, old, new) = (event as u16, old as u16, new as u16);
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

impl<R: RegisterAccess> RegisterAccess for Shadowed<R> {
    fn read32(&mut self, offset: u64) -> Result<u32, DriverError> {
        self.inner.read32(offset)
    }

    fn write32(&mut self, offset: u64, value: u32) -> Result<(), DriverError> {
        if offset == registers::offset::CC && !Configuration(value).enabled() {
            // A reset forgets the pages (section 5.7).
            self.pages = None;
        }
        self.inner.write32(offset, value)
    }

    fn ring(&mut self, doorbell: usize, value: u32) -> Result<(), DriverError> {
        if let Some(pages) = self.pages.as_ref().filter(|pages| doorbell >= pages.first) {
            let at = 4 * doorbell as u64;
            let old = self.memory.load_u32(pages.doorbells + at)?;
            self.memory.store_u32(pages.doorbells + at, value)?;
            // Pairs with the controller's fence between its event indexes and its last look.
            fence(Ordering::SeqCst);
            if !passes(self.memory.load_u32(pages.events + at)?, old, value) {
                return Ok(());
            }
            self.written += 1;
        }
        self.inner.ring(doorbell, value)
    }

    fn idle(&mut self) -> Result<(), DriverError> {
        self.inner.idle()
    }
}

/// Returns a Doorbell Buffer Config with these pages.
pub fn doorbell_buffer_config(doorbells: u64, events: u64) -> SubmissionEntry {
    let command = admin(AdminOpcode::DoorbellBufferConfig);
    SubmissionEntry { prp1: doorbells.into(), prp2: events.into(), ..command }
}

impl<R: RegisterAccess> Driver<Shadowed<R>> {
    /// Configures shadow doorbells, the admin queue's included if `admin_too`, and uses them from
    /// now on. Returns the pages: doorbells, event indexes.
    ///
    /// # Errors
    /// [`DriverError`].
    pub fn shadow_doorbells(&mut self, admin_too: bool) -> Result<(u64, u64), DriverError> {
        let (doorbells, events) = (self.arena.allocate(4096)?, self.arena.allocate(4096)?);
        self.admin(doorbell_buffer_config(doorbells, events))?;
        let first = if admin_too { 0 } else { 2 };
        self.registers.pages = Some(Pages { doorbells, events, first });
        Ok((doorbells, events))
    }
}
