//! A guest's socket function: a PCI function by which the engine in a guest reaches the machine's
//! engine.
//!
//! [`slipway_sgiov_spec::function`] has the registers, the control memory and the messages. This
//! crate knows no sockets, no threads and no bytes of streams: it moves messages and signals, and
//! gives the peer, which serves the guest, the guest's arenas, which are pieces of the guest's
//! memory.
//!
//! How the pieces meet. [`Device::new`] makes two objects of [`Parts`]:
//! - [`Device`], the [`slipway_pci::Function`], belongs to the code that serves the guest's
//!   register accesses: registers, `layout`, `state`;
//! - a [`Peer`] belongs to the code that serves the guest's streams, on its own thread. When the
//!   guest starts the function, the peer can take a [`Channel`]: `channel` has the messages and
//!   signals, `arenas` the guest's arenas.
//!
//! A channel has one owner at a time. The function recalls it (`exchange`), without waiting, for a
//! reset. It asks the channel to release the guest's memory when the function is quiesced because
//! memory is about to be taken away. The peer sees both requests in [`Channel::attend`], which it
//! must call in every turn, and gives a channel back by dropping it. After a quiescence the channel
//! maps all its memory again, and a guest that took some of it away has broken its function.
//!
//! The peer raises interrupts (`attention`), by MSI-X or the pin, under a lock that is held only
//! while one is raised.
//!
//! A hostile guest can harm only itself: an invalid address, arena, counter or message breaks its
//! function ([`Broken`]), and the status register says why. The peer must check a stream's
//! counters, as with any arena. Messages that the guest does not read pile up
//! ([`Channel::backlog`]), so the peer should read further messages only when the guest has read
//! its own. Memory that its owner may take away is refused: an access to it would raise SIGBUS, and
//! copies of a stream's bytes are not guarded against that.
//!
//! Decisions: the function works without Bus Master, but clearing Bus Master resets it: Linux'
//! drivers for user space clear it when their program has ended, for whatever reason, and the
//! memory soon has another owner. A saved state has no channel, so a successor's guest finds the
//! function broken (`Broken::Unserved`) and starts it again.
//!
//! Not implemented: several vectors, message-only memory, interrupt moderation.
//!
//! Features: `driver` is the guest's side of the control memory, for tests; `fuzz` has the body of
//! the fuzz target.
//!
//! Dependencies: `serde` and `serde_json` for saved state (rare, small, and readable when it is
//! refused).

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
