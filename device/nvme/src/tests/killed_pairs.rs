//! Fused pairs of a controller that is killed on either side of every store to its journal.
//!
//! A pair is an exchange of a block's value. The ends that the guest was told of all commands of a
//! batch, and the block's final value, must be what some order of the commands, one after the
//! other, would give: no write of a pair that failed, no lost write of a pair that succeeded, no
//! comparison with the pair's own write. A half's buffer is reused for something else as soon as
//! that half has ended.

use slipway_nvme_spec::command::{CopyRange, SubmissionEntry};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::offset;
use slipway_nvme_spec::status::Status;
use zerocopy::IntoBytes;

use super::killed::{Guest, Killable, Lives, MEMORY, PAGE, with_page};
use super::rig::Random;
use crate::driver::{Arena, Driver, RegisterAccess, Shadowed, io};
use crate::journal::testing::kill_after;

/// The block whose value changes, and one whose value is copied there.
const BLOCK: u64 = 0;
const SOURCE: u64 = 64;
const SOURCE_VALUE: u8 = 0x77;
const JUNK: u8 = 0xdd;
const SUCCESS: Status = Status::SUCCESS;
const FAILED: Status = Status::FUSED_FAILED.dnr();
const MISSING: Status = Status::FUSED_MISSING.dnr();

/// A guest's request.
#[derive(Clone, Copy, Debug)]
enum Ask {
    /// A pair that replaces the first value by the second, if the block holds the first.
    Exchange(u8, u8),
    Write(u8),
    /// A Copy of several ranges, the last of which brings [`SOURCE_VALUE`].
    Copy,
    /// The second half of a pair without its first.
    Half(u8),
    /// A pair whose write has its data at an unmapped address.
    Nowhere(u8),
}

/// A command in flight: its queue, the request it belongs to, its ID and its page.
struct Open {
    queue: u16,
    ask: usize,
    half: usize,
    id: u16,
    page: u64,
}

fn filled(guest: &mut Guest, value: u8) -> u64 {
    let page = guest.arena.allocate(PAGE).unwrap();
    guest.arena.memory().write(page, &[value; PAGE]).unwrap();
    page
}

fn commands(guest: &mut Guest, ask: Ask) -> Vec<(SubmissionEntry, u64)> {
    let mut command = |opcode, value, flags| {
        let page = filled(guest, value);
        let command = with_page(io(opcode, 1, BLOCK, 8), page);
        (SubmissionEntry { flags, ..command }, page)
    };
    match ask {
        Ask::Exchange(old, new) => {
            vec![command(NvmOpcode::Compare, old, 1), command(NvmOpcode::Write, new, 2)]
        }
        Ask::Nowhere(old) => {
            let (write, page) = command(NvmOpcode::Write, JUNK, 2);
            let write = with_page(write, MEMORY as u64);
            vec![command(NvmOpcode::Compare, old, 1), (write, page)]
        }
        Ask::Half(value) => vec![command(NvmOpcode::Write, value, 2)],
        Ask::Write(value) => vec![command(NvmOpcode::Write, value, 0)],
        Ask::Copy => {
            let (copy, page) = command(NvmOpcode::Copy, 0, 0);
            let ranges = [CopyRange::new(SOURCE, 4), CopyRange::new(SOURCE + 4, 4)];
            guest.arena.memory().write(page, ranges.as_slice().as_bytes()).unwrap();
            vec![(copy.with_dword(12, 1), page)]
        }
    }
}

