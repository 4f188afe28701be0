//! A plane that is killed, and its successor: the present state of endpoints is kept, and so are
//! named disks; state of another build is left alone.
//!
//! Over 500 lines: tests that share the plane's process.
//!
//! The plane's process is this test program itself, started with its task in the environment; the
//! keeper is a thread of the test.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

mod common;

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slipway_keeper::Keeper;
use slipway_nvme::driver::{Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::offset;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1::{self, disk::Kind};
use slipway_ram::Lasting;
use slipway_vfio_user_client::{Client, ClientError, Continuity, RemoteFunction};
use slipway_vfio_user_spec::device_state;

use common::*;

const MIB: u64 = 1 << 20;
const DIRECTORY: &str = "SLIPWAY_KEPT_DIR";
const WORK: &str = "SLIPWAY_KEPT_WORK";

fn wait_for<T>(mut find: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = find() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "it does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn serve_keeper(dir: &Path) {
    let path = dir.join("keeper");
    std::thread::spawn(move || slipway_keeper::serve(&path).unwrap());
}

fn connect(dir: &Path) -> Keeper {
    wait_for(|| Keeper::connect(&dir.join("keeper")).ok())
}

fn plane(dir: &Path) -> std::io::Result<Plane> {
    Plane::with_keeper(Settings::default(), connect(dir), &dir.join("witness"))
}

fn disk(kind: Kind) -> Option<v1::Disk> {
    Some(v1::Disk { block_size: 0, kind: Some(kind) })
}

/// Makes a namespace as one of a saved machine.
fn namespace((nsid, kind): (u32, Kind)) -> v1::Namespace {
    v1::Namespace { nsid, disk: disk(kind), identity: "saved".into() }
}

fn named(name: &str) -> Kind {
    Kind::Named(v1::NamedDiskReference { name: name.into(), read_only: false })
}

fn attach(plane: &Plane, kind: Kind) -> u32 {
    let request = v1::AttachDiskRequest { endpoint_id: "one".into(), disk: disk(kind), nsid: 0 };
    plane.attach(&request).unwrap().nsid
}

fn detach(plane: &Plane, nsid: u32) {
    let namespace = Some(v1::detach_disk_request::Namespace::Nsid(nsid));
    plane.detach(&v1::DetachDiskRequest { endpoint_id: "one".into(), namespace }).unwrap();
}

fn create_disk(plane: &Plane, name: &str, kind: Kind) {
    plane.create_disk(&v1::CreateDiskRequest { name: name.into(), disk: disk(kind) }).unwrap();
}

/// Makes an endpoint and then changes it in every possible way.
fn make(plane: &Plane, dir: &Path) {
    create_disk(plane, "memory", ram(MIB));
    let path = dir.join("disk").to_string_lossy().into_owned();
    create_disk(plane, "file", Kind::File(v1::FileDisk { path, ..Default::default() }));
    let namespaces = (1..).zip([ram(MIB), named("memory")]).map(namespace);
    let request = v1::CreateEndpointRequest {
        virtio_net: None,
        memory: None,
        id: "one".into(),
        socket_path: dir.join("cntrl").to_string_lossy().into_owned(),
        owner: None,
        nvme: Some(v1::NvmeController { namespaces: namespaces.collect(), ..Default::default() }),
    };
    plane.create(&request).unwrap();
    assert_eq!((attach(plane, ram(2 * MIB)), attach(plane, named("file"))), (3, 4));
    detach(plane, 1);
    assert_eq!(attach(plane, ram(3 * MIB)), 1);
    detach(plane, 3);
    let limits = v1::Limits { commands_per_second: 200, command_burst: 1, ..Default::default() };
    let limits = v1::LimitEndpointRequest { endpoint_id: "one".into(), limits: Some(limits) };
    plane.limit(&limits).unwrap();
    let larger =
        v1::ResizeDiskRequest { name: "memory".into(), size_bytes: 2 * MIB, shrink: false };
    plane.resize_disk(&larger).unwrap();
}

fn names(plane: &Plane) -> Vec<String> {
    plane.list().into_iter().map(|endpoint| endpoint.id).collect()
}

/// Not a test of its own, but the code of the plane's process. It does nothing without its task in
/// the environment.
#[test]
fn the_planes_process() {
    let (Ok(dir), Ok(work)) = (std::env::var(DIRECTORY), std::env::var(WORK)) else { return };
    let dir = PathBuf::from(dir);
    let plane = plane(&dir).unwrap();
    match work.as_str() {
        "make" => make(&plane, &dir),
        "end" => {
            plane.remove("one").unwrap();
            plane.remove_disk("memory").unwrap();
            plane.remove_disk("file").unwrap();
        }
        "make-e1000" => make_e1000(&plane, &dir),
        "make-two" => make_two(&plane, &dir),
        "end-one-of-two" => {
            assert_eq!(names(&plane), ["one", "two"]);
            plane.remove("one").unwrap();
            assert_eq!(names(&plane), ["two"]);
        }
        "go-on" => {
            // A page of data and its page table, the head of the file, and two maps with their
            // records.
            let held = |id| plane.get(id).unwrap().overlays.unwrap().held_bytes;
            assert_eq!(["one", "two"].map(held), [7 * 4096; 2]);
            let (endpoint_id, copy) = ("one".to_owned(), dir.join("copy"));
            let path = copy.to_string_lossy().into_owned();
            let request = v1::CopyDiskRequest { endpoint_id, nsid: 2, path };
            assert_eq!(plane.copy_disk(&request).unwrap().size_bytes, MIB);
            let bytes = std::fs::read(&copy).unwrap();
            assert_eq!((bytes[5 * 512], bytes[6 * 512]), (1, 0x11));
        }
        "find-nothing" => assert!(names(&plane).is_empty()),
        _ => {}
    }
    std::fs::write(dir.join(work), "").unwrap();
    loop {
        std::thread::park();
    }
}

/// Starts a process that has done `work` and serves.
fn start(dir: &Path, work: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "the_planes_process", "--nocapture"]);
    command.env(DIRECTORY, dir).env(WORK, work).stdin(Stdio::null()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    wait_for(|| {
        assert!(child.try_wait().unwrap().is_none(), "the plane has ended");
        dir.join(work).exists().then_some(())
    });
    child
}

