//! A plane whose process is killed with SIGKILL again and again, at chosen points and at any time,
//! and restarted, while a driver over the socket writes and verifies known data. The driver sees
//! pauses and nothing else.
//!
//! The plane's process is this test program itself, started with the name of a directory in its
//! environment; the keeper is a thread of the test.
//!
//! Over 500 lines: one scenario with the processes that play it.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

#[path = "../common/resumed.rs"]
mod resumed;
mod socket;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slipway_keeper::Keeper;
use slipway_nvme::driver::{Arena, Driver, RegisterAccess, io};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::registers::offset;
use slipway_nvme_spec::status::Status;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1;
use slipway_vfio_user_client::{TestGuest, sealed_memory};

use socket::{PlaneClient, Socket};

/// The time for which a serving plane may leave the driver without an answer.
const PATIENCE: Duration = Duration::from_secs(60);
/// The number of fruitless polls that the driver must have made, besides, before an answer counts
/// as missing: a busy machine may leave the driver's thread without a processor for as long.
const LOOKS: u32 = 5000;
/// The time between two polls. The thread sleeps instead of yielding: the scheduler takes a turn
/// from a thread that yields, so one that yields again and again gets next to no time beside
/// threads that compute.
const PAUSE: Duration = Duration::from_micros(50);
/// The time that a plane may take until it serves. It waits for the kernel to take down the last
/// plane's rings, which needs several grace periods of RCU. Beside threads that compute, one has
/// taken a minute.
const LONG: Duration = Duration::from_secs(900);
/// The file that the plane's process creates when it serves.
const SERVING: &str = "serving";
const BASE: u64 = 1 << 32;
const MEMORY: u64 = 8 << 20;
/// The size of the controller's BAR0.
const BAR: u64 = 0x4000;
const PAGE: usize = 4096;
const DISK: u64 = 1 << 20;
/// The environment variable for the directory of the plane's process.
const DIRECTORY: &str = "SLIPWAY_KILLED_DIR";
/// The number of namespaces that are written to.
const WRITTEN: u32 = 3;
/// The namespaces of the overlay and of the image that is its base.
const OVER: [u32; 2] = [3, 4];
const FAULT: &str = "SLIPWAY_FAULT";
const POINTS: [&str; 7] =
    ["peeked", "applied", "stored", "recorded", "replied", "consumed", "part"];
/// The number of bytes of a message that does not fit a socket.
const LARGE: usize = 700_000;

