//! A function on a vfio-user socket.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::task::Waker;

use slipway_pci::Interrupt;
use slipway_ram::LateMemory;
use slipway_reactor::Handle;
use slipway_sgiov_function::{Device, Parts, Peer};
use slipway_vfio_user::{Config, Control, Endpoint, EndpointParts, MemoryFile};

use crate::Memory;

/// A function that is served.
pub struct Served {
    control: Control,
    /// The client that asked for the function.
    pub asker: u32,
    /// The guest's memory, if the VMM has no descriptor of it to map. The endpoint knows it as long
    /// as it is here.
    _named: Option<Arc<LateMemory>>,
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

/// Takes the file of the memory that a VMM can only name. All of it has the bytes that the guest
/// sees.
///
/// # Errors
/// `InvalidInput` if `file` is not the `memory` that the VMM may hand over, or those of
/// [`LateMemory::given`].
fn named(memory: Option<Memory>, file: OwnedFd) -> std::io::Result<Arc<LateMemory>> {
    // Other files than those in memory may belong to a server that never answers.
    if !slipway_peer::is_memory_file(&file) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let status = rustix::fs::fstat(&file)?;
    let is_its = |own: Memory| (own.device, own.inode) == (status.st_dev, status.st_ino);
    if !memory.is_some_and(is_its) {
        return Err(ErrorKind::InvalidInput.into());
    }
    Ok(Arc::new(LateMemory::given(file)?))
}

/// Serves a function on `reactor`. The VMM may hand over `memory`, whose file is beside it if the
/// VMM has no descriptor of it to map.
///
/// # Errors
/// `listener` is no listening Unix socket; the file is not that memory's; no descriptors are left.
pub fn serve(
    asker: u32,
    listener: OwnedFd,
    (memory, file): (Option<Memory>, Option<OwnedFd>),
    peer: Waker,
    reactor: &Handle,
) -> std::io::Result<(Served, Peer)> {
    // The path of the socket belongs to the party that made it.
    let mut config = Config { one_connection: true, ..Config::at("") };
    if let Some(Memory { bytes, device, inode }) = memory {
        config.max_dma_bytes = bytes;
        config.memory_file = Some(MemoryFile { device, inode });
    }
    let named = file.map(|file| named(memory, file)).transpose()?;
    if let Some(named) = &named {
        config.late.add(named);
    }
    let parts = EndpointParts::new(&config);
    let interrupt = Interrupt::new(parts.interrupts(), 0);
    let (device, peer) = Device::new(Parts { memory: parts.memory(), interrupt, peer });
    let endpoint = Endpoint::on(listener, config, parts, Box::new(device), reactor)?;
    let control = endpoint.control();
    reactor.add(Box::new(endpoint)).map_err(std::io::Error::other)?;
    Ok((Served { control, asker, _named: named }, peer))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use slipway_ram::Lasting;

    use super::*;

    #[test]
    fn the_file_of_a_memory_is_that_which_the_function_names() {
        let own = Lasting::new("guest", 1 << 20).unwrap();
        let own = own.file().unwrap();
        let status = rustix::fs::fstat(own).unwrap();
        let memory = Memory { bytes: 1 << 20, device: status.st_dev, inode: status.st_ino };
        let taken = |memory, file: &dyn AsFd| {
            named(memory, file.as_fd().try_clone_to_owned().unwrap()).map_err(|error| error.kind())
        };
        assert!(taken(Some(memory), &own).is_ok());
        let (pipe, _writer) = std::io::pipe().unwrap();
        let other = Memory { inode: memory.inode + 1, ..memory };
        for refused in [taken(None, &own), taken(Some(other), &own), taken(Some(memory), &pipe)] {
            assert_eq!(refused.err(), Some(ErrorKind::InvalidInput));
        }
    }
}
