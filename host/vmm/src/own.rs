//! The functions that every machine has in its own process: a console with the agent's port, and a
//! source of random numbers.

use std::ops::Range;

use slipway_virtio_console::{Console, PortSettings};
use slipway_virtio_rng::Rng;

use crate::local::Local;
use crate::{Machine, Result};

/// PCI device of the console.
pub const CONSOLE_DEVICE: u8 = 1;
/// PCI device of the source of random numbers.
pub const RNG_DEVICE: u8 = 2;

/// The devices of this module.
pub const DEVICES: Range<u8> = CONSOLE_DEVICE..RNG_DEVICE + 1;

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
pub fn console(machine: &Machine) -> Result<Local<Console>> {
    let queues = slipway_virtio_spec::console::queue::count(PORTS);
    let notifications = (0..queues).map(slipway_virtio_console::layout::notification);
    let vectors = slipway_virtio_console::vectors(PORTS);
    Local::new(machine, CONSOLE_DEVICE, vectors, notifications, |memory, interrupts| {
        let ports = vec![PortSettings::console(), PortSettings::named(AGENT_NAME)];
        Console::new(slipway_virtio_console::Parts { memory, interrupts, ports })
    })
}

/// Adds the source of random numbers, which are the host kernel's.
///
/// # Errors
/// [`crate::Error`].
pub fn rng(machine: &Machine) -> Result<Local<Rng>> {
    let notifications = std::iter::once(slipway_virtio_rng::layout::notification(0));
    let vectors = slipway_virtio_rng::VECTORS;
    Local::new(machine, RNG_DEVICE, vectors, notifications, |memory, interrupts| {
        let source = Box::new(|into: &mut [u8]| {
            // Fails only if the kernel's generator is not seeded, long before any guest.
            let flags = rustix::rand::GetRandomFlags::empty();
            let _ = rustix::rand::getrandom(into, flags);
        });
        Rng::new(slipway_virtio_rng::Parts { memory, interrupts, source })
    })
}
