//! A function on a vfio-user socket.

use std::os::fd::OwnedFd;
use std::task::Waker;

use slipway_pci::Interrupt;
use slipway_reactor::Handle;
use slipway_sgiov_function::{Device, Parts, Peer};
use slipway_vfio_user::{Config, Control, Endpoint, EndpointParts, MemoryFile};

use crate::Memory;

/// A function that is served.
pub struct Served {
    control: Control,
    /// The client that asked for the function.
    pub asker: u32,
}

impl Served {
    /// Returns the control of the function's endpoint.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Returns whether a VMM has ever connected.
    pub fn was_used(&self) -> bool {
        self.control.stats().connections > 0
    }

    /// Asks the function to end, and does not wait for it.
    pub fn close(&self) {
        self.control.close();
    }
}

/// Returns whether a VMM has connected and gone.
pub fn is_over(control: &Control) -> bool {
    let stats = control.stats();
    stats.connections > 0 && stats.client.is_none()
}

/// Serves a function on `reactor`.
///
/// # Errors
/// `listener` is no listening Unix socket; no descriptors are left.
pub fn serve(
    asker: u32,
    listener: OwnedFd,
    memory: Option<Memory>,
    peer: Waker,
    reactor: &Handle,
) -> std::io::Result<(Served, Peer)> {
    // The path of the socket belongs to the party that made it.
    let mut config = Config { one_connection: true, ..Config::at("") };
    if let Some(Memory { bytes, device, inode }) = memory {
        config.max_dma_bytes = bytes;
        config.memory_file = Some(MemoryFile { device, inode });
    }
    let parts = EndpointParts::new(&config);
    let interrupt = Interrupt::new(parts.interrupts(), 0);
    let (device, peer) = Device::new(Parts { memory: parts.memory(), interrupt, peer });
    let endpoint = Endpoint::on(listener, config, parts, Box::new(device), reactor)?;
    let control = endpoint.control();
    reactor.add(Box::new(endpoint)).map_err(std::io::Error::other)?;
    Ok((Served { control, asker }, peer))
}
