//! Kinds of ports other than those of devices.

mod memory;
mod packet;
mod rings;
mod simple;
mod tap;
mod threaded;

pub use memory::{MemoryPort, Tell};
pub use packet::{PacketPort, Reception};
pub use simple::{LoopbackPort, NullPort, UnpluggedPort};
pub use tap::{TapHold, TapPort};
pub use threaded::{PortThread, ThreadedPort};

/// Converts a system call's return value to a result.
fn check(result: std::ffi::c_int) -> std::io::Result<()> {
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns whether the kernel had no room for the frame. Otherwise it does not accept such a frame,
/// or the interface is down.
fn is_full(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, OutOfMemory, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted | OutOfMemory)
}

/// Returns a burst with one frame whose head is followed by `pieces` pieces of one byte.
#[cfg(test)]
#[allow(clippy::unwrap_used)]
fn frame_in_pieces(pieces: usize) -> crate::Burst {
    let memory = slipway_ram::Span::heap(128);
    let mut burst = crate::Burst::new();
    let mut frame = burst.begin();
    frame.append(&memory, 0, 96).unwrap();
    (0..pieces).for_each(|_| frame.append(&memory, 96, 1).unwrap());
    frame.finish(crate::Offload::NONE);
    burst
}
