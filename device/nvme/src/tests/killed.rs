//! A controller that is killed on either side of every store to its journal, and its successors.
//!
//! The guest is the crate's driver, which notices nothing. A register write that a kill cut off is
//! done again, as its host does with a message that it has not taken off the socket. Guest memory,
//! doorbell cells, the disk's content and the journal outlive the controller. Requests that the
//! disk had in flight end before the successor starts, which a host must ensure, too.
//!
//! Over 500 lines: one scenario with the guest and the host that play it.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use slipway_block::{Completion, Disk, Geometry, Operation, Request};
use slipway_doorbells::Doorbells;
use slipway_nvme_spec::command::{CompletionEntry, SubmissionEntry};
use slipway_nvme_spec::feature::FeatureId;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::{offset, tail_doorbell};
use slipway_nvme_spec::status::Status;
use slipway_pci::{Function, Progress};
use slipway_ram::{Lasting, Memory};

use super::rig::{Random, Setup, Shared, ram};
use crate::driver::{
    AccessError, Arena, Driver, RegisterAccess, RingDoorbells, Shadowed, admin, io,
};
use crate::journal::testing::{Killed, kill_after};
use crate::journal::{Journal, UsedSlot};
use crate::{Controller, Limits, Namespace, doorbell_count, journal_len};

pub const MEMORY: usize = 4 << 20;
pub const PAGE: usize = 4096;
/// The most threads of any controller.
const MOST_THREADS: u16 = 3;
const LIMITS: Limits =
    Limits { queue_pairs: 4, queue_entries: 64, transfer: 1 << 16, in_flight: 32, lanes: 1 };

/// The state that outlives a controller.
#[derive(Clone)]
pub struct Lives {
    pub memory: Memory,
    disk: Shared,
    journal: Lasting,
    doorbells: Doorbells,
    /// `true` if the disk is slow.
    slow: bool,
    /// The number of flushes that a slow disk has carried out.
    flushes: Arc<AtomicU32>,
    /// The number of threads of each controller in turn; the list is repeated.
    pub threads: &'static [u16],
    made: usize,
}

impl Lives {
    pub fn new(slow: bool) -> Self {
        Self {
            memory: Memory::heap(MEMORY),
            disk: Shared::new(ram(1 << 20, 512)),
            journal: Lasting::heap(journal_len(&Limits { lanes: MOST_THREADS, ..LIMITS })),
            doorbells: Doorbells::trapped(doorbell_count(LIMITS.queue_pairs)),
            slow,
            flushes: Arc::default(),
            threads: &[1],
            made: 0,
        }
    }

    fn successor(&mut self) -> Controller {
        let lanes = self.threads[self.made % self.threads.len()];
        self.made += 1;
        let mut controller = self.of_threads(lanes);
        controller.recover().unwrap();
        let controller = controller.with_lanes_beside();
        assert_eq!(controller.home.fleet.len() + 1, usize::from(lanes));
        controller
    }

    fn controller(&self) -> Controller {
        self.of_threads(1)
    }

    fn of_threads(&self, lanes: u16) -> Controller {
        let disk: Box<dyn Disk> = match self.slow {
            true => {
                let (inner, flushes) = (self.disk.clone(), self.flushes.clone());
                Box::new(Slow { inner, waiting: Vec::new(), flushes })
            }
            false => Box::new(self.disk.clone()),
        };
        let setup = Setup {
            journal: Some(self.journal.clone()),
            limits: Limits { lanes, ..LIMITS },
            vectors: 5,
            ..Setup::on(self.memory.clone(), disk)
        };
        setup.with_doorbells(self.doorbells.clone())
    }
}

/// A disk that ends one request per poll, the newest first. When it is dropped, all requests end,
/// as in a kernel.
struct Slow {
    inner: Shared,
    waiting: Vec<Request>,
    flushes: Arc<AtomicU32>,
}

impl Disk for Slow {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&mut self, requests: &mut Vec<Request>, _: &mut Vec<Completion>) {
        self.waiting.append(requests);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if let Some(request) = self.waiting.pop() {
            let flush = request.operation == Operation::Flush;
            self.flushes.fetch_add(flush.into(), Ordering::Relaxed);
            self.inner.submit(&mut vec![request], completions);
        }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.inner.submit(&mut self.waiting, &mut Vec::new());
    }
}

/// Registers of a controller that is killed now and then. The controller sleeps when it may.
pub struct Killable {
    lives: Lives,
    controller: Option<Controller>,
    asleep: bool,
    /// `true` if only the next poll notices writes.
    pub holds: bool,
    pub kills: u32,
    /// Returns the number of points until the next kill, or `None` for no more kills.
    next: Box<dyn FnMut() -> Option<u64>>,
}

