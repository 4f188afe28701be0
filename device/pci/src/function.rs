//! The contract of a PCI function.

use std::task::Waker;
use std::time::Duration;

use crate::Lane;

/// Outcome of an access to a register. What is wrong with the *device* goes into its status
/// registers, never in here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device took or gave the bytes.
    Done,
    /// The bus refuses: nothing is there, or the width is not supported.
    Refused,
    /// The device answers later: the host repeats the same access after the next
    /// [`Function::poll`] that was not idle.
    Deferred,
}

/// A base address register of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Register number, 0 to 5; a 64-bit BAR also takes the next one.
    pub index: u8,
    /// Bytes, a power of two, at least 4096.
    pub size: u64,
    /// Decodes 64-bit addresses.
    pub wide: bool,
    /// The part of it, in bytes from the BAR's start and page-aligned, that holds doorbells and
    /// nothing else: a host may map the doorbell cells there instead of trapping writes.
    pub doorbell_page: Option<std::ops::Range<u64>>,
}

/// What a host must know of a function to present it; constant for its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Memory BARs, ascending.
    pub bars: Vec<Bar>,
    /// Number of MSI-X vectors, 1 to 2048.
    pub vectors: u16,
    /// Has an interrupt pin, INTA#.
    pub pin: bool,
}

/// What [`Function::poll`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Did something, or may have more to do at once: poll again.
    Busy,
    /// The same, and more waits than the turn had room for.
    Behind,
    /// Nothing to do until a register is written, a backend's descriptor wakes, or, when there is
    /// one, this time (of the function's clock) has come.
    Idle(Option<Duration>),
    /// As `Idle`, except that work may also come unannounced, through memory that the function
    /// shares with its guest: the host goes on polling while it likes to, and calls
    /// [`Function::rest`] before it stops.
    Watching(Option<Duration>),
}

impl Progress {
    /// Whether there was anything to do.
    pub fn is_busy(self) -> bool {
        matches!(self, Self::Busy | Self::Behind)
    }
}

/// How much [`Function::poll`] may do. How much that is, in work and never in time, is up to the
/// function: time would have to be looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Turn {
    /// The thread has nothing else to do: much, some tens of microseconds, so that the poll's own
    /// cost is small in it.
    #[default]
    Long,
    /// Others wait for the thread, who have little to do: little, less than a microsecond.
    Short,
}

/// Why a saved state was refused. The function is then as after a reset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// Not a state of this kind of function, or of a version that this one does not know.
    #[error("the saved state is not of this device or of another version: {0}")]
    Unknown(String),
    /// The state contradicts itself, the function's configuration, or has leftovers.
    #[error("the saved state is not consistent: {0}")]
    Inconsistent(String),
}

/// A PCI function. The host owns it on one thread and calls it from there only. Parts of it may have
/// other threads: [`Lane`].
///
/// Duties of the host: offsets and lengths lie within the BAR or the 4096-byte configuration
/// space; lengths are 1 to 8 for registers of BARs unless the region is memory-like; `poll` is
/// called after every write, when a backend's descriptor wakes, and while it returns
/// [`Progress::Busy`] or [`Progress::Behind`]; after [`Progress::Watching`] polling ends with `rest` and not without.
///
/// Duties of the function: no call blocks; no input of a guest makes it panic; guest memory is
/// reached through its `Memory` only; after `quiesce` returned true and until the next register
/// access or `poll`, nothing refers to guest memory.
pub trait Function: Send {
    /// Gives the parts of it that the host polls apart from it, each with the calls by which it is to
    /// be woken: `wakers` has one for each that the host has a thread for, `home` wakes the function
    /// itself, which is then polled, or asked once more whether it is quiet. At most once, before
    /// anything else. A function without such parts gives none, and one that is not asked, or whose
    /// host has no thread for them, does everything itself.
    fn take_lanes(&mut self, home: Waker, wakers: Vec<Waker>) -> Vec<Box<dyn Lane>> {
        let _ = (home, wakers);
        Vec::new()
    }

    /// The function's shape.
    fn description(&self) -> &Description;

    /// Reads configuration space; bytes that do not exist read as zero.
    fn config_read(&mut self, offset: u16, into: &mut [u8]);

    /// Writes configuration space; read-only bits keep their value.
    fn config_write(&mut self, offset: u16, from: &[u8]);

    /// Reads from BAR number `bar`.
    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access;

    /// Writes to BAR number `bar`.
    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access;

    /// How much polls may do from now on; [`Turn::Long`] after construction.
    fn set_turn(&mut self, turn: Turn);

    /// Does what there is to do: doorbells, commands, completions; a bounded amount, so that many
    /// functions share a thread fairly.
    fn poll(&mut self) -> Progress;

    /// Told before the host stops polling after [`Progress::Watching`]: from now on work must be
    /// announced by a register write. Asks the guest for that, then looks once more, as `poll` does.
    /// `Busy` or `Watching`: the host must not stop yet. `Idle`: it may, and a `poll` that finds
    /// nothing does not change that.
    fn rest(&mut self) -> Progress;

    /// Function-level reset: as after construction, configuration space included. Requests in
    /// flight end without a trace in guest memory that the guest could see as a completion.
    fn reset(&mut self);

    /// Starts no new access to guest memory and tells whether none is in flight. A host calls it
    /// before it takes memory away, repeatedly until true or until its deadline; `poll` ends the quiesced state.
    fn quiesce(&mut self) -> bool;

    /// Everything that a successor needs to go on, as bytes of a versioned format. The function
    /// must be quiesced.
    fn save(&self) -> Vec<u8>;

    /// Takes over a saved state, on a freshly made function of the same configuration.
    ///
    /// # Errors
    /// [`StateError`]; every byte is checked as hostile input.
    fn restore(&mut self, state: &[u8]) -> Result<(), StateError>;
}
