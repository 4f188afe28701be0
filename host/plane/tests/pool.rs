//! Endpoints whose clients have recycled memory: a disk and a network get zeros of memory that
//! nobody touched. Needs /dev/userfaultfd; without it the tests end at once.
//!
//! An earlier sandbox is this program again, as the test `earlier`; the keeper is a thread.
#![allow(clippy::unwrap_used, unsafe_code)] // a test; it maps memory as a VMM does

mod common;

use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{BASE, PATIENCE, Registers, ram};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use slipway_keeper::Keeper;
use slipway_nvme::driver::{Arena, Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1;
use slipway_pool_wire::{HandOver, Lease, Page, Range, Request};
use slipway_ram::{Access, DmaMap, Memory, Permissions, Region};
use slipway_vfio_user_client::{Client, ClientError};
use slipway_virtio_net::driver as net;
use slipway_virtio_spec::net::HEADER;

/// Much, so that the pool is not done with zeroing when the test begins.
const BYTES: u64 = 256 << 20;
/// The environment variable for the pool's socket.
const POOL: &str = "SLIPWAY_POOL_TEST";

/// The earlier sandbox: fills its memory, and waits to be killed.
#[test]
fn earlier() {
    let Some(path) = std::env::var_os(POOL) else { return };
    let lease = ask(Path::new(&path));
    let hand_over = HandOver::begin(lease.connection).unwrap();
    let (prot, len) = (ProtFlags::READ | ProtFlags::WRITE, BYTES as usize);
    let any = std::ptr::null_mut();
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe { rustix::mm::mmap(any, len, prot, MapFlags::SHARED, &lease.file, 0) };
    let base = base.unwrap().cast::<u8>();
    let range = Range { address: base.addr() as u64, len: BYTES, offset: 0 };
    let _kept = hand_over.finish(&[range]).unwrap();
    // SAFETY: the mapping, which nobody else uses.
    unsafe { std::slice::from_raw_parts_mut(base, len) }.fill(0xaa);
    println!("filled");
    std::thread::sleep(PATIENCE * 10);
}

fn ask(path: &Path) -> Lease {
    Lease::ask(path, Request { bytes: BYTES, page: Page::Base, near: None, template: None })
        .unwrap()
}

/// Makes a plane with a keeper and a pool.
fn plane(directory: &Path) -> Plane {
    let path = directory.join("keeper");
    let keepers = path.clone();
    std::thread::spawn(move || slipway_keeper::serve(&keepers));
    let keeper = (0..60_000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        Keeper::connect(&path).ok()
    });
    let settings = Settings { pool: Some(BYTES), ..Settings::default() };
    Plane::with_keeper(settings, keeper.unwrap(), &directory.join("witness")).unwrap()
}

/// Runs the earlier sandbox, until the pool has its memory back.
fn dirty(plane: &Plane, pool: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["earlier", "--exact", "--nocapture"]).env(POOL, pool).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("filled")));
    child.kill().unwrap();
    child.wait().unwrap();
    let stats = || plane.pool().unwrap().stats();
    // The pool may have new memory besides, which is never dirty.
    let tries = (0..60_000).find(|_| {
        std::thread::sleep(Duration::from_millis(1));
        let stats = stats();
        stats.lent == 0 && (stats.granules.dirty > 0 || stats.zeroed_ahead > 0)
    });
    assert!(tries.is_some(), "{:?}", stats());
}

/// Memory of the pool that a client has.
struct Lent {
    memory: Memory,
    /// The descriptor that names the memory to an endpoint.
    token: OwnedFd,
    /// The pool takes the memory back once this is closed.
    _connection: OwnedFd,
}

