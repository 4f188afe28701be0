//! The state of the members of a lazily pulled image: which of them are there, which are wanted,
//! and which a request has. A member is fetched by one request at a time, for all that wait for it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use tokio::sync::mpsc;

use super::budget::Urgency;
use super::have::SpanBitmap;
use super::members::Members;

/// The most bytes of one request for members that are wanted together. One member may have more.
const MOST_WANTED_BYTES: u64 = 8 << 20;
/// The most bytes of one request for members that nobody waits for.
const MOST_AHEAD_BYTES: u64 = 4 << 20;

/// The state of an image's members. `members` of the methods are those of the image.
pub(super) struct MembersState {
    have: SpanBitmap,
    /// The ones that wait for each member that is queued or in flight. Each is told once whether
    /// the member is there; `false`: it cannot be fetched now.
    waiters: HashMap<u32, Vec<Waiter>>,
    /// Wanted members. A member that is in flight already, or that nobody waits for any more, is
    /// skipped when it is taken.
    queue: VecDeque<u32>,
    /// Members that a request has.
    in_flight: HashSet<u32>,
    ahead: Ahead,
    /// The bytes of each layer's blob that are no longer needed.
    done: Vec<u64>,
    /// Set if nothing will be fetched any more.
    closed: bool,
}

/// The channel of a call that waits for members. All of a call's members share it.
type Waiter = mpsc::UnboundedSender<bool>;

/// The position of the members that are fetched ahead.
#[derive(Clone, Copy)]
enum Ahead {
    /// Among all members, of which those of the layers' prefetch parts are taken.
    Prefetch(u32),
    /// Among all members, all of which are taken.
    Rest(u32),
}

impl Ahead {
    const BEGIN: Self = Self::Prefetch(0);

    fn next(self) -> u32 {
        match self {
            Self::Prefetch(next) | Self::Rest(next) => next,
        }
    }

    /// Returns the position `count` members further.
    fn after(self, count: u32) -> Self {
        match self {
            Self::Prefetch(next) => Self::Prefetch(next + count),
            Self::Rest(next) => Self::Rest(next + count),
        }
    }
}

/// The purpose of a request, by which members are taken for it.
#[derive(Clone, Copy)]
enum Purpose<'a> {
    /// The members are waited for.
    Wanted,
    /// Nobody waits for the members.
    Ahead(Ahead),
    /// The members are among these, in ascending order, which a caller fetches by itself.
    Chosen(&'a [u32]),
}

impl MembersState {
    /// Makes the state of an image of `layers` layers, with the presence bitmap `have`.
    pub(super) fn new(have: SpanBitmap, members: &Members, layers: usize) -> Self {
        let mut state = Self {
            have,
            waiters: HashMap::new(),
            queue: VecDeque::new(),
            in_flight: HashSet::new(),
            ahead: Ahead::BEGIN,
            done: vec![0; layers],
            closed: false,
        };
        // An earlier process may have fetched some.
        for number in 0..members.len() {
            if state.is_there(members, number) {
                let member = members.get(number);
                state.done[member.layer as usize] += member.bytes;
            }
        }
        state
    }

    /// Returns the presence bitmap.
    pub(super) fn have(&self) -> &SpanBitmap {
        &self.have
    }

    /// Marks a span as written.
    pub(super) fn set(&mut self, span: usize) {
        self.have.set(span);
    }

    /// Marks all of `spans` spans as missing, from now on in memory alone.
    pub(super) fn forget(&mut self, spans: usize) {
        self.have = SpanBitmap::in_memory(spans);
    }

    /// Returns the bytes of each layer that are fetched so far.
    pub(super) fn done(&self) -> &[u64] {
        &self.done
    }

    /// Returns whether somebody waits for a member.
    pub(super) fn is_wanted(&self) -> bool {
        !self.waiters.is_empty()
    }

    /// Returns whether the file has all spans of a member.
    fn is_there(&self, members: &Members, member: u32) -> bool {
        members.spans(member).iter().all(|span| self.have.has(*span as usize))
    }

    /// Queues the missing members of a range of spans. Returns their number, and a receiver that is
    /// told once for each of them whether it is there.
    pub(super) fn want(
        &mut self,
        members: &Members,
        spans: Range<usize>,
    ) -> (mpsc::UnboundedReceiver<bool>, usize) {
        let spans = spans.filter(|span| !self.have.has(*span));
        let mut wanted: Vec<u32> = spans.map(|span| members.of_span(span)).collect();
        wanted.sort_unstable();
        wanted.dedup();
        let (sender, receiver) = mpsc::unbounded_channel();
        let count = wanted.len();
        if self.closed {
            // Without a sender, the receiver is told that nothing comes.
            return (receiver, count);
        }
        for member in wanted {
            let others = self.waiters.entry(member).or_default();
            if others.is_empty() && !self.in_flight.contains(&member) {
                self.queue.push_back(member);
            }
            others.push(sender.clone());
        }
        (receiver, count)
    }