fn kill(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn byte(driver: &mut Driver<Registers>, opcode: NvmOpcode, nsid: u32, lba: u64, byte: u8) -> u8 {
    let buffer = driver.arena.allocate(512).unwrap();
    let memory = driver.arena.memory().clone();
    memory.write(buffer, &[byte; 512]).unwrap();
    driver.transfer(1, io(opcode, nsid, lba, 1), (buffer, 512)).unwrap();
    let mut bytes = [0; 512];
    memory.read(buffer, &mut bytes).unwrap();
    driver.arena.release(buffer, 512);
    assert_eq!(bytes, [bytes[0]; 512]);
    bytes[0]
}

/// The namespaces with their sizes in blocks, and the block of each that is checked.
const EXPECTED: [(u32, u64, u64); 3] =
    [(1, 3 * MIB / 512, 6143), (2, 2 * MIB / 512, 4095), (4, 2048, 7)];

#[test]
fn what_an_endpoint_has_become_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    slipway_block::create_sparse(&dir.path().join("disk"), MIB).unwrap();
    serve_keeper(dir.path());
    let child = start(dir.path(), "make");
    let (arena, registers) = connect_driver(&dir.path().join("cntrl"));
    let mut driver = Driver::new(registers, arena, 32).unwrap();
    driver.create_pair(1, 64, None).unwrap();
    for (nsid, _, lba) in EXPECTED {
        byte(&mut driver, NvmOpcode::Write, nsid, lba, 0x30 + nsid as u8);
    }
    kill(child);
    let child = start(dir.path(), "first");
    kill(child);
    let child = start(dir.path(), "second");
    for (nsid, blocks, lba) in EXPECTED {
        assert_eq!(driver.identify_namespace(nsid).unwrap().size.get(), blocks, "{nsid}");
        assert_eq!(byte(&mut driver, NvmOpcode::Read, nsid, lba, 0), 0x30 + nsid as u8);
    }
    assert_eq!(driver.identify_namespace(3).unwrap().size.get(), 0, "it was detached");
    let begun = Instant::now();
    for _ in 0..60 {
        byte(&mut driver, NvmOpcode::Read, 1, 0, 0);
    }
    assert!(begun.elapsed() > Duration::from_millis(200), "200 a second is the limit");
    kill(child);
    let child = start(dir.path(), "end");
    kill(child);
    // The keeper has nothing left to hold.
    wait_for(|| (!dir.path().join("keeper").exists()).then_some(()));
}