fn connect_keeper(dir: &Path) -> Keeper {
    let begun = Instant::now();
    loop {
        match Keeper::connect(&dir.join("keeper")) {
            Ok(keeper) => return keeper,
            Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn request(dir: &Path) -> v1::CreateEndpointRequest {
    use v1::nvme_controller::DoorbellMode;
    let is = |name: &str| dir.join(name).exists();
    let doorbells = match (is("mapped"), is("rung")) {
        (true, _) => DoorbellMode::Mapped,
        (_, true) => DoorbellMode::Rung,
        _ => DoorbellMode::Trapped,
    };
    let ram = v1::disk::Kind::Ram(v1::RamDisk { size_bytes: DISK });
    let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
    let file = v1::disk::Kind::File(v1::FileDisk { path: path("disk"), ..Default::default() });
    let image = v1::disk::Kind::File(v1::FileDisk {
        path: path("base"),
        read_only: true,
        ..Default::default()
    });
    let overlay = v1::OverlayDisk { base_path: path("base"), limit_bytes: DISK };
    let lanes = dir.join("lanes").exists();
    let overlay = match lanes {
        // An overlay belongs to one thread.
        true => v1::disk::Kind::File(v1::FileDisk { path: path("over"), ..Default::default() }),
        false => v1::disk::Kind::Overlay(overlay),
    };
    let disk = |kind| Some(v1::Disk { block_size: 0, kind: Some(kind) });
    let namespaces = (1..).zip([ram, file, overlay, image]);
    let namespaces = namespaces.map(|(nsid, kind)| v1::Namespace {
        nsid,
        disk: disk(kind),
        ..Default::default()
    });
    v1::CreateEndpointRequest {
        virtio_net: None,
        memory: None,
        id: "kept".to_owned(),
        socket_path: dir.join("cntrl").to_string_lossy().into_owned(),
        owner: None,
        nvme: Some(v1::NvmeController {
            namespaces: namespaces.collect(),
            doorbells: doorbells.into(),
            sweep_period_us: 500,
            lanes: if lanes { 2 } else { 1 },
            ..Default::default()
        }),
    }
}

/// Not a test of its own, but the code of the plane's process. It does nothing without the variable
/// in the environment.
#[test]
fn the_planes_process() {
    let Ok(dir) = std::env::var(DIRECTORY) else { return };
    let dir = PathBuf::from(dir);
    let keeper = connect_keeper(&dir);
    let reactors = if dir.join("lanes").exists() { 2 } else { 1 };
    let settings = Settings { reactors, ..Settings::default() };
    let witness = dir.join("witness");
    // The process ends if the last plane's rings exist for too long; then the test starts it again.
    let plane = match Plane::with_keeper(settings, keeper, &witness) {
        Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {
            eprintln!("{error}");
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)
                .unwrap();
            return;
        }
        plane => plane.unwrap(),
    };
    if plane.list().is_empty() {
        plane.create(&request(&dir)).unwrap();
    }
    std::fs::write(dir.join(SERVING), "").unwrap();
    loop {
        std::thread::park();
    }
}

fn start(dir: &Path, fault: Option<&str>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_planes_process", "--nocapture"]);
    command.env(DIRECTORY, dir).stdin(Stdio::null()).stdout(Stdio::null());
    match fault {
        Some(fault) => command.env(FAULT, fault),
        None => command.env_remove(FAULT),
    };
    command.spawn().unwrap()
}

/// The guest: memory, driver, known data.
struct Guest {
    driver: Driver<Socket>,
    other: OwnedFd,
    event: OwnedFd,
    /// The eventfd that the interrupt pin signals, and the one that unmasks it.
    pin: [OwnedFd; 2],
    buffers: Vec<u64>,
    round: u64,
    /// The controller supports fused pairs.
    pairs: bool,
    /// The value of block [`EXCHANGED`] of each namespace that is written to.
    exchanged: [u64; WRITTEN as usize],
}

/// The block that fused pairs compare and write.
const EXCHANGED: u64 = 2000;

fn value_page(value: u64) -> [u8; PAGE] {
    std::array::from_fn(|byte| value.to_le_bytes()[byte % 8])
}

/// Returns exchanges (queue, old and new value) of a block that holds `now`: the first two are for
/// queue 0.
fn exchanges(now: u64) -> [(usize, [u64; 2]); 3] {
    [(0, [now, now + 1]), (0, [now + 1, now + 2]), (1, [now, now + 3])]
}

/// Returns the content of the base from block `lba` on.
fn base_page(lba: u64) -> [u8; PAGE] {
    std::array::from_fn(|byte| (lba * 512 + byte as u64).wrapping_mul(0x9e37_79b9).to_be_bytes()[4])
}

fn event() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap()
}

impl Guest {
    fn new(dir: &Path) -> Self {
        let (guest, other) =
            (TestGuest::new(BASE, MEMORY).unwrap(), sealed_memory(MEMORY).unwrap());
        let is = |name: &str| dir.join(name).exists();
        let mut link = PlaneClient::new(dir, is("resumed"));
        link.map(BASE, MEMORY, guest.file.as_fd()).unwrap();
        let pin = [event(), event()];
        link.route_pin(pin[0].as_fd(), pin[1].as_fd()).unwrap();
        let arena = Arena::new(guest.memory, BASE, MEMORY);
        let socket = Socket::new(dir, link, offset::DOORBELLS);
        assert_eq!(socket.window.is_some(), is("mapped"));
        assert_eq!(!socket.bells.is_empty(), is("rung") && !is("resumed"));
        let mut driver = Driver::new(socket, arena, 32).unwrap();
        for queue in [1, 2] {
            driver.create_pair(queue, 16, Some(queue)).unwrap();
        }
        let buffers = (0..24).map(|_| driver.arena.allocate(PAGE).unwrap()).collect();
        let pairs = driver.identify_controller().unwrap().fused.get() == 1;
        assert_ne!(pairs, is("lanes"));
        let exchanged = [0; WRITTEN as usize];
        let event = event();
        let mut guest = Self { driver, other, event, pin, buffers, round: 0, pairs, exchanged };
        let everywhere = |at: usize| (1 + at as u32 % WRITTEN, EXCHANGED);
        guest.run(NvmOpcode::WriteZeroes, everywhere);
        guest
    }

    fn stamp(&self, at: usize) -> [u8; PAGE] {
        let seed = self.round * 31 + at as u64;
        std::array::from_fn(|byte| (seed.wrapping_mul(0x9e37_79b9) >> (byte % 24)) as u8)
    }

    /// Submits all commands at once, each at its place. Each must succeed, and end once.
    fn run(&mut self, opcode: NvmOpcode, place: impl Fn(usize) -> (u32, u64)) {
        let mut open = Vec::new();
        for (at, page) in self.buffers.iter().enumerate() {
            let (nsid, lba) = place(at);
            let command = SubmissionEntry { prp1: (*page).into(), ..io(opcode, nsid, lba, 8) };
            let queue = 1 + (at as u16 / 2) % 2;
            open.push((queue, self.driver.submit(queue, command).unwrap()));
        }
        self.wait(open, |_, status| assert_eq!(status, Status::SUCCESS));
    }

    /// Waits until each of these commands (queue and ID) has ended, once; calls `ended` with the
    /// index of each and its status.
    fn wait(&mut self, open: Vec<(u16, u16)>, mut ended: impl FnMut(usize, Status)) {
        let mut open: Vec<_> = open.into_iter().enumerate().collect();
        while !open.is_empty() {
            for queue in [1, 2] {
                let mut entries = Vec::new();
                self.driver.reap(queue, &mut entries).unwrap();
                for entry in entries {
                    let one = (queue, entry.id.get());
                    let at = open.iter().position(|(_, other)| *other == one);
                    let (at, _) =
                        open.swap_remove(at.unwrap_or_else(|| panic!("{one:?} ended twice")));
                    ended(at, entry.status());
                }
            }
            self.driver.registers.idle().unwrap();
        }
    }

    /// Runs fused pairs, each of which exchanges the value of a block if the value is the expected
    /// one: two pairs on one queue that build on each other, and one pair on another queue for the
    /// same block. Either the two succeed or the one, and the block holds the last value written.
    /// The buffer of a half is reused as soon as that half has ended.
    fn pairs(&mut self) {
        let (mut all, mut pages) = ([Vec::new(), Vec::new()], Vec::new());
        let memory = self.driver.arena.memory().clone();
        for (at, now) in self.exchanged.into_iter().enumerate() {
            for (pair, (queue, [old, new])) in exchanges(now).into_iter().enumerate() {
                for (half, value) in [old, new].into_iter().enumerate() {
                    let page = self.buffers[6 * at + 2 * pair + half];
                    memory.write(page, &value_page(value)).unwrap();
                    let opcode = [NvmOpcode::Compare, NvmOpcode::Write][half];
                    let command = io(opcode, 1 + at as u32, EXCHANGED, 8);
                    let flags = 1 << half;
                    all[queue].push(SubmissionEntry { prp1: page.into(), flags, ..command });
                    pages.push((queue, page));
                }
            }
        }
        let mut ids = [1, 2].map(|queue| {
            let all = &all[usize::from(queue) - 1];
            self.driver.submit_all(queue, all).unwrap().into_iter()
        });
        let id = |(queue, _): &(usize, u64)| (1 + *queue as u16, ids[*queue].next().unwrap());
        let open = pages.iter().map(id).collect();
        let mut ends = vec![Status::SUCCESS; pages.len()];
        self.wait(open, |at, status| {
            memory.write(pages[at].1, &[0xdd; PAGE]).unwrap();
            ends[at] = Status(status.0 & !(1 << 13));
        });
        const DONE: [Status; 2] = [Status::SUCCESS; 2];
        const NOT: [Status; 2] = [Status::COMPARE_FAILURE.dnr(), Status::FUSED_FAILED.dnr()];
        for (at, ends) in ends.chunks(6).enumerate() {
            let two = [DONE, DONE, NOT].concat() == ends;
            assert!(two || [NOT, NOT, DONE].concat() == ends, "round {}: {ends:?}", self.round);
            self.exchanged[at] += if two { 2 } else { 3 };
        }
        let now = self.exchanged;
        let place = |at: usize| (1 + (at % now.len()) as u32, EXCHANGED);
        self.read(place, |_, at| value_page(now[at % now.len()]));
    }

    /// Reads into all buffers and compares each with the expected content.
    fn read(
        &mut self,
        place: impl Fn(usize) -> (u32, u64),
        expected: impl Fn(&Self, usize) -> [u8; PAGE],
    ) {
        let memory = self.driver.arena.memory().clone();
        for page in &self.buffers {
            memory.write(*page, &[0xee; PAGE]).unwrap();
        }
        self.run(NvmOpcode::Read, &place);
        let mut found = [0; PAGE];
        for at in 0..self.buffers.len() {
            memory.read(self.buffers[at], &mut found).unwrap();
            let expected = expected(self, at);
            assert!(found == expected, "round {}, {:?}", self.round, place(at));
        }
    }

    fn round(&mut self) {
        self.round += 1;
        let memory = self.driver.arena.memory().clone();
        for at in 0..self.buffers.len() {
            memory.write(self.buffers[at], &self.stamp(at)).unwrap();
        }
        let written = |at: usize| (1 + at as u32 % WRITTEN, 8 * at as u64);
        self.run(NvmOpcode::Write, written);
        self.read(written, Self::stamp);
        // Blocks that were not written have the base's content, and so has the image.
        let untouched = |at: usize| (OVER[at % 2], DISK / 1024 + 8 * at as u64);
        self.read(untouched, |_, at| base_page(untouched(at).1));
        if self.round.is_multiple_of(3) {
            self.run(NvmOpcode::WriteZeroes, written);
            self.read(written, |_, _| [0; PAGE]);
        }
        if self.pairs {
            self.pairs();
        }
        self.admin();
    }

    /// Leaves an entry in the admin queue: the pin is signalled however often the plane is killed,
    /// once it is unmasked, by a message or the eventfd.
    fn pin(&mut self) {
        // Signals for entries that were taken already do not count.
        let _ = rustix::io::read(&self.pin[0], &mut [0; 8]);
        match self.round % 2 {
            0 => drop(rustix::io::write(&self.pin[1], &1_u64.to_ne_bytes()).unwrap()),
            _ => self.driver.registers.timed(PlaneClient::unmask_pin).unwrap(),
        }
        let command = SubmissionEntry::new(AdminOpcode::KeepAlive.0, 0);
        let id = self.driver.submit(0, command).unwrap();
        while rustix::io::read(&self.pin[0], &mut [0; 8]).is_err() {
            let told = self.driver.registers.idle();
            assert!(told.is_ok(), "round {}: the pin is not told", self.round);
        }
        let mut ended = Vec::new();
        while ended.is_empty() {
            self.driver.reap(0, &mut ended).unwrap();
            self.driver.registers.idle().unwrap();
        }
        assert_eq!((ended.len(), ended[0].id.get()), (1, id));
    }

    /// Tests operations other than I/O: the session, registers, admin commands.
    fn admin(&mut self) {
        let (other, event) = (self.other.as_fd(), self.event.as_fd());
        self.driver.registers.timed(|link| {
            link.map(BASE + MEMORY, MEMORY, other).unwrap();
            link.route(1, event).unwrap();
            link.unmap(BASE + MEMORY, MEMORY).unwrap();
        });
        // The write is refused, since there is no such register, but it arrives and is answered.
        let large = self.driver.registers.timed(|link| link.registers().write(0, &[0; LARGE]));
        assert!(large.as_ref().is_err_and(|error| error.0.contains("refused")), "{large:?}");
        self.pin();
        if !self.driver.registers.bells.is_empty() {
            self.driver.registers.bells = self.driver.registers.timed(PlaneClient::bells);
            assert!(!self.driver.registers.bells.is_empty());
        }
        if self.driver.registers.window.is_some() {
            // The same page as at first, whichever process sends it.
            let window = self.driver.registers.timed(|link| link.window(offset::DOORBELLS));
            self.driver.registers.window = window;
        }
        self.driver.identify_controller().unwrap();
        self.driver.create_pair(3, 4, None).unwrap();
        self.driver.delete_pair(3).unwrap();
        assert!(self.driver.registers.read32(offset::CSTS).unwrap() & 1 == 1);
    }
}

/// The state that the guest's thread reports to the thread that serves.
#[derive(Default)]
struct GuestProgress {
    /// The guest is connected; while it is connecting, it may be disconnected.
    came: AtomicBool,
    gone: AtomicBool,
}

/// Serves until the guest has gone, each time with a new process; returns the number of processes
/// killed.
fn serve(dir: &Path, guest: &GuestProgress, mut next: impl FnMut(u64) -> Plan) -> u64 {
    for kills in 0.. {
        let plan = next(kills);
        let _ = std::fs::remove_file(dir.join(SERVING));
        let mut child = start(dir, plan.fault.as_deref());
        let mut begun = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            let came = guest.came.load(Ordering::Relaxed);
            if !came {
                begun = Instant::now();
            }
            let late = came && plan.kill_after.is_some_and(|after| begun.elapsed() > after);
            if late || guest.gone.load(Ordering::Relaxed) {
                child.kill().unwrap();
            }
            std::thread::sleep(Duration::from_micros(200));
        };
        assert_eq!(status.signal(), Some(9), "the plane ended by itself: {status}");
        if guest.gone.load(Ordering::Relaxed) {
            return kills;
        }
    }
    0
}

