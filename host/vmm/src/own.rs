//! The functions that a machine has in its own process: a console with the agent's port, a source
//! of random numbers, one that tells where shared pages are, if there are any, one for each region
//! of hot-plug memory, and one to which the guest reports free pages, if the host wants them.
//!
//! A new device is a crate of `device/`, and here a PCI device number and a function that adds it.
//! All numbers below `plug::FIRST_FUNCTION` are taken. So another fixed device either takes numbers
//! from the end of the bus, as `layout::hot_memory_device` and behind them the balloon do, which
//! leaves fewer slots for functions, or raises `FIRST_FUNCTION`. A device at the end of the bus has
//! its number in `layout`, its setting in `Config` (`machine`), and counts among the `others` of
//! `make::check_counts`. With another `FIRST_FUNCTION` go `VmSpec::FIRST_SLOT` of
//! `host/hypervisor`, which QEMU's machines have too, `FIRST_SLOT` of `front/hollow` and a new
//! `state::VERSION`, since saved machines have their functions at the old numbers.
//!
//! Its saved state is a field of `OwnState` (`state`), with `#[serde(default)]` if not every
//! machine has it. A device that not every machine has is also in `Identity`, as `shared` and
//! `hot_memory` are, with its check in `Identity::check`: a state goes on only in a machine with
//! the same devices. `Ports::restore` alone checks the balloon. In `front/vmm`, `Ports` (`ports`)
//! has it as a field, with a `Token`, and in `new`, `save`, `go_on`, `restore`, `watch` and
//! `serve`; an option for it is in `args` and `help.txt`. With `Polling::Anywhere` the threads of
//! CPUs poll it too, and then `filter` must admit its system calls for `Role::Cpu` as well as for
//! `Role::Events`. The guest's driver is in `sandbox/initramfs` (`modules`), unless it is in every
//! kernel. Tests: `tests/guests` of this crate. `docs/vmm.md`, "The machine", and `SECURITY.md`
//! describe the device. Its lines count for the bound of `deploy/check/vmm_lines.py`.

use std::sync::Arc;

use slipway_virtio_balloon::Balloon;
use slipway_virtio_console::{Console, PortSettings};
use slipway_virtio_mem::Mem;
use slipway_virtio_pmem::Pmem;
use slipway_virtio_rng::Rng;

use crate::hot_host::HotHost;
use crate::hot_memory::HotMemory;
use crate::local::{Local, Polling};
use crate::pci::Bus;
use crate::state::LocalState;
use crate::{Chassis, Result, layout};

/// PCI device of the console.
pub const CONSOLE_DEVICE: u8 = 1;
/// PCI device of the source of random numbers.
pub const RNG_DEVICE: u8 = 2;
/// PCI device of the shared pages.
pub const PMEM_DEVICE: u8 = 3;

/// The port that is the guest's console, `hvc0` in Linux.
pub const CONSOLE_PORT: u16 = 0;
/// The agent's port.
pub const AGENT_PORT: u16 = 1;
/// The agent's port's name in the guest.
pub const AGENT_NAME: &str = "slipway.agent";

const PORTS: u16 = 2;

/// Adds the console.
///
/// # Errors
/// [`crate::Error`].
pub fn console(machine: &Chassis) -> Result<Local<Console>> {
    let place = (CONSOLE_DEVICE, slipway_virtio_console::vectors(PORTS));
    Local::new(machine, Polling::Anywhere, place, |memory, interrupts| {
        let ports = vec![PortSettings::console(), PortSettings::named(AGENT_NAME)];
        Console::new(slipway_virtio_console::Parts { memory, interrupts, ports })
    })
}

/// Lets the console go on where that of a saved machine was. The guest finds the host's end of the
/// agent's port closed, even if the host opens it at once: what the agent was told belongs to
/// another machine. The host's end of the guest's console is open already, so that its bytes are
/// not dropped.
///
/// # Errors
/// [`crate::Error::State`].
pub fn restore_console(console: &Local<Console>, bus: &Bus, saved: &LocalState) -> Result<()> {
    console.restore(bus, saved)?;
    console.serve(|console| {
        // A close is told if the end was open before. As far as the guest knows, it was.
        console.set_host_open(AGENT_PORT, true);
        console.set_host_open(AGENT_PORT, false);
    });
    Ok(())
}

/// Adds the source of random numbers, which are the host kernel's.
///
/// # Errors
/// [`crate::Error`].
pub fn rng(machine: &Chassis) -> Result<Local<Rng>> {
    let place = (RNG_DEVICE, slipway_virtio_rng::VECTORS);
    Local::new(machine, Polling::Anywhere, place, |memory, interrupts| {
        let source = Box::new(|into: &mut [u8]| {
            // Fails only if the kernel's generator is not seeded, long before any guest.
            let flags = rustix::rand::GetRandomFlags::empty();
            let _ = rustix::rand::getrandom(into, flags);
        });
        Rng::new(slipway_virtio_rng::Parts { memory, interrupts, source })
    })
}

/// Adds the device by which the guest finds its shared pages. Returns `None` if it has none.
///
/// # Errors
/// [`crate::Error`].
pub fn pmem(machine: &Chassis) -> Result<Option<Local<Pmem>>> {
    let Some(shared) = machine.ram.shared() else { return Ok(None) };
    let (start, bytes) = (shared.part.start, shared.part.len);
    let place = (PMEM_DEVICE, slipway_virtio_pmem::VECTORS);
    let make = |memory, interrupts| {
        Pmem::new(slipway_virtio_pmem::Parts { memory, interrupts, start, bytes })
    };
    Local::new(machine, Polling::Anywhere, place, make).map(Some)
}

/// Adds the device by which the guest reports free pages, which the host then has back, also those
/// of memory that began as a template. A pool's recycled memory stays as it is, and so does all
/// memory that the launcher's filter lets nobody make holes in: a report is answered, and gives
/// back nothing.
///
/// # Errors
/// [`crate::Error`].
pub fn balloon(machine: &Chassis) -> Result<Local<Balloon>> {
    let regions = machine.ram.hot_memory().len();
    let place = (layout::hot_memory_device(regions), slipway_virtio_balloon::VECTORS);
    let ram = Arc::clone(&machine.ram);
    // A page that the kernel does not give back now stays the guest's.
    let discard = Box::new(move |start| ram.is_recycled() || ram.discard(start).is_some());
    Local::new(machine, Polling::InSteps, place, |memory, interrupts| {
        Balloon::new(slipway_virtio_balloon::Parts { memory, interrupts, discard })
    })
}

/// Adds the devices by which the guest plugs and unplugs hot-plug memory, one for each region.
///
/// # Errors
/// [`crate::Error`].
pub fn memory(machine: &Chassis) -> Result<Vec<Local<Mem>>> {
    let device = |(index, region): (usize, &HotMemory)| {
        let place = (layout::hot_memory_device(index), slipway_virtio_mem::VECTORS);
        let (geometry, host) = (region.geometry(), Box::new(HotHost::new(&machine.ram, index)));
        // To give back pages is nothing for a CPU's thread, whose filter refuses it.
        Local::new(machine, Polling::InSteps, place, |memory, interrupts| {
            Mem::new(slipway_virtio_mem::Parts { memory, interrupts, geometry, host })
        })
    };
    machine.ram.hot_memory().iter().enumerate().map(device).collect()
}
