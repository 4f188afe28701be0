//! The turn of a function or lane: the work that a poll may do, and its outcome.

use std::time::Duration;

/// The outcome of [`Function::poll`](crate::Function::poll).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The function did something, or may have more to do at once: poll again.
    Busy,
    /// Like `Busy`, and more work waits than the turn had room for.
    Behind,
    /// There is nothing to do until a register is written, a backend's descriptor wakes, or the
    /// given time (of the function's clock), if any, has come.
    Idle(Option<Duration>),
    /// Like `Idle`, but work may also come unannounced, through memory that the function shares
    /// with its guest. The host goes on polling while it likes to, and calls
    /// [`Function::rest`](crate::Function::rest) before it stops.
    Watching(Option<Duration>),
}

impl Progress {
    /// Returns whether there was anything to do.
    pub fn is_busy(self) -> bool {
        matches!(self, Self::Busy | Self::Behind)
    }
}

/// The amount of work that [`Function::poll`](crate::Function::poll) may do. The function
/// translates it into work, never into time, since reading a clock has a cost.
#[cfg(any(test, feature = "plane"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum TurnLength {
    /// The thread has nothing else to do: the function does much, some tens of microseconds, so
    /// that the poll's own cost is small in it.
    #[default]
    Long,
    /// Other tasks with little work wait for the thread: the function does little, less than a
    /// microsecond.
    Short,
}
