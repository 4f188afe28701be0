//! Certificates (by the `openssl` program), engines, and programs at the other end of their FIFOs.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use slipway_link::{End, Ended, Event, Links, Settings, StreamId};
use slipway_ring::cross::{Arena, Error, Own, Regions, Side, Stream};
use slipway_sgiov_spec::Address;

pub fn openssl(dir: &Path, words: &str) {
    let mut command = Command::new("openssl");
    command.args(words.split_whitespace()).current_dir(dir);
    let done = command.stdin(Stdio::null()).output().expect("the openssl program");
    assert!(done.status.success(), "openssl {words}: {}", String::from_utf8_lossy(&done.stderr));
}

/// Makes an authority.
pub fn authority(dir: &Path, name: &str) {
    openssl(
        dir,
        &format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
             -keyout {name}.key -out {name}.pem -subj /CN={name}"
        ),
    );
}

/// Makes a certificate of `authority` for `name`, in files called `file`, valid for the days that
/// are given to openssl.
pub fn certificate(dir: &Path, authority: &str, name: &str, file: &str, days: &str) {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
    openssl(dir, &format!("req -new {key} -keyout {file}.key -out {file}.csr -subj /CN={name}"));
    // `openssl ca`: no other command lets every version choose the days.
    let database = dir.join(format!("{file}.db"));
    std::fs::write(&database, "").unwrap();
    let config = format!(
        "[ca]\ndefault_ca=d\n[d]\ndatabase={file}.db\nnew_certs_dir=.\nrand_serial=yes\n\
         default_md=sha256\npolicy=p\nunique_subject=no\nx509_extensions=x\n\
         [p]\ncommonName=supplied\n[x]\nsubjectAltName=DNS:{name}\nbasicConstraints=CA:FALSE\n"
    );
    std::fs::write(dir.join(format!("{file}.cnf")), config).unwrap();
    openssl(
        dir,
        &format!(
            "ca -batch -notext -config {file}.cnf -cert {authority}.pem -keyfile {authority}.key \
             -in {file}.csr -out {file}.pem {days}"
        ),
    );
}

/// Makes an authority `ca` and certificates for `left` and `right`.
pub fn certificates(dir: &Path) {
    authority(dir, "ca");
    certificate(dir, "ca", "left", "left", "-days 2");
    certificate(dir, "ca", "right", "right", "-days 2");
}

/// Returns settings of `name`, whose only peer `other` is at `at` and has all addresses in
/// 10.`net`.0.0/16. The silence limit is long: a busy machine may leave a test without a processor
/// for seconds.
pub fn settings(dir: &Path, name: &str, other: &str, at: &str, net: u8) -> Settings {
    let dir = dir.display();
    toml::from_str(&format!(
        "name = '{name}'\nlisten = '127.0.0.1:0'\ncertificate = '{dir}/{name}.pem'\n\
         key = '{dir}/{name}.key'\nauthority = '{dir}/ca.pem'\nsilence_ms = 60000\n\
         [[engine]]\nname = '{other}'\nat = '{at}'\naddresses = ['10.{net}.0.0/16']\n"
    ))
    .unwrap()
}

pub fn left(dir: &Path, at: &str) -> Settings {
    settings(dir, "left", "right", at, 2)
}

pub fn right(dir: &Path, at: &str) -> Settings {
    settings(dir, "right", "left", at, 1)
}

pub const SOURCE: Address = Address::v4([10, 1, 0, 1], 40000);
pub const DESTINATION: Address = Address::v4([10, 2, 0, 1], 80);

/// The memory between an engine and its programs.
pub struct Memory {
    arena: Arena,
    engine: Arc<[AtomicU64]>,
    programs: Arc<[AtomicU64]>,
    next: u32,
}

fn zeros(count: usize) -> Arc<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

impl Memory {
    pub fn new(streams: u32) -> Self {
        let arena = Arena::new(Regions::shape(streams)).unwrap();
        Self { arena, engine: zeros(Regions::WORDS), programs: zeros(Regions::WORDS), next: 0 }
    }

    /// Returns a program's socket, and the engine's end of it.
    pub fn socket(&mut self) -> (Program, End) {
        let number = self.next;
        self.next += 1;
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
        let end = End {
            arena: self.arena.clone(),
            regions: self.engine.clone(),
            number,
            side: Side::One,
            bell: bell.clone(),
        };
        (self.of(number, bell), end)
    }

    fn of(&self, number: u32, bell: Arc<std::os::fd::OwnedFd>) -> Program {
        let (arena, regions) = (self.arena.clone(), self.programs.clone());
        Program { arena, regions, number, words: Default::default(), bell }
    }

