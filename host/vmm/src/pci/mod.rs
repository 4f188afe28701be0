//! PCI: bus 0, its configuration space (ECAM), and the BARs of its devices in the window below
//! 4 GiB.
//!
//! - A [`Bus`] finds the device of an access.
//! - A [`Slot`] has what every device needs from its host: decoding of BARs, MSI-X, notifications
//!   without an exit.
//! - `shadow` lets the guest read the configuration space of functions in this process without an
//!   exit.
//! - A [`Backend`] is the function itself: in this process ([`crate::local`]) or behind a vfio-user
//!   socket ([`crate::remote`]).
//!
//! Locks: the decoder of a slot is locked before its function, the function before the slot's
//! MSI-X table, and the bus's table of BARs by itself. No lock of the bus is held during a call of
//! a function, since a server may take its time.

mod bus;
mod shadow;
mod slot;
mod vectors;

pub use bus::Bus;
pub use slot::{Backend, Notification, Shape, Slot, SlotState};
pub use vectors::VectorSource;
