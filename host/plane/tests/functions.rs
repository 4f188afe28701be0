//! Pools of virtual functions on a plane: real endpoints, driven over their sockets.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

mod common;

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use slipway_nvme::driver::{Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_plane::{Plane, Settings, VfError, VirtualFunctions};
use slipway_plane_api::v1::{self, disk::Kind};
use slipway_plane_api::vf_v1::virtual_functions_server::VirtualFunctions as Calls;
use slipway_plane_api::vf_v1::{self, template};
use slipway_switch::Mac;
use slipway_vf_pool::Owner;
use slipway_vfio_user_client::{Client, sealed_memory};
use slipway_virtio_net::driver as net;
use tonic::Request;

use common::*;

/// The MAC address of an interface's client.
const CLIENT: &str = "02:00:00:00:00:07";

fn nvme(kind: Kind, count: u32) -> vf_v1::Template {
    let disk = Some(v1::Disk { block_size: 0, kind: Some(kind) });
    let kind = Some(template::Kind::Nvme(template::Nvme { disk, layers_bytes: 0 }));
    vf_v1::Template { kind, count, ..Default::default() }
}

/// Makes a pool of one interface on the switch `blue`, which it makes, too.
fn make_nics(plane: &Plane, functions: &VirtualFunctions, pool: &str) {
    let switch = v1::CreateSwitchRequest { name: "blue".into(), ..Default::default() };
    plane.fabric().create_switch(&switch).unwrap();
    let kind = Some(template::Kind::Nic(template::Nic { switch: "blue".into(), mtu: 0 }));
    functions.create(pool, vf_v1::Template { kind, count: 1, ..Default::default() }).unwrap();
}

/// Returns a client with a MAC address, or without one of its own if that is empty.
fn client(mac: &str) -> vf_v1::Client {
    vf_v1::Client { mac: mac.into(), ..Default::default() }
}

/// Begins with the interface behind a socket.
fn interface(socket: &str) -> net::Driver<Registers> {
    let (arena, registers) = connect_driver(Path::new(socket));
    let arena = net::Arena::new(arena.memory().clone(), BASE, MEMORY);
    net::Driver::new(registers, arena, net::Options::default()).unwrap()
}

/// Returns the MAC address that a driver finds.
fn mac(driver: &mut net::Driver<Registers>) -> String {
    Mac(driver.mac().unwrap()).to_string()
}

fn owner(id: &str) -> Owner {
    Owner::new("test", id).unwrap()
}

fn functions(folder: &Path) -> (Plane, VirtualFunctions) {
    let plane = Plane::new(Settings::default()).unwrap();
    let functions = VirtualFunctions::open(plane.clone(), folder, &folder.join("ledger"));
    (plane, functions)
}

/// Returns the pool's VFs by their states.
fn states(functions: &VirtualFunctions, pool: &str) -> Vec<(u32, String)> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let request = Request::new(vf_v1::GetPoolRequest { name: pool.into() });
    let pool = runtime.block_on(Calls::get_pool(functions, request)).unwrap().into_inner();
    pool.vfs.into_iter().map(|vf| (vf.number, vf.state)).collect()
}

/// Takes a VF as soon as one is ready.
fn take(functions: &VirtualFunctions, pool: &str, id: &str) -> vf_v1::Lease {
    take_for(functions, pool, id, None)
}

