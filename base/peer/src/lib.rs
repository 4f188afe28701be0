//! Safe ways to deal with a peer: a program at the other end of a socket that may do anything.
//!
//! A thread that serves several peers must never sleep on something that one of them controls. Many
//! plain system calls can be made to sleep by a peer, so this crate offers a form of each that
//! cannot:
//!
//! | plain form | how a peer makes it sleep | form that does not |
//! |---|---|---|
//! | `close(2)` of a descriptor that a peer sent | a TCP socket with `SO_LINGER` and unsent data, a file of a FUSE server | [`Foreign`], whose drop hands it to a [`Bin`] |
//! | `recv(2)`, or `recvmsg(2)` with little room for control data | the kernel closes the descriptors that have no room, in the caller's thread | [`receive`], which has room for all |
//! | `close(2)` of a connection | it closes the descriptors that were sent and not received | [`Bin::discard`] |
//! | `write(2)` to an eventfd | its counter is full, and it is set to blocking | [`eventfd::raise`] |
//! | `read(2)` of an eventfd | it is empty, and set to blocking | [`eventfd::drain`] |
//! | `munmap(2)` of a peer's memory | giving back gigabytes takes seconds | [`Bin::discard_value`] with the mapping |
//!
//! `clippy.toml` refuses the plain forms in the rest of the workspace. Where no descriptor is
//! expected, [`refuse_descriptors`] makes the kernel refuse the sender's call.
//!
//! A [`Bin`] belongs to one peer, and [`Bin::held`] counts the things of that peer that this
//! process still has to close.
//!
//! [`ready`] looks at a file without waiting for it.
//!
//! [`waits`] counts calls of a thread that no form keeps from waiting for a peer's memory.
//!
//! [`boot_id`] is the boot to which a peer's process id belongs, for records that outlive it.
//!
//! Not here: deadlines of requests, limits of peers, page faults on a peer's memory (`slipway-ram`
//! turns failing ones into errors; `slipway-reactor` goes on without a task that sleeps in one).

mod bin;
mod boot;
mod credentials;
pub mod eventfd;
mod foreign;
mod kind;
mod ready;
mod receive;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "tokio")]
pub mod tokio;
pub mod waits;

pub use bin::Bin;
pub use boot::boot_id;
pub use credentials::Peer;
pub use foreign::Foreign;
pub use kind::{is_eventfd, is_memory_file};
pub use ready::ready;
pub use receive::{MAX_FILES, Received, receive, receive_reply, refuse_descriptors};