/// Submits all requests of queues 1 and 2, each with one doorbell. Returns how the halves of each
/// have ended.
fn run(guest: &mut Guest, asked: [&[Ask]; 2]) -> Vec<(Ask, Vec<Status>)> {
    let (mut open, mut ends) = (Vec::new(), Vec::new());
    for (queue, asked) in (1..).zip(asked) {
        let mut all = Vec::new();
        for ask in asked {
            let commands = commands(guest, *ask);
            for (half, (command, page)) in commands.iter().enumerate() {
                open.push(Open { queue, ask: ends.len(), half, id: 0, page: *page });
                all.push(*command);
            }
            ends.push((*ask, vec![None; commands.len()]));
        }
        if all.is_empty() {
            continue;
        }
        let ids = guest.submit_all(queue, &all).unwrap();
        let own = open.iter_mut().filter(|one| one.queue == queue);
        own.zip(ids).for_each(|(one, id)| one.id = id);
    }
    guest.registers.inner.holds = false;
    let mut polls = 0;
    while !open.is_empty() {
        for queue in [1, 2] {
            let mut ended = Vec::new();
            guest.reap(queue, &mut ended).unwrap();
            for entry in ended {
                let is_it = |one: &Open| (one.queue, one.id) == (queue, entry.id.get());
                let at = open.iter().position(is_it).expect("each ends once");
                let one = open.swap_remove(at);
                guest.arena.memory().write(one.page, &[JUNK; PAGE]).unwrap();
                guest.arena.release(one.page, PAGE);
                ends[one.ask].1[one.half] = Some(Status(entry.status().0 & !(1 << 13)));
            }
        }
        polls += 1;
        assert!(polls < 2000, "{} never ended", open.len());
        guest.registers.idle().unwrap();
    }
    ends.into_iter().map(|(ask, ends)| (ask, ends.into_iter().flatten().collect())).collect()
}

fn value(guest: &mut Guest) -> u8 {
    let page = guest.arena.allocate(PAGE).unwrap();
    guest.transfer(1, io(NvmOpcode::Read, 1, BLOCK, 8), (page, PAGE)).unwrap();
    let mut found = [0; PAGE];
    guest.arena.memory().read(page, &mut found).unwrap();
    guest.arena.release(page, PAGE);
    assert!(found.iter().all(|byte| *byte == found[0]), "a torn block");
    found[0]
}

/// Returns whether some order of `steps` leads from the value `from` to `to`. A step is an expected
/// value, if any, a new value, if any, and whether the expectation held.
fn is_explained(steps: &[(Option<u8>, Option<u8>, bool)], from: u8, to: u8) -> bool {
    if steps.is_empty() {
        return from == to;
    }
    (0..steps.len()).any(|at| {
        let (expected, new, held) = steps[at];
        let fits = expected.is_none_or(|expected| (expected == from) == held);
        let mut rest = steps.to_vec();
        rest.remove(at);
        fits && is_explained(&rest, if held { new.unwrap_or(from) } else { from }, to)
    })
}

/// Runs one batch and checks its outcome. Returns the block's value afterwards.
fn batch(guest: &mut Guest, before: u8, asked: [&[Ask]; 2]) -> u8 {
    let ends = run(guest, asked);
    let steps = ends.iter().map(|(ask, ends)| match (ask, &ends[..]) {
        (Ask::Exchange(old, new), [SUCCESS, SUCCESS]) => (Some(*old), Some(*new), true),
        (Ask::Exchange(old, _), [first, FAILED]) if *first == Status::COMPARE_FAILURE.dnr() => {
            (Some(*old), None, false)
        }
        (Ask::Write(value), [SUCCESS]) => (None, Some(*value), true),
        (Ask::Copy, [SUCCESS]) => (None, Some(SOURCE_VALUE), true),
        (Ask::Half(_), [MISSING]) => (None, None, true),
        (Ask::Nowhere(_), [FAILED, Status::DATA_TRANSFER_ERROR]) => (None, None, true),
        (ask, ends) => panic!("{ask:?} ended with {ends:?}"),
    });
    let steps: Vec<_> = steps.collect();
    let after = value(guest);
    assert!(is_explained(&steps, before, after), "from {before} to {after} by {ends:?}");
    after
}

fn guest(lives: Lives, next: impl FnMut() -> Option<u64> + 'static) -> Guest {
    let memory = lives.memory.clone();
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let registers = Shadowed::new(Killable::new(lives, || None), memory);
    let mut guest = Driver::new(registers, arena, 8).unwrap();
    assert_eq!(guest.identify_controller().unwrap().fused.get(), 1);
    guest.create_pair(1, 16, Some(1)).unwrap();
    guest.create_pair(2, 16, None).unwrap();
    let page = filled(&mut guest, SOURCE_VALUE);
    guest.transfer(1, io(NvmOpcode::Write, 1, SOURCE, 8), (page, PAGE)).unwrap();
    guest.arena.release(page, PAGE);
    guest.registers.inner.kill(next);
    guest
}

