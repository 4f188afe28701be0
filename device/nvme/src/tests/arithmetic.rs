//! Queue arithmetic, exhaustively: every size up to a bound, every pair of indexes, every doorbell
//! value; and sizes at the limits. Expected results come from walking the ring entry by entry.

use slipway_doorbells::Doorbells;
use slipway_nvme_spec::command::{
    COMPLETION_ENTRY, CompletionEntry, SUBMISSION_ENTRY, SubmissionEntry,
};
use slipway_nvme_spec::status::Status;
use slipway_ram::Memory;
use zerocopy::{FromZeros, IntoBytes};

use crate::cell::{BadDoorbell, Cell, ShadowPages, distance};
use crate::driver::passes;
use crate::queue::{CompletionQueue, SubmissionQueue};

/// The largest size whose indexes are all tested.
const SMALL: u32 = 24;
/// Sizes at a limit: of the default limits, and of an admin queue.
const LARGE: [u32; 4] = [1023, 1024, 4095, 4096];

const RING: u64 = 0x4000;
const PAGES: ShadowPages = ShadowPages { doorbells: 0x1000, events: 0x2000, number: 0 };

fn next(index: u32, size: u32) -> u32 {
    if index + 1 == size { 0 } else { index + 1 }
}

fn memory() -> Memory {
    Memory::heap(0x4000 + 4096 * SUBMISSION_ENTRY)
}

/// Returns a queue's doorbell with the value `seen` at the last look: a register, or an entry of a
/// shadow page.
fn cell(memory: &Memory, doorbells: &Doorbells, seen: u32, shadow: bool) -> Cell {
    let mut cell = Cell::resumed(doorbells, 0, seen);
    doorbells.store(0, seen);
    if shadow {
        memory.store_u32(PAGES.doorbells, seen).unwrap();
        cell.resume_shadow(PAGES, seen, true);
    }
    cell
}

/// Rings as the host does.
fn ring(memory: &Memory, doorbells: &Doorbells, value: u32, shadow: bool) {
    match shadow {
        true => memory.store_u32(PAGES.doorbells, value).unwrap(),
        false => doorbells.store(0, value),
    }
}

/// Returns the indexes of a ring to test where not all are tested: both ends and the middle.
fn chosen(size: u32) -> Vec<u32> {
    match size {
        ..=SMALL => (0..size).collect(),
        _ => vec![0, 1, size / 2 - 1, size / 2, size - 2, size - 1],
    }
}

fn sizes() -> impl Iterator<Item = u32> {
    (2..=SMALL).chain(LARGE)
}

#[test]
fn distance_counts_the_steps() {
    for size in (2..=64).chain(LARGE) {
        for from in 0..size {
            let mut to = from;
            for steps in 0..size {
                assert_eq!(distance(from, to, size), steps, "{from} to {to} of {size}");
                to = next(to, size);
            }
        }
    }
}

#[test]
fn a_tail_takes_free_entries_and_nothing_else() {
    let (memory, doorbells) = (memory(), Doorbells::trapped(1));
    for (size, shadow) in sizes().flat_map(|size| [(size, false), (size, true)]) {
        for (head, tail) in pairs(size) {
            let free = size - 1 - (tail + size - head) % size;
            for value in values(size) {
                let cell = cell(&memory, &doorbells, tail, shadow);
                let mut queue = SubmissionQueue::new(1, 1, RING, size, cell);
                (queue.head, queue.tail) = (head, tail);
                ring(&memory, &doorbells, value, shadow);
                let expected = match reaches(tail, value, free, size) {
                    true => (Ok(()), value),
                    false => (Err(BadDoorbell::Value), tail),
                };
                let observed = (queue.observe(&memory), queue.tail);
                assert_eq!(observed, expected, "{head}..{tail} of {size}, {value} rung");
                assert!(queue.waiting() < size);
                let again = queue.observe(&memory);
                assert_eq!(again, Ok(()), "a value that cannot be is reported once");
            }
        }
    }
}

#[test]
fn a_head_gives_back_posted_entries_and_nothing_else() {
    let (memory, doorbells) = (memory(), Doorbells::trapped(1));
    for (size, shadow) in sizes().flat_map(|size| [(size, false), (size, true)]) {
        for (head, tail) in pairs(size) {
            let posted = (tail + size - head) % size;
            for value in values(size) {
                let cell = cell(&memory, &doorbells, head, shadow);
                let mut queue = CompletionQueue::new(1, RING, size, None, cell);
                (queue.head, queue.tail) = (head, tail);
                assert_eq!((queue.posted(), queue.free()), (posted, size - 1 - posted));
                ring(&memory, &doorbells, value, shadow);
                let expected = match reaches(head, value, posted, size) {
                    true => (Ok(()), value),
                    false => (Err(BadDoorbell::Value), head),
                };
                let observed = (queue.observe(&memory), queue.head);
                assert_eq!(observed, expected, "{head}..{tail} of {size}, {value} rung");
                queue.reserved = size - 1;
                assert_eq!(queue.free(), 0, "promised slots are not free");
                assert_eq!(queue.observe(&memory), Ok(()));
            }
        }
    }
}

/// Returns all pairs of indexes of a small ring, and those at the ends of a large one.
fn pairs(size: u32) -> impl Iterator<Item = (u32, u32)> {
    let all = chosen(size);
    all.clone()
        .into_iter()
        .flat_map(move |head| all.clone().into_iter().map(move |tail| (head, tail)))
}