    /// Returns the program's side of socket `number`, which has not moved a byte yet.
    pub fn program(&self, number: u32) -> Program {
        let bell = Arc::new(eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap());
        self.of(number, bell)
    }
}

/// The program's side of a socket.
pub struct Program {
    pub arena: Arena,
    regions: Arc<[AtomicU64]>,
    pub number: u32,
    words: [AtomicU64; 4],
    pub bell: Arc<std::os::fd::OwnedFd>,
}

impl Program {
    pub fn stream(&self) -> Stream<'_> {
        let [tail, head_seen, head, tail_seen] = &self.words;
        let (out, into) = (Own { own: tail, seen: head_seen }, Own { own: head, seen: tail_seen });
        Stream::new(&self.arena, self.number, Side::Zero, out, into)
    }

    /// Returns how many bytes were written; calls `tell` if the engine asked for a signal.
    pub fn write(&self, bytes: &[u8], tell: impl FnMut()) -> Result<usize, Error> {
        let regions = Regions::new(&self.regions, self.arena.shape());
        self.stream().write(bytes, 512 << 10, regions, tell)
    }

    pub fn read(&self, into: &mut [u8], tell: impl FnMut()) -> Result<usize, Error> {
        self.stream().read(into, tell)
    }

    pub fn shutdown(&self) -> bool {
        self.stream().out.finish()
    }

    pub fn is_at_end(&self) -> bool {
        self.stream().available() == Ok((0, true))
    }

    pub fn is_reset(&self) -> bool {
        self.stream().available() == Err(Error::Reset)
    }
}

/// An engine, and the events that it has reported.
pub struct Engine {
    pub links: Links,
    pub memory: Memory,
    pub asked: Vec<StreamId>,
    pub opened: Vec<StreamId>,
    pub ended: Vec<(StreamId, Ended)>,
}

impl Engine {
    pub fn new(settings: Settings) -> Self {
        let links = Links::new(settings).unwrap();
        let memory = Memory::new(1024);
        Self { links, memory, asked: vec![], opened: vec![], ended: vec![] }
    }

    pub fn turn(&mut self, now: Instant) -> bool {
        let worked = self.links.turn(now);
        while let Some(event) = self.links.event() {
            match event {
                Event::Asked { stream, .. } => self.asked.push(stream),
                Event::Opened(stream) => self.opened.push(stream),
                Event::Ended { stream, ended, .. } => self.ended.push((stream, ended)),
            }
        }
        worked
    }

    pub fn at(&self) -> String {
        self.links.local().unwrap().to_string()
    }
}

/// Runs both engines until `done`; panics after a minute.
pub fn until(
    left: &mut Engine,
    right: &mut Engine,
    mut done: impl FnMut(&mut Engine, &mut Engine) -> bool,
) {
    let end = Instant::now() + Duration::from_secs(60);
    while !done(left, right) {
        let now = Instant::now();
        assert!(now < end, "nothing comes of it: {:?} {:?}", left.ended, right.ended);
        if !(left.turn(now) | right.turn(now)) {
            std::thread::yield_now();
        }
    }
}

/// Starts two engines over loopback.
pub fn two(dir: &Path) -> (Engine, Engine) {
    let right = Engine::new(right(dir, "127.0.0.1:1"));
    let left = Engine::new(left(dir, &right.at()));
    (left, right)
}

/// Opens a stream between two programs, one at each engine.
pub fn joined(left: &mut Engine, right: &mut Engine) -> (Joined, Joined) {
    joined_for(left, right, "blue")
}

pub fn joined_for(left: &mut Engine, right: &mut Engine, tenant: &str) -> (Joined, Joined) {
    let opened = left.links.open(tenant, SOURCE, DESTINATION, Instant::now()).unwrap();
    until(left, right, |_, right| !right.asked.is_empty());
    let asked = right.asked.pop().unwrap();
    let (there, end) = right.memory.socket();
    right.links.attach(asked, end);
    until(left, right, |left, _| left.opened.contains(&opened));
    let (here, end) = left.memory.socket();
    left.links.attach(opened, end);
    ((here, opened), (there, asked))
}

pub type Joined = (Program, StreamId);

/// Returns byte `at` of the stream numbered `seed`.
pub fn pattern(seed: u64, at: u64) -> u8 {
    let mixed = (at / 8 + (seed << 40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> (at % 8 * 8)) as u8
}

pub fn bytes(seed: u64, from: u64, count: usize) -> Vec<u8> {
    (from..from + count as u64).map(|at| pattern(seed, at)).collect()
}