    /// Takes the members of the next request for what is wanted. Returns `None` if nothing is, or a
    /// request has it already.
    pub(super) fn take_wanted(&mut self, members: &Members) -> Option<Vec<u32>> {
        while let Some(first) = self.queue.pop_front() {
            let batch = self.take_batch(members, first, Purpose::Wanted);
            if batch.is_some() {
                return batch;
            }
            if !self.in_flight.contains(&first) {
                // All calls that waited for it have been dropped.
                self.waiters.remove(&first);
            }
        }
        None
    }

    /// Takes the members of the next request for what nobody waits for: first those that the
    /// layers' makers marked, then all, in the order of the layers. Returns `None` at the end,
    /// where it begins again.
    pub(super) fn take_ahead(&mut self, members: &Members) -> Option<Vec<u32>> {
        loop {
            let ahead = self.ahead;
            match ahead {
                Ahead::Prefetch(next) if next == members.len() => {
                    self.ahead = Ahead::Rest(0);
                    continue;
                }
                Ahead::Rest(next) if next == members.len() => {
                    self.ahead = Ahead::BEGIN;
                    return None;
                }
                Ahead::Prefetch(_) | Ahead::Rest(_) => {}
            }
            let batch = self.take_batch(members, ahead.next(), Purpose::Ahead(ahead));
            let passed = batch.as_ref().map_or(1, |batch| batch.len() as u32);
            self.ahead = ahead.after(passed);
            if batch.is_some() {
                return batch;
            }
        }
    }

    /// Takes those of `chosen`, in ascending order, that are missing and that no request has.
    /// Returns them in requests.
    pub(super) fn take_chosen(&mut self, members: &Members, chosen: &[u32]) -> Vec<Vec<u32>> {
        let batches = chosen.iter().filter_map(|first| {
            // Members of earlier batches are in flight by now, and are not taken again.
            self.take_batch(members, *first, Purpose::Chosen(chosen))
        });
        batches.collect()
    }

    /// Takes `first`, and the members after it that go with it into one request. Returns `None` if
    /// `first` may not be taken.
    fn take_batch(
        &mut self,
        members: &Members,
        first: u32,
        purpose: Purpose<'_>,
    ) -> Option<Vec<u32>> {
        if !self.may_take(members, first, purpose) {
            return None;
        }
        let most = match purpose {
            Purpose::Wanted | Purpose::Chosen(_) => MOST_WANTED_BYTES,
            Purpose::Ahead(_) => MOST_AHEAD_BYTES,
        };
        let batch = members.batch(first, most, |member| self.may_take(members, member, purpose));
        self.in_flight.extend(&batch);
        Some(batch)
    }

    /// Returns whether a member may be taken for a request.
    fn may_take(&self, members: &Members, member: u32, purpose: Purpose<'_>) -> bool {
        if self.in_flight.contains(&member) {
            return false;
        }
        match purpose {
            Purpose::Wanted => self
                .waiters
                .get(&member)
                .is_some_and(|waiters| waiters.iter().any(|waiter| !waiter.is_closed())),
            Purpose::Ahead(ahead) => {
                let is_meant = match ahead {
                    Ahead::Prefetch(_) => members.is_prefetched(member),
                    Ahead::Rest(_) => true,
                };
                is_meant && !self.waiters.contains_key(&member) && !self.is_there(members, member)
            }
            Purpose::Chosen(chosen) => {
                chosen.binary_search(&member).is_ok() && !self.is_there(members, member)
            }
        }
    }

    /// Ends the request of a member that is there now, and tells those who wait for it. Returns its
    /// layer, and the bytes of the layer that are fetched so far. Returns `None`, and changes
    /// nothing, if the member is missing.
    pub(super) fn land(&mut self, members: &Members, member: u32) -> Option<(usize, u64)> {
        if !self.is_there(members, member) {
            return None;
        }
        self.in_flight.remove(&member);
        self.tell(member, true);
        let member = members.get(member);
        let layer = member.layer as usize;
        self.done[layer] += member.bytes;
        Some((layer, self.done[layer]))
    }

    /// Ends the request of a member that is still missing.
    pub(super) fn give_up(&mut self, member: u32, urgency: Urgency) {
        self.in_flight.remove(&member);
        match urgency {
            Urgency::Wanted => self.tell(member, false),
            // It was not waited for when the request began.
            Urgency::Ahead if self.waiters.contains_key(&member) => self.queue.push_back(member),
            Urgency::Ahead => {}
        }
    }