/// Returns doorbell values: the chosen indexes, and values that are no index.
fn values(size: u32) -> Vec<u32> {
    let mut values = chosen(size);
    values.extend([size, size + 1, 0xffff, 0x1_0000, u32::MAX]);
    values
}

/// Returns whether at most `steps` steps lead from index `from` to `to`.
fn reaches(from: u32, to: u32, steps: u32, size: u32) -> bool {
    let mut at = from;
    for _ in 0..steps {
        if at == to {
            return true;
        }
        at = next(at, size);
    }
    at == to
}

#[test]
fn an_event_index_kept_behind_is_not_passed_for_half_a_queue() {
    let (memory, doorbells) = (memory(), Doorbells::trapped(1));
    for size in (2..=SMALL).chain(LARGE) {
        // Wherever the event index was published before, if ever: it is moved if it is too near.
        for (value, before) in pairs(size) {
            let before = before.checked_sub(1);
            let mut cell = cell(&memory, &doorbells, value, true);
            if let Some(before) = before {
                cell.publish(&memory, before).unwrap();
            }
            cell.keep_behind(&memory, value, size).unwrap();
            let event = memory.load_u32(PAGES.events).unwrap();
            let mut new = value;
            for _ in 0..size / 2 {
                let old = new;
                new = next(new, size);
                assert!(!passes(event, old, new), "{old} to {new} passes {event} of {size}");
                assert!(!passes(event, value, new), "{value} to {new} passes {event} of {size}");
            }
        }
    }
}

/// Fills a ring so that the entry at `index` has the identifier `index`.
fn fill(memory: &Memory, size: u32) {
    for index in 0..size {
        let entry = SubmissionEntry { id: (index as u16).into(), ..SubmissionEntry::default() };
        let at = RING + u64::from(index) * SUBMISSION_ENTRY as u64;
        memory.write(at, entry.as_bytes()).unwrap();
    }
}

#[test]
fn a_fetch_copies_what_waits_up_to_the_end_of_the_ring() {
    let (memory, doorbells) = (memory(), Doorbells::trapped(1));
    let mut entries = Vec::new();
    for size in sizes() {
        fill(&memory, size);
        for (head, tail) in pairs(size) {
            for most in [0, 1, 2, size / 2, size - 1, size, u32::MAX] {
                let cell = Cell::new(&doorbells, 0);
                let mut queue = SubmissionQueue::new(1, 1, RING, size, cell);
                (queue.head, queue.tail) = (head, tail);
                queue.fetch(&memory, most, &mut entries).unwrap();
                let mut expected = Vec::new();
                let mut at = head;
                while at != tail && (expected.len() as u32) < most && at < size {
                    expected.push(at as u16);
                    at += 1;
                }
                let ids: Vec<u16> = entries.iter().map(|entry| entry.id.get()).collect();
                assert_eq!(ids, expected, "{head}..{tail} of {size}, {most} at most");
                assert_eq!(queue.in_flight as usize, expected.len());
                for _ in &expected {
                    queue.advance();
                }
                let end = if at == size { 0 } else { at };
                assert_eq!((queue.head, queue.taken as usize), (end, expected.len()));
                // A successor that knows only the count finds the same place.
                let cell = Cell::new(&doorbells, 0);
                let mut successor = SubmissionQueue::new(1, 1, RING, size, cell);
                successor.resume(&memory, u64::from(head) + queue.taken, 0);
                assert_eq!((successor.head, successor.tail), (end, end));
            }
        }
    }
}

/// A host that reads entries as long as they have the phase tag that it expects.
struct Host {
    head: u32,
    phase: bool,
}

impl Host {
    fn take(&mut self, memory: &Memory, size: u32) -> Option<u16> {
        let mut entry = CompletionEntry::new_zeroed();
        let at = RING + u64::from(self.head) * COMPLETION_ENTRY as u64;
        memory.read(at, entry.as_mut_bytes()).unwrap();
        if entry.phase() != self.phase {
            return None;
        }
        self.head = next(self.head, size);
        self.phase ^= self.head == 0;
        Some(entry.id.get())
    }
}

#[test]
fn a_host_that_goes_by_the_phase_tag_sees_each_entry_once() {
    let doorbells = Doorbells::trapped(1);
    for size in 2..=SMALL {
        for burst in 1..size {
            // Fresh memory: no phase tag is set.
            let memory = memory();
            let cell = Cell::new(&doorbells, 0);
            let mut queue = CompletionQueue::new(1, RING, size, None, cell);
            let mut host = Host { head: 0, phase: true };
            let (mut written, mut seen) = (0_u16, 0_u16);
            while written < 5 * size as u16 {
                for _ in 0..burst {
                    let mut entry =
                        CompletionEntry { id: written.into(), ..CompletionEntry::default() };
                    entry.set_status(Status::SUCCESS, false);
                    queue.post(&memory, entry).unwrap();
                    written += 1;
                }
                while let Some(id) = host.take(&memory, size) {
                    assert_eq!(id, seen, "size {size}, bursts of {burst}");
                    seen += 1;
                }
                assert_eq!(seen, written);
                doorbells.store(0, host.head);
                queue.observe(&memory).unwrap();
                assert_eq!((queue.posted(), queue.written), (0, u64::from(written)));
                let successor = Cell::resumed(&doorbells, 0, 0);
                let mut successor = CompletionQueue::new(1, RING, size, None, successor);
                successor.resume(&memory, queue.written);
                let state = |one: &CompletionQueue| (one.head, one.tail, one.phase);
                assert_eq!(state(&successor), state(&queue));
            }
        }
    }
}
