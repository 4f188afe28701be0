//! A port: its place, and what the interface shows of it (settings, counters, impairment).
//!
//! A new counter of ports is counted by the switch (`slipway_switch::PortStats`). It has a field of
//! `SwitchPort` in `plane.proto`, which [`port`] fills in; a place in `as_json` of the CLI's
//! `port.rs`, which serves `slipway port inspect` and, with `--json`, `port ls` and `port stats`,
//! and in `counter_row` if the table of `port stats` is to show it (the table of `port ls` is
//! `address_row`, without counters); a sum in `encode_ports` of the CLI's `metrics/figures.rs`; and
//! a row in `docs/observe.md`. Tests: those of `backend/switch` for the count,
//! `slipway-plane --test network` for the interface, and those of `metrics/figures.rs`. A new cause
//! of drops needs none of that, since the switch gives causes with their names: see
//! `slipway_switch::Drop`, and the table of causes in `docs/networks.md`.

use std::time::Duration;

use slipway_plane_api::v1;
use slipway_switch::decorators::{Directions, Impairment};
use slipway_switch::{LinkSetting, Owner, PortIndex, VlanMode};

use crate::rate::rate;
use crate::switch::SwitchHandle;

/// A port that was found. It may be removed before it is used.
pub struct FoundPort {
    /// The switch of the port.
    pub switch: SwitchHandle,
    /// The port's number at its switch.
    pub index: PortIndex,
    /// The port's name.
    pub name: String,
}

/// Returns the port's name as the user wrote it.
pub fn port_text(port: Option<&v1::PortReference>) -> String {
    port.map(|port| port.port.clone()).unwrap_or_default()
}

/// Returns a port with its settings and counters, or `None` if there is no such port.
pub fn port(owner: &mut Owner<'_, '_>, index: PortIndex) -> Option<v1::SwitchPort> {
    let switch = owner.switch();
    let config = switch.config(index)?.clone();
    let impairment = switch.impairment(index).map(impairment_of);
    let up = switch.port_mut(index).is_some_and(|port| port.is_up());
    let stats = switch.stats(index)?;
    let named = |(cause, count): (&str, u64)| (cause.to_owned(), count);
    Some(v1::SwitchPort {
        index: index.into(),
        name: config.name,
        mac: config.mac.map(|mac| mac.to_string()).unwrap_or_default(),
        peer_mac: config.peer_mac.map(|mac| mac.to_string()).unwrap_or_default(),
        addresses: config.addresses.iter().map(ToString::to_string).collect(),
        spoof_check: config.spoof_check,
        up: up && config.link != LinkSetting::Down,
        frames_in: stats.frames_in,
        bytes_in: stats.bytes_in,
        frames_out: stats.frames_out,
        bytes_out: stats.bytes_out,
        dropped_in: stats.causes_in().map(named).collect(),
        dropped_out: stats.causes_out().map(named).collect(),
        impairment,
        // The plane has the functions.
        e1000: None,
        socket_path: String::new(),
        trust: config.trust,
        vlan: match config.vlans {
            VlanMode::Access(vlan) => vlan.into(),
            VlanMode::Trunk { .. } => 0,
        },
        link: match config.link {
            LinkSetting::Auto => v1::PortLink::Auto,
            LinkSetting::Up => v1::PortLink::On,
            LinkSetting::Down => v1::PortLink::Off,
        }
        .into(),
        max_rate: config.max_rate.map_or(0, |rate| rate.per_second),
        max_burst: config.max_rate.map_or(0, |rate| rate.burst),
        receive_rate: config.receive_rate.map_or(0, |rate| rate.per_second),
        receive_burst: config.receive_rate.map_or(0, |rate| rate.burst),
    })
}

/// Converts a direction, which is given from the peer's view.
pub fn ways(direction: v1::PortDirection) -> Directions {
    Directions {
        inward: direction != v1::PortDirection::Received,
        outward: direction != v1::PortDirection::Sent,
    }
}

/// Converts an impairment of the interface.
pub fn wanted(wanted: &v1::Impairment) -> Impairment {
    Impairment {
        loss: wanted.loss,
        delay: Duration::from_nanos(wanted.delay_ns),
        jitter: Duration::from_nanos(wanted.jitter_ns),
        rate: rate(wanted.bytes_per_second, wanted.byte_burst),
        queue: wanted.queue,
        ways: ways(wanted.direction()),
        seed: if wanted.seed == 0 { random() } else { wanted.seed },
    }
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // Cannot fail for so few bytes once the system has started.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

/// Converts an impairment for the interface.
pub fn impairment_of(impairment: &Impairment) -> v1::Impairment {
    // The times are at most a minute.
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let direction = match (impairment.ways.inward, impairment.ways.outward) {
        (true, false) => v1::PortDirection::Sent,
        (false, true) => v1::PortDirection::Received,
        _ => v1::PortDirection::Both,
    };
    v1::Impairment {
        loss: impairment.loss,
        delay_ns: nanoseconds(impairment.delay),
        jitter_ns: nanoseconds(impairment.jitter),
        bytes_per_second: impairment.rate.map_or(0, |rate| rate.per_second),
        byte_burst: impairment.rate.map_or(0, |rate| rate.burst),
        queue: impairment.queue,
        direction: direction.into(),
        seed: impairment.seed,
    }
}
