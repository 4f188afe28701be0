//! The contract of a PCI function.

#[cfg(any(test, feature = "plane"))]
use std::task::Waker;

use crate::Progress;
#[cfg(any(test, feature = "plane"))]
use crate::{Lane, TurnLength};

/// Outcome of an access to a register. Errors of the *device* go into its status registers, never
/// in here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device took or gave the bytes.
    Done,
    /// The bus refuses: nothing is there, or the width is not supported.
    Refused,
}

/// A base address register of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Register number, 0 to 5; a 64-bit BAR also takes the next one.
    pub index: u8,
    /// Bytes, a power of two: at least 4096 of memory, or 4 to 256 of ports.
    pub size: u64,
    /// `true` if the BAR decodes 64-bit addresses; never for ports.
    pub wide: bool,
    /// `true` if the BAR decodes I/O ports, else memory. A host without ports leaves it out.
    pub ports: bool,
    /// The registers whose values the function reads from doorbell cells
    /// (`slipway_doorbells::Doorbells`); `None` if there are none.
    pub doorbells: Option<DoorbellRegisters>,
    /// Registers whose writes announce something, whatever the value; `None` if there are none. A
    /// host may take an event for a write of any of them: [`Function::notified`].
    pub notifications: Option<Notifications>,
}

/// The doorbell registers of a BAR, of four bytes each, by their offset from the BAR's start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DoorbellRegisters {
    /// A page-aligned range of bytes that holds doorbells and nothing else, the first one at its
    /// start. A host may map the cells there instead of trapping writes.
    Page(std::ops::Range<u64>),
    /// Registers between others, in the order of their cells. A host traps the guest's writes. It
    /// may let its client do that: store the value to the cell and announce it
    /// ([`Function::notified`]), in place of passing the write on.
    Apart(Vec<u64>),
}

/// Notification registers of a BAR. Nothing else lies between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notifications {
    /// The bytes from the first register's start to the end of the last register's place.
    pub range: std::ops::Range<u64>,
    /// Bytes from one register to the next, at least 1.
    pub stride: u64,
}

impl Notifications {
    /// Returns the offset of each register in the BAR.
    pub fn offsets(&self) -> impl Iterator<Item = u64> + use<> {
        self.range.clone().step_by(usize::try_from(self.stride).unwrap_or(usize::MAX).max(1))
    }
}

/// The shape of a function, which a host needs to present it; constant for the function's life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The BARs, ascending.
    pub bars: Vec<Bar>,
    /// Number of MSI-X vectors, at most 2048; 0 for a function without MSI-X.
    pub vectors: u16,
    /// `true` if the function has an interrupt pin, INTA#.
    pub pin: bool,
}

/// The reason why a saved state was refused. The function is then in its state after a reset.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The bytes are not a state of this kind of function, or have a version that this function
    /// does not know.
    #[error("the saved state is not of this device or of another version: {0}")]
    Unknown(String),
    /// The state contradicts itself or the function's configuration, or has unknown parts.
    #[error("the saved state is not consistent: {0}")]
    Inconsistent(String),
}

/// A PCI function. The host owns it on one thread and calls it only from there. Parts of it may
/// have other threads: [`Lane`].
///
/// Duties of the host:
/// - Offsets and lengths lie within the BAR or the 4096-byte configuration space.
/// - Lengths are 1 to 8 for registers of BARs, unless the region is memory-like.
/// - It calls `poll` after every write, when a backend's descriptor wakes, at the time that
///   [`Progress::Idle`] or [`Progress::Watching`] gives, and while `poll` returns
///   [`Progress::Busy`] or [`Progress::Behind`].
/// - After [`Progress::Watching`] it calls `rest` before it stops polling.
///
/// Duties of the function:
/// - No call blocks.
/// - No input of a guest makes it panic.
/// - It reaches guest memory only through its `Memory`.
/// - After `quiesce` has returned `true`, nothing refers to guest memory until the next register
///   access or `poll`.
pub trait Function: Send {
    /// Returns the parts of the function that the host polls separately. `wakers` has one waker for
    /// each part that the host has a thread for; the part calls it to be polled. The function calls
    /// `home` to be polled itself, or to be asked once more whether it is quiet. Called at most
    /// once, before anything else. A function without such parts returns none. A function that is
    /// not asked, or whose host has no thread for them, does everything itself.
    #[cfg(any(test, feature = "plane"))]
    fn take_lanes(&mut self, home: Waker, wakers: Vec<Waker>) -> Vec<Box<dyn Lane>> {
        let _ = (home, wakers);
        Vec::new()
    }

