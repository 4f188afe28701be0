//! Servers that are killed and replaced.

use std::os::fd::AsFd;
use std::time::Duration;

use rustix::io::Errno;
use slipway_vfio_user::testing::{DONE, ID, NOTIFIED};
use slipway_vfio_user_client::{ConnectionState, FunctionError, RemoteFunction};
use slipway_vfio_user_spec::Command;

use crate::common::*;
use crate::liar::{self, Act, Sent};

#[test]
fn an_access_waits_for_the_next_server() {
    let first = Process::start("rung");
    let function = first.connect();
    let (ram, files) = (memory(0x2000), [event(), event(), event(), event()]);
    rustix::io::pwrite(&ram, b"replayed", 0).unwrap();
    function.map_ram(0x4000, 0x2000, ram.as_fd(), 0).unwrap();
    // Vector 1 stays without a route, so that the vectors are no single range.
    function.route(0, &[files[0].as_fd()]).unwrap();
    function.route(2, &[files[2].as_fd(), files[3].as_fd()]).unwrap();
    write_u32(&function, 8, 5);
    let old = function.notifications(0);
    drop(first);
    eventually("the end is seen", || is_readable(&function));
    std::thread::scope(|scope| {
        let waiting: Vec<_> = (0..4).map(|_| scope.spawn(|| read_u32(&function, 0))).collect();
        let writing = scope.spawn(|| function.write(0, 0x10, &9_u32.to_le_bytes()));
        eventually("the end is known", || matches!(function.state(), ConnectionState::Lost(_)));
        assert!(!function.ring(0, 0x1000, 1), "nobody would look");
        let second = Process::start("rung");
        second.take_over(&function);
        for thread in waiting {
            assert_eq!(thread.join().unwrap(), ID);
        }
        writing.join().unwrap().unwrap();
        assert_eq!(function.state(), ConnectionState::Connected);
        assert_eq!(function.connections(), 2);
        assert!(!is_readable(&function));
        let raised: Vec<_> = files[..NOTIFIED].iter().map(count).collect();
        assert_eq!(raised, [1, 0, 1], "an interrupt may have been lost");
        // One for the same reason, and one since the new server is told to look.
        let mut told = 0;
        eventually("the function is told", || {
            told += count(&files[NOTIFIED]);
            told == 2
        });
        assert_eq!((read_u32(&function, 8), read_u32(&function, 0x10)), (0, 9));
        // What the VMM had set is there again.
        assert_eq!(copy(&function, 0x4000, 0x5000, 8), DONE);
        let mut bytes = [0; 8];
        rustix::io::pread(&ram, &mut bytes, 0x1000).unwrap();
        assert_eq!(&bytes, b"replayed");
        assert!(function.ring(0, 0x1000, 3));
        eventually("vector 0 is signalled", || count(&files[0]) == 1);
        // One at a time: the server may see two events as one.
        for register in [&old[0], &function.notifications(0)[0]] {
            assert!(register.event.raise());
            eventually("the function is told", || count(&files[NOTIFIED]) == 1);
        }
    });
}

#[test]
fn what_is_set_meanwhile_is_set_then() {
    let first = Process::start("rung");
    let function = first.connect();
    let ram = memory(0x3000);
    function.map_ram(0, 0x1000, ram.as_fd(), 0).unwrap();
    drop(first);
    eventually("the end is known", || matches!(function.state(), ConnectionState::Lost(_)));
    let told = event();
    function.unmap(0, 0x1000).unwrap();
    function.map_ram(0x1_0000, 0x2000, ram.as_fd(), 0x1000).unwrap();
    function.route(1, &[told.as_fd()]).unwrap();
    let second = Process::start("rung");
    second.take_over(&function);
    assert_eq!(count(&told), 1);
    assert_eq!(copy(&function, 0x1_0000, 0x1_1000, 8), DONE);
    assert_ne!(copy(&function, 0, 0x1_1000, 8), DONE);
    write_u32(&function, 0x58, 1);
    assert_eq!(count(&told), 1);
}

