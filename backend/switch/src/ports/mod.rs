//! Kinds of ports, besides those of devices.

mod memory;
mod simple;

pub use memory::{MemoryPort, Tell};
pub use simple::{LoopbackPort, NullPort};
