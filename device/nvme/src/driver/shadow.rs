//! Shadow doorbells (sections 5.7 and 7.13), the host's side.

use std::sync::atomic::{Ordering, fence};

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::AdminOpcode;
use slipway_nvme_spec::registers::{self, Configuration};
use slipway_ram::{Fault, Memory};

use super::{AccessError, Driver, DriverError, RegisterAccess, admin};

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

    /// Returns whether the doorbell at byte `at` of the doorbells is shadowed.
    fn is_shadowed(&self, at: u64) -> bool {
        self.pages.as_ref().is_some_and(|pages| at >= 4 * pages.first as u64)
    }

    /// Stores `value` to the shadow page, at byte `at`. Returns whether the register is to be
    /// written as well.
    fn store(&self, at: u64, value: u32) -> Result<bool, Fault> {
        let Some(pages) = &self.pages else { return Ok(true) };
        let old = self.memory.load_u32(pages.doorbells + at)?;
        self.memory.store_u32(pages.doorbells + at, value)?;
        // Pairs with the controller's fence between its event indexes and its last look.
        fence(Ordering::SeqCst);
        Ok(passes(self.memory.load_u32(pages.events + at)?, old, value))
    }
}

/// Returns whether a change of a doorbell from `old` to `new` passes `event` (section 7.13). The
/// comparison is modulo 2^16, which also holds across the end of a queue of any size.
pub fn passes(event: u32, old: u32, new: u32) -> bool {
    let (event, old, new) = (event as u16, old as u16, new as u16);
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

impl<R: RegisterAccess> RegisterAccess for Shadowed<R> {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.inner.read(offset, into)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        if offset == registers::offset::CC
            && let Ok(value) = from.try_into()
            && !Configuration(u32::from_le_bytes(value)).enabled()
        {
            // A reset forgets the pages (section 5.7).
            self.pages = None;
        }
        self.inner.write(offset, from)
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        if let Some(at) = offset.checked_sub(registers::offset::DOORBELLS)
            && let Ok(value) = from.try_into()
            && self.is_shadowed(at)
        {
            let rings = self.store(at, u32::from_le_bytes(value));
            if !rings.map_err(|fault| AccessError(fault.to_string()))? {
                return Ok(());
            }
            self.written += 1;
        }
        self.inner.post(offset, from)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
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