impl Killable {
    /// Makes a controller that is killed at the points that `next` returns, each counted from the
    /// last kill.
    pub fn new(lives: Lives, next: impl FnMut() -> Option<u64> + 'static) -> Self {
        let none = Box::new(|| None);
        let (asleep, holds) = (false, false);
        let mut killable = Self { lives, controller: None, asleep, holds, kills: 0, next: none };
        killable.kill(next);
        killable
    }

    /// Kills the controller as `next` says from now on.
    pub fn kill(&mut self, mut next: impl FnMut() -> Option<u64> + 'static) {
        kill_after(next());
        self.next = Box::new(next);
    }

    fn call<T>(&mut self, mut call: impl FnMut(&mut Controller) -> T) -> T {
        loop {
            let whole = catch_unwind(AssertUnwindSafe(|| {
                let lives = &mut self.lives;
                let controller = self.controller.get_or_insert_with(|| lives.successor());
                call(controller)
            }));
            match whole {
                Ok(value) => return value,
                Err(reason) if reason.is::<Killed>() => {
                    self.kills += 1;
                    self.controller = None;
                    kill_after((self.next)());
                }
                Err(reason) => resume_unwind(reason),
            }
        }
    }
}

impl RegisterAccess for Killable {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.call(|controller| controller.read(0, offset, into));
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.asleep = false;
        let holds = self.holds;
        self.call(|controller| {
            controller.write(0, offset, from);
            if !holds {
                controller.poll();
            }
        });
        Ok(())
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        // The number of requests that lanes have is not known here.
        let sleeps = !self.lives.slow || self.lives.threads == [1];
        if !self.asleep {
            // A completion of the disk wakes it.
            self.asleep = self.call(|controller| {
                let found = match controller.poll() {
                    Progress::Watching(_) => controller.rest(),
                    found => found,
                };
                sleeps && found == Progress::Idle(None) && controller.requests_in_flight() == 0
            });
        }
        Ok(())
    }
}

pub type Guest = Driver<Shadowed<Killable>>;

/// Submits `commands` to queues 1 and 2 in turn, and waits until each has ended once, with success.
fn run_all(guest: &mut Guest, commands: &[SubmissionEntry]) {
    let mut open = Vec::new();
    for (at, command) in commands.iter().enumerate() {
        let queue = 1 + at as u16 % 2;
        open.push((queue, guest.submit(queue, *command).unwrap()));
    }
    let mut polls = 0;
    while !open.is_empty() {
        for queue in [1, 2] {
            let mut ended = Vec::new();
            guest.reap(queue, &mut ended).unwrap();
            for entry in ended {
                let one = (queue, entry.id.get());
                let at = open.iter().position(|other| *other == one);
                open.swap_remove(at.unwrap_or_else(|| panic!("{one:?} ended twice")));
                assert_eq!(entry.status(), Status::SUCCESS);
            }
        }
        polls += 1;
        assert!(polls < 1000, "{open:?} never ended");
        guest.registers.idle().unwrap();
    }
}

fn pages(guest: &mut Guest, count: usize) -> Vec<u64> {
    (0..count).map(|_| guest.arena.allocate(PAGE).unwrap()).collect()
}

pub fn with_page(command: SubmissionEntry, page: u64) -> SubmissionEntry {
    SubmissionEntry { prp1: page.into(), ..command }
}

/// Writes, reads back, and reuses each buffer as soon as its command has ended.
fn data(guest: &mut Guest, round: u8) {
    let buffers = pages(guest, 6);
    let memory = guest.arena.memory().clone();
    let stamp = |at: usize| [round.wrapping_mul(16) + at as u8; PAGE];
    let lba = |at: usize| 8 * at as u64;
    for (at, page) in buffers.iter().enumerate() {
        memory.write(*page, &stamp(at)).unwrap();
    }
    let all = |opcode| {
        let command = |(at, page): (usize, &u64)| with_page(io(opcode, 1, lba(at), 8), *page);
        buffers.iter().enumerate().map(command).collect::<Vec<_>>()
    };
    run_all(guest, &all(NvmOpcode::Write));
    for page in &buffers {
        memory.write(*page, &[0xee; PAGE]).unwrap();
    }
    run_all(guest, &all(NvmOpcode::Read));
    let mut found = [0; PAGE];
    for (at, page) in buffers.iter().enumerate() {
        memory.read(*page, &mut found).unwrap();
        assert_eq!(found, stamp(at), "round {round}, block {}", lba(at));
        memory.write(*page, &[0xdd; PAGE]).unwrap();
    }
    run_all(guest, &[io(NvmOpcode::Flush, 1, 0, 1)]);
    for page in buffers {
        memory.read(page, &mut found).unwrap();
        assert_eq!(found, [0xdd; PAGE], "written after the guest was told of the end");
        guest.arena.release(page, PAGE);
    }
}

