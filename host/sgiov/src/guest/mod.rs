//! The engine in a guest: its streams to other machines go through a socket function
//! (`slipway_sgiov_spec::function`), a PCI function that the machine's engine serves.
//!
//! The engine is the same as on a host, for the same library, except for its [`StreamCarrier`]: the
//! other side of the streams is the machine's engine, which reads and writes the arenas in the
//! guest's memory by itself, so that no byte passes through here. [`FunctionRemote`] turns the
//! calls of a `StreamCarrier` into messages, turns the machine's answers into events, and forwards
//! the signals of both sides.
//!
//! - [`Device`]: registers, interrupts and memory, as the function's driver provides them;
//! - `machine`: the function, from its start to its end; `control`: its control memory;
//! - `streams`: arenas and connections by both sides' numbers; `listeners`: this guest's listeners;
//! - `watches`: descriptors that wake the thread;
//! - `remote`: the engine's calls; `turn`: messages and signals; `rest`: waking and sleeping.
//!
//! All of it runs on the engine's thread. The thread sleeps when there is nothing to do, and is
//! woken by the machine's interrupt or by the eventfd of a family.
//!
//! [`StreamCarrier`]: crate::remote::StreamCarrier

mod control;
mod listeners;
mod machine;
mod remote;
mod rest;
mod streams;
mod turn;
mod watches;

use std::os::fd::BorrowedFd;

use slipway_ram::Lasting;
use slipway_sgiov_spec::function::{BROKEN, Broken, VERSION};

pub use remote::FunctionRemote;

/// A piece of the guest's memory: `slipway_sgiov_spec::function::PIECE` bytes of zeros at a
/// multiple of that.
pub struct Piece {
    /// The memory. It stays mapped at its address as long as this value lives.
    pub memory: Lasting,
    /// The guest-physical address of the memory.
    pub at: u64,
}

/// A socket function, as its driver provides it.
pub trait Device: Send {
    /// Reads 4 bytes of BAR 0 at a multiple of 4.
    fn read(&mut self, offset: u64) -> u32;

    /// Writes 4 bytes of BAR 0 at a multiple of 4.
    fn write(&mut self, offset: u64, value: u32);

    /// Returns a descriptor that is readable when the function has interrupted. Returns `None` if
    /// the function cannot interrupt: it is then polled every millisecond while it is in use.
    fn interrupt(&self) -> Option<BorrowedFd<'_>>;

    /// Acknowledges interrupts. The caller then reads the cause, which lowers the pin, and calls
    /// [`Device::unmask`].
    fn take_interrupt(&mut self);

    /// Lets the function interrupt again.
    fn unmask(&mut self);

    /// Returns a new piece of memory.
    ///
    /// # Errors
    /// No memory is left.
    fn piece(&mut self) -> std::io::Result<Piece>;
}

/// The reason for which a socket function cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// Another device answers.
    #[error("no socket function: its first register reads {0:#x}")]
    Other(u64),
    /// The function has a version that this engine does not know.
    #[error("the socket function has version {0}, this engine knows {VERSION}")]
    Version(u32),
    /// The function does not end a reset, or neither runs nor reports a fault.
    #[error("the socket function does not {0}")]
    Stuck(&'static str),
    /// The function reports that it is broken.
    #[error("the socket function is broken: {0}")]
    Broken(&'static str),
    /// The machine's engine sent an invalid message or signal.
    #[error("the machine's engine does not keep to the protocol: {0}")]
    Protocol(&'static str),
    /// No memory or descriptors are left.
    #[error("the socket function needs a huge page of 2 MiB and descriptors: {0}")]
    System(#[from] std::io::Error),
}

impl From<rustix::io::Errno> for FunctionError {
    fn from(errno: rustix::io::Errno) -> Self {
        Self::System(errno.into())
    }
}

/// Returns the reason in a status that says that the function is broken, or `None`.
fn broken(status: u32) -> Option<FunctionError> {
    let reasons = [
        (Broken::Memory, "the machine cannot rely on the guest's memory"),
        (Broken::Arena, "the machine found no arena in the guest's memory"),
        (Broken::Spoiled, "the machine found counters that cannot be"),
        (Broken::Message, "the machine did not understand a message"),
        (Broken::Unmapped, "memory was taken away under it"),
        (Broken::Unserved, "the machine's socket engine has ended"),
    ];
    let known = reasons.iter().find(|(reason, _)| reason.status() == status);
    let gone = (status == u32::MAX).then_some("it is gone");
    let text = known.map(|(_, text)| *text).or(gone);
    let text = text.unwrap_or("for no reason that this engine knows");
    (status & BROKEN != 0).then_some(FunctionError::Broken(text))
}
