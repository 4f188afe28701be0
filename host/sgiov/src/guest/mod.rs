//! The engine in a guest: its streams to other machines go through a socket function
//! (`slipway_sgiov_spec::function`), a PCI function that the machine's engine serves.
//!
//! It is the same engine as on a host, for the same library. What is different is its [`Remote`]:
//! the streams' other side is the machine's engine, which reads and writes the arenas in the
//! guest's memory by itself, so that no byte passes through here. [`FunctionRemote`] says to it in
//! messages what a `Remote` is asked, tells what it answers, and forwards the signals of both
//! sides.
//!
//! - [`Device`]: registers, interrupts and memory, as whoever has the function's driver gives them;
//! - `control`: the control memory; `streams`: arenas and connections by both sides' names;
//!   `remote`: what the engine asks; `turn`: messages and signals; `rest`: waking and sleeping.
//!
//! All of it runs on the engine's thread, which sleeps when there is nothing to do; the machine
//! interrupts it then, and programs raise their family's bell.
//!
//! [`Remote`]: crate::remote::Remote

mod control;
mod remote;
mod rest;
mod streams;
mod turn;

use std::os::fd::BorrowedFd;

use slipway_ram::Lasting;
use slipway_sgiov_spec::function::{BROKEN, Broken, VERSION};

pub use remote::FunctionRemote;

/// A piece of the guest's memory: `slipway_sgiov_spec::function::PIECE` bytes of zeros at a
/// multiple of that.
pub struct Piece {
    /// The words. They stay where they are as long as this value lives.
    pub memory: Lasting,
    /// Their guest-physical address.
    pub at: u64,
}

/// A socket function, as its driver gives it.
pub trait Device: Send {
    /// Reads 4 bytes of BAR 0 at a multiple of 4.
    fn read(&mut self, offset: u64) -> u32;

    /// Writes 4 bytes of BAR 0 at a multiple of 4.
    fn write(&mut self, offset: u64, value: u32);

    /// Returns a descriptor that is readable when the function has interrupted. Returns `None` if
    /// the function cannot interrupt: it is then polled every millisecond while it is in use.
    fn interrupt(&self) -> Option<BorrowedFd<'_>>;

    /// Has taken notice of interrupts. The cause is read after this, which lowers the pin, and then
    /// [`Device::unmask`] follows.
    fn take_interrupt(&mut self);

    /// The function may interrupt again.
    fn unmask(&mut self);

    /// A new piece of memory.
    ///
    /// # Errors
    /// There is none left.
    fn piece(&mut self) -> std::io::Result<Piece>;
}

/// Why a socket function is of no use.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// Another device answers.
    #[error("no socket function: its first register reads {0:#x}")]
    Other(u64),
    /// It speaks a version that this engine does not know.
    #[error("the socket function has version {0}, this engine knows {VERSION}")]
    Version(u32),
    /// It does not end a reset, or neither runs nor says why not.
    #[error("the socket function does not {0}")]
    Stuck(&'static str),
    /// It says that it is broken.
    #[error("the socket function is broken: {0}")]
    Broken(&'static str),
    /// The machine's engine says what cannot be.
    #[error("the machine's engine does not keep to the protocol: {0}")]
    Protocol(&'static str),
    /// No memory, no descriptors.
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
