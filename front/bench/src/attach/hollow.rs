//! A VF without hardware.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use slipway_vf_pool::{Device, Fault};

use super::AttachLoad;

/// The step in which an owner writes to its memory and looks at it: a page.
const STEP: usize = 4096;

/// Memory that a VF's owner uses, as its DMA would.
#[derive(Clone)]
pub(super) struct Memory(Arc<Mutex<Vec<u8>>>);

impl Memory {
    /// Uses the memory as an owner does: looks for bytes of the last owner and leaves its own.
    /// Returns `false` if there were any.
    pub(super) fn is_clean_and_used(&self) -> bool {
        let mut bytes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_clean = bytes.iter().all(|byte| *byte == 0);
        bytes.iter_mut().step_by(STEP).for_each(|byte| *byte = 0xa5);
        is_clean
    }
}

/// A VF whose reset is a wait and whose scrub zeroes memory.
pub(super) struct Hollow {
    load: AttachLoad,
    memory: Memory,
    resets: Arc<AtomicU64>,
}

impl Hollow {
    /// Makes the VFs of a load, with memory that has been written to, and a counter of their
    /// resets.
    pub(super) fn all(load: &AttachLoad) -> (Vec<Self>, Arc<AtomicU64>) {
        let resets = Arc::<AtomicU64>::default();
        let memory = || Memory(Arc::new(Mutex::new(vec![0xa5; load.scrub_bytes()])));
        let one = |_| Self { load: *load, memory: memory(), resets: resets.clone() };
        ((0..load.owners).map(one).collect(), resets)
    }
}

impl Device for Hollow {
    type Access = Memory;

    fn open(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn adopt(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn reset(&mut self) -> Result<(), Fault> {
        std::thread::sleep(self.load.reset());
        self.resets.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn scrub(&mut self) -> Result<(), Fault> {
        self.memory.0.lock().unwrap_or_else(PoisonError::into_inner).fill(0);
        Ok(())
    }

    fn reset_set(devices: &mut [&mut Self]) -> Result<(), Fault> {
        devices.first_mut().map_or(Ok(()), |device| device.reset())
    }

    fn admit(&mut self) -> Result<(), Fault> {
        Ok(())
    }

    fn expel(&mut self) {}

    fn access(&self) -> Memory {
        self.memory.clone()
    }

    fn close(&mut self) -> Result<(), Fault> {
        Ok(())
    }
}
