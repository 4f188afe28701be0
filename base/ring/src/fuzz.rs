//! Entries of the fuzz targets.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use slipway_ram::Lasting;

use crate::cross::{Arena, Own, Regions, Side, Signals, Stream};

const MOST: usize = 64 << 10;

/// The private state of a side.
struct Party {
    side: Side,
    own: [[AtomicU64; 4]; 2],
    bits: Vec<AtomicU64>,
}

impl Party {
    fn new(side: Side) -> Self {
        let bits = (0..Regions::WORDS).map(|_| AtomicU64::new(0)).collect();
        Self { side, own: Default::default(), bits }
    }

    fn stream<'a>(&'a self, arena: &'a Arena, number: u32) -> Stream<'a> {
        let [tail, head_seen, head, tail_seen] = &self.own[number as usize];
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Stream::new(arena, number, self.side, out, into)
    }

    fn write(&self, arena: &Arena, number: u32, bytes: &[u8]) -> usize {
        let regions = Regions::new(&self.bits, arena.shape());
        self.stream(arena, number).write(bytes, MOST, regions, || ()).unwrap_or(0)
    }

    fn read(&self, arena: &Arena, number: u32, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        let count = self.stream(arena, number).read(&mut bytes, || ()).unwrap_or(0);
        bytes.truncate(count);
        bytes
    }
}

/// Runs two streams between two parties. In stream 0 party zero writes what `data` says into every
/// word that it may write. Stream 1, which both use correctly, must not suffer.
///
/// # Panics
/// If stream 1 suffers, or party one accepts an impossible value: that is the finding.
pub fn streams(data: &[u8]) {
    thread_local! {
        // One arena for all inputs: threads that unmap arenas would not keep up with the inputs.
        static ARENA: Option<Arena> = Arena::new(Regions::shape(2)).ok();
    }
    ARENA.with(|arena| arena.as_ref().map_or((), |arena| streams_of(arena, data)));
}

fn streams_of(arena: &Arena, data: &[u8]) {
    (0..2).for_each(|number| arena.clear(number));
    let (zero, one) = (Party::new(Side::Zero), Party::new(Side::One));
    let mut under_way = VecDeque::new();
    for step in data.chunks_exact(12) {
        let value = step[4..].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
        let count = usize::from(u16::from_le_bytes([step[1], step[2]]));
        let hostile = arena.inbox(0, Side::One);
        let words = [hostile.tail, hostile.head, hostile.data_wanted, hostile.space_wanted];
        match step[0] % 8 {
            0 => words[usize::from(step[3] % 4)].store(value, Ordering::Relaxed),
            1 => {
                let moved = words[usize::from(step[3] % 2)].load(Ordering::Relaxed);
                words[usize::from(step[3] % 2)]
                    .store(moved.wrapping_add(value % 8192), Ordering::Relaxed);
            }
            2 => drop(one.write(arena, 0, &vec![step[3]; count])),
            3 => drop(one.read(arena, 0, count)),
            4 => {
                let stream = one.stream(arena, 0);
                let known = stream.into.known();
                assert!(
                    known <= stream.into.tail().size(),
                    "it believes more than there is room for"
                );
                assert!(stream.out.used() <= stream.out.tail().size());
                let _ = (stream.arm_data(count), stream.arm_space(), stream.space());
                let _ = stream.readable();
                let regions = Regions::new(&one.bits, arena.shape());
                stream.untie().into_iter().for_each(|region| regions.give(region));
            }
            5 => drop(zero.write(arena, 0, &vec![step[3]; count])),
            6 => {
                let sent = zero.write(arena, 1, &vec![step[3]; count]);
                under_way.extend(std::iter::repeat_n(step[3], sent));
            }
            _ => {
                let got = one.read(arena, 1, count);
                assert_eq!(got.len(), count.min(under_way.len()), "what was sent is there");
                assert!(got.into_iter().all(|byte| under_way.pop_front() == Some(byte)));
            }
        }
    }
}

/// Runs a FIFO of signals whose other side writes what `data` says.
///
/// # Panics
/// If more than twice as many signals are taken as the FIFO has room for: that is the finding.
pub fn signals(data: &[u8]) {
    const EVENTS: usize = 16;
    let words = Lasting::heap(Signals::bytes(EVENTS));
    let side = || Signals::new(words.clone(), EVENTS);
    let (Some(mut out), Some(mut into)) = (side(), side()) else { return };
    for step in data.chunks_exact(10) {
        let value = step[2..].iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
        match step[0] % 4 {
            0 => words.words()[usize::from(step[1]) % words.words().len()]
                .store(value, Ordering::Relaxed),
            1 => drop(out.raise(value)),
            2 => drop(into.take()),
            _ => {
                let taken =
                    (0..).take_while(|_| matches!(into.take(), Ok(Some(_)))).take(100).count();
                // A hostile side may move its tail once while signals that were seen before are
                // still to be taken.
                assert!(taken <= 2 * EVENTS, "{taken} signals in a FIFO of {EVENTS}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn random_parties_find_nothing() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        for _ in 0..20 {
            let data: Vec<u8> = (0..6000).map(|_| next()).collect();
            super::streams(&data);
            super::signals(&data);
        }
    }
}
