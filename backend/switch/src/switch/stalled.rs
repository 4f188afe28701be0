//! Ports whose peers' memory made the switch's thread sleep: they stand still.
//!
//! A copy from or to memory that a peer takes away at that moment sleeps in a page fault, and all
//! ports wait meanwhile. So the port of that peer pays as [`Stalls`] says: for a time the switch
//! neither takes frames from it nor delivers any to it. Frames for it are dropped
//! ([`Drop::Stalled`](crate::Drop::Stalled)). Ports that make the thread sleep for more than a 32nd
//! of its time share that, however many they are.
//!
//! # Whose memory it was
//! A copy from one port to another does not tell which of the two made it sleep. While single ports
//! are measured, the rests of frames are copied into memory of the switch first
//! ([`Burst::make_private`](crate::Burst)), as work for their source, and from there to each
//! destination, as work for that one. This costs one more copy, so bursts are short then. At other
//! times the step of the task is measured as a whole, and nothing else differs.
//!
//! Only a switch that is a task ([`crate::spawn`]) measures: it calls [`Switch::begin_step`].

use std::time::{Duration, Instant};

use slipway_ram::Span;
use slipway_reactor::Stalls;

use super::Switch;
use crate::burst::{BURST, MAX_FRAME};
use crate::index::PortIndex;

/// The largest number of frames in a burst while single ports are measured: their copies fit about
/// a megabyte, whatever their lengths.
const COPIED: usize = 16;

/// The ports that stand still, and the measurement that finds them.
pub(super) struct StalledPorts {
    stalls: Stalls<PortIndex>,
    /// The origin of the switch's clock.
    origin: Instant,
    /// Memory for the rests of a burst's frames. Present only while single ports are measured.
    copies: Option<Span>,
}

impl StalledPorts {
    pub fn new() -> Self {
        let now = Instant::now();
        Self { stalls: Stalls::new(now), origin: now, copies: None }
    }

    /// Returns until when a port stands still, on the switch's clock. Returns `None` if it is
    /// served.
    pub fn until(&self, index: PortIndex) -> Option<Duration> {
        let until = self.stalls.until(&index)?;
        Some(until.saturating_duration_since(self.origin))
    }

    /// Returns whether single ports are measured.
    #[inline]
    pub fn is_alert(&self) -> bool {
        self.stalls.is_alert()
    }

    /// Returns the largest number of frames in a burst.
    #[inline]
    pub fn most(&self) -> usize {
        if self.is_alert() { COPIED } else { BURST }
    }

    /// Returns the memory for the rests of a burst's frames if single ports are measured.
    #[inline]
    pub fn copies(&mut self) -> Option<&Span> {
        if !self.stalls.is_alert() {
            return None;
        }
        Some(self.copies.get_or_insert_with(|| Span::heap(COPIED * MAX_FRAME)))
    }

    /// Charges a port if the thread slept since the last such call. Returns whether the port stands
    /// still from now on, and did not before.
    fn charge(&mut self, index: PortIndex) -> bool {
        let slept = self.stalls.slept();
        slept.is_some_and(|slept| self.stalls.charge_shared(&index, slept))
    }

    /// Forgets a port that is detached.
    pub fn forget(&mut self, index: PortIndex) {
        self.stalls.forget(&index);
    }
}

impl Switch {
    /// Begins a step of the switch's task, whose clock began at `origin`: measures from here, and
    /// has the ports served again that have paid.
    pub(crate) fn begin_step(&mut self, origin: Instant) {
        let now = Instant::now();
        self.stalled.origin = origin;
        self.stalled.stalls.settle(now);
        self.stalled.stalls.begin_after_others(now);
    }

    /// Ends a step of the switch's task.
    pub(crate) fn end_step(&mut self) {
        self.stalled.stalls.end();
        if !self.stalled.is_alert() && self.stalled.copies.take().is_some() {
            self.release();
        }
    }

    /// Leaves out of the measurement what the step did until now, or since the last work for a port
    /// if single ports are measured.
    pub(crate) fn disown(&mut self) {
        self.stalled.stalls.woken();
        self.stalled.stalls.begin(Instant::now());
    }

    /// Returns until when a port stands still, on the switch's clock. Returns `None` if it is
    /// served.
    pub(crate) fn stalled_until(&self, index: PortIndex) -> Option<Duration> {
        self.stalled.until(index)
    }

    /// Ends the work with the memory of a port's peer. The port pays if the thread slept in it.
    #[inline]
    pub(super) fn worked_on(&mut self, index: PortIndex) {
        if self.stalled.is_alert() {
            self.charge(index);
        }
    }

