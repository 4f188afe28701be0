//! A guest whose functions move.

use std::path::Path;

pub use slipway_vfio_user::testing::{PATIENCE, eventually};
pub use slipway_vfio_user_client::{SharedRegisters as Registers, TestGuest};

pub const MEMORY: u64 = 8 << 20;

pub fn guest(interrupts: u16) -> TestGuest {
    TestGuest::new(0, MEMORY).unwrap().with_interrupts(interrupts).unwrap()
}

/// Connects to the endpoint at `path`, gives it the memory, and routes the interrupts.
pub fn connect(guest: &TestGuest, path: &Path) -> Registers {
    guest.connect_shared(path, PATIENCE).unwrap()
}
