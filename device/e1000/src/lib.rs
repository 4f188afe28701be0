//! An Intel 82540EM Gigabit Ethernet controller, the `e1000` that every guest knows: a PCI function
//! that connects a guest to a port of a switch.
//!
//! It follows Intel's *PCI/PCI-X Family of Gigabit Ethernet Controllers Software Developer's
//! Manual* (317453, revision 4.0); section numbers in this crate are of that document. Its data
//! path and its interrupt moderation follow *Speeding Up Packet I/O in Virtual Machines*, "the
//! paper".
//!
//! How the pieces meet. [`Device::new`] makes two objects of [`Parts`]:
//! - [`Device`], the [`slipway_pci::Function`], belongs to the code that serves the guest's
//!   register accesses: `access`, `registers`, `eeprom`, `phy`, `statistics`, `state`;
//! - [`DevicePort`], the [`slipway_switch::Port`], belongs to the switch, on the switch's thread.
//!   It moves frames with the `path`: `transmit` (with `packet` and `offload`) and `receive` (with
//!   `filter` and `verify`), each on its `ring`.
//!
//! The path has one owner at a time ([`slipway_switch::Exchange`]). The function asks for it back,
//! without waiting, when the device is reset or quiesced; all else that registers change reaches
//! the path as new `rules`. Heads are words that both sides share, and tails are doorbell cells
//! ([`slipway_doorbells`]), which a VMM may store to without a message. A write of a tail wakes the
//! switch only if the port sleeps. Both share the interrupt line (`interrupts`), too: whoever moved
//! a frame or changed a register drives the pin, and no interrupt waits for another thread.
//!
//! Interrupts are moderated (`moderation`): RDTR, RADV, TIDV, TADV and ITR are exact in the time of
//! the clock that is passed in. A host can enforce a shortest interval on drivers that ask for none
//! ([`Settings::interval`], section 3.1 of the paper). Deadlines are the port's timed work
//! ([`slipway_switch::decorators::Timed`]) and the result of the function's `poll`, and either of
//! them suffices.
//!
//! With [`Settings::csb`] the device has the paper's communication status block
//! ([`slipway_e1000_spec::csb`]): tails in shared memory, a kick only after the device slept, an
//! interrupt only for a driver that sleeps. It is off until the driver turns it on.
//!
//! A hostile driver can harm only itself: an invalid frame is dropped and counted by cause
//! ([`Counters`]); a ring or block that is not in memory is never read. Everything is read once,
//! into a private copy; lengths are bounded before they are used; a turn reads a bounded number of
//! descriptors. A transmit ring whose descriptors cannot be read has no frames, so that the switch
//! sleeps, until its driver writes the tail or another of its registers, or the client's map
//! changes. A tail beyond its ring is counted (`bad_tail`), and the ring has no descriptors until
//! the next write of it.
//!
//! Decisions where the manual leaves room, or the hardware has none to copy:
//! - TCP and UDP checksums and segmentation are left to the switch, which carries them out only for
//!   a peer that cannot take the frame whole.
//! - A received frame's checksums are checked in software, unless the switch knows that they are
//!   right. The packet checksum field is 0.
//! - The check sequence of a received frame, when it is not stripped, is four zeros.
//! - A frame that a filter rejects counts as delivered for the switch.
//! - The controller's reset is over (CTRL.RST reads as 0) when the switch's thread has let go of
//!   the rings. From the write on it begins no frame.
//! - The link's negotiation takes a millisecond.
//! - Each ring, and the block, lies in one region of memory that the client passed a descriptor
//!   for. Frames may lie in several regions, which must have descriptors as well. Memory that is
//!   reached by messages could stall the switch.
//!
//! Not implemented: segmentation of UDP, checksums of a part of a frame (TUCSE other than the
//! frame's end), whole segments for the driver, source address filters, flow control frames, half
//! duplex and speeds other than 1000 Mbit/s, flash and writes of the EEPROM, wake-up, management,
//! TXD_LOW, diagnostic access to packet buffers, recovery by a journal.
//!
//! Features: `driver` is a small real driver for tests and benches; `fuzz` has the body of the fuzz
//! target.
//!
//! Dependencies: `serde` and `serde_json` for saved state (rare, small, and readable when it is
//! refused), `thiserror` for [`PartsError`].

mod access;
mod common;
mod control;
mod counters;
mod csb;
mod device;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod eeprom;
mod filter;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod interrupts;
mod moderation;
mod offload;
mod packet;
mod parts;
mod path;
mod phy;
mod port;
mod receive;
mod registers;
mod ring;
mod rules;
mod state;
mod statistics;
#[cfg(test)]
mod tests;
mod transmit;
mod verify;

pub use control::Control;
pub use counters::{Accesses, COUNTED, Counters};
pub use device::Device;
pub use parts::{DOORBELLS, LONGEST_INTERVAL, Parts, PartsError, Settings};
pub use port::DevicePort;
pub use state::STATE_VERSION;
