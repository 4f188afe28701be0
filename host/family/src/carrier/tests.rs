//! Carriers whose work is a script.

use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{FallocateFlags, fallocate};
use slipway_ram::Lasting;
use slipway_ring::cross::Signals;
use slipway_ring::sleep::{ANY, SleepWord};
use slipway_sgiov_spec::table;

use super::*;

/// The longest time for which a test waits.
const LIMIT: Duration = Duration::from_secs(60);
const ENTRIES: usize = 16;

enum Command {
    /// Sends the same command so many times more, each when the last is carried out.
    Repeat(CommandSender<Command>, usize),
    /// Is a defect.
    Panic,
    /// Makes a family's signals, which lie here, invalid between the last look at them and sleep.
    Spoil(Lasting),
}

#[derive(Debug, PartialEq)]
enum News {
    /// A turn came after so many commands.
    Turn(usize),
    Signalled(u32, Option<u32>),
    Spoiled(u32),
    /// The tables of this tenant's families are left out.
    StandsStill(String),
}

struct Script {
    news: NewsSender<News>,
    obeyed: usize,
    spoils: Option<Lasting>,
    _alive: Arc<()>,
}

impl Work for Script {
    type Command = Command;
    type Member = ();

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        None
    }

    fn obey(&mut self, command: Command, _: &mut Families<()>, _: Instant) {
        self.obeyed += 1;
        match command {
            Command::Repeat(sender, left) if left > 0 => {
                sender.send(Command::Repeat(sender.clone(), left - 1));
            }
            Command::Repeat(..) => {}
            Command::Panic => panic!("a defect"),
            Command::Spoil(signals) => self.spoils = Some(signals),
        }
    }

    fn signalled(&mut self, family: u32, (): &(), entry: Option<u32>) {
        self.news.send(News::Signalled(family, entry));
    }

    fn spoiled(&mut self, family: u32, (): (), _: Instant) {
        self.news.send(News::Spoiled(family));
    }

    fn stands_still(&mut self, tenant: &str, _: Duration) {
        self.news.send(News::StandsStill(tenant.to_owned()));
    }

    fn turn(&mut self, _: &mut Families<()>, _: Instant) -> bool {
        let obeyed = std::mem::take(&mut self.obeyed);
        if obeyed > 0 {
            self.news.send(News::Turn(obeyed));
        }
        self.news.announce();
        false
    }

    fn worked(&mut self) {}

    fn looks_on(&mut self, _: Instant) -> bool {
        false
    }

    fn rest(&mut self, _: Instant) -> Rest {
        if let Some(signals) = self.spoils.take() {
            signals.words()[0].store(u64::MAX, Ordering::Relaxed);
        }
        slipway_ring::barrier();
        Rest::Asleep(None)
    }

    fn woken(&mut self, _: Option<Instant>) {}
}

/// A carrier, and what tells whether its work is dropped.
struct Rig {
    carrier: Carrier<Command, News>,
    alive: Arc<()>,
}

impl Rig {
    fn new() -> Self {
        let alive = Arc::new(());
        let work = |news| Script { news, obeyed: 0, spoils: None, _alive: alive.clone() };
        let carrier = Carrier::start("carrier", |why| eprintln!("{why}"), work).unwrap();
        Self { carrier, alive }
    }

    /// Waits until so much news, or more, is announced, and takes it.
    fn news(&self, count: usize) -> Vec<News> {
        let limit = Timespec { tv_sec: 60, tv_nsec: 0 };
        let (file, mut all) = (self.carrier.descriptor(), Vec::new());
        while all.len() < count {
            let ready = poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&limit)).unwrap();
            assert_eq!(ready, 1, "no news is announced after {all:?}");
            all.extend(self.carrier.news());
        }
        all
    }

    /// Adds a family. Returns its table and its bell.
    fn join(&self, number: u32) -> (Lasting, Arc<OwnedFd>) {
        let memory = Lasting::heap(table::bytes(ENTRIES, 2));
        let bell = self.join_with(number, &memory, "quick");
        (memory, bell)
    }

    /// Adds a family of a tenant with this table. Returns its bell.
    fn join_with(&self, number: u32, memory: &Lasting, tenant: &str) -> Arc<OwnedFd> {
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK).unwrap());
        let family = Family::new(memory, ENTRIES, 2, bell.clone()).unwrap();
        self.carrier.join(number, family.of_tenant(tenant));
        bell
    }
}

/// Returns the signals in a family's table.
fn signals(memory: &Lasting) -> Lasting {
    memory.split(table::signals(ENTRIES, 2)).unwrap().1
}

/// Has a program signal an entry, and raise the family's bell if the carrier sleeps.
fn signal(program: &mut Signals, (memory, bell): (&Lasting, &OwnedFd), entry: u32) {
    program.raise(entry.into()).unwrap().unwrap();
    if SleepWord::new(&memory.words()[table::ASLEEP / 8]).barrier_and_take(ANY) {
        crate::wake(bell);
    }
}