fn statuses(entries: &[CompletionEntry], id: u16) -> Vec<Status> {
    let own = entries.iter().filter(|entry| entry.id.get() == id);
    own.map(|entry| Status(entry.status().0 & !(1 << 13))).collect()
}

/// Runs a guest's life, with or without shadow doorbells, and with the admin queue's if so given.
/// Returns the number of kills that the guest did not notice.
fn life(
    lives: Lives,
    (rounds, shadow): (u8, Option<bool>),
    next: impl FnMut() -> Option<u64> + 'static,
) -> u32 {
    let memory = lives.memory.clone();
    let arena = Arena::new(memory.clone(), 0, MEMORY as u64);
    let registers = Shadowed::new(Killable::new(lives, next), memory);
    let mut guest = Driver::new(registers, arena, 8).unwrap();
    if let Some(admin_too) = shadow {
        guest.shadow_doorbells(admin_too).unwrap();
    }
    let request = admin(AdminOpcode::AsynchronousEventRequest);
    let first = guest.submit(0, request).unwrap();
    let second = guest.submit(0, request).unwrap();
    for round in 0..rounds {
        guest.create_pair(1, 4, Some(1)).unwrap();
        guest.create_pair(2, 5, None).unwrap();
        data(&mut guest, round);
        guest.delete_pair(2).unwrap();
        guest.delete_pair(1).unwrap();
    }
    guest.identify_controller().unwrap();
    // An invalid doorbell value: one event, by the first request.
    guest.create_pair(1, 4, Some(1)).unwrap();
    guest.registers.ring(tail_doorbell(1), 77).unwrap();
    let abort = admin(AdminOpcode::Abort).with_dword(10, u32::from(second) << 16);
    assert_eq!(guest.run(0, abort).unwrap().status(), Status::SUCCESS);
    guest.identify_controller().unwrap();
    assert_eq!(statuses(&guest.unclaimed, first), [Status::SUCCESS], "the event");
    assert_eq!(statuses(&guest.unclaimed, second), [Status::ABORT_REQUESTED], "the abort");
    assert_eq!(guest.unclaimed.len(), 2);
    // After a reset nothing from before comes back.
    guest.enable(8).unwrap();
    guest.create_pair(1, 4, None).unwrap();
    guest.create_pair(2, 5, None).unwrap();
    data(&mut guest, rounds);
    guest.shutdown().unwrap();
    kill_after(None);
    guest.registers.inner.kills
}

#[test]
fn one_kill_at_every_point() {
    for (slow, shadow) in [(false, None), (true, None), (false, Some(false)), (true, Some(true))] {
        at_every_point(slow, shadow, &[1]);
    }
}

#[test]
fn one_kill_at_every_point_with_lanes() {
    at_every_point(true, Some(true), &[2]);
    // The successor has another number of threads.
    at_every_point(true, None, &[2, 1]);
    at_every_point(false, Some(false), &[1, 3]);
}

fn at_every_point(slow: bool, shadow: Option<bool>, threads: &'static [u16]) {
    let mut at = 0;
    loop {
        let mut plan = Some(at).into_iter();
        let lives = Lives { threads, ..Lives::new(slow) };
        if life(lives, (1, shadow), move || plan.next()) == 0 {
            break;
        }
        at += 1;
    }
    // Every command takes more than ten.
    assert!(at > 500, "only {at} points");
}

#[test]
fn many_kills_anywhere_recovery_included() {
    for seed in 0..30 {
        let mut random = Random(seed);
        // Kills are rare enough that a recovery and the longest step fit between two.
        let next = move || Some(random.below(if seed % 2 == 0 { 600 } else { 2000 }));
        let shadow = [None, Some(false), Some(true)][seed as usize % 5 % 3];
        life(Lives::new(seed % 3 == 0), (6, shadow), next);
    }
}

#[test]
fn many_kills_anywhere_with_lanes_that_come_and_go() {
    for seed in 100..140 {
        let mut random = Random(seed);
        let next = move || Some(random.below(if seed % 2 == 0 { 700 } else { 2000 }));
        let shadow = [None, Some(false), Some(true)][seed as usize % 5 % 3];
        let threads = [&[2][..], &[1, 2], &[3, 2, 1], &[2, 3]][seed as usize % 4];
        life(Lives { threads, ..Lives::new(seed % 3 == 0) }, (6, shadow), next);
    }
}