impl Lent {
    fn by(pool: &Path) -> Self {
        let lease = ask(pool);
        let hand_over = HandOver::begin(lease.connection).unwrap();
        let region = Region::mapped(lease.file.as_fd(), 0, BYTES, Permissions::READ_WRITE).unwrap();
        let mut map = DmaMap::new();
        map.add(BASE, region).unwrap();
        let mut spans = Vec::new();
        map.memory().pin(BASE, BYTES as usize, Access::Write, &mut spans).unwrap();
        let address = spans[0].io_vector().0.addr() as u64;
        let range = Range { address, len: BYTES, offset: 0 };
        let (_connection, token) = hand_over.finish(&[range]).unwrap();
        Self { memory: map.memory(), token, _connection }
    }

    /// Returns the memory as an endpoint is told of it.
    fn named(&self) -> Option<v1::ClientMemory> {
        let status = rustix::fs::fstat(&self.token).unwrap();
        let (device, inode) = (status.st_dev, status.st_ino);
        Some(v1::ClientMemory { device, inode, ..Default::default() })
    }

    /// Passes the token to the endpoint.
    fn connect(&self, socket: &Path) -> Registers {
        let mut client = Client::connect(socket, PATIENCE).unwrap();
        client.map(BASE, BYTES, self.token.as_fd(), 0, true).unwrap();
        // The rings are at the start; the end is zeroed last.
        Registers::new(client, PATIENCE)
    }
}

#[test]
fn a_disk_gets_zeros_of_memory_that_nobody_touched() {
    if !Path::new("/dev/userfaultfd").exists() || std::env::var_os(POOL).is_some() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let name = |name: &str| -> PathBuf { directory.path().join(name) };
    let plane = plane(directory.path());
    let _server = plane.pool().unwrap().listen(&name("pool")).unwrap();
    let request = v1::CreateEndpointRequest {
        id: "late".into(),
        socket_path: name("cntrl").to_string_lossy().into_owned(),
        nvme: Some(v1::NvmeController {
            namespaces: vec![v1::Namespace {
                nsid: 1,
                disk: Some(v1::Disk { block_size: 0, kind: Some(ram(16 << 20)) }),
                ..Default::default()
            }],
            ..Default::default()
        }),
        ..Default::default()
    };
    dirty(&plane, &name("pool"));
    let lent = Lent::by(&name("pool"));
    // An endpoint that was not told of the memory does not know it by its file's numbers.
    plane.create(&request).unwrap();
    let mut stranger = Client::connect(&name("cntrl"), PATIENCE).unwrap();
    let refused = stranger.map(BASE, BYTES, lent.token.as_fd(), 0, true);
    assert!(matches!(refused, Err(ClientError::Refused(Errno::ACCESS))), "{refused:?}");
    drop(stranger);
    plane.remove("late").unwrap();
    let request = v1::CreateEndpointRequest { memory: lent.named(), ..request };
    plane.create(&request).unwrap();
    let registers = lent.connect(&name("cntrl"));
    let arena = Arena::new(lent.memory, BASE, BYTES);
    let mut driver = Driver::new(registers, arena, 32).unwrap();
    driver.create_pair(1, 64, None).unwrap();
    let len = 64 << 10;
    let blocks = (len / 512) as u32;
    let ends = (0..16).map(|at| BASE + BYTES - (at + 1) * (1 << 20));
    let ends: Vec<u64> = ends.collect();
    for (number, from) in ends.iter().enumerate() {
        let write = io(NvmOpcode::Write, 1, number as u64 * u64::from(blocks), blocks);
        driver.transfer(1, write, (*from, len)).unwrap();
    }
    let to = driver.arena.allocate(len).unwrap();
    for number in 0..ends.len() {
        driver.arena.memory().write(to, &vec![1; len]).unwrap();
        let read = io(NvmOpcode::Read, 1, number as u64 * u64::from(blocks), blocks);
        driver.transfer(1, read, (to, len)).unwrap();
        let mut bytes = vec![1; len];
        driver.arena.memory().read(to, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "write {number}");
    }
    // A read of the disk fills memory that nobody touched, and leaves zeros around.
    let at = BASE + BYTES - (24 << 20);
    driver.arena.memory().write(to, &vec![7; len]).unwrap();
    driver.transfer(1, io(NvmOpcode::Write, 1, 0, blocks), (to, len)).unwrap();
    driver.transfer(1, io(NvmOpcode::Read, 1, 0, 8), (at + 4096, 4096)).unwrap();
    let mut bytes = vec![1; 3 * 4096];
    driver.arena.memory().read(at, &mut bytes).unwrap();
    let expected = [[0; 4096], [7; 4096], [0; 4096]].concat();
    assert!(bytes == expected);
    drop(driver);
    plane.remove("late").unwrap();
}