/// Runs batches of every kind, from a block of zeros.
fn life(guest: &mut Guest) {
    use Ask::{Copy, Exchange, Half, Nowhere, Write};
    // No other command uses the block, so these have one outcome.
    assert_eq!(batch(guest, 0, [&[Exchange(0, 1)], &[]]), 1);
    assert_eq!(batch(guest, 1, [&[Exchange(0, 2)], &[]]), 1);
    assert_eq!(batch(guest, 1, [&[Exchange(1, 2), Exchange(2, 3)], &[]]), 3);
    assert_eq!(batch(guest, 3, [&[Half(9)], &[Nowhere(3)]]), 3);
    // Two pairs want the same value, and other commands come between.
    let now = batch(guest, 3, [&[Exchange(3, 4)], &[Exchange(3, 5)]]);
    let now =
        batch(guest, now, [&[Write(6), Exchange(6, 7)], &[Write(8), Exchange(8, 9), Half(1)]]);
    let now = batch(guest, now, [&[Copy, Exchange(SOURCE_VALUE, 10)], &[Exchange(now, 11)]]);
    at_once(guest, now);
}

/// Submits a pair of one queue and a write of the other that one poll finds, whichever queue it
/// looks at first.
fn at_once(guest: &mut Guest, mut now: u8) {
    for turn in 0..3 {
        for _ in 0..turn {
            guest.registers.write32(offset::INTMS, 0).unwrap();
        }
        guest.registers.inner.holds = true;
        let (write, pair) = ([Ask::Write(12 + turn)], [Ask::Exchange(now, 20 + turn)]);
        now = batch(guest, now, [&write, &pair]);
    }
}

#[test]
fn one_kill_at_every_point() {
    for slow in [false, true] {
        for at in 0.. {
            let mut plan = Some(at).into_iter();
            let mut guest = guest(Lives::new(slow), move || plan.next());
            life(&mut guest);
            kill_after(None);
            if guest.registers.inner.kills == 0 {
                assert!(at > 300, "only {at} points");
                break;
            }
        }
    }
}

#[test]
fn many_kills_anywhere_recovery_included() {
    let mut kills = 0;
    for seed in 0..60 {
        let mut random = Random(seed);
        // Kills are rare enough that a recovery and a pair fit between two.
        let most = if seed % 2 == 0 { 60 } else { 400 };
        let mut guest = guest(Lives::new(seed % 3 == 0), move || Some(random.below(most)));
        life(&mut guest);
        kill_after(None);
        kills += guest.registers.inner.kills;
    }
    assert!(kills > 500, "only {kills} kills");
}

/// Submits these to queues 1 and 2. As soon as one command of queue 2 has ended, or nothing
/// proceeds any more, returns how many commands of each have ended.
fn until_the_other_ends(turn: u8, asked: [&[Ask]; 2], beside: bool) -> [usize; 2] {
    let mut guest = guest(Lives::new(true), || None);
    for _ in 0..turn {
        guest.registers.write32(offset::INTMS, 0).unwrap();
    }
    guest.registers.inner.holds = true;
    for (queue, asked) in (1..).zip(asked) {
        let all = asked.iter().flat_map(|ask| commands(&mut guest, *ask));
        let all: Vec<_> = all.map(|(command, _)| command).collect();
        guest.submit_all(queue, &all).unwrap();
        if beside {
            guest.registers.idle().unwrap();
        }
    }
    let (mut first, mut second) = (Vec::new(), Vec::new());
    // Completions of queue 1 are not taken, since its doorbell would wake the controller.
    for _ in 0..200 {
        guest.registers.idle().unwrap();
        if guest.reap(2, &mut second).unwrap() > 0 {
            break;
        }
    }
    guest.reap(1, &mut first).unwrap();
    [first.len(), second.len()]
}

#[test]
fn a_queue_that_is_rung_beside_a_pair_has_its_turn_after_it() {
    for turn in 0..3 {
        let asked: [&[Ask]; 2] = [&[Ask::Exchange(0, 1)], &[Ask::Write(2)]];
        assert_eq!(until_the_other_ends(turn, asked, true), [2, 1]);
    }
}

#[test]
fn a_queue_full_of_pairs_lets_others_have_their_turn() {
    let pairs: Vec<_> = (0..7).map(|value| Ask::Exchange(value, value + 1)).collect();
    for turn in 0..3 {
        for beside in [false, true] {
            let [first, second] = until_the_other_ends(turn, [&pairs, &[Ask::Write(9)]], beside);
            assert!(first <= 4 && second == 1, "{first} halves, {second} of the other");
        }
    }
}