#[test]
fn signals_wake_a_carrier_that_sleeps_and_its_end_is_waited_for() {
    let mut rig = Rig::new();
    let (memory, bell) = rig.join(3);
    let mut program = Signals::new(signals(&memory), table::SIGNALS).unwrap();
    for entry in 0..100 {
        signal(&mut program, (&memory, &bell), entry);
        assert_eq!(rig.news(1), [News::Signalled(3, Some(entry))]);
    }
    assert!(!rig.carrier.has_ended());
    rig.carrier.end();
    assert_eq!(Arc::strong_count(&rig.alive), 1, "the work is still there");
    assert!(rig.carrier.has_ended());
    rig.carrier.command(Command::Panic);
}

/// A program takes its table away again and again. Signals of others wait for that until its tenant
/// pays.
#[test]
fn a_tenant_whose_table_made_the_carrier_sleep_is_left_out_until_that_is_paid_for() {
    let slow = Lasting::new("slipway-test", table::bytes(ENTRIES, 2)).unwrap();
    let pause = Duration::from_millis(100);
    let Ok(sleeps) = slipway_peer::testing::slow(slow.words(), pause) else {
        eprintln!("skipped: it needs userfaultfd(2)");
        return;
    };
    let sleeps = || sleeps.load(Ordering::Relaxed);
    let take_away = || {
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(slow.file().unwrap(), mode, 0, slow.len() as u64).unwrap();
    };
    let (rig, begun) = (Rig::new(), Instant::now());
    let slow_bell = rig.join_with(3, &slow, "slow");
    let (memory, bell) = rig.join(5);
    let mut program = Signals::new(signals(&memory), table::SIGNALS).unwrap();
    let mut stands_still_after = |entry: u32| {
        take_away();
        signal(&mut program, (&memory, &bell), entry);
        let (mut heard, mut stands_still) = (false, false);
        while !heard {
            for news in rig.news(1) {
                heard |= news == News::Signalled(5, Some(entry));
                stands_still |= news == News::StandsStill("slow".into());
            }
        }
        stands_still
    };
    // The first sleep is nobody's, and so is one that comes a minute after the last.
    assert!((0..100_u32).any(&mut stands_still_after), "nobody pays for {} sleeps", sleeps());
    // Nobody wakes the carrier for this: it comes back to the table by itself.
    let mut hostile = Signals::new(signals(&slow), table::SIGNALS).unwrap();
    signal(&mut hostile, (&slow, &slow_bell), 7);
    while !rig.carrier.news().any(|news| news == News::Signalled(3, Some(7))) {
        assert!(begun.elapsed() < 10 * LIMIT, "the tenant is left out for good");
        std::thread::sleep(Duration::from_millis(1));
    }
    // The tenant stands still for 32 times the part of the pause beyond 20 ms.
    let held = (pause - Duration::from_millis(20)) * 32;
    assert!(begun.elapsed() >= held, "it is served after {:?}", begun.elapsed());
}

/// The other carrier of a family.
struct Other(Arc<AtomicBool>);

impl crate::Beside for Other {
    fn stirred(&self, _: u64) {}

    fn overflowed(&self) {}

    fn spoiled(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A reactor watches no descriptor twice, so it does not watch a bell that two families have for
/// the second one.
#[test]
fn the_other_carrier_is_told_that_a_bell_cannot_be_watched() {
    let rig = Rig::new();
    let (_memory, bell) = rig.join(3);
    let (lost, begun) = (Arc::<AtomicBool>::default(), Instant::now());
    let memory = Lasting::heap(table::bytes(ENTRIES, 2));
    let family = Family::new(&memory, ENTRIES, 2, bell).unwrap();
    rig.carrier.join(4, family.with_beside(Box::new(Other(lost.clone()))));
    while !lost.load(Ordering::Relaxed) {
        assert!(begun.elapsed() < LIMIT, "it waits for signals");
        std::thread::yield_now();
    }
}

#[test]
fn the_owner_sees_that_a_carrier_has_ended_by_a_defect() {
    let (rig, begun) = (Rig::new(), Instant::now());
    rig.carrier.command(Command::Panic);
    while !rig.carrier.has_ended() {
        assert!(begun.elapsed() < LIMIT, "the carrier has not ended");
        std::thread::yield_now();
    }
}

#[test]
fn commands_without_end_leave_turns() {
    let rig = Rig::new();
    let total = 4 * COMMANDS;
    rig.carrier.command(Command::Repeat(rig.carrier.sender(), total - 1));
    let (mut obeyed, begun) = (0, Instant::now());
    while obeyed < total {
        for news in rig.news(1) {
            let News::Turn(count) = news else { panic!("{news:?}") };
            assert!(count <= COMMANDS, "{count} commands before a turn");
            obeyed += count;
        }
        assert!(begun.elapsed() < LIMIT, "{obeyed} of {total} commands are carried out");
    }
}

/// A family's signals become invalid after a turn, when the carrier is about to sleep. What follows
/// is announced before it sleeps.
#[test]
fn invalid_signals_are_announced_before_the_carrier_sleeps() {
    let rig = Rig::new();
    let (memory, _bell) = rig.join(3);
    rig.carrier.command(Command::Spoil(signals(&memory)));
    assert_eq!(rig.news(2), [News::Turn(1), News::Spoiled(3)]);
}