/// Takes a VF for a client as soon as one is ready.
fn take_for(
    functions: &VirtualFunctions,
    pool: &str,
    id: &str,
    client: Option<vf_v1::Client>,
) -> vf_v1::Lease {
    loop {
        match functions.take(pool, &owner(id), None, client.clone()) {
            Ok(lease) => return lease,
            Err(VfError::Pool(slipway_vf_pool::Error::Empty { counts, .. }))
                if counts.returning > 0 =>
            {
                std::thread::yield_now();
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// Returns the first 4 KiB of the disk behind a socket.
fn first_bytes(driver: &mut Driver<Registers>) -> Vec<u8> {
    let to = driver.arena.allocate(4096).unwrap();
    driver.transfer(1, io(NvmOpcode::Read, 1, 0, 8), (to, 4096)).unwrap();
    let mut bytes = vec![1; 4096];
    driver.arena.memory().read(to, &mut bytes).unwrap();
    bytes
}

fn drive(socket: &str) -> Driver<Registers> {
    let (arena, registers) = connect_driver(Path::new(socket));
    let mut driver = Driver::new(registers, arena, 32).unwrap();
    driver.create_pair(1, 64, Some(1)).unwrap();
    driver
}

/// Has two owners use a VF one after the other, with `kind` as its disk.
fn nothing_is_left_for_the_next_owner(kind: Kind) {
    let folder = tempfile::tempdir().unwrap();
    let (plane, functions) = functions(folder.path());
    functions.create("pool", nvme(kind, 1)).unwrap();
    let lease = take(&functions, "pool", "a");
    assert_eq!((lease.number, &*lease.id), (0, "pool.0"));
    let mut driver = drive(&lease.socket_path);
    round_trip(&mut driver, 1, 0, 8);
    assert!(first_bytes(&mut driver).iter().any(|byte| *byte != 0));
    // The owner goes on to use it: it is cut off.
    assert_eq!(functions.give_back("pool", &owner("a")).unwrap(), 0);
    let next = take(&functions, "pool", "b");
    assert_eq!(next.socket_path, lease.socket_path);
    let endpoint = plane.get("pool.0").unwrap();
    assert_eq!((endpoint.client_pid, endpoint.dma_regions.len()), (0, 0));
    let mut driver = drive(&next.socket_path);
    assert!(first_bytes(&mut driver).iter().all(|byte| *byte == 0), "bytes of the last owner");
}

/// A host has no such function, if it has VFIO at all.
#[test]
fn hardware_that_cannot_be_had_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (plane, functions) = functions(folder.path());
    let addresses = vec!["fffe:fd:1f.7".to_owned()];
    let hardware = template::Hardware { addresses, ..Default::default() };
    let kind = Some(template::Kind::Hardware(hardware));
    let pool = vf_v1::Template { kind, ..Default::default() };
    let refused = functions.create("nics", pool).unwrap_err();
    let VfError::Hardware(why) = &refused else { panic!("{refused}") };
    assert!(why.contains("vfio-pci") || why.contains("no PCI function"), "{why}");
    assert!(!functions.is_in_use() && plane.list().is_empty());
    // The ledger has no template of it either.
    drop(functions);
    let again = VirtualFunctions::open(plane, folder.path(), &folder.path().join("ledger"));
    assert!(!again.is_in_use());
}

/// Asserts that no client is admitted behind the name of a socket.
fn is_refused(socket: &str) {
    let error = UnixStream::connect(socket).unwrap_err();
    let kinds = [ErrorKind::ConnectionRefused, ErrorKind::NotFound];
    assert!(kinds.contains(&error.kind()), "{error}");
}

#[test]
fn an_owner_changes_the_client_of_its_function() {
    let folder = tempfile::tempdir().unwrap();
    let (_plane, functions) = functions(folder.path());
    functions.create("pool", nvme(ram(1 << 20), 1)).unwrap();
    let lease = take(&functions, "pool", "a");
    drop(drive(&lease.socket_path));
    let admit = |id: &str, client| functions.admit("pool", &owner(id), client);
    let again = admit("a", vf_v1::Client::default()).unwrap();
    assert_eq!((again.number, &again.socket_path), (0, &lease.socket_path));
    drop(drive(&again.socket_path));
    let nobodys = admit("b", vf_v1::Client::default());
    assert!(matches!(nobodys, Err(VfError::Pool(slipway_vf_pool::Error::NoLease { .. }))));
    let addressed = vf_v1::Client { mac: "02:00:00:00:00:01".into(), ..Default::default() };
    assert!(matches!(admit("a", addressed), Err(VfError::Invalid(_))));
    functions.give_back("pool", &owner("a")).unwrap();
    assert!(admit("a", vf_v1::Client::default()).is_err());
}

#[test]
fn a_function_admits_clients_while_it_has_an_owner() {
    let folder = tempfile::tempdir().unwrap();
    let (plane, functions) = functions(folder.path());
    functions.create("pool", nvme(ram(1 << 20), 1)).unwrap();
    let is_ready = || states(&functions, "pool")[0].1 == "ready";
    let settle = || {
        while !is_ready() {
            std::thread::yield_now();
        }
    };
    settle();
    let socket = plane.get("pool.0").unwrap().socket_path;
    for id in ["a", "b"] {
        // The socket is there, and nobody waits in its queue either.
        let refused = UnixStream::connect(&socket).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::ConnectionRefused);
        let lease = take(&functions, "pool", id);
        assert_eq!(lease.socket_path, socket);
        let mut driver = drive(&socket);
        assert!(first_bytes(&mut driver).iter().all(|byte| *byte == 0), "bytes of a stranger");
        round_trip(&mut driver, 1, 0, 8);
        drop(driver);
        functions.give_back("pool", &owner(id)).unwrap();
        // Until the reactor has closed the socket, its queue takes connections that are not served.
        while UnixStream::connect(&socket).is_ok() {
            std::thread::yield_now();
        }
        is_refused(&socket);
        settle();
        is_refused(&socket);
    }
}

/// An owner says which client it has: no other memory is taken, and no other address is sent from.
#[test]
fn a_function_is_for_the_client_that_its_owner_said() {
    let folder = tempfile::tempdir().unwrap();
    let (plane, functions) = functions(folder.path());
    make_nics(&plane, &functions, "pool");
    let [ours, other] = [(); 2].map(|()| sealed_memory(MEMORY).unwrap());
    let status = rustix::fs::fstat(&ours).unwrap();
    let (device, inode) = (status.st_dev, status.st_ino);
    let memory = Some(v1::ClientMemory { device, inode, ..Default::default() });
    let client = vf_v1::Client { memory, addresses: vec!["10.0.0.7".into()], ..client(CLIENT) };
    let lease = take_for(&functions, "pool", "a", Some(client));
    assert_eq!((&*lease.switch, lease.mtu, &*lease.mac), ("blue", 0, CLIENT));
    let port = || plane.fabric().list_switches().remove(0).ports.remove(0);
    assert_eq!(port().mac, CLIENT);
    assert_eq!(port().addresses, ["10.0.0.7"]);
    let mut client = Client::connect(Path::new(&lease.socket_path), PATIENCE).unwrap();
    assert!(client.map(BASE, MEMORY, other.as_fd(), 0, true).is_err());
    client.map(BASE, MEMORY, ours.as_fd(), 0, true).unwrap();
    // The next owner has said nothing: it gets what the template says.
    functions.give_back("pool", &owner("a")).unwrap();
    let next = take(&functions, "pool", "b");
    assert_ne!(next.mac, lease.mac);
    assert_eq!((port().mac, port().addresses.len()), (next.mac, 0));
    let mut client = Client::connect(Path::new(&next.socket_path), PATIENCE).unwrap();
    client.map(BASE, MEMORY, other.as_fd(), 0, true).unwrap();
}

/// A driver sets no MAC address by a command: it has that of its owner's client when it begins.
#[test]
fn an_interface_has_the_address_of_its_client_before_its_driver_begins() {
    let folder = tempfile::tempdir().unwrap();
    let (plane, functions) = functions(folder.path());
    make_nics(&plane, &functions, "pool");
    let found = |socket: &str| mac(&mut interface(socket));
    let lease = take_for(&functions, "pool", "a", Some(client(CLIENT)));
    assert_eq!((found(&lease.socket_path), &*lease.mac), (lease.mac.clone(), CLIENT));
    // The owner lets another client in, which has the function after the first one.
    let other = functions.admit("pool", &owner("a"), client("02:00:00:00:00:08")).unwrap();
    assert_eq!((found(&other.socket_path), &*other.mac), (other.mac.clone(), "02:00:00:00:00:08"));
    let slow = vf_v1::Client { max_rate: 1 << 20, ..Default::default() };
    assert_eq!(functions.admit("pool", &owner("a"), slow).unwrap().mac, other.mac);
    assert_eq!(plane.fabric().list_switches().remove(0).ports.remove(0).max_rate, 1 << 20);
    // Nothing of it is left for the next owner.
    functions.give_back("pool", &owner("a")).unwrap();
    let next = take(&functions, "pool", "b");
    assert_eq!(found(&next.socket_path), next.mac);
    assert_ne!(next.mac, other.mac);
}

/// An owner that never connects leaves a function that is not open to clients.
#[test]
fn a_function_that_was_taken_and_not_used_is_shut_again() {
    let folder = tempfile::tempdir().unwrap();
    let (_plane, functions) = functions(folder.path());
    functions.create("pool", nvme(ram(1 << 20), 1)).unwrap();
    let lease = take(&functions, "pool", "a");
    functions.give_back("pool", &owner("a")).unwrap();
    while states(&functions, "pool")[0].1 != "ready" {
        std::thread::yield_now();
    }
    is_refused(&lease.socket_path);
    let lease = take(&functions, "pool", "b");
    drive(&lease.socket_path);
}

#[test]
fn memory_is_zeros_for_the_next_owner() {
    nothing_is_left_for_the_next_owner(ram(1 << 20));
}

#[test]
fn an_overlay_is_empty_for_the_next_owner() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let base_path = file.path().to_string_lossy().into_owned();
    nothing_is_left_for_the_next_owner(Kind::Overlay(v1::OverlayDisk {
        base_path,
        limit_bytes: 0,
    }));
}

#[test]
fn pools_and_owners_outlive_the_process_as_far_as_their_functions_do() {
    let folder = tempfile::tempdir().unwrap();
    let drained = {
        let (_plane, functions) = functions(folder.path());
        functions.create("pool", nvme(ram(1 << 20), 3)).unwrap();
        // Which one is ready first is a matter of chance.
        let drained = (take(&functions, "pool", "a").number + 1) % 3;
        let request = vf_v1::DrainRequest { pool: "pool".into(), number: Some(drained) };
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(Calls::drain(&functions, Request::new(request))).unwrap();
        while states(&functions, "pool")[drained as usize].1 != "drained" {
            std::thread::yield_now();
        }
        drained
    };
    // The pool's threads let go of the ledger when they end.
    let ledger = folder.path().join("ledger");
    while slipway_vf_pool::Ledger::open(&ledger).is_err() {
        std::thread::yield_now();
    }
    // The next plane has none of the endpoints: nothing outlived the first one.
    let (_plane, functions) = functions(folder.path());
    let words = |functions: &VirtualFunctions| -> Vec<String> {
        states(functions, "pool").into_iter().map(|(_, word)| word).collect()
    };
    let mut expected = ["ready"; 3];
    expected[drained as usize] = "drained";
    while words(&functions) != expected {
        std::thread::yield_now();
    }
    assert!(functions.give_back("pool", &owner("a")).is_err());
}

#[test]
fn owners_that_are_gone_return_their_functions() {
    let folder = tempfile::tempdir().unwrap();
    let (_plane, functions) = functions(folder.path());
    functions.create("pool", nvme(ram(1 << 20), 2)).unwrap();
    let gone = take(&functions, "pool", "gone");
    take(&functions, "pool", "here");
    assert_eq!(functions.reconcile("other", &[]), Vec::<String>::new());
    assert_eq!(functions.reconcile("test", &["here".into()]), [gone.id]);
    let error = functions.remove("pool").unwrap_err().to_string();
    assert_eq!(error, "pool pool cannot be removed: owners have 1 of its VFs");
    functions.give_back("pool", &owner("here")).unwrap();
    functions.remove("pool").unwrap();
    assert!(!functions.is_in_use());
    assert!(matches!(functions.remove("pool"), Err(VfError::Unknown(_))));
}

#[test]
fn a_pool_that_cannot_be_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (plane, functions) = functions(folder.path());
    let bad = nvme(Kind::Null(v1::NullDisk { size_bytes: 1 << 20 }), 1);
    assert!(matches!(functions.create("pool", bad), Err(VfError::Invalid(_))));
    functions.create("pool", nvme(ram(1 << 20), 1)).unwrap();
    let again = functions.create("pool", nvme(ram(1 << 20), 1));
    assert!(matches!(again, Err(VfError::Exists(_))));
    take(&functions, "pool", "a");
    functions.give_back("pool", &owner("a")).unwrap();
    functions.remove("pool").unwrap();
    assert!(plane.list().is_empty());
    let left = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut left: Vec<_> = left.collect();
    left.sort();
    assert_eq!(left, ["ledger", "ledger.lock"]);
}