    /// Returns the function's shape.
    fn description(&self) -> &Description;

    /// Reads configuration space; bytes that do not exist read as zero.
    fn config_read(&mut self, offset: u16, into: &mut [u8]);

    /// Writes configuration space; read-only bits keep their value.
    fn config_write(&mut self, offset: u16, from: &[u8]);

    /// Reads from BAR number `bar`.
    fn read(&mut self, bar: u8, offset: u64, into: &mut [u8]) -> Access;

    /// Writes to BAR number `bar`.
    fn write(&mut self, bar: u8, offset: u64, from: &[u8]) -> Access;

    /// Handles that the guest wrote registers without a call of [`Function::write`]: the host got
    /// an event for some of the BARs' [`Notifications`], or another process stored doorbells in
    /// their cells. The event does not say which registers; `writes` is their number as the other
    /// side counts it, for statistics alone. The host polls afterwards. A function that looks at
    /// everything in each poll keeps this default.
    fn notified(&mut self, writes: u64) {
        let _ = writes;
    }

    /// Sets how much polls may do from now on; [`TurnLength::Long`] after construction. A function
    /// whose polls are always short keeps this default.
    #[cfg(any(test, feature = "plane"))]
    fn set_turn(&mut self, turn: TurnLength) {
        let _ = turn;
    }

    /// Does a bounded amount of the waiting work (doorbells, commands, completions), so that many
    /// functions share a thread fairly.
    fn poll(&mut self) -> Progress;

    /// Prepares for the end of polling after [`Progress::Watching`]: asks the guest to announce
    /// work by a register write from now on, then looks once more, as `poll` does. After `Busy`,
    /// `Behind` or `Watching` the host must not stop yet. After `Idle` it may, and a later `poll`
    /// that finds nothing does not change that. A function that never watches keeps this default.
    fn rest(&mut self) -> Progress {
        self.poll()
    }

    /// Function-level reset: returns to the state after construction, configuration space included.
    /// Requests in flight end without anything in guest memory that the guest could take for a
    /// completion.
    fn reset(&mut self);

    /// Starts no new access to guest memory, and returns whether none is in flight. A host calls it
    /// repeatedly before it takes memory away, until it returns `true` or the host's deadline has
    /// passed. `poll` ends the quiesced state.
    fn quiesce(&mut self) -> bool;

    /// Returns the length in bytes of the longest state that [`Function::save`] returns and
    /// [`Function::restore`] takes. Returns 0 if the state of such a function means nothing to
    /// another one; a host does not offer to save or restore it then.
    #[cfg(any(test, feature = "plane"))]
    fn max_state(&self) -> usize {
        0
    }

    /// Returns the state that a successor needs to go on, as bytes of a versioned format. The
    /// function must be quiesced.
    fn save(&self) -> Vec<u8>;

    /// Takes over a state that a function of the same kind and size has saved, here or on another
    /// host, with the same content of guest memory. The function was just made, or was reset and is
    /// quiet; it stays quiet until it is polled. The function keeps the identity, the backends and
    /// the limits that its host gave it. If the guest has to hear of a difference, the next poll
    /// tells it.
    ///
    /// # Errors
    /// [`StateError`]; every byte is checked as hostile input.
    fn restore(&mut self, state: &[u8]) -> Result<(), StateError> {
        let restored = self.take_over(state);
        if restored.is_err() {
            self.reset();
        }
        restored
    }

    /// Does the work of [`Function::restore`], which resets the function after an error: until
    /// then it may be in any state. Hosts call `restore`.
    ///
    /// # Errors
    /// The errors of [`Function::restore`].
    fn take_over(&mut self, state: &[u8]) -> Result<(), StateError>;

    /// Goes on where a predecessor with the same journal and doorbell cells was killed, on a newly
    /// made function of the same configuration. The guest's memory is mapped and its interrupts are
    /// routed, and nothing of the predecessor can reach either any more.
    ///
    /// # Errors
    /// [`StateError`]: the function has no journal, or the journal is of another version or
    /// configuration. The function is then in its state after a reset.
    #[cfg(any(test, feature = "plane"))]
    fn recover(&mut self) -> Result<(), StateError> {
        self.reset();
        Err(StateError::Unknown("this function has no journal".into()))
    }

    /// Drops what a predecessor with the same journal left, since its guest is gone: instead of
    /// [`Function::recover`].
    #[cfg(any(test, feature = "plane"))]
    fn abandon(&mut self) {
        self.reset();
    }
}