    /// Tells those who wait for a member whether it is there.
    fn tell(&mut self, member: u32, there: bool) {
        for waiter in self.waiters.remove(&member).into_iter().flatten() {
            // The receiver may have gone.
            let _ = waiter.send(there);
        }
    }

    /// Ends all waiting: nothing is fetched any more.
    pub(super) fn close(&mut self) {
        self.closed = true;
        for waiter in self.waiters.drain().flat_map(|(_, waiters)| waiters) {
            // The receiver may have gone.
            let _ = waiter.send(false);
        }
        self.queue.clear();
    }

    /// Returns whether nothing is fetched any more.
    pub(super) fn is_closed(&self) -> bool {
        self.closed
    }
}

#[cfg(test)]
mod tests {
    use super::super::map::{Map, MapLayer, Span};
    use super::*;
    use crate::Digest;

    /// The bytes from one member to the next, too many for one request.
    const STEP: u64 = 1 << 20;

    /// Makes four members of one span each, of which the first two are prefetched.
    fn members() -> Members {
        let digest = Digest::of(b"");
        let span = |at: u64| Span {
            image: at * 4096,
            bytes: 10,
            layer: 0,
            stream: at * STEP,
            stream_bytes: 50,
            inner: 0,
            digest,
        };
        let map = Map {
            reference: "localhost/x".parse().unwrap(),
            plain_http: false,
            bytes: 1 << 20,
            layers: vec![MapLayer { digest, bytes: 8 * STEP, prefetch: 2 * STEP }],
            spans: (0..4).map(span).collect(),
        };
        Members::of(&map).unwrap()
    }

    fn state(members: &Members) -> MembersState {
        MembersState::new(SpanBitmap::in_memory(4), members, 1)
    }

    #[test]
    fn a_member_is_taken_by_one_request_at_a_time() {
        let members = members();
        let mut state = state(&members);
        assert_eq!(state.take_ahead(&members), Some(vec![0]));
        let (mut told, count) = state.want(&members, 0..2);
        assert_eq!((count, state.is_wanted()), (2, true));
        assert_eq!(state.take_wanted(&members), Some(vec![1]));
        assert_eq!(state.take_wanted(&members), None, "a request has the other one");
        assert_eq!(state.take_chosen(&members, &[0, 1, 3]), [vec![3]]);
        assert_eq!(state.take_ahead(&members), Some(vec![2]));
        // The one that was fetched ahead is wanted by now, so it is queued when that failed.
        state.give_up(0, Urgency::Ahead);
        assert_eq!(state.take_wanted(&members), Some(vec![0]));
        state.give_up(0, Urgency::Wanted);
        assert_eq!(told.try_recv(), Ok(false));
        assert_eq!(state.land(&members, 1), None);
        state.set(1);
        assert_eq!(state.land(&members, 1), Some((0, 50)));
        assert_eq!((told.try_recv(), state.is_wanted()), (Ok(true), false));
        // Nobody waits for one that failed ahead.
        state.give_up(2, Urgency::Ahead);
        assert_eq!(state.take_wanted(&members), None);
    }

    #[test]
    fn marked_members_come_first_and_what_is_there_is_passed_over() {
        let members = members();
        let mut state = state(&members);
        state.set(0);
        let (waits, _) = state.want(&members, 2..3);
        let take = |state: &mut MembersState| state.take_ahead(&members);
        assert_eq!(take(&mut state), Some(vec![1]));
        assert_eq!(take(&mut state), Some(vec![3]), "another one is waited for");
        assert_eq!(take(&mut state), None);
        // All calls that waited for the member are dropped: it has no priority from then on.
        drop(waits);
        assert_eq!(state.take_wanted(&members), None);
        assert!(!state.is_wanted());
        assert_eq!(take(&mut state), Some(vec![2]));
    }

    #[test]
    fn an_earlier_process_has_fetched_what_the_bitmap_has() {
        let members = members();
        let mut have = SpanBitmap::in_memory(4);
        have.set(3);
        assert_eq!(MembersState::new(have, &members, 1).done(), [50]);
    }

    #[test]
    fn a_closed_image_has_nobody_wait() {
        let members = members();
        let mut state = state(&members);
        let (mut before, _) = state.want(&members, 0..1);
        state.close();
        assert_eq!(before.try_recv(), Ok(false));
        let (mut after, count) = state.want(&members, 0..1);
        assert_eq!((count, state.is_closed(), state.is_wanted()), (1, true, false));
        assert_eq!(after.try_recv(), Err(mpsc::error::TryRecvError::Disconnected));
        assert_eq!(state.take_wanted(&members), None);
    }
}