#[test]
fn a_damaged_ledger_is_said_until_it_is_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("ledger"), "half").unwrap();
    let (_plane, functions) = functions(folder.path());
    let error = functions.create("pool", nvme(ram(1 << 20), 1)).unwrap_err().to_string();
    assert!(error.contains("is damaged") && error.contains("slipway vf rebuild"), "{error}");
    let aside = functions.rebuild().unwrap();
    assert_eq!(std::fs::read(aside).unwrap(), b"half");
    assert!(matches!(functions.rebuild(), Err(VfError::Whole(_))));
    functions.create("pool", nvme(ram(1 << 20), 1)).unwrap();
    take(&functions, "pool", "a");
}

/// The environment variable for the directory of the daemon's process.
const DIRECTORY: &str = "SLIPWAY_FUNCTIONS_DIR";
/// The file that the daemon's process creates when it serves.
const SERVING: &str = "serving";

/// Not a test of its own, but the code of the daemon's process. It does nothing without its
/// directory in the environment. It has a pool of two, one with an owner, and one of an interface.
#[test]
fn the_daemons_process() {
    let Ok(dir) = std::env::var(DIRECTORY) else { return };
    let dir = Path::new(&dir);
    let keeper = loop {
        match slipway_keeper::Keeper::connect(&dir.join("keeper")) {
            Ok(keeper) => break keeper,
            Err(_) => std::thread::yield_now(),
        }
    };
    let plane = Plane::with_keeper(Settings::default(), keeper, &dir.join("witness")).unwrap();
    let functions = VirtualFunctions::open(plane.clone(), dir, &dir.join("ledger"));
    if !functions.is_in_use() {
        functions.create("pool", nvme(ram(1 << 20), 2)).unwrap();
        take(&functions, "pool", "a");
        make_nics(&plane, &functions, "nics");
        take_for(&functions, "nics", "a", Some(client(CLIENT)));
    }
    let words = || -> Vec<_> {
        let mut words: Vec<_> = states(&functions, "pool").into_iter().map(|one| one.1).collect();
        words.sort();
        words
    };
    while words() != ["ready", "taken"] {
        std::thread::yield_now();
    }
    let (taken, _) = states(&functions, "pool").into_iter().find(|one| one.1 == "taken").unwrap();
    std::fs::write(dir.join("number"), taken.to_string()).unwrap();
    let lease = loop {
        match functions.admit("nics", &owner("a"), client("")) {
            Ok(lease) => break lease,
            Err(VfError::Pool(slipway_vf_pool::Error::Adopting { .. })) => std::thread::yield_now(),
            Err(other) => panic!("{other}"),
        }
    };
    let port = plane.fabric().list_switches().remove(0).ports.remove(0);
    std::fs::write(dir.join("addresses"), [lease.mac, port.mac].join(" ")).unwrap();
    std::fs::write(dir.join(SERVING), "").unwrap();
    loop {
        std::thread::park();
    }
}