    #[cold]
    fn charge(&mut self, index: PortIndex) {
        if self.stalled.charge(index)
            && let Some(slot) = self.slot_mut(index)
        {
            slot.stalled = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rustix::fs::{FallocateFlags, fallocate};
    use slipway_peer::testing::slow;
    use slipway_ram::Lasting;

    use super::*;
    use crate::decorators::Impairment;
    use crate::{
        Abilities, Burst, Delivered, Learning, LearningOptions, Offload, Pick, Port, PortConfig,
        PortTurn,
    };

    const PAGE: usize = 4096;
    /// The place of a frame that the peer sends: its head ends where its rest begins a page.
    const FRAME: usize = PAGE - crate::HEAD;
    /// The page of the frame's rest.
    const REST: usize = 1;
    /// The page of the frames that the peer gets.
    const GOT: usize = 2;
    /// Long enough to be paid for.
    const PAUSE: Duration = Duration::from_millis(100);

    /// A port whose peer has the file of its memory, and sends a frame to all others in each turn.
    struct TestPort(Span);

    impl Port for TestPort {
        fn abilities(&self) -> Abilities {
            Abilities::ALL
        }

        fn is_up(&self) -> bool {
            true
        }

        fn take(&mut self, burst: &mut Burst, _: usize) -> bool {
            burst.push(&self.0, FRAME, 1000, Offload::NONE).unwrap();
            false
        }

        fn release(&mut self) {}

        fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
            picks.iter().for_each(|pick| burst.copy(*pick, &self.0, GOT * PAGE).unwrap());
            Delivered { frames: picks.len() as u32, ..Delivered::default() }
        }

        fn notify(&mut self) {
            self.0.read(GOT * PAGE, &mut [0]).unwrap();
        }

        fn arm(&mut self) -> bool {
            false
        }
    }

    /// A switch with three such ports.
    struct Rig {
        switch: Switch,
        peers: Vec<(OwnedFd, Span)>,
        begin: Instant,
        /// How often the switch slept in the memory of [`Rig::sleep_twice`].
        sleeps: Arc<AtomicUsize>,
    }

    impl Rig {
        fn new() -> Self {
            let table = Learning::new(LearningOptions::default(), 1);
            let mut switch = Switch::new(Box::new(table));
            let peers = [1, 2, 3].map(|number| {
                let file = Lasting::new("slipway-test", 3 * PAGE).unwrap();
                let file = file.file().unwrap().try_clone_to_owned().unwrap();
                let memory = Span::file(file.as_fd(), 0, 3 * PAGE).unwrap();
                let addresses = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, number];
                memory.write(FRAME, &addresses).unwrap();
                let port = Box::new(TestPort(memory.clone()));
                let attached = switch.attach(port, PortConfig::default());
                assert!(attached.is_ok_and(|index| index + 1 == u16::from(number)));
                (file, memory)
            });
            let sleeps = Arc::default();
            Self { switch, peers: peers.into(), begin: Instant::now(), sleeps }
        }

        fn got(&mut self) -> [u64; 2] {
            [1, 2].map(|index| self.switch.stats(index).unwrap().frames_out)
        }

        /// Has a step in which port 0 has its turn. Returns that turn, and the frames that the
        /// others have got in it.
        fn step(&mut self) -> (PortTurn, [u64; 2]) {
            let before = self.got();
            self.switch.begin_step(self.begin);
            let turn = self.switch.turn(0, BURST, self.begin.elapsed());
            self.switch.end_step();
            let after = self.got();
            (turn, [after[0] - before[0], after[1] - before[1]])
        }

        /// Has the switch sleep when it next touches this page of a peer's memory.
        fn take_away(&self, peer: usize, page: usize) {
            let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(&self.peers[peer].0, mode, (page * PAGE) as u64, PAGE as u64).unwrap();
        }

        fn stalled(&self) -> [bool; 3] {
            [0, 1, 2].map(|index| self.switch.stalled_until(index).is_some())
        }

        /// Takes a page away twice, and has a step after each time. Returns whether the ports stand
        /// still after each, or `None` if the machine cannot have the switch sleep.
        fn sleep_twice(&mut self, peer: usize, page: usize) -> Option<[[bool; 3]; 2]> {
            let words = Lasting::over(self.peers[peer].1.clone()).unwrap();
            let Ok(sleeps) = slow(words.words(), PAUSE) else {
                eprintln!("skipped: it needs userfaultfd(2)");
                return None;
            };
            self.sleeps = sleeps;
            let stalled = [1, 2].map(|number| {
                self.take_away(peer, page);
                assert_eq!(self.step(), (PortTurn::Done, [1, 1]));
                assert_eq!(self.sleeps.load(Ordering::Relaxed), number);
                self.stalled()
            });
            // A minute more, which is longer than a slow machine takes for the rest of a test.
            if let Some(index) = stalled[1].iter().position(|stalled| *stalled) {
                let stalls = &mut self.switch.stalled.stalls;
                stalls.charge_shared(&(index as PortIndex), Duration::from_secs(2));
            }
            Some(stalled)
        }

        /// Ends the time for which ports stand still.
        fn settle(&mut self) {
            let until = self.switch.stalled.stalls.due().unwrap();
            self.switch.stalled.stalls.settle(until);
        }
    }