struct Plan {
    fault: Option<String>,
    kill_after: Option<Duration>,
}

/// The kind of controller under test.
#[derive(Clone, Copy)]
struct Controller {
    /// The controller's doorbells are mapped.
    mapped: bool,
    /// The controller's doorbells are rung.
    rung: bool,
    /// The controller's queues are spread over two threads.
    lanes: bool,
    /// The client connects again by itself and resumes the controller.
    resumed: bool,
}

const TRAPPED: Controller = Controller { mapped: false, rung: false, lanes: false, resumed: false };
const MAPPED: Controller = Controller { mapped: true, ..TRAPPED };
const RUNG: Controller = Controller { rung: true, ..TRAPPED };
const RESUMED: Controller = Controller { resumed: true, ..RUNG };

/// Has a guest work while `next` plans the end of each process, from the number of processes killed
/// so far and since the guest last completed a round. Returns kills, rounds and the longest pause.
fn life(
    kills: u64,
    controller: Controller,
    mut next: impl FnMut(u64, u64) -> Plan + Send,
) -> (u64, u64, Duration) {
    let dir = tempfile::tempdir().unwrap();
    let kind = [
        ("mapped", controller.mapped),
        ("rung", controller.rung),
        ("lanes", controller.lanes),
        ("resumed", controller.resumed),
    ];
    for (name, is_so) in kind {
        if is_so {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
    }
    slipway_block::create_sparse(&dir.path().join("disk"), DISK).unwrap();
    let base: Vec<u8> = (0..DISK / 512).step_by(8).flat_map(base_page).collect();
    std::fs::write(dir.path().join("base"), &base).unwrap();
    std::fs::write(dir.path().join("over"), base).unwrap();
    let path = dir.path().join("keeper");
    std::thread::spawn(move || slipway_keeper::serve(&path).unwrap());
    let (state, done, rounds) = (GuestProgress::default(), AtomicU64::new(0), AtomicU64::new(0));
    let outcome = std::thread::scope(|scope| {
        let serving = scope.spawn(|| {
            let mut last = (0, 0);
            serve(dir.path(), &state, |number| {
                done.store(number, Ordering::Relaxed);
                let rounds = rounds.load(Ordering::Relaxed);
                if rounds != last.0 {
                    last = (rounds, number);
                }
                // The first process lives until the guest has connected.
                if number == 0 {
                    return Plan { fault: None, kill_after: Some(Duration::from_millis(10)) };
                }
                next(number, number - last.1)
            })
        });
        let guest = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut guest = Guest::new(dir.path());
            state.came.store(true, Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < kills {
                guest.round();
                rounds.store(guest.round, Ordering::Relaxed);
            }
            (guest.round, guest.driver.registers.longest)
        }));
        state.gone.store(true, Ordering::Relaxed);
        let killed = serving.join().unwrap();
        if guest.is_err() {
            println!("{killed} kills, {} rounds, and then no more", rounds.load(Ordering::Relaxed));
        }
        guest.map(|(rounds, longest)| (killed, rounds, longest))
    });
    // Everything that the keeper holds is removed with the test.
    let keeper = Arc::new(connect_keeper(dir.path()));
    slipway_keeper::Shelf::new(keeper, 0..slipway_vfio_user::KEPT_SLOTS).clear_all().unwrap();
    outcome.unwrap_or_else(|reason| std::panic::resume_unwind(reason))
}

