//! Decides when the driver notifies of new buffers; the argument why no notification is lost while
//! the device's thread sleeps.
//!
//! A queue that its device polls is in one of two modes:
//! - *awake*: the device looks at the available index in every round, so it needs no notification:
//!   avail_event is kept [behind](Notifications::awake) the index, where the driver does not pass
//!   it for at least 32,768 buffers (without event index: the flag NO_NOTIFY is set);
//! - *armed*: before its thread sleeps, avail_event is set to the index that was seen last (the
//!   flag is cleared), and then the device looks at the queue once more ([`Notifications::arm`]).
//!
//! # No notification is slept over
//! Driver (section 2.7.13.4): store the available index A, full barrier, load avail_event (or
//! flags), and notify if A passed it. Device: store avail_event E (or flags), full barrier
//! (`fence(SeqCst)` in `arm`), load the available index. Of two such stores with a full barrier
//! before the loads, at least one is seen by the other side's load. Either the last look finds A,
//! and the thread does not sleep; or the driver finds E. The driver's change began at E or before,
//! and ended past it, so the driver notifies. A notification is a register write, which wakes the
//! thread: by a message if it is trapped (`slipway_reactor` argues that this message is not lost),
//! or by an eventfd. Later changes find the device awake, or armed anew.
//!
//! The half-words are stored and loaded in one access each. If E were torn, the driver's load would
//! have met the device's store half-way; then the device's last look comes after the driver's
//! store, and finds it. `tests/sleep.rs` has loom go through the interleavings.

/// The words of one queue by which both sides tell each other of new buffers.
pub(crate) trait Meeting {
    /// The error of a word that cannot be reached.
    type Fault;

    /// Loads the available index, acquiring.
    fn available(&mut self) -> Result<u16, Self::Fault>;

    /// Stores avail_event.
    fn set_event(&mut self, index: u16) -> Result<(), Self::Fault>;

    /// Stores the used ring's flags.
    fn set_flags(&mut self, flags: u16) -> Result<(), Self::Fault>;

    /// A full barrier.
    fn fence(&self);
}

/// The used ring's flag by which the device asks for no notifications (section 2.7.8).
#[cfg(feature = "plane")]
const NO_NOTIFY: u16 = 1;
/// The number of buffers after which avail_event is moved on.
#[cfg(feature = "plane")]
const FAR: u16 = 0x4000;

/// The notifications that one queue has asked its driver for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notifications {
    /// `true` if both sides use event indexes.
    event_index: bool,
    /// The avail_event with which the driver was last asked for no notification. `None` if it was
    /// asked for one since, or for nothing yet.
    #[cfg(feature = "plane")]
    silent: Option<u16>,
}

impl Notifications {
    pub fn new(event_index: bool) -> Self {
        Self {
            event_index,
            #[cfg(feature = "plane")]
            silent: None,
        }
    }

    /// Asks for a notification of the buffer at index `next`, and looks once more. Returns whether
    /// the buffer is there: then no notification may come, and the caller must not sleep.
    pub fn arm<M: Meeting>(&mut self, meeting: &mut M, next: u16) -> Result<bool, M::Fault> {
        match self.event_index {
            true => meeting.set_event(next)?,
            false => meeting.set_flags(0)?,
        }
        #[cfg(feature = "plane")]
        {
            self.silent = None;
        }
        meeting.fence();
        Ok(meeting.available()? != next)
    }
}

#[cfg(feature = "plane")]
impl Notifications {
    /// Asks for no notification, while `next` is the index of the buffer that the device looks for.
    /// Cheap if that was asked already.
    #[inline]
    pub fn awake<M: Meeting>(&mut self, meeting: &mut M, next: u16) -> Result<(), M::Fault> {
        if let Some(event) = self.silent
            && (!self.event_index || next.wrapping_sub(event) < FAR)
        {
            return Ok(());
        }
        let event = next.wrapping_sub(1);
        match self.event_index {
            true => meeting.set_event(event)?,
            false => meeting.set_flags(NO_NOTIFY)?,
        }
        self.silent = Some(event);
        Ok(())
    }
}