    #[test]
    fn a_port_that_frames_are_from_pays_for_sleeps_in_its_memory() {
        let mut rig = Rig::new();
        // The first sleep is nobody's.
        let Some(stalled) = rig.sleep_twice(0, REST) else { return };
        assert_eq!(stalled, [[false; 3], [true, false, false]]);
        let (turn, got) = rig.step();
        assert!(matches!(turn, PortTurn::Held(until) if until > rig.begin.elapsed()));
        assert_eq!(got, [0, 0]);
        rig.settle();
        assert_eq!(rig.step(), (PortTurn::Done, [1, 1]));
    }

    #[test]
    fn a_port_that_frames_are_for_pays_for_sleeps_in_its_memory() {
        let mut rig = Rig::new();
        let Some(stalled) = rig.sleep_twice(1, GOT) else { return };
        assert_eq!(stalled, [[false; 3], [false, true, false]]);
        // The others are served meanwhile.
        rig.take_away(1, GOT);
        assert_eq!(rig.step(), (PortTurn::Done, [0, 1]));
        assert_eq!(rig.sleeps.load(Ordering::Relaxed), 2, "its memory is not touched");
        let dropped: Vec<_> = rig.switch.stats(1).unwrap().causes_out().collect();
        assert_eq!(dropped, [("stalled", 1)]);
        rig.settle();
        assert_eq!(rig.step(), (PortTurn::Done, [1, 1]));
    }

    #[test]
    fn delayed_frames_wait_until_their_port_is_served_again() {
        let mut rig = Rig::new();
        let delay = Duration::from_millis(1);
        let impairment = Impairment { delay, ..Impairment::default() };
        rig.switch.impair(1, Some(impairment)).unwrap();
        assert_eq!(rig.step(), (PortTurn::Done, [0, 1]));
        rig.step();
        assert_eq!(rig.switch.waiting, [1], "it is on the list once");
        rig.switch.stalled.stalls.charge_shared(&1_u16, Duration::from_secs(2));
        let until = rig.switch.stalled_until(1);
        assert!(until.is_some_and(|until| until > Duration::from_secs(10)));
        assert_eq!(rig.switch.due(1, true), until);
    }

    #[test]
    fn a_port_that_is_attached_does_not_pay_for_a_former_one() {
        let mut rig = Rig::new();
        rig.switch.begin_step(rig.begin);
        rig.switch.stalled.stalls.charge_shared(&1_u16, Duration::from_secs(1));
        assert_eq!(rig.stalled(), [false, true, false]);
        let port = rig.switch.detach(1).unwrap();
        assert!(rig.switch.attach(port, PortConfig::default()).is_ok_and(|index| index == 1));
        assert_eq!((rig.stalled(), rig.step()), ([false; 3], (PortTurn::Done, [1, 1])));
    }

    #[test]
    fn frames_that_cannot_be_copied_are_malformed() {
        let memory = Span::heap(2000);
        memory.write(0, &[7; 2000]).unwrap();
        let mut burst = Burst::new();
        for len in [60, 1000, 1500, 500] {
            burst.push(&memory, 0, len, Offload::NONE).unwrap();
        }
        let copies = Span::heap(1500);
        assert_eq!(burst.make_private(&copies), 1, "there is no room for the longest");
        memory.write(0, &[9; 2000]).unwrap();
        assert_eq!((burst.len(), burst.bytes()), (3, 1560));
        for (frame, len) in [60, 1000, 500].into_iter().enumerate() {
            let mut bytes = vec![0; len];
            let pick = Pick { frame: frame as u16, tci: 0 };
            assert_eq!(burst.read(pick).read(&mut bytes).unwrap(), len);
            assert!(bytes.iter().all(|byte| *byte == 7), "its peer has changed it");
        }
    }
}
