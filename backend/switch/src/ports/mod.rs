//! Kinds of ports other than those of devices.
//!
//! A new kind implements `Port`, whose documentation has the duties; its buffers stay its own. If a
//! call on it may last as long as its peer wants, `ThreadedPort` serves it by a thread of its own.
//! `host/fabric` opens it, in a module as `uplink` is, and gives it a name with the kind before a
//! colon (`SwitchPort.name` in `plane.proto`). A call of the plane attaches it (the head of
//! `service.rs` in `host/plane`). The next daemon attaches it again if a ledger says so, as that of
//! `host/network` does of TAP interfaces and uplinks; a memory port ends with its daemon. Tests: a
//! file of `backend/switch/tests`, `slipway-plane --test network`, and
//! `tests/e2e/47-network-restart.sh`. `docs/networks.md`, "Ports", has it, and
//! `docs/walks/frame.md`, "Ports that are no device's".

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
