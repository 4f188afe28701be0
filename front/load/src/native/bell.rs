//! The ways to ring a doorbell.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use anyhow::Result;
use slipway_nvme::driver::{AccessError, passes};
use slipway_nvme_spec::registers::{head_doorbell, offset, tail_doorbell};
use slipway_ram::{RegisterWindow, Span};

/// Writes registers by messages to a controller in another process.
pub trait Post: Send + Sync {
    /// Writes `value` to the register at byte `at` of BAR 0, without waiting for a reply.
    ///
    /// # Errors
    /// The message cannot be sent.
    fn post(&self, at: u64, value: u32) -> Result<()>;
}

/// The way in which the threads of a load ring doorbells.
#[derive(Clone)]
pub enum Bell {
    /// A store to a register: in a page that the target sweeps, or of a function.
    Page(Arc<RegisterWindow>),
    /// A message without reply, as QEMU's client sends it.
    Message(Arc<dyn Post>),
    /// A store to a page of ours, and to a register if the target asked for that (section 7.13).
    Shadow(Shadow),
    /// A store to memory of this process: the element at the doorbell's number.
    Cells(Arc<[AtomicU32]>),
}

/// The pages of Doorbell Buffer Config (section 7.13).
#[derive(Clone)]
pub struct Shadow {
    /// The page with the doorbells' values, which the driver writes.
    pub doorbells: Span,
    /// The page with the event indexes, which the controller writes.
    pub events: Span,
    /// The way in which registers are written.
    pub beneath: Box<Bell>,
}

impl Shadow {
    /// Resets the doorbells of queue pair `id`, before a new pair gets that number.
    ///
    /// # Errors
    /// The pages have no such doorbells.
    pub fn clear(&self, id: u16) -> Result<()> {
        for cell in [tail_doorbell(id), head_doorbell(id)] {
            self.doorbells.store_u32(4 * cell, 0)?;
            self.events.store_u32(4 * cell, 0)?;
        }
        Ok(())
    }

    /// Stores `value`. Returns whether the target wants the register written.
    fn store(&self, doorbell: usize, value: u32) -> Result<bool> {
        let at = 4 * doorbell;
        let old = self.doorbells.load_u32(at)?;
        self.doorbells.store_u32(at, value)?;
        // Pairs with the controller's fence between its event indexes and its last look.
        fence(Ordering::SeqCst);
        Ok(passes(self.events.load_u32(at)?, old, value))
    }
}

/// Writes the register at byte `at` of BAR 0, which is a doorbell, by `bell`.
///
/// # Errors
/// The register is no doorbell, or `from` is not 4 bytes; and the errors of [`Bell::ring`].
pub fn ring(bell: &Bell, at: u64, from: &[u8]) -> Result<(), AccessError> {
    let index = at.checked_sub(offset::DOORBELLS).map(|at| at as usize / 4);
    let (Some(index), Ok(value)) = (index, from.try_into()) else {
        return Err(AccessError("only doorbells are posted".into()));
    };
    let rung = bell.ring((index, u32::from_le_bytes(value)));
    rung.map_err(|error| AccessError(error.to_string()))
}

impl Bell {
    /// Writes `value` to doorbell register number `doorbell` of BAR 0.
    ///
    /// # Errors
    /// A message cannot be sent, or the shadow pages have no such doorbell.
    #[inline]
    pub fn ring(&self, (doorbell, value): (usize, u32)) -> Result<()> {
        let at = offset::DOORBELLS + 4 * doorbell as u64;
        match self {
            Self::Page(window) => window.store_u32(at, value),
            Self::Message(messages) => messages.post(at, value)?,
            Self::Shadow(shadow) => {
                if shadow.store(doorbell, value)? {
                    shadow.beneath.ring((doorbell, value))?;
                }
            }
            Self::Cells(cells) => cells[doorbell].store(value, Ordering::Release),
        }
        Ok(())
    }
}
