//! The state that a VMM has given to a function, to be given again after a reconnection.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use slipway_vfio_user_spec as spec;
use spec::irq;

use crate::{Client, ClientError};

/// A range of RAM, or of memory that is only read.
pub(crate) struct Ram {
    pub len: u64,
    pub file: OwnedFd,
    pub offset: u64,
    pub writable: bool,
}

/// The VMM's settings of one function. The descriptors are duplicates of the VMM's.
#[derive(Default)]
pub(crate) struct VmmSettings {
    /// RAM, by its address.
    pub ram: BTreeMap<u64, Ram>,
    /// The eventfds of MSI-X vectors.
    pub vectors: BTreeMap<u32, OwnedFd>,
    /// The eventfd that the pin raises.
    pub pin: Option<OwnedFd>,
    /// The eventfd that unmasks the pin.
    #[cfg(feature = "driver")]
    pub unmask: Option<OwnedFd>,
    /// The VMM has stopped the function.
    pub stopped: bool,
}

impl VmmSettings {
    /// Raises every routed MSI-X vector once.
    pub fn raise_vectors(&self) {
        for file in self.vectors.values() {
            // A server has these eventfds, too, so a write(2) could wait for one of them.
            let _ = slipway_peer::eventfd::raise(file.as_fd());
        }
    }

    /// Gives all of it to a function that was just connected.
    pub fn replay(&self, client: &mut Client) -> Result<(), ClientError> {
        for (iova, ram) in &self.ram {
            client.map(*iova, ram.len, ram.file.as_fd(), ram.offset, ram.writable)?;
        }
        for (first, files) in runs(&self.vectors) {
            route(client, irq::MSIX, first, &files)?;
        }
        if let Some(file) = &self.pin {
            route(client, irq::INTX, 0, &[file.as_fd()])?;
        }
        #[cfg(feature = "driver")]
        if let Some(file) = &self.unmask {
            set_unmask(client, Some(file.as_fd()))?;
        }
        Ok(())
    }
}

/// Returns the maximal runs of consecutive vectors, each with its first vector.
fn runs(vectors: &BTreeMap<u32, OwnedFd>) -> Vec<(u32, Vec<BorrowedFd<'_>>)> {
    let mut runs: Vec<(u32, Vec<BorrowedFd<'_>>)> = Vec::new();
    for (vector, file) in vectors {
        match runs.last_mut() {
            Some((first, files)) if *first + files.len() as u32 == *vector => {
                files.push(file.as_fd());
            }
            _ => runs.push((*vector, vec![file.as_fd()])),
        }
    }
    runs
}

/// Routes interrupts from `first` on, in as many messages as the server's limit of descriptors
/// needs.
pub(crate) fn route(
    client: &mut Client,
    index: u32,
    first: u32,
    files: &[BorrowedFd<'_>],
) -> Result<(), ClientError> {
    let at_once = client.max_files();
    for (number, files) in (0..).zip(files.chunks(at_once)) {
        let start = first + number * at_once as u32;
        client.route_irqs(index, start, files.len() as u32, files)?;
    }
    Ok(())
}

/// Sets or removes the eventfd that unmasks the pin.
#[cfg(feature = "driver")]
pub(crate) fn set_unmask(
    client: &mut Client,
    file: Option<BorrowedFd<'_>>,
) -> Result<(), ClientError> {
    let flags = spec::IrqSetFlags::DATA_EVENTFD | spec::IrqSetFlags::UNMASK;
    client.set_irqs(flags, irq::INTX, 0, 1, &[], file.as_slice())
}