#[test]
fn a_fresh_journal_has_no_predecessor_and_a_foreign_one_is_refused() {
    let lives = Lives::new(false);
    assert_eq!(lives.controller().recover(), Ok(false));
    let mut killable = Killable::new(lives.clone(), || None);
    killable.write32(0x14, 0).unwrap();
    let other = Setup {
        journal: Some(lives.journal.clone()),
        limits: Limits { queue_entries: 32, ..LIMITS },
        ..Setup::on(lives.memory.clone(), ram(1 << 20, 512))
    };
    assert!(other.controller().recover().is_err());
    lives.journal.words()[0].store(1, std::sync::atomic::Ordering::Relaxed);
    let parts = catch_unwind(AssertUnwindSafe(|| drop(lives.controller())));
    assert!(parts.is_err());
}

/// Returns a Set Features for the volatile write cache.
fn write_cache(on: u32) -> SubmissionEntry {
    let id = u32::from(FeatureId::VolatileWriteCache.0);
    admin(AdminOpcode::SetFeatures).with_dword(10, id).with_dword(11, on)
}

#[test]
fn a_cache_that_is_switched_off_is_flushed_wherever_it_is_killed() {
    for at in 0.. {
        let lives = Lives::new(true);
        let flushes = lives.flushes.clone();
        let arena = Arena::new(lives.memory.clone(), 0, MEMORY as u64);
        let mut guest = Driver::new(Killable::new(lives, || None), arena, 8).unwrap();
        guest.admin(write_cache(1)).unwrap();
        let before = flushes.load(Ordering::Relaxed);
        kill_after(Some(at));
        // A register write in the middle, which stores a snapshot.
        let command = guest.submit(0, write_cache(0)).unwrap();
        guest.registers.write32(offset::INTMS, 0).unwrap();
        let mut ended = Vec::new();
        while ended.is_empty() {
            guest.reap(0, &mut ended).unwrap();
            guest.registers.idle().unwrap();
        }
        kill_after(None);
        assert_eq!((ended[0].id.get(), ended[0].status()), (command, Status::SUCCESS));
        assert!(flushes.load(Ordering::Relaxed) > before, "killed at point {at}");
        if guest.registers.kills == 0 {
            assert!(at > 10, "only {at} points");
            return;
        }
    }
}

#[test]
fn a_reset_frees_the_slots_of_what_lanes_were_asked() {
    let lives = Lives { threads: &[2], ..Lives::new(false) };
    let in_use = || Journal::new(&lives.journal, &LIMITS).unwrap().recover().len();
    let arena = Arena::new(lives.memory.clone(), 0, MEMORY as u64);
    let mut guest = Driver::new(Killable::new(lives.clone(), || None), arena, 32).unwrap();
    for _ in 0..3 {
        guest.registers.holds = true;
        guest.submit_all(0, &[write_cache(1); 16]).unwrap();
        // The home asks lanes, and is killed before it gets the answers.
        guest.registers.idle().unwrap();
        assert_eq!(in_use(), 16);
        guest.registers.write32(offset::CC, 0).unwrap();
        guest.registers.holds = false;
        guest.enable(32).unwrap();
        assert_eq!(in_use(), 0);
    }
}

#[test]
fn a_home_takes_over_the_slots_of_a_lane_whose_queue_it_has_now() {
    let lives = Lives { threads: &[3, 2], ..Lives::new(true) };
    let owners = || {
        let mut home = Journal::new(&lives.journal, &LIMITS).unwrap();
        home.recover().iter().map(|one| home.owns(one.slot_number)).collect::<Vec<_>>()
    };
    let arena = Arena::new(lives.memory.clone(), 0, MEMORY as u64);
    let mut guest = Driver::new(Killable::new(lives.clone(), || None), arena, 8).unwrap();
    guest.create_pair(2, 8, Some(2)).unwrap();
    let page = guest.arena.allocate(PAGE).unwrap();
    let writes = [0, 8, 16, 24, 32, 40].map(|lba| with_page(io(NvmOpcode::Write, 1, lba, 8), page));
    guest.registers.holds = true;
    guest.submit_all(2, &writes).unwrap();
    guest.registers.idle().unwrap();
    let before = owners();
    assert!(before.len() > 2 && !before.contains(&true), "{before:?}");
    guest.registers.controller = None;
    let successor = guest.registers.lives.successor();
    guest.registers.controller = Some(successor);
    assert_eq!(owners(), vec![true; before.len()]);
    let mut ended = Vec::new();
    for _ in 0..50 {
        guest.registers.idle().unwrap();
        guest.reap(2, &mut ended).unwrap();
    }
    assert!(ended.len() == 6 && owners().is_empty(), "{ended:?}");
}