/// Makes two endpoints, each with a volume and an overlay over a file that both have read-only, and
/// both with an image that is being fetched.
fn make_two(plane: &Plane, dir: &Path) {
    let path = |name: &str| dir.join(name).to_string_lossy().into_owned();
    for name in ["one", "two"] {
        let image = Kind::Lazy(fetcher::disk(dir, "image"));
        let layer = Kind::Overlay(v1::OverlayDisk { base_path: path("base"), limit_bytes: 0 });
        let volume = Kind::File(v1::FileDisk { path: path(name), ..Default::default() });
        let namespaces = (1..).zip([image, layer, volume]).map(namespace);
        let nvme = v1::NvmeController { namespaces: namespaces.collect(), ..Default::default() };
        let request = v1::CreateEndpointRequest {
            virtio_net: None,
            memory: None,
            id: name.into(),
            socket_path: path(&format!("{name}.sock")),
            owner: Some(v1::Owner { uid: 0, gid: 0 }),
            nvme: Some(nvme),
        };
        plane.create(&request).unwrap();
    }
}

/// Makes an e1000 on a switch.
fn make_e1000(plane: &Plane, dir: &Path) {
    let switch = v1::CreateSwitchRequest { name: "blue".into(), ..Default::default() };
    plane.fabric().create_switch(&switch).unwrap();
    let net = v1::VirtioNet {
        switch: "blue".into(),
        mac: "02:00:00:00:00:01".into(),
        model: v1::NetworkModel::E1000.into(),
        ..Default::default()
    };
    let request = v1::CreateEndpointRequest {
        id: "one".into(),
        socket_path: dir.join("cntrl").to_string_lossy().into_owned(),
        virtio_net: Some(net),
        ..Default::default()
    };
    plane.create(&request).unwrap();
}

/// A driver finds a device that was reset, and goes on when it has reset it itself, by messages as
/// well as by tails that it stores.
#[test]
fn an_e1000_outlives_the_plane() {
    use slipway_e1000::driver::{Driver, Options, memory_len};
    use slipway_e1000_spec::register;
    for io_fds in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        serve_keeper(dir.path());
        let mut child = start(dir.path(), "make-e1000");
        let (arena, mut registers) = connect_driver(&dir.path().join("cntrl"));
        registers.client.write(slipway_vfio_user_spec::region::CONFIG, 4, &[6, 0]).unwrap();
        if io_fds {
            registers = registers.with_io_fds().unwrap();
        }
        let options = Options { descriptors: 64, ..Options::default() };
        let range = (BASE, memory_len(64) as u64);
        let memory = arena.memory().clone();
        let mut driver = Driver::new(registers, &memory, range, options).unwrap();
        for life in ["first", "second", "third"] {
            wait_for(|| (driver.get(register::STATUS).unwrap() & 2 != 0).then_some(()));
            for _ in 0..5 {
                assert!(driver.sending.queue(&[0xff; 60], 0).unwrap());
                driver.flush().unwrap();
                wait_for(|| (driver.clean().unwrap() > 0).then_some(()));
            }
            kill(child);
            child = start(dir.path(), life);
            assert_eq!(driver.get(register::TDT).unwrap(), 0, "it was reset, {io_fds}");
            driver = Driver::new(driver.registers, &memory, range, options).unwrap();
        }
        kill(child);
    }
}