/// A network function of the plane, of the machine whose address ends with `number`.
fn network_function(
    plane: &Plane,
    directory: &Path,
    number: u8,
    memory: Option<v1::ClientMemory>,
) -> PathBuf {
    let socket = directory.join(format!("net-{number}"));
    let request = v1::CreateEndpointRequest {
        id: format!("net-{number}"),
        socket_path: socket.to_string_lossy().into_owned(),
        virtio_net: Some(v1::VirtioNet {
            switch: "blue".into(),
            mac: format!("02:00:00:00:00:{number:02x}"),
            ..Default::default()
        }),
        memory,
        ..Default::default()
    };
    plane.create(&request).unwrap();
    socket
}

#[test]
fn a_network_gets_zeros_of_memory_that_nobody_touched() {
    if !Path::new("/dev/userfaultfd").exists() || std::env::var_os(POOL).is_some() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let plane = plane(directory.path());
    let pool = directory.path().join("pool");
    let _server = plane.pool().unwrap().listen(&pool).unwrap();
    let switch = v1::CreateSwitchRequest { name: "blue".into(), ..Default::default() };
    plane.fabric().create_switch(&switch).unwrap();
    let receiver = network_function(&plane, directory.path(), 2, None);
    let drive = |arena, registers| net::Driver::new(registers, arena, Default::default()).unwrap();
    let (arena, registers) = common::connect_driver(&receiver);
    let arena = net::Arena::new(arena.memory().clone(), BASE, common::MEMORY);
    let mut receiver = drive(arena, registers);
    dirty(&plane, &pool);
    let lent = Lent::by(&pool);
    let sender = network_function(&plane, directory.path(), 1, lent.named());
    let (registers, memory) = (lent.connect(&sender), lent.memory);
    let mut sender = drive(net::Arena::new(memory.clone(), BASE, BYTES), registers);
    // The header is written; what follows is where nobody was.
    let start = sender.arena.allocate(HEADER + 14).unwrap();
    let addresses = [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x88, 0xb5];
    memory.write(start + HEADER as u64, &addresses).unwrap();
    let (mut came, begun, mut ends) = (0, Instant::now(), (1..200).cycle());
    while came < 16 {
        assert!(begun.elapsed() < PATIENCE, "{came} frames came");
        let untouched = BASE + BYTES - ends.next().unwrap() * (1 << 20);
        let parts = [(start, HEADER as u32 + 14), (untouched, 1000)];
        let parts = parts.map(|(at, len)| net::Buffer::readable(at, len));
        sender.transmit[0].reap().unwrap();
        sender.transmit[0].ring.push(&parts).unwrap();
        sender.flush(0).unwrap();
        // The switch may not have noticed yet that both are there.
        let soon = Instant::now() + Duration::from_millis(100);
        let frame = std::iter::repeat_with(|| receiver.receive[0].pop().unwrap())
            .take_while(|_| Instant::now() < soon)
            .find_map(|received| received);
        if let Some(received) = frame {
            assert_eq!(received.frame.len(), 14 + 1000);
            assert!(received.frame[14..].iter().all(|byte| *byte == 0), "frame {came}");
            came += 1;
        }
    }
    drop((sender, receiver));
    plane.remove("net-1").unwrap();
    plane.remove("net-2").unwrap();
}
