//! Hardware behind a function: it reaches the client's memory, and raises the client's interrupts,
//! past this process.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use slipway_ram::Permissions;

/// Memory that a client has mapped with a descriptor.
pub struct MappedRange<'a> {
    /// The client's address of the first byte, a multiple of 4096.
    pub iova: u64,
    /// Bytes, a multiple of 4096.
    pub len: u64,
    /// The accesses that the client allows.
    pub permissions: Permissions,
    /// The address of the first byte in this process, until the range is unmapped.
    pub address: u64,
    /// The file that the client passed, and the offset of the first byte in it. The descriptor of
    /// late memory may allow nothing but to tell its file.
    pub file: (BorrowedFd<'a>, u64),
}

/// The driver of the hardware behind a function, which an endpoint tells of its client.
///
/// The calls may block, and so may those of the function then: such an endpoint has a thread of its
/// own ([`Endpoint::serve_alone`](crate::Endpoint::serve_alone)). An endpoint calls
/// [`map`](Self::map) for ranges that do not overlap, at most [`slipway_ram::MAX_REGIONS`] at a
/// time, of as many bytes together as the client may map.
pub trait Hardware: Send {
    /// Lets the hardware reach a range of the client's memory.
    ///
    /// # Errors
    /// The hardware cannot reach the range, which the client is told; it reaches none of it.
    fn map(&mut self, range: &MappedRange<'_>) -> Result<(), Errno>;

    /// Lets the hardware no longer reach a range that was mapped. On return it does not.
    ///
    /// # Errors
    /// The hardware may still reach the range.
    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), Errno>;

    /// Routes each MSI-X vector to an eventfd of the client, or nowhere. `routes` has all vectors.
    ///
    /// # Errors
    /// The hardware's interrupts cannot be had. No vector is routed then.
    fn route_vectors(&mut self, routes: &[Option<Arc<OwnedFd>>]) -> Result<(), Errno>;

    /// Routes the interrupt pin to an eventfd of the client, or nowhere.
    ///
    /// # Errors
    /// As for [`route_vectors`](Self::route_vectors).
    fn route_pin(&mut self, route: Option<&Arc<OwnedFd>>) -> Result<(), Errno>;

    /// Masks or unmasks the pin, which masks itself when it is delivered. May have no effect while
    /// the pin is not routed.
    ///
    /// # Errors
    /// The hardware refuses the change.
    fn mask_pin(&mut self, masked: bool) -> Result<(), Errno>;

    /// Cuts the hardware off a client that is gone: on return no interrupt is routed, it masters no
    /// bus, and reaches no memory. The function is reset afterwards.
    ///
    /// # Errors
    /// The hardware is not cut off. The endpoint calls this again soon, and serves no client until
    /// then.
    fn release(&mut self) -> Result<(), Errno>;
}