#[test]
fn overlays_and_images_outlive_the_plane_and_go_with_their_endpoints() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("base"), vec![0x11; MIB as usize]).unwrap();
    for name in ["one", "two", "image"] {
        slipway_block::create_sparse(&dir.path().join(name), MIB).unwrap();
    }
    fetcher::serve(dir.path(), "image", |_| 0x11);
    serve_keeper(dir.path());
    let child = start(dir.path(), "make-two");
    let mut drivers = ["one", "two"].map(|name| {
        let (arena, registers) = connect_driver(&dir.path().join(format!("{name}.sock")));
        let mut driver = Driver::new(registers, arena, 32).unwrap();
        driver.create_pair(1, 64, None).unwrap();
        driver
    });
    for (own, driver) in (1..).zip(&mut drivers) {
        byte(driver, NvmOpcode::Write, 2, 5, own);
        byte(driver, NvmOpcode::Write, 3, 5, 0x30 + own);
        assert_eq!(byte(driver, NvmOpcode::Read, 1, 5, 0), 0x11);
    }
    let nguid = |driver: &mut Driver<Registers>| driver.identify_namespace(2).unwrap().nguid;
    let names = drivers.each_mut().map(nguid);
    assert_eq!(names[0], names[1], "those of the same saved machine");
    kill(child);
    let child = start(dir.path(), "go-on");
    for (own, driver) in (1..).zip(&mut drivers) {
        let mut found = |nsid, lba| byte(driver, NvmOpcode::Read, nsid, lba, 0);
        assert_eq!([found(2, 5), found(2, 6), found(1, 5)], [own, 0x11, 0x11]);
        assert_eq!(found(3, 5), 0x30 + own);
        byte(driver, NvmOpcode::Write, 2, 6, 0x20 + own);
    }
    assert_eq!(drivers.each_mut().map(nguid), names);
    kill(child);
    // The successor removes one endpoint; the other stays.
    let child = start(dir.path(), "end-one-of-two");
    assert_eq!(byte(&mut drivers[1], NvmOpcode::Read, 2, 6, 0), 0x22);
    kill(child);
    // With another base, the overlay would be another disk.
    std::fs::write(dir.path().join("base"), vec![0x12; MIB as usize]).unwrap();
    let child = start(dir.path(), "find-nothing");
    kill(child);
    // The keeper has nothing left to hold.
    wait_for(|| (!dir.path().join("keeper").exists()).then_some(()));
}

#[test]
fn another_layout_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    serve_keeper(dir.path());
    // An endpoint's memory with another version, and memory without a version.
    let versioned = Lasting::new("test", 1 << 20).unwrap();
    versioned.words()[0].store(u64::from_be_bytes(*b"SLIPKEEP"), Ordering::Release);
    versioned.words()[1].store(99 << 32 | 64, Ordering::Release);
    let bare = Lasting::new("test", 1 << 20).unwrap();
    for (memory, words) in [(versioned, "layout 99/64 "), (bare, "none that has a version")] {
        let holder = connect(dir.path());
        holder.put(0, memory.file().unwrap()).unwrap();
        drop(holder);
        let error = plane(dir.path()).err().unwrap().to_string();
        assert!(error.contains(words) && error.contains("Nothing was touched"), "{error}");
        let holder = connect(dir.path());
        let left = holder.take(PATIENCE).unwrap();
        assert_eq!(left.iter().map(|(slot, _)| *slot).collect::<Vec<_>>(), [0]);
    }
    connect(dir.path()).clear(0).unwrap();
}

