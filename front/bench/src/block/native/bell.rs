//! The ways to ring a doorbell.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow};
use slipway_nvme_spec::registers::offset;
use slipway_vfio_user::client::{Client, Window};

/// How the threads of a load ring.
#[derive(Clone)]
pub(super) enum Bell {
    /// By a store to the page that the target sweeps.
    Page(Arc<Window>),
    /// By a message that nobody answers, as QEMU's client does; the lock keeps messages whole.
    Message(Arc<Mutex<Client>>),
    /// By a store to memory of this process.
    Cells(Arc<[AtomicU32]>),
}

impl Bell {
    /// Doorbell register number `doorbell` of BAR 0 gets `value`.
    #[inline]
    pub fn ring(&self, (doorbell, value): (usize, u32)) -> Result<()> {
        let at = offset::DOORBELLS + 4 * doorbell as u64;
        match self {
            Self::Page(window) => window.store_u32(at, value),
            Self::Message(client) => {
                let mut client = client.lock().map_err(|_| anyhow!("another thread panicked"))?;
                client.post(0, at, &value.to_le_bytes())?;
            }
            Self::Cells(cells) => cells[doorbell].store(value, Ordering::Release),
        }
        Ok(())
    }
}
