//! A guest's socket function: a PCI function by which the engine in a guest reaches the machine's.
//!
//! Registers, control memory and messages are those of [`slipway_sgiov_spec::function`]. This crate knows no
//! sockets, no threads and no streams' bytes: it moves messages and signals, and gives whoever serves the guest
//! its arenas, which are pieces of the guest's memory.
//!
//! How the pieces meet. [`Device::new`] makes two objects of [`Parts`]:
//! - [`Device`], the [`slipway_pci::Function`], belongs to whoever serves the guest's register accesses:
//!   registers, `layout`, `state`;
//! - a [`Peer`] belongs to whoever serves the guest's streams, on its own thread. When the guest starts the function, a
//!   [`Channel`] is there to be taken: `channel` has the messages and signals, `arenas` the guest's arenas.
//!
//! A channel has one owner at a time. It is asked back (`exchange`), without waiting, for a reset, and asked to let go of
//! the guest's memory when the function is quiesced since memory shall go; the peer sees both in
//! [`Channel::attend`], to be called in every turn. Who drops a channel gives it back. After a quiescence the channel
//! looks for all its memory again, and a guest that took some of it away has broken its function.
//!
//! Interrupts (`attention`) are the peer's doing, MSI-X or the pin, by a lock that is taken for as long as it takes to
//! raise one.
//!
//! What a hostile guest can do to itself: an address, an arena, a counter or a message that cannot be breaks its function
//! ([`Broken`]), and its register says why. A stream's counters are the peer's to check, as with any arena. What the
//! guest does not read piles up ([`Channel::backlog`]), so the peer reads on when it has been read. Memory that its
//! owner may take away is refused: it would be a SIGBUS, and no copy of a stream's is guarded.
//!
//! Decisions: the function works without Bus Master, but one that is taken away resets it: Linux' drivers for user space
//! do so when their program has ended, however it did, and the memory is soon somebody else's. A saved state has no
//! channel, so that a successor's guest finds the function broken (`Broken::Unserved`) and starts it again.
//!
//! Not implemented: several vectors, message-only memory, interrupt moderation.
//!
//! Features: `driver` is the guest's side of the control memory, for tests; `fuzz` the fuzz target's body.
//!
//! Dependencies: `serde` and `serde_json` for saved state (rare, small, and readable when it is refused).

mod arenas;
mod attention;
mod channel;
mod device;
#[cfg(any(test, feature = "driver"))]
pub mod driver;
mod exchange;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod layout;
mod state;
#[cfg(test)]
mod tests;

pub use channel::{Attended, Channel};
pub use device::{Device, Parts};
pub use exchange::Peer;
pub use slipway_sgiov_spec::function::Broken;
pub use state::STATE_VERSION;