/// Connects to `socket` as a client that can resume its function, once the last one is gone.
fn resuming(socket: &Path) -> RemoteFunction {
    wait_for(|| {
        let stream = UnixStream::connect(socket).unwrap();
        RemoteFunction::new(stream.into(), PATIENCE).ok()
    })
}

/// Does what [`resuming`] does, and enables the controller.
fn enabled(socket: &Path) -> RemoteFunction {
    let function = resuming(socket);
    let write = |at: u64, value: u32| function.write(0, at, &value.to_le_bytes()).unwrap();
    write(offset::AQA, 0xf_000f);
    write(offset::ASQ, 0x1000);
    write(offset::ACQ, 0x2000);
    write(offset::CC, 0x0046_0001);
    wait_for(|| (status(&function) & 1 == 1).then_some(()));
    function
}

fn status(function: &RemoteFunction) -> u32 {
    let mut bytes = [0; 4];
    function.read(0, offset::CSTS, &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

/// Has a client that cannot resume a function negotiate. Returns the errno of the reply, or 0.
fn negotiate(stream: &mut UnixStream) -> std::io::Result<u32> {
    let data = b"{\"capabilities\":{}}\0";
    let size = 20 + data.len() as u32;
    // A header with a message id, the command VERSION and the size; versions 0 and 1; data.
    let head = [&[1_u8, 0, 1, 0][..], &size.to_le_bytes()[..], &[0; 8], &[0, 0, 1, 0]].concat();
    stream.write_all(&[&head[..], &data[..]].concat())?;
    let mut reply = [0; 16];
    stream.read_exact(&mut reply)?;
    let word = |at: usize| u32::from_le_bytes(reply[at..at + 4].try_into().unwrap());
    let mut rest = vec![0; word(4) as usize - reply.len()];
    stream.read_exact(&mut rest)?;
    Ok(word(12))
}

#[test]
fn a_function_is_reset_for_a_client_that_does_not_resume_it() {
    let dir = tempfile::tempdir().unwrap();
    slipway_block::create_sparse(&dir.path().join("disk"), MIB).unwrap();
    serve_keeper(dir.path());
    let socket = dir.path().join("cntrl");
    let child = start(dir.path(), "make");
    drop(enabled(&socket));
    // A client that leaves a living server gives its function up: the next one finds it reset.
    let next = resuming(&socket);
    assert_eq!(status(&next) & 1, 0);
    drop(next);
    let first = enabled(&socket);
    kill(child);
    // Another client, which can resume the function and accesses it instead.
    let child = start(dir.path(), "first");
    let other = enabled(&socket);
    kill(child);
    // A client that cannot resume a function: it is given up before the connection ends.
    let child = start(dir.path(), "given-up");
    let (errno, mut refused) = wait_for(|| {
        let mut stream = UnixStream::connect(&socket).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let errno = negotiate(&mut stream).ok()?;
        Some((errno, stream))
    });
    assert_eq!(errno, rustix::io::Errno::AGAIN.raw_os_error() as u32);
    let ended = refused.read(&mut [0]);
    let is_ended = ended.as_ref().is_ok_and(|&bytes| bytes == 0);
    assert!(is_ended || ended.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset));
    kill(child);
    let child = start(dir.path(), "held-for-nobody");
    let client = Client::connect(&socket, PATIENCE);
    assert!(client.is_ok(), "the function is held, and its state is gone: {:?}", client.err());
    drop(client);
    let third = enabled(&socket);
    kill(child);
    // A client that cannot resume a function.
    let child = start(dir.path(), "second");
    let refused = Client::connect(&socket, PATIENCE);
    assert!(matches!(refused, Err(ClientError::Refused(_))), "{:?}", refused.err());
    let mut client = wait_for(|| Client::connect(&socket, PATIENCE).ok());
    let mut bytes = [0; 4];
    client.read(0, offset::CSTS, &mut bytes).unwrap();
    assert_eq!(bytes[0] & 1, 0);
    drop((client, first, other, third));
    kill(child);
    let child = start(dir.path(), "end");
    kill(child);
    wait_for(|| (!dir.path().join("keeper").exists()).then_some(()));
}

/// A connection that the keeper holds.
#[test]
fn a_function_that_was_stopped_is_stopped_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    slipway_block::create_sparse(&dir.path().join("disk"), MIB).unwrap();
    serve_keeper(dir.path());
    let child = start(dir.path(), "make");
    let (arena, registers) = connect_driver(&dir.path().join("cntrl"));
    let mut driver = Driver::new(registers, arena, 32).unwrap();
    driver.create_pair(1, 64, None).unwrap();
    let (nsid, _, lba) = EXPECTED[0];
    byte(&mut driver, NvmOpcode::Write, nsid, lba, 0x51);
    driver.registers.client.set_device_state(device_state::STOP).unwrap();
    kill(child);
    let child = start(dir.path(), "first");
    let client = &mut driver.registers.client;
    assert_eq!(client.device_state().unwrap(), device_state::STOP);
    client.set_device_state(device_state::STOP_COPY).unwrap();
    let begin = client.read_state_part(100).unwrap();
    kill(child);
    let child = start(dir.path(), "second");
    assert_eq!(client.device_state().unwrap(), device_state::STOP);
    client.set_device_state(device_state::STOP_COPY).unwrap();
    let state = client.read_state().unwrap();
    assert!(state.starts_with(&begin));
    // Half a state is none.
    client.set_device_state(device_state::RESUMING).unwrap();
    client.write_state(&state[..state.len() / 2]).unwrap();
    kill(child);
    let child = start(dir.path(), "third");
    assert_eq!(client.device_state().unwrap(), device_state::ERROR);
    assert!(client.write_state(&state[state.len() / 2..]).is_err());
    assert!(client.set_device_state(device_state::RUNNING).is_err());
    client.reset().unwrap();
    client.set_device_state(device_state::RESUMING).unwrap();
    client.write_state(&state).unwrap();
    client.set_device_state(device_state::RUNNING).unwrap();
    assert_eq!(byte(&mut driver, NvmOpcode::Read, nsid, lba, 0), 0x51);
    kill(child);
    // And the state that was loaded is the function's own.
    let child = start(dir.path(), "fourth");
    assert_eq!(byte(&mut driver, NvmOpcode::Read, nsid, lba, 0), 0x51);
    kill(child);
    let child = start(dir.path(), "end");
    kill(child);
    wait_for(|| (!dir.path().join("keeper").exists()).then_some(()));
}

