use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::Duration;

use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::testing::{DOORBELLS, FAULT, Scratch};
use slipway_vfio_user::{Endpoint, EndpointParts};

use super::dma_map::copy;
use crate::common::*;

#[test]
fn the_next_client_finds_a_fresh_function() {
    let served = serve();
    let mut raw = served.client();
    let guest = memory(0x2000);
    raw.map(0, 0x2000, guest.as_fd()).ok();
    raw.write_u32(0x10, 77);
    drop(raw);
    let mut raw = served.client();
    assert_eq!(raw.read_u32(0x10), 0);
    assert_eq!(copy(&mut raw, 0, 0x1000, 4), FAULT);
    assert_eq!(served.knobs.resets.load(Ordering::SeqCst), 1);
    let stats = served.control.stats();
    assert_eq!(stats.connections, 2);
    assert_eq!(stats.last_disconnect.as_deref(), Some("the peer hung up"));
}

#[test]
fn a_second_client_is_hung_up_on() {
    let served = serve();
    let mut raw = served.client();
    assert!(served.connect().try_reply().is_none());
    assert!(raw.is_alive());
    assert_eq!(served.control.stats().refused, 1);
}

#[test]
fn a_shut_endpoint_refuses_clients_until_it_is_opened() {
    let served = serve_with(|config| config.shut = true);
    let refused = || UnixStream::connect(&served.path).unwrap_err().kind();
    assert_eq!(refused(), ErrorKind::ConnectionRefused);
    served.control.open().unwrap();
    assert!(served.client().is_alive());
    served.control.open().unwrap();
    assert!(served.client().is_alive());
    let stats = served.control.stats();
    assert_eq!((stats.connections, stats.refused), (2, 0));
    served.control.close();
    assert!(served.control.wait_closed(PATIENCE));
    assert_eq!(refused(), ErrorKind::NotFound);
    assert!(served.control.open().is_err());
}

#[test]
fn an_endpoint_that_was_never_open_ends_and_moves_as_others() {
    let other = Reactor::spawn(Settings::default()).unwrap();
    let served = serve_with(|config| config.shut = true);
    served.control.relocate(&other.handle());
    served.control.open().unwrap();
    assert!(served.client().is_alive());
    let served = serve_with(|config| config.shut = true);
    served.control.close();
    assert!(served.control.wait_closed(PATIENCE));
    assert!(!served.path.exists());
    assert!(served.control.open().is_err());
}

/// A launcher is of the server's user, and connects for a VMM of another user.
#[test]
fn the_servers_own_user_connects_for_others() {
    let us = rustix::process::getuid().as_raw();
    for allowed in [us, us + 1] {
        let served = serve_with(|config| config.allowed_uid = Some(allowed));
        assert!(served.client().is_alive());
    }
}

#[test]
fn another_user_is_hung_up_on_as_root() {
    let test = "another_user_is_hung_up_on_as_root";
    if !rustix::process::geteuid().is_root() {
        return println!("SKIPPED: {test}: needs root to act as another user");
    }
    const USER: u32 = 65534;
    for (allowed, answer) in [(USER, "served"), (USER + 1, "hung up on")] {
        let served = serve_with(|config| {
            config.allowed_uid = Some(allowed);
            config.mode = 0o666;
        });
        // The directory of the socket is this user's alone, but not a descriptor of it.
        let socket = std::fs::File::from(
            rustix::fs::open(&served.path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())
                .unwrap(),
        );
        let program = "import socket, struct, sys\n\
             client = socket.socket(socket.AF_UNIX)\n\
             client.connect(f'/proc/self/fd/{sys.argv[1]}')\n\
             try: client.send(struct.pack('<HHIIIHH', 1, 1, 20, 0, 0, 0, 1))\n\
             except BrokenPipeError: pass\n\
             try: print('served' if client.recv(16) else 'hung up on')\n\
             except ConnectionResetError: print('hung up on')";
        let number = std::os::fd::AsRawFd::as_raw_fd(&socket).to_string();
        let mut client = std::process::Command::new("python3");
        client.args(["-c", program, &number]);
        let said = match std::os::unix::process::CommandExt::uid(&mut client, USER).output() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return println!("SKIPPED: {test}: needs python3");
            }
            said => said.unwrap(),
        };
        assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), answer, "{said:?}");
    }
}