/// A daemon's process, which is killed when this is dropped.
struct Daemon(std::process::Child);

impl Daemon {
    /// Starts it. Returns it with the number of the function that is taken.
    fn start(dir: &Path) -> (Self, u32) {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "the_daemons_process", "--nocapture"]).env(DIRECTORY, dir);
        let mut daemon = Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap());
        while !dir.join(SERVING).exists() {
            assert!(daemon.0.try_wait().unwrap().is_none(), "the daemon has ended");
            std::thread::yield_now();
        }
        std::fs::remove_file(dir.join(SERVING)).unwrap();
        let number = std::fs::read_to_string(dir.join("number")).unwrap();
        (daemon, number.parse().unwrap())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_ready_function_is_shut_over_a_restart_and_a_taken_one_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keeper");
    std::thread::spawn(move || slipway_keeper::serve(&path).unwrap());
    let (daemon, taken) = Daemon::start(folder.path());
    let socket = |number: u32| folder.path().join(format!("pool.{number}")).display().to_string();
    let (mine, other) = (socket(taken), socket(1 - taken));
    let mut driver = drive(&mine);
    round_trip(&mut driver, 1, 0, 8);
    is_refused(&other);
    drop(daemon);
    // The keeper has the sockets: clients of the function that is taken wait, and only those.
    is_refused(&other);
    let (_daemon, still) = Daemon::start(folder.path());
    assert_eq!(still, taken);
    is_refused(&other);
    assert!(first_bytes(&mut driver).iter().any(|byte| *byte != 0));
    drop(driver);
    let mut driver = drive(&mine);
    assert!(first_bytes(&mut driver).iter().any(|byte| *byte != 0));
}

/// The port checks the addresses of frames: it has that of the client, as the driver has.
#[test]
fn an_interface_keeps_the_address_of_its_client_over_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("keeper");
    std::thread::spawn(move || slipway_keeper::serve(&path).unwrap());
    let (daemon, _) = Daemon::start(folder.path());
    let socket = folder.path().join("nics.0").display().to_string();
    let addresses = || std::fs::read_to_string(folder.path().join("addresses")).unwrap();
    let mut driver = interface(&socket);
    let expected = ([CLIENT; 2].join(" "), CLIENT.to_owned());
    assert_eq!((addresses(), mac(&mut driver)), expected);
    drop(daemon);
    let (_daemon, _) = Daemon::start(folder.path());
    assert_eq!((addresses(), mac(&mut driver)), expected);
    drop(driver);
    assert_eq!(mac(&mut interface(&socket)), CLIENT);
}