/// A client that connects again by itself.
#[test]
fn a_function_that_is_resumed_stays_stopped() {
    let dir = tempfile::tempdir().unwrap();
    slipway_block::create_sparse(&dir.path().join("disk"), MIB).unwrap();
    serve_keeper(dir.path());
    let socket = dir.path().join("cntrl");
    let child = start(dir.path(), "make");
    let function = enabled(&socket);
    function.stop().unwrap();
    let reconnect = || {
        wait_for(|| {
            let stream = UnixStream::connect(&socket).unwrap();
            function.reconnect(stream.into()).ok()
        })
    };
    kill(child);
    let child = start(dir.path(), "first");
    assert_eq!(reconnect(), Continuity::Resumed);
    let state = function.save().unwrap();
    kill(child);
    let child = start(dir.path(), "second");
    assert_eq!(reconnect(), Continuity::Resumed);
    assert_eq!(status(&function) & 1, 1, "it is enabled");
    function.start().unwrap();
    function.load(&state).unwrap();
    kill(child);
    let child = start(dir.path(), "third");
    assert_eq!(reconnect(), Continuity::Resumed);
    assert_eq!(status(&function) & 1, 1);
    drop(function);
    kill(child);
    let child = start(dir.path(), "end");
    kill(child);
    wait_for(|| (!dir.path().join("keeper").exists()).then_some(()));
}