#[test]
fn closing_takes_everything_away() {
    let served = serve();
    let mut raw = served.client();
    assert!(served.path.exists() && !served.control.is_closed());
    served.control.close();
    assert!(served.control.wait_closed(PATIENCE));
    assert!(raw.try_reply().is_none());
    assert!(!served.path.exists());
    assert_eq!(std::sync::Arc::strong_count(&served.knobs), 1, "the function is dropped");
    let served = serve();
    served.control.close();
    assert!(served.control.wait_closed(PATIENCE), "without a client too");
}

#[test]
fn closing_over_a_medium_that_does_not_answer_holds_nobody_up() {
    let served = serve_with(|config| config.reply_deadline = Duration::from_millis(30));
    let neighbour = serve_on(served.reactor.clone(), |_| {});
    let mut beside = neighbour.client();
    let used = served.client();
    served.knobs.restless.store(true, Ordering::SeqCst);
    served.knobs.clinging.store(true, Ordering::SeqCst);
    served.control.close();
    drop(used);
    // Long enough for the deadline to pass and for the endpoint to be dropped.
    for _ in 0..50 {
        assert!(beside.call(Command::DeviceReset, &[]).ok().is_empty());
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(!served.control.wait_closed(Duration::ZERO));
    served.knobs.clinging.store(false, Ordering::SeqCst);
    assert!(served.control.wait_closed(PATIENCE));
}

#[test]
fn the_end_of_the_reactor_closes_it() {
    let served = serve();
    drop(served.reactor);
    assert!(served.control.wait_closed(PATIENCE));
    assert!(!served.path.exists());
}

#[test]
fn the_socket_has_its_mode_and_name() {
    let directory = tempfile::tempdir().unwrap();
    let inner = directory.path().join("endpoint");
    let served = serve_with(|config| {
        *config = Config { mode: 0o660, ..Config::in_directory(&inner) };
    });
    assert_eq!(served.path, inner.join("cntrl"));
    let mode = std::fs::metadata(&served.path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    assert!(served.client().is_alive());
    served.control.close();
    assert!(served.control.wait_closed(PATIENCE));
    assert!(!inner.exists(), "the directory was made for it");
}

fn endpoint(config: Config) -> std::io::Result<Endpoint> {
    let mut parts = EndpointParts::new(&config);
    let doorbells = parts.doorbells(DOORBELLS)?;
    let function =
        Scratch::new(parts.memory(), &parts.interrupts(), doorbells, std::sync::Arc::default());
    let reactor = slipway_reactor::Reactor::spawn(slipway_reactor::Settings::default())?;
    Endpoint::new(config, parts, Box::new(function), Vec::new(), &reactor.handle())
}

#[test]
fn a_name_is_taken_only_from_the_dead() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let living = endpoint(Config::at(&path)).unwrap();
    let error = endpoint(Config::at(&path)).err().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    assert!(error.to_string().contains("socket"), "{error}");
    drop(living);
    // A killed server leaves such a socket.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    drop(endpoint(Config::at(&path)).unwrap());
    std::fs::write(&path, "a file").unwrap();
    assert!(endpoint(Config::at(&path)).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"a file");
    assert!(endpoint(Config::at("x".repeat(200))).is_err());
    assert!(endpoint(Config::at("/nonexistent/socket")).is_err());
}

#[test]
fn the_owner_of_the_socket_can_be_set_by_root() {
    if !rustix::process::geteuid().is_root() {
        skipped("the_owner_of_the_socket_can_be_set_by_root", "root");
        return;
    }
    use std::os::unix::fs::MetadataExt;
    let served = serve_with(|config| config.owner = Some((1234, 4321)));
    let found = std::fs::metadata(&served.path).unwrap();
    assert_eq!((found.uid(), found.gid()), (1234, 4321));
}

#[test]
fn a_poke_polls_a_function_that_sleeps() {
    let served = serve();
    let polls = || served.knobs.polls.load(Ordering::SeqCst);
    let poked = || {
        let before = polls();
        served.control.poke();
        eventually("a poll", || polls() > before);
    };
    poked();
    let raw = served.client();
    poked();
    drop(raw);
    eventually("a reset", || served.knobs.resets.load(Ordering::SeqCst) == 1);
    poked();
}
