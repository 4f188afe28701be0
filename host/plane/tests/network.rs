//! Network functions of a plane: drivers on sockets that reach each other through a switch, also
//! while the plane's process is killed with SIGKILL and restarted. That process is this test
//! program itself, started with the name of a directory in its environment; the keeper is a thread
//! of the test.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

#[path = "common/resumed.rs"]
mod resumed;

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use slipway_fabric::Error as FabricError;
use slipway_keeper::{Keeper, Shelf};
use slipway_plane::{Error, Plane, Settings};
use slipway_plane_api::v1;
use slipway_vfio_user_client::{Client, Registers, SharedRegisters, TestGuest};
use slipway_virtio_net::driver::{AccessError, Arena, Driver, Options, RegisterAccess};
use slipway_virtio_spec::net::Header;

/// The environment variable for the directory of the plane's process.
const DIRECTORY: &str = "SLIPWAY_NETWORK_DIR";
const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 4 << 20;

/// Starts a driver with memory of its own, on the function at `path`.
fn drive(path: &Path) -> Driver<Registers> {
    let guest = TestGuest::new(0, MEMORY).unwrap();
    let registers = wait_for(|| guest.connect(path, PATIENCE).ok());
    Driver::new(registers, Arena::new(guest.memory, 0, MEMORY), Options::default()).unwrap()
}

/// Does what [`drive`] does, for a client that connects again by itself and resumes the function.
fn drive_resumed(path: &Path) -> Driver<SharedRegisters> {
    let guest = TestGuest::new(0, MEMORY).unwrap();
    let function = resumed::connect(path, PATIENCE);
    guest.attach(&function).unwrap();
    let registers = SharedRegisters::new(function, PATIENCE);
    Driver::new(registers, Arena::new(guest.memory, 0, MEMORY), Options::default()).unwrap()
}