fn every_step_of_a_message(controller: Controller) {
    let counts = if controller.mapped || controller.rung { &[1, 3][..] } else { &[1, 2, 3, 7, 20] };
    let plan = |point| counts.iter().map(move |count| format!("{point}:{count}"));
    let plans: Vec<String> = POINTS.iter().flat_map(plan).collect();
    let all = plans.len() as u64;
    let (kills, rounds, longest) = life(all + 1, controller, move |number, _| Plan {
        fault: plans.get(number as usize - 1).cloned(),
        kill_after: None,
    });
    println!("{kills} kills, {rounds} rounds, longest pause {longest:?}");
    assert!(kills > all);
}

fn any_time(controller: Controller) {
    let (mut seed, wanted) = (7u64, if controller.mapped || controller.rung { 15 } else { 40 });
    let (kills, rounds, longest) = life(wanted, controller, move |_, stuck| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        // A busy machine may take longer to start a process than the process lives. The next ones
        // live longer, and longer again, until one gets something done.
        let most = 60_000 << (stuck / 8).min(11);
        let after = Duration::from_micros((seed >> 40) % most);
        Plan { fault: None, kill_after: Some(after) }
    });
    println!("{kills} kills, {rounds} rounds, longest pause {longest:?}");
    assert!(kills >= wanted && rounds > 0);
}

