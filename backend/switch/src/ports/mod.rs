//! Kinds of ports, besides those of devices.

mod memory;
mod packet;
mod simple;
mod tap;

pub use memory::{MemoryPort, Tell};
pub use packet::PacketPort;
pub use simple::{LoopbackPort, NullPort};
pub use tap::TapPort;
