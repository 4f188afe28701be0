//! `slipway bench packet`: measures switches.

use std::time::Duration;

use anyhow::Result;
use slipway_bench::Subject;
use slipway_bench::block::native::Cpus;
use slipway_bench::packet::native::{RawLink, Switched};
use slipway_bench::packet::{
    Bridge, Devices, E1000, Ends, Memif, Mode, OvsDpdk, PacketLoad, PacketMeasured, PacketPlan,
    PacketReport, PacketSubject, Times, packet_plot, packet_table,
};

use super::nic;
use super::packet_target;
use super::reports::{self, View};
use super::subjects;
use crate::args::{NodeArgs, PacketArgs};

/// The subjects to measure, with descriptions.
const SUBJECTS: [(&str, &str); 12] = [
    ("link", "a ring in shared memory without a switch: the floor"),
    ("switch", "Slipway's switch between memory ports, sharing a processor with the source"),
    (
        "virtio-net",
        "two virtio-net functions over vfio-user and the switch on one processor, drivers on \
         another",
    ),
    (Mode::Base.name(), Mode::Base.about()),
    (Mode::Rung.name(), Mode::Rung.about()),
    (Mode::Moderated.name(), Mode::Moderated.about()),
    (Mode::Combining.name(), Mode::Combining.about()),
    (Mode::Block.name(), Mode::Block.about()),
    (
        "memif",
        "a memif link between two of DPDK's testpmd, where that is installed; no switch in it",
    ),
    ("ovs-dpdk", "Open vSwitch with DPDK, where that is installed"),
    ("bridge-veth", "a Linux bridge between two veth pairs, as root"),
    ("bridge-tap", "a Linux bridge between two TAP interfaces, as root"),
];
/// Short and long frames, numbers of ports, and rates of offered frames.
const LOADS: [&str; 18] = [
    "64b-p2",
    "128b-p2",
    "256b-p2",
    "512b-p2",
    "1024b-p2",
    "1500b-p2",
    "64b-p16-r32",
    "64b-p128-r32",
    "64b-p1024-r32",
    "64b-p1024-r1",
    "64b-p2-o1M",
    "64b-p2-o5M",
    "64b-p2-o10M",
    "64b-p2-o20M",
    "64b-p2-w1",
    "64b-p2-o10M-n100k",
    "64b-p2-o20M-n100k",
    "64b-p2-n100k",
];
/// The loads of a quick run.
const QUICK: [&str; 3] = ["64b-p2", "1500b-p2", "64b-p128-r32"];

/// Measures, or shows an earlier report.
pub fn packet(node: &NodeArgs, args: &PacketArgs) -> Result<i32> {
    if args.guests {
        return nic::nic(node, args);
    }
    if args.turns.list {
        return Ok(subjects::list(&SUBJECTS, &loads(args)?));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(args))?)
}

/// The view of these reports.
const VIEW: View<PacketReport> = View::of(packet_plot, packet_table);

fn loads(args: &PacketArgs) -> Result<Vec<PacketLoad>> {
    subjects::parsed(&args.load, if args.quick { &QUICK } else { &LOADS })
}

fn subjects(args: &PacketArgs, times: Times) -> Result<Vec<Box<PacketSubject>>> {
    let only = &args.turns.only;
    let chosen = subjects::chosen("subject", only, &SUBJECTS, |(name, _)| name)?;
    let cpus = Cpus::split(1)?;
    let mut subjects: Vec<Box<PacketSubject>> = Vec::new();
    for (name, _) in chosen {
        let mode = Mode::ALL.into_iter().find(|mode| mode.name() == name);
        if let Some(mode) = mode {
            let serve = Box::new(packet_target::start);
            subjects.push(Box::new(E1000::new(mode, cpus.clone(), times, serve)));
            continue;
        }
        match name {
            "link" => subjects.push(Box::new(RawLink(cpus.clone(), times))),
            "switch" => subjects.push(Box::new(Switched(cpus.clone(), times))),
            "virtio-net" => {
                let serve = Box::new(packet_target::start);
                subjects.push(Box::new(Devices::new(cpus.clone(), times, serve)));
            }
            _ => {
                let (peer, needs) = peer(name, &cpus, times);
                subjects.extend(subjects::able(name, only, peer.ok_or(needs))?);
            }
        }
    }
    Ok(subjects)
}

/// Returns a peer if it can run here, and what it needs.
fn peer(name: &str, cpus: &Cpus, times: Times) -> (Option<Box<PacketSubject>>, &'static str) {
    fn boxed(
        subject: impl Subject<Load = PacketLoad, Measured = PacketMeasured> + 'static,
    ) -> Box<PacketSubject> {
        Box::new(subject)
    }
    match name {
        "memif" => (
            Memif::find(cpus, times).map(boxed),
            "DPDK's testpmd (Debian 12: apt install dpdk-dev) and two processors",
        ),
        "ovs-dpdk" => (
            OvsDpdk::find(cpus, times).map(boxed),
            "root, Open vSwitch with DPDK (Debian: apt install openvswitch-switch-dpdk) and two \
             processors",
        ),
        "bridge-veth" => (Bridge::find(cpus, times, Ends::Veth).map(boxed), "root and `ip`"),
        _ => (Bridge::find(cpus, times, Ends::Tap).map(boxed), "root, `ip` and /dev/net/tun"),
    }
}

fn run(args: &PacketArgs) -> Result<PacketReport> {
    let (warm_up, time) = match args.quick {
        true => (Duration::from_millis(20), Duration::from_millis(200)),
        false => args.turns.durations(),
    };
    let rounds = if args.quick { args.turns.rounds.min(3) } else { args.turns.rounds };
    let times = Times { warm_up, time };
    let plan = PacketPlan::timed(loads(args)?, rounds, times);
    subjects::report(subjects(args, times)?, plan, "none".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_names_the_packages_that_have_its_programs() {
        let cpus = Cpus::split(1).unwrap();
        let times = Times { warm_up: Duration::ZERO, time: Duration::ZERO };
        // Debian 12 has dpdk-testpmd in dpdk-dev, not in dpdk.
        assert!(peer("memif", &cpus, times).1.contains("apt install dpdk-dev)"));
        assert!(peer("ovs-dpdk", &cpus, times).1.contains("openvswitch-switch-dpdk"));
    }
}