#[test]
fn killed_at_every_step_of_a_message() {
    every_step_of_a_message(TRAPPED);
}

#[test]
fn killed_at_every_step_of_a_message_with_mapped_doorbells() {
    every_step_of_a_message(MAPPED);
}

#[test]
fn killed_at_any_time() {
    any_time(TRAPPED);
}

#[test]
fn killed_at_any_time_with_mapped_doorbells() {
    any_time(MAPPED);
}

#[test]
fn killed_at_every_step_of_a_message_with_rung_doorbells() {
    every_step_of_a_message(RUNG);
}

#[test]
fn killed_at_any_time_with_rung_doorbells() {
    any_time(RUNG);
}

/// No keeper holds the connection: the client connects again, and the controller goes on.
#[test]
fn killed_at_any_time_and_resumed() {
    any_time(RESUMED);
}

#[test]
fn killed_at_any_time_and_resumed_with_trapped_doorbells() {
    any_time(Controller { resumed: true, ..TRAPPED });
}

#[test]
fn killed_at_any_time_with_lanes_and_rung_doorbells() {
    any_time(Controller { lanes: true, ..RUNG });
}

#[test]
fn killed_at_every_step_of_a_message_with_lanes() {
    every_step_of_a_message(Controller { lanes: true, ..TRAPPED });
}

#[test]
fn killed_at_any_time_with_lanes() {
    any_time(Controller { lanes: true, ..TRAPPED });
}

#[test]
fn killed_at_any_time_with_lanes_and_mapped_doorbells() {
    any_time(Controller { lanes: true, ..MAPPED });
}