fn request(directory: &Path, number: u8, switch: &str) -> v1::CreateEndpointRequest {
    v1::CreateEndpointRequest {
        id: format!("net-{number}"),
        socket_path: directory.join(format!("{number}")).to_string_lossy().into_owned(),
        virtio_net: Some(v1::VirtioNet {
            switch: switch.to_owned(),
            mac: mac(number),
            spoof_check: true,
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn mac(number: u8) -> String {
    format!("02:00:00:00:00:{number:02x}")
}

fn frame(from: u8, to: u8, len: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
    bytes[..6].copy_from_slice(&[2, 0, 0, 0, 0, to]);
    bytes[6..12].copy_from_slice(&[2, 0, 0, 0, 0, from]);
    bytes[12..14].copy_from_slice(&[0x88, 0xb5]);
    bytes
}

/// Sends a frame until it arrives: the switch may not have noticed yet that the other driver is
/// there.
fn cross<A: RegisterAccess>(from: &mut Driver<A>, to: &mut Driver<A>, sent: &[u8]) -> bool {
    arrives(from, to, sent, sent)
}

/// Does what [`cross`] does with a frame that arrives as another one.
fn arrives<A: RegisterAccess>(
    from: &mut Driver<A>,
    to: &mut Driver<A>,
    sent: &[u8],
    expected: &[u8],
) -> bool {
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        from.transmit[0].push(&mut from.arena, &Header::default(), sent, &[]).unwrap();
        from.flush(0).unwrap();
        let soon = Instant::now() + Duration::from_millis(100);
        while Instant::now() < soon {
            match to.receive[0].pop().unwrap() {
                // An earlier frame, sent again by the successor of a process that was killed.
                Some(received) if received.frame != expected => {}
                Some(_) => return true,
                None => {}
            }
        }
    }
    false
}

fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(begun.elapsed() < PATIENCE, "it does not come about");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn plane(reactors: u32) -> (Plane, tempfile::TempDir) {
    let plane = Plane::new(Settings { reactors, ..Default::default() }).unwrap();
    (plane, tempfile::tempdir().unwrap())
}

fn switch(plane: &Plane, name: &str) {
    plane
        .fabric()
        .create_switch(&v1::CreateSwitchRequest { name: name.into(), ..Default::default() })
        .unwrap();
}

#[test]
fn drivers_reach_each_other_and_their_ports_go_with_their_endpoints() {
    for reactors in [1, 2] {
        let (plane, directory) = plane(reactors);
        switch(&plane, "blue");
        for number in 1..=2 {
            plane.create(&request(directory.path(), number, "blue")).unwrap();
        }
        let mut one = drive(&directory.path().join("1"));
        let mut two = drive(&directory.path().join("2"));
        for round in 0..20 {
            assert!(cross(&mut one, &mut two, &frame(1, 2, 60 + round)));
            assert!(cross(&mut two, &mut one, &frame(2, 1, 1000 + round)));
            if round % 5 == 0 {
                // Until the switch sleeps, from which a notification wakes it.
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let ports = &plane.fabric().list_switches()[0].ports;
        assert_eq!(ports.len(), 2);
        assert!(ports.iter().all(|port| port.up && port.frames_in >= 20 && port.frames_out >= 20));
        // Memory is mapped and unmapped under a running function.
        let file = rustix::fs::memfd_create("more", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 8192).unwrap();
        for _ in 0..10 {
            two.registers.client.map(1 << 40, 8192, file.as_fd(), 0, true).unwrap();
            two.registers.client.unmap(1 << 40, 8192).unwrap();
            assert!(cross(&mut one, &mut two, &frame(1, 2, 1500)));
        }
        drop(two);
        plane.remove("net-2").unwrap();
        assert_eq!(plane.fabric().list_switches()[0].ports.len(), 1);
        // The address is free again.
        plane.create(&request(directory.path(), 2, "blue")).unwrap();
        let mut two = drive(&directory.path().join("2"));
        assert!(cross(&mut one, &mut two, &frame(1, 2, 64)));
        one.reset().unwrap();
        one.start().unwrap();
        assert!(cross(&mut two, &mut one, &frame(2, 1, 64)));
    }
}

#[test]
fn functions_with_one_address_for_their_drivers_have_their_own_on_the_switch() {
    let (plane, directory) = plane(1);
    switch(&plane, "blue");
    for number in 1..=2 {
        let mut request = request(directory.path(), number, "blue");
        request.virtio_net.as_mut().unwrap().peer_mac = mac(9);
        plane.create(&request).unwrap();
    }
    plane.create(&request(directory.path(), 3, "blue")).unwrap();
    let [mut one, mut two, mut three] =
        ["1", "2", "3"].map(|number| drive(&directory.path().join(number)));
    for driver in [&mut one, &mut two] {
        assert_eq!(driver.mac().unwrap(), [2, 0, 0, 0, 0, 9]);
    }
    assert!(arrives(&mut one, &mut two, &frame(9, 2, 300), &frame(1, 9, 300)));
    assert!(arrives(&mut two, &mut three, &frame(9, 3, 300), &frame(2, 3, 300)));
    assert!(arrives(&mut three, &mut one, &frame(3, 1, 300), &frame(3, 9, 300)));
    let ports = &plane.fabric().list_switches()[0].ports;
    let macs: Vec<_> = ports.iter().map(|port| (port.mac.clone(), port.peer_mac.clone())).collect();
    assert_eq!(macs, [(mac(1), mac(9)), (mac(2), mac(9)), (mac(3), String::new())]);
    let mut wrong = request(directory.path(), 4, "blue");
    wrong.virtio_net.as_mut().unwrap().peer_mac = "01:00:00:00:00:01".into();
    assert!(plane.create(&wrong).is_err(), "a group's address");
}

/// Registers that count the accesses that the driver waits for.
struct Counted {
    inner: Registers,
    waits: u64,
}

impl RegisterAccess for Counted {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.waits += 1;
        self.inner.read(offset, into)
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.inner.write(offset, from)
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.inner.post(offset, from)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        self.inner.idle()
    }
}

#[test]
fn an_interface_comes_up_with_few_messages_and_fewer_waits() {
    let (plane, directory) = plane(1);
    switch(&plane, "blue");
    plane.create(&request(directory.path(), 1, "blue")).unwrap();
    let messages = || plane.get("net-1").unwrap().counters.unwrap().messages;
    let guest = TestGuest::new(0, MEMORY).unwrap();
    let socket = UnixStream::connect(directory.path().join("1")).unwrap();
    let mut client = Client::negotiate_as_vmm(socket.into(), PATIENCE).unwrap();
    client.map(0, MEMORY, guest.file.as_fd(), 0, true).unwrap();
    let before = messages();
    let registers = Counted { inner: Registers::new(client, PATIENCE), waits: 0 };
    let arena = Arena::new(guest.memory, 0, MEMORY);
    let mut driver = Driver::new(registers, arena, Options::default()).unwrap();
    assert_eq!(driver.mac().unwrap(), [2, 0, 0, 0, 0, 1]);
    // Reads of the status (7), of features (2), of the number of queue pairs and of the address
    // (8). The rest are writes: the last read came after all of them.
    let (messages, waits) = (messages() - before, driver.registers.waits);
    assert!(waits <= 20, "{waits} waits");
    assert!(messages <= 64, "{messages} messages");
}

#[test]
fn what_no_function_can_have_is_one_clear_line_and_leaves_nothing() {
    let (plane, directory) = plane(1);
    let at = |number: u8| request(directory.path(), number, "blue");
    let refuse = |request: &v1::CreateEndpointRequest| -> (Error, PathBuf) {
        let error = plane.create(request).unwrap_err();
        let socket = PathBuf::from(&request.socket_path);
        assert!(!socket.exists(), "{error}");
        (error, socket)
    };
    assert!(matches!(refuse(&at(1)).0, Error::Fabric(FabricError::UnknownSwitch(_))));
    switch(&plane, "blue");
    let with = |change: fn(&mut v1::VirtioNet)| {
        let mut request = at(1);
        change(request.virtio_net.as_mut().unwrap());
        refuse(&request).0
    };
    for change in [
        |net: &mut v1::VirtioNet| net.mac = "2:0".into(),
        |net: &mut v1::VirtioNet| net.mac = "01:00:00:00:00:01".into(),
        |net: &mut v1::VirtioNet| net.mtu = 67,
        |net: &mut v1::VirtioNet| net.mtu = 65_536,
        |net: &mut v1::VirtioNet| net.queue_pairs = 65,
        |net: &mut v1::VirtioNet| net.addresses = vec!["10.0.0.256".into()],
    ] {
        let error = with(change);
        assert!(matches!(error, Error::Invalid(_)), "{error}");
        assert!(!error.to_string().contains('\n'));
    }
    plane.create(&at(1)).unwrap();
    let mut same = at(2);
    same.virtio_net.as_mut().unwrap().mac = mac(1);
    assert!(matches!(refuse(&same).0, Error::Fabric(FabricError::Port(_))));
    assert_eq!((plane.list().len(), plane.fabric().list_switches()[0].ports.len()), (1, 1));
    let limit = v1::LimitEndpointRequest { endpoint_id: "net-1".into(), limits: None };
    assert!(matches!(plane.limit(&limit), Err(Error::Network(_))));
}

#[test]
fn settings_of_a_port_change_under_its_driver() {
    let (plane, directory) = plane(1);
    switch(&plane, "blue");
    for number in 1..=2 {
        plane.create(&request(directory.path(), number, "blue")).unwrap();
    }
    let mut one = drive(&directory.path().join("1"));
    let mut two = drive(&directory.path().join("2"));
    assert!(cross(&mut one, &mut two, &frame(1, 2, 64)));
    let at = |switch: &str, port: &str| v1::SetPortRequest {
        port: Some(v1::PortReference { switch: switch.into(), port: port.into() }),
        ..Default::default()
    };
    let of = |port: &str| at("blue", port);
    let link = |link: v1::PortLink| v1::SetPortRequest { link: Some(link.into()), ..of("net-2") };
    let carrier = |driver: &mut Driver<Registers>, wanted: bool| {
        wait_for(|| (driver.config().unwrap().status.get() & 1 == u16::from(wanted)).then_some(()));
    };
    carrier(&mut two, true);
    assert!(!plane.set_port(&link(v1::PortLink::Off)).unwrap().up);
    carrier(&mut two, false);
    carrier(&mut one, true);
    // Frames for the port, and from it, are dropped and counted.
    let dropped = |port: &v1::SwitchPort| *port.dropped_out.get("down").unwrap_or(&0);
    one.transmit[0].push(&mut one.arena, &Header::default(), &frame(1, 2, 64), &[]).unwrap();
    one.flush(0).unwrap();
    wait_for(|| (dropped(&plane.fabric().list_switches()[0].ports[1]) == 1).then_some(()));
    assert!(plane.set_port(&link(v1::PortLink::Auto)).unwrap().up);
    carrier(&mut two, true);
    assert!(cross(&mut one, &mut two, &frame(1, 2, 65)));

    let vlan = |port, vlan| v1::SetPortRequest { vlan: Some(vlan), ..of(port) };
    assert_eq!(plane.set_port(&vlan("net-1", 7)).unwrap().vlan, 7);
    plane.set_port(&vlan("net-2", 7)).unwrap();
    assert!(cross(&mut one, &mut two, &frame(1, 2, 66)));
    use v1::set_port_request::{Rate, Receiving};
    let rate = |rate| v1::SetPortRequest { rate: Some(rate), ..of("net-1") };
    let port = plane.set_port(&rate(Rate::MaxRate(1_000_000))).unwrap();
    assert_eq!(
        (port.max_rate, port.vlan, port.spoof_check, port.trust),
        (1_000_000, 7, true, false)
    );
    assert!(cross(&mut one, &mut two, &frame(1, 2, 67)));
    assert_eq!(plane.set_port(&rate(Rate::AnyRate(true))).unwrap().max_rate, 0);
    let receiving = |rate| v1::SetPortRequest { receiving: Some(rate), ..of("net-1") };
    let port = plane.set_port(&receiving(Receiving::ReceiveRate(2_000_000))).unwrap();
    assert_eq!((port.max_rate, port.receive_rate, port.receive_burst), (0, 2_000_000, 0));
    assert!(cross(&mut two, &mut one, &frame(2, 1, 67)));
    let port = plane.set_port(&receiving(Receiving::AnyReceiveRate(true))).unwrap();
    assert_eq!(port.receive_rate, 0);
    let off = v1::SetPortRequest { spoof_check: Some(false), trust: Some(true), ..of("net-1") };
    let port = plane.set_port(&off).unwrap();
    assert_eq!((port.spoof_check, port.trust), (false, true));
    assert!(cross(&mut one, &mut two, &frame(9, 2, 68)));

    let none = receiving(Receiving::ReceiveRate(0));
    for bad in [rate(Rate::MaxRate(0)), none, vlan("net-1", 4095), vlan("net-1", 65_536 + 7)] {
        let error = plane.set_port(&bad).unwrap_err();
        assert!(
            matches!(error, Error::Fabric(FabricError::Port(_)))
                && !error.to_string().contains('\n'),
            "{error}"
        );
    }
    assert!(matches!(
        plane.set_port(&of("net-3")),
        Err(Error::Fabric(FabricError::UnknownPort(_)))
    ));
    assert!(matches!(
        plane.set_port(&at("red", "net-1")),
        Err(Error::Fabric(FabricError::UnknownSwitch(_)))
    ));
    assert_eq!(plane.fabric().list_switches()[0].ports[0].vlan, 7);
    // A removed switch takes the carrier away.
    plane.set_port(&link(v1::PortLink::On)).unwrap();
    plane.remove_switch("blue").unwrap();
    carrier(&mut one, false);
    carrier(&mut two, true);
}

/// A receive rate that limits nothing, in bytes per second.
const RATE: u64 = 1_000_000_000_000;

/// Not a test of its own, but the code of the plane's process. It does nothing without the variable
/// in the environment.
#[test]
fn the_planes_process() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let directory = PathBuf::from(directory);
    let keeper = wait_for(|| Keeper::connect(&directory.join("keeper")).ok());
    let settings = Settings::default();
    let plane = Plane::with_keeper(settings, keeper, &directory.join("witness")).unwrap();
    // If it was killed in between, the predecessor made one of them or both.
    let there = plane.list().len();
    switch(&plane, "blue");
    for number in 1..=2 {
        match plane.create(&request(&directory, number, "blue")) {
            Ok(_) | Err(Error::Exists(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }
    let mut ports: Vec<_> = plane.fabric().list_switches()[0]
        .ports
        .iter()
        .map(|port| (port.name.clone(), port.mac.clone()))
        .collect();
    ports.sort();
    assert_eq!(ports, [("net-1".to_owned(), mac(1)), ("net-2".to_owned(), mac(2))], "{there}");
    // Settings that a predecessor changed are kept.
    let (port, changed) = ("net-1".to_owned(), directory.join("changed"));
    if changed.exists() {
        let ports = plane.fabric().list_switches().remove(0).ports;
        let is_kept = |one: &v1::SwitchPort| {
            let changed = one.name == port;
            one.trust == changed && (one.receive_rate == RATE) == changed
        };
        assert!(ports.iter().all(is_kept), "{ports:?}");
    } else {
        let trust = Some(true);
        let port = Some(v1::PortReference { switch: "blue".into(), port });
        let receiving = Some(v1::set_port_request::Receiving::ReceiveRate(RATE));
        let request = v1::SetPortRequest { port, trust, receiving, ..Default::default() };
        plane.set_port(&request).unwrap();
        std::fs::write(changed, "").unwrap();
    }
    loop {
        std::thread::park();
    }
}

/// Keeps a plane's process running until `ended`. Each process is killed after some time, which
/// counts from `came` on.
fn keep_killing(directory: &Path, came: &AtomicBool, ended: &AtomicBool, kills: &AtomicU64) {
    let mut seed = 7_u64;
    while !ended.load(Ordering::Relaxed) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_planes_process", "--nocapture"]).env(DIRECTORY, directory);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        // Longer each time, so that a slow machine makes progress, too.
        let most = 50_000 * (1 + kills.load(Ordering::Relaxed) / 8);
        let life = Duration::from_micros((seed >> 40) % most);
        let mut begun = None;
        while !ended.load(Ordering::Relaxed) {
            assert!(child.try_wait().unwrap().is_none(), "the plane ended by itself");
            // A process without a client may have left nothing with the keeper, which then ends.
            if came.load(Ordering::Relaxed)
                && begun.get_or_insert_with(Instant::now).elapsed() >= life
            {
                break;
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn killed_at_any_time_its_drivers_see_a_pause_and_nothing_else() {
    killed_at_any_time(drive);
}

/// No keeper holds the drivers' connections: they connect again, and the functions go on.
#[test]
fn killed_at_any_time_it_is_resumed_by_its_drivers() {
    killed_at_any_time(drive_resumed);
}

fn killed_at_any_time<A: RegisterAccess>(drive: fn(&Path) -> Driver<A>) {
    const KILLS: u64 = 25;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keeper");
    std::thread::spawn(move || slipway_keeper::serve(&path).unwrap());
    let (came, ended, kills) = (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(0));
    let outcome = std::thread::scope(|scope| {
        let killing = scope.spawn(|| keep_killing(directory.path(), &came, &ended, &kills));
        let drivers = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let mut one = drive(&directory.path().join("1"));
            let mut two = drive(&directory.path().join("2"));
            came.store(true, Ordering::Relaxed);
            let mut round = 0;
            while kills.load(Ordering::Relaxed) < KILLS {
                round += 1;
                let len = 60 + round % 1400;
                assert!(cross(&mut one, &mut two, &frame(1, 2, len)), "round {round}");
                assert!(cross(&mut two, &mut one, &frame(2, 1, len)), "round {round}");
                if round % 8 == 0 {
                    two.command(0, 1, &[(round / 8 % 2) as u8]).unwrap();
                }
                one.needs_no_reset().unwrap();
                two.needs_no_reset().unwrap();
            }
            round
        }));
        ended.store(true, Ordering::Relaxed);
        killing.join().unwrap();
        drivers
    });
    // Everything that the keeper holds is removed with the test.
    let keeper = Arc::new(Keeper::connect(&directory.path().join("keeper")).unwrap());
    Shelf::new(keeper, 0..slipway_vfio_user::KEPT_SLOTS).clear_all().unwrap();
    let rounds = outcome.unwrap_or_else(|reason| std::panic::resume_unwind(reason));
    assert!(rounds > 0);
    println!("{} kills, {rounds} rounds", kills.load(Ordering::Relaxed));
}
