//! A switch of a process without free descriptor numbers. A test of its own process: the limit is
//! the process's.
#![allow(clippy::unwrap_used)]

mod program;

use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use slipway_reactor::{Reactor, Settings};
use slipway_switch::{AttachError, Handle, Learning, LearningOptions, PortIndex, Switch, spawn};

use program::{program, send};

const PATIENCE: Duration = Duration::from_secs(100);

/// Waits until the switch has taken this many frames from a port. Asking does not wake the port.
fn wait_for(frames: u64, handle: &Handle, port: PortIndex) {
    let taken = || handle.call(move |owner| owner.switch().stats(port).unwrap().frames_in).unwrap();
    let begun = Instant::now();
    while taken() < frames {
        assert!(begun.elapsed() < PATIENCE, "the switch does not hear its port");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a step of the switch has ended, after which a port without frames may sleep.
fn step(handle: &Handle) {
    (0..2).for_each(|_| handle.call(|_| ()).unwrap());
}

#[test]
fn a_port_that_cannot_be_watched_is_refused_or_stays_awake() {
    let settings = Settings { poll_budget: Duration::ZERO, ..Settings::default() };
    let reactor = Reactor::spawn(settings).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let ((first, _, _, config), (new, link, wake, _)) = (program(1), program(1));
    let (other, _, _, other_config) = program(2);
    let port = handle.call(move |owner| owner.attach(first, config)).unwrap().unwrap();
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();

    let refused = handle.call(move |owner| owner.attach(other, other_config)).unwrap();
    assert!(matches!(refused, Err(AttachError::Watch(_))), "{refused:?}");
    let ports = handle.call(|owner| owner.switch().ports().count()).unwrap();
    assert_eq!(ports, 1);

    handle.call(move |owner| drop(owner.replace(port, new).unwrap())).unwrap();
    step(&handle);
    let (_, mut output) = link.peer();
    send(&mut output, &wake);
    wait_for(1, &handle, port);

    setrlimit(Resource::Nofile, limit).unwrap();
    step(&handle);
    send(&mut output, &wake);
    wait_for(2, &handle, port);
    handle.stop();
}
