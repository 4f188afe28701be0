//! The numbers of ports.

/// The largest number of ports of a switch.
pub const MAX_PORTS: usize = 4096;
/// A port's number in its switch; reused after the port was detached.
pub type PortIndex = u16;
