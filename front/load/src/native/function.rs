//! Our driver on a PCI function of the machine that it runs in: in a guest, in user space.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use slipway_nvme::driver::{AccessError, RegisterAccess};
use slipway_nvme_spec::registers::{offset, tail_doorbell};
use slipway_ram::RegisterWindow;

use super::bell::{Bell, ring};
use super::controller::{Controller, room};
use super::cpus::Cpus;
use super::huge::HugePages;
use super::pci::PciFunction;
use crate::{Measured, Workload};

/// The longest wait for the controller; guests may be emulated.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of BAR 0 up to the last doorbell of a load.
const REGISTERS: u64 =
    offset::DOORBELLS + 4 * tail_doorbell(Workload::MOST_THREADS as u16 + 1) as u64;

/// The registers of BAR 0, mapped.
struct Registers {
    window: Arc<RegisterWindow>,
    bell: Bell,
    since: Instant,
}

impl RegisterAccess for Registers {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let value = self.window.load_u32(offset).to_le_bytes();
        into.copy_from_slice(value.get(..into.len()).ok_or_else(wide)?);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.since = Instant::now();
        let value = from.try_into().map_err(|_| wide())?;
        self.window.store_u32(offset, u32::from_le_bytes(value));
        Ok(())
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.since = Instant::now();
        ring(&self.bell, offset, from)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        if self.since.elapsed() > PATIENCE {
            return Err(AccessError("the controller does not answer".into()));
        }
        std::thread::yield_now();
        Ok(())
    }
}

fn wide() -> AccessError {
    AccessError("registers are accessed by 32 bits".into())
}

/// Runs `workload` on the NVMe controller at PCI address `address`, which no kernel driver uses:
/// our driver in user space, polling, with shadow doorbells. Some places of the disk are written
/// and read again before.
///
/// # Errors
/// If there is no such function, or no huge pages for it; if its controller does not take the load,
/// or a command fails.
pub fn load_function(
    address: &str,
    workload: &Workload,
    warm_up: Duration,
    time: Duration,
) -> Result<Measured> {
    let memory = HugePages::new(room(std::slice::from_ref(workload)))?;
    // Dropped before the memory, which disables the function's access to memory.
    let function = PciFunction::open(address, REGISTERS);
    let function = function.with_context(|| format!("function {address}"))?;
    let (window, bell) = (function.registers.clone(), Bell::Page(function.registers.clone()));
    let registers = Registers { window, bell: bell.clone(), since: Instant::now() };
    let mut controller = Controller::bring_up(registers, bell, memory.arena())?;
    ensure!(controller.takes(workload), "the controller takes no commands of this size");
    // Checked before doorbells are shadowed, since only loads ring shadow doorbells.
    controller.check()?;
    controller.shadow_doorbells()?;
    let measured = controller.run((&Cpus::all()?, None), workload, (warm_up, time));
    controller.driver.disable()?;
    measured
}