#[test]
fn another_function_is_refused_and_the_same_one_taken() {
    let first = Process::start("rung");
    let function = first.connect();
    drop(first);
    eventually("the end is known", || matches!(function.state(), ConnectionState::Lost(_)));
    let mapped = Process::start("mapped");
    let mut outcome = Ok(());
    eventually("it is another one", || {
        outcome = function.reconnect(connect(&mapped.path)).map(drop);
        matches!(outcome, Err(FunctionError::Different(_)))
    });
    assert!(matches!(function.state(), ConnectionState::Lost(_)));
    let second = Process::start("rung");
    second.take_over(&function);
    assert_eq!(read_u32(&function, 0), ID);
}

#[test]
fn a_living_connection_can_be_replaced() {
    let (first, second) = (Process::start("rung"), Process::start("rung"));
    let function = first.connect();
    second.take_over(&function);
    drop(first);
    assert_eq!(read_u32(&function, 0), ID);
    assert!(!is_readable(&function));
    assert_eq!(function.connections(), 2);
}

#[test]
fn a_function_that_ends_with_its_connection_breaks_with_it() {
    let first = Process::start("only");
    let function = first.connect();
    let told = event();
    function.route(0, &[told.as_fd()]).unwrap();
    let other = Process::start("only");
    let mut outcome = Ok(());
    eventually("it keeps its connection", || {
        outcome = function.reconnect(connect(&other.path)).map(drop);
        outcome == Err(FunctionError::Refused(Errno::BUSY))
    });
    assert_eq!(read_u32(&function, 0), ID);
    drop(first);
    // As long as the function's patience, which is as long as the test's, if it waited.
    eventually("it is broken", || matches!(function.state(), ConnectionState::Broken(_)));
    assert_eq!(read_u32(&function, 0), u32::MAX);
    assert_eq!(count(&told), 1, "a driver that waits for an interrupt looks");
    let outcome = function.reconnect(connect(&other.path));
    assert!(matches!(outcome, Err(FunctionError::Broken(_))), "{outcome:?}");
}

#[test]
fn a_server_that_stays_away_breaks_the_function_for_good() {
    let first = Process::start("rung");
    let patience = Duration::from_millis(300);
    let mut made = None;
    eventually("it is connected", || {
        made = RemoteFunction::new(connect(&first.path), patience).ok();
        made.is_some()
    });
    let function = made.unwrap();
    drop(first);
    assert_eq!(read_u32(&function, 0), u32::MAX);
    assert!(matches!(function.state(), ConnectionState::Broken(_)), "{:?}", function.state());
    assert!(is_readable(&function));
    assert!(matches!(function.write(0, 8, &[0; 4]), Err(FunctionError::Broken(_))));
    assert!(matches!(function.unmap(0, 0x1000), Err(FunctionError::Broken(_))));
    let second = Process::start("rung");
    eventually("it is too late", || {
        let outcome = function.reconnect(connect(&second.path));
        matches!(outcome, Err(FunctionError::Broken(_)))
    });
}

/// A server that ends while it is told of a vector: the function breaks within this very request.
#[test]
fn a_vector_whose_routing_breaks_the_function_is_not_said_to_be_routed() {
    let only = b"\0\0\x01\0{\"capabilities\":{\"slipway_one_connection\":true}}\0";
    let socket = liar::start(|header, _| match Command::from_code(header.command.get()) {
        Some(Command::Version) => Act::Send(liar::reply(header, only)),
        Some(Command::DeviceSetIrqs) => {
            Act::SendAndLeave(Sent { bytes: Vec::new(), files: Vec::new() })
        }
        _ => Act::Honest,
    });
    let function = RemoteFunction::new(socket, PATIENCE).unwrap();
    let told = event();
    let outcome = function.route(0, &[told.as_fd()]);
    assert!(matches!(outcome, Err(FunctionError::Broken(_))), "{outcome:?}");
    assert!(matches!(function.state(), ConnectionState::Broken(_)), "{:?}", function.state());
    assert_eq!(count(&told), 0, "it is none of the vectors that are raised");
}
