//! When the driver notifies of new buffers, and the argument that no notification is slept over.
//!
//! A queue that the switch polls is in one of two moods:
//! - *awake*: the switch looks at the available index in every round, so the driver is asked for no
//!   notification: avail_event is kept [behind](Notifications::awake) the index, where the driver does
//!   not pass it for at least 32,768 buffers (without event index: the flag NO_NOTIFY);
//! - *armed*: before the switch sleeps, avail_event is the index that was seen last (the flag is taken
//!   away), and then the queue is looked at once more ([`Notifications::arm`]).
//!
//! # No notification is slept over
//! Driver (section 2.7.13.4): store the available index A, full barrier, load avail_event (or flags),
//! and notify if A passed it. Device: store avail_event E (or flags), full barrier (`fence(SeqCst)` in
//! `arm`), load the available index. Of two such stores with a full barrier before the loads, at least
//! one is seen by the other side's load. Either the last look finds A, and the switch does not sleep; or
//! the driver finds E, which is the index that its change began at or before, and that it ended past: it
//! notifies. A notification is a trapped register write, which wakes the switch's task by message
//! (`slipway_reactor` argues that this is not lost). Later changes find the switch awake, or armed anew.
//!
//! The half-words are stored and loaded in one access each. Were E torn, the driver's load would have
//! met the store half-way, hence the device's last look comes after the driver's store, and finds it.
//! `tests/sleep.rs` has loom go through the interleavings.

/// Where the parties meet: the words of one queue that tell of new buffers.
pub(crate) trait Meeting {
    /// Why it cannot be reached.
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
const NO_NOTIFY: u16 = 1;
/// How far the driver may come before avail_event is moved on.
const FAR: u16 = 0x4000;

/// What one queue asks of its driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Notifications {
    /// Both sides use event indexes.
    event_index: bool,
    /// What was asked last; None: nothing yet.
    asked: Option<Asked>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    /// No notification; avail_event is this.
    None(u16),
    /// A notification.
    Next,
}

impl Notifications {
    pub fn new(event_index: bool) -> Self {
        Self { event_index, asked: None }
    }

    /// Asks for no notification while `next` is the index of the buffer that is looked for. Cheap while
    /// that is so already.
    #[inline]
    pub fn awake<M: Meeting>(&mut self, meeting: &mut M, next: u16) -> Result<(), M::Fault> {
        if let Some(Asked::None(event)) = self.asked
            && (!self.event_index || next.wrapping_sub(event) < FAR)
        {
            return Ok(());
        }
        let event = next.wrapping_sub(1);
        match self.event_index {
            true => meeting.set_event(event)?,
            false => meeting.set_flags(NO_NOTIFY)?,
        }
        self.asked = Some(Asked::None(event));
        Ok(())
    }

    /// Asks for a notification of the buffer at index `next`, and looks once more. Whether it is there:
    /// then no notification may come, and nobody may sleep.
    pub fn arm<M: Meeting>(&mut self, meeting: &mut M, next: u16) -> Result<bool, M::Fault> {
        match self.event_index {
            true => meeting.set_event(next)?,
            false => meeting.set_flags(0)?,
        }
        self.asked = Some(Asked::Next);
        meeting.fence();
        Ok(meeting.available()? != next)
    }
}
