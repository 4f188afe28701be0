//! The parts of a device.

use slipway_pci::Interrupt;
use slipway_ram::Memory;
use slipway_virtio::InterruptCount;

/// Most ports.
pub const MAX_PORTS: usize = 16;
/// Most bytes of a port's name.
pub const MAX_NAME: usize = 64;
/// Most entries of a queue. Linux gives every receive queue as many pages.
pub const QUEUE_SIZE: u16 = 32;

/// The parts that a host hands to [`Console::new`](crate::Console::new).
pub struct Parts {
    /// The guest's memory, by guest-physical addresses.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256. [`vectors`] handles give every queue a
    /// vector of its own.
    pub interrupts: Vec<Interrupt>,
    /// The ports by number, 1 to [`MAX_PORTS`].
    pub ports: Vec<PortSettings>,
}

/// The properties of a port that the driver is told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortSettings {
    /// The port's name: at most [`MAX_NAME`] ASCII letters, digits, dots, dashes and underscores.
    /// Empty if the port has no name.
    pub name: String,
    /// `true` if the port is a console for the driver: `hvc` in Linux.
    pub is_console: bool,
}

impl PortSettings {
    /// Returns a console without a name.
    pub fn console() -> Self {
        Self { name: String::new(), is_console: true }
    }

    /// Returns a port that is no console.
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), is_console: false }
    }
}

/// Returns the number of vectors for a device with `ports` ports: one for each queue, and one for
/// changes of the configuration.
pub const fn vectors(ports: u16) -> u16 {
    slipway_virtio_spec::console::queue::count(ports) + 1
}

/// A mistake in the parts, made by the program or its configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// The number of ports is out of range.
    #[error("a console device has 1 to 16 ports, not {0}")]
    Ports(usize),
    /// A name is too long, or has other characters than it may have.
    #[error("{0:?} is no name of a port")]
    Name(String),
    /// The number of interrupts is out of range.
    #[error(transparent)]
    Interrupts(#[from] InterruptCount),
}

impl Parts {
    pub(crate) fn check(&self) -> Result<(), PartsError> {
        if !(1..=MAX_PORTS).contains(&self.ports.len()) {
            return Err(PartsError::Ports(self.ports.len()));
        }
        let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        for PortSettings { name, .. } in &self.ports {
            if name.len() > MAX_NAME || !name.bytes().all(fits) {
                return Err(PartsError::Name(name.clone()));
            }
        }
        Ok(())
    }
}