#[test]
fn a_successor_tells_of_namespaces_that_came_went_and_grew() {
    let lives = Lives::new(false);
    let namespace = |(nsid, bytes, uuid)| Namespace::new(nsid, ram(bytes, 512), [uuid; 16]);
    let with = |namespaces: &[(u32, u64, u8)]| {
        let mut controller = lives.controller();
        controller.detach(1, Box::new(|gone| gone.unwrap()));
        for one in namespaces {
            controller.attach(namespace(*one)).unwrap();
        }
        controller
    };
    let mut killable = Killable::new(lives.clone(), || None);
    killable.controller = Some(with(&[(1, 1 << 20, 1), (2, 1 << 20, 2), (3, 1 << 20, 3)]));
    let arena = Arena::new(lives.memory.clone(), 0, MEMORY as u64);
    let mut guest = Driver::new(killable, arena, 8).unwrap();
    let notices = admin(AdminOpcode::SetFeatures)
        .with_dword(10, FeatureId::AsynchronousEventConfiguration.0.into())
        .with_dword(11, 1 << 8);
    guest.admin(notices).unwrap();
    let request = guest.submit(0, admin(AdminOpcode::AsynchronousEventRequest)).unwrap();
    let mut successor = with(&[(1, 1 << 20, 1), (2, 2 << 20, 2), (7, 1 << 20, 7)]);
    assert_eq!(successor.recover(), Ok(true));
    guest.registers.controller = Some(successor);
    let log = admin(AdminOpcode::GetLogPage).with_dword(10, 4 | 1023 << 16);
    let list = guest.admin_read(log, 4096).unwrap();
    let words = list.chunks(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    assert_eq!(words.take_while(|nsid| *nsid != 0).collect::<Vec<_>>(), [2, 3, 7]);
    assert_eq!(statuses(&guest.unclaimed, request), [Status::SUCCESS]);
    assert_eq!(guest.identify_namespace(2).unwrap().size.get(), 4096);
    // Another disk under the same number is refused.
    guest.registers.controller = None;
    assert!(with(&[(1, 1 << 20, 9)]).recover().is_err());
}

#[test]
fn parts_of_a_journal_share_no_slot() {
    let limits = Limits { in_flight: 4, lanes: 3, ..LIMITS };
    let memory = Lasting::heap(journal_len(&limits));
    let mut home = Journal::new(&memory, &limits).unwrap();
    assert!(home.parts() == 3 && home.part(3).is_none());
    let epoch = home.open_submission(1);
    let begin = |journal: &mut Journal, number| {
        journal.begin(1, epoch, number, &io(NvmOpcode::Read, 1, number, 1))
    };
    let own = begin(&mut home, 0);
    let mut lane = home.part(1).unwrap();
    let (ended, kept) = (begin(&mut lane, 1), begin(&mut lane, 2));
    assert!(lane.owns(kept) && !home.owns(kept) && home.owns(own) && !lane.owns(own));
    lane.end(ended);
    // The successor's home finds all slots, and a lane hands out none that is in use.
    let mut home = Journal::new(&memory, &limits).unwrap();
    let numbers = |found: &[UsedSlot]| {
        let mut all: Vec<_> = found.iter().map(|one| (one.number, one.slot_number)).collect();
        all.sort_by_key(|(number, _)| *number);
        all
    };
    let found = home.recover();
    assert_eq!(numbers(&found), [(0, own), (2, kept)]);
    let (mut lane, mut other) = (home.part(1).unwrap(), home.part(2).unwrap());
    let more = [3, 4, 5].map(|number| begin(&mut lane, number));
    assert!(
        more.iter().all(|slot_number| lane.owns(*slot_number) && *slot_number != kept),
        "{more:?}"
    );
    more.into_iter().for_each(|slot_number| lane.end(slot_number));
    // A slot moves to another lane.
    let one = found.iter().find(|one| one.slot_number == kept).unwrap();
    let moved = other.adopt(one);
    lane.end(kept);
    let found = Journal::new(&memory, &limits).unwrap().recover();
    assert_eq!(numbers(&found), [(0, own), (2, moved)]);
    assert!(other.owns(moved));
    let entry = |found: &[UsedSlot]| found.iter().find(|one| one.number == 2).unwrap().entry;
    assert_eq!(entry(&found).starting_lba(), 2);
}
