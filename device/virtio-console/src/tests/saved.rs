//! Saved states and successors.

use slipway_pci::{Function, StateError};

use super::rig::{AGENT, CONSOLE, Rig, device, pattern};
use crate::driver::Options;

/// Saves the device, and makes the driver go on with a successor, whose host opens both ports.
fn succeed(rig: &mut Rig) {
    assert!(rig.console().quiesce());
    let state = rig.console().save();
    let (mut successor, sink) = device(&rig.memory);
    successor.restore(&state).unwrap();
    successor.set_host_open(CONSOLE, true);
    successor.set_host_open(AGENT, true);
    *rig.console() = successor;
    rig.sink = sink;
    rig.settle();
}

#[test]
fn a_successor_goes_on_at_the_very_byte() {
    for event_index in [true, false] {
        let mut rig = Rig::new(Options { event_index, ..Options::default() });
        let (mut sent, mut read, mut from_host) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..50 {
            let bytes = pattern(200 + 13 * round);
            rig.driver.send(AGENT, &bytes, 1 + round as u32 % 3).unwrap();
            sent.extend(bytes);
            rig.settle();
            // Parts of chains, and whole ones.
            let mut piece = vec![0; 150 + 29 * round % 400];
            let len = rig.console().port_read(AGENT, &mut piece);
            read.extend(&piece[..len]);
            assert_eq!(rig.console().port_write(AGENT, &pattern(round)), round);
            succeed(&mut rig);
            from_host.extend(rig.driver.receive(AGENT).unwrap());
            rig.driver.fill(AGENT).unwrap();
            if round % 2 == 1 {
                read.extend(rig.read_all(AGENT, 100));
                assert!(read == sent, "round {round}");
            }
        }
        assert_eq!(from_host.len(), 50 * 49 / 2);
        rig.driver.pump().unwrap();
        assert_eq!(rig.driver.ports[1].host_opens, [true], "the guest notices nothing");
        rig.recovers();
    }
}

#[test]
fn a_successor_finishes_what_the_ports_tell() {
    let mut rig = Rig::new(Options::default());
    rig.console().set_host_open(AGENT, false);
    succeed(&mut rig);
    rig.driver.pump().unwrap();
    assert_eq!(rig.driver.ports[1].host_opens, [true, false, true]);
    rig.console().set_host_open(AGENT, false);
    let state = rig.console().save();
    let (mut successor, _) = device(&rig.memory);
    successor.restore(&state).unwrap();
    *rig.console() = successor;
    rig.driver.pump().unwrap();
    assert_eq!(rig.driver.ports[1].host_opens, [true, false, true, false]);
    assert_eq!(
        rig.driver.ports[0].host_opens,
        [true, false],
        "the successor's host has not opened"
    );
}

#[test]
fn states_that_cannot_be_are_refused() {
    let mut rig = Rig::new(Options::default());
    rig.driver.send(AGENT, b"abc", 1).unwrap();
    rig.console().port_read(AGENT, &mut [0; 2]);
    assert!(rig.console().quiesce());
    let state = String::from_utf8(rig.console().save()).unwrap();
    let restore = |state: &str| {
        let (mut console, _) = device(&rig.memory);
        let outcome = console.restore(state.as_bytes());
        let mut status = [1];
        console.read(0, slipway_virtio_spec::pci::common::DEVICE_STATUS, &mut status);
        assert!(outcome.is_ok() || status == [0], "as after a reset");
        outcome
    };
    assert_eq!(restore(&state), Ok(()));
    let unknown = [
        "",
        "{}",
        &state.replace("console\",\"version\":1", "console\",\"version\":2"),
        &state.replace("virtio-console", "virtio-rng"),
        &state.replacen('{', "{\"more\":1,", 1),
        &state.replace("\"Ready\"", "\"Gone\""),
        &state[..state.len() / 2],
    ];
    for bad in unknown {
        assert!(matches!(restore(bad), Err(StateError::Unknown(_))), "{bad}");
    }
    let inconsistent = [
        state.replace("slipway.agent", "other"),
        state.replace("\"is_console\":true", "\"is_console\":false"),
        state.replace("\"size\":8", "\"size\":7"),
        state.replace("\"size\":8", "\"size\":64"),
        state.replace("\"status\":15", "\"status\":7"),
        state.replace("\"status\":15", "\"status\":31"),
        state.replace("\"status\":15", "\"status\":11"),
        state.replace("\"Ready\"", "\"Announced\""),
        state.replace("\"Ready\"", "\"Added\""),
        state.replace("\"resetting\":false", "\"resetting\":true"),
        state.replace("\"config_vector\":65535", "\"config_vector\":99"),
        state.replace("\"driver_features\":4831838210", "\"driver_features\":4831838208"),
        state.replace("\"driver_features\":4831838210", "\"driver_features\":4831838214"),
        state.replace(
            "\"told_open\":true,\"tells_close\":false",
            "\"told_open\":false,\"tells_close\":true",
        ),
    ];
    for bad in inconsistent {
        assert_ne!(bad, state);
        assert!(matches!(restore(&bad), Err(StateError::Inconsistent(_))), "{bad}");
    }
    // More bytes taken than the chain has: the chain is over.
    let state = state.replace("\"taken\":2", &format!("\"taken\":{}", u64::MAX));
    let (mut console, _) = device(&rig.memory);
    console.restore(state.as_bytes()).unwrap();
    *rig.console() = console;
    rig.console().set_host_open(AGENT, true);
    rig.settle();
    rig.driver.send(AGENT, b"next", 1).unwrap();
    assert_eq!(rig.read_all(AGENT, 64), b"next");
}
