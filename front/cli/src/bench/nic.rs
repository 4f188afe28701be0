//! `slipway bench packet --guests`: measures guests' network interfaces.

use std::rc::Rc;

use anyhow::{Result, ensure};
use slipway_bench::nic::{NicLoad, NicPlan, NicReport, NicSubject, Times, nic_plot, nic_table};

use super::reports::{self, View};
use super::subjects;
use super::vm::{GuestSettings, INTERFACES, Interface, Interfaces, Node};
use crate::args::{MachineArgs, NodeArgs, PacketArgs};
use crate::client::config;

/// The columns of the paper's tables, from a guest to the host and between two guests, and
/// streams to a guest.
const LOADS: [&str; 12] = [
    "udp8-gh",
    "udp1460-gh",
    "tcp1460-gh",
    "tcp16384-gh",
    "rr-gh",
    "tcp1460-hg",
    "tcp16384-hg",
    "udp8-gg",
    "udp1460-gg",
    "tcp1460-gg",
    "tcp16384-gg",
    "rr-gg",
];
/// The loads of a quick run.
const QUICK: [&str; 3] = ["udp8-gh", "tcp1460-gg", "udp18-sg-o20k"];

/// Measures, or shows an earlier report.
pub fn nic(node: &NodeArgs, args: &PacketArgs) -> Result<i32> {
    if args.turns.list {
        let all: Vec<_> = INTERFACES.iter().map(|kind| (kind.name, kind.about)).collect();
        return Ok(subjects::list(&all, &loads(args)?));
    }
    reports::complete(&reports::show(&VIEW, &args.report, || run(node, args))?)
}

/// The view of these reports.
const VIEW: View<NicReport> = View::of(nic_plot, nic_table);

fn loads(args: &PacketArgs) -> Result<Vec<NicLoad>> {
    subjects::parsed(&args.load, if args.quick { &QUICK } else { &LOADS })
}

/// Returns the kinds of interface that the user named, or all that the node has what they need for.
fn kinds(node: &NodeArgs, args: &PacketArgs) -> Result<Vec<Interface>> {
    let only = &args.turns.only;
    let config = config(node)?;
    let mut kinds = Vec::new();
    for kind in subjects::chosen("interface", only, &INTERFACES, |kind| kind.name)? {
        kinds.extend(subjects::able(kind.name, only, kind.check(&config).map(|()| kind))?);
    }
    Ok(kinds)
}

fn run(node: &NodeArgs, args: &PacketArgs) -> Result<NicReport> {
    let (warm_up, time) = args.turns.durations();
    let rounds = if args.quick { 1 } else { args.turns.rounds };
    let plan = NicPlan::new(loads(args)?, rounds);
    let kinds = kinds(node, args)?;
    ensure!(!kinds.is_empty(), "there is nothing to measure");
    let machine = MachineArgs {
        memory: args.memory,
        max_memory: None,
        layers: None,
        cpus: None,
        max_cpus: None,
        free_page_reporting: None,
        kernel: None,
        accel: args.accel.clone(),
    };
    let wishes = GuestSettings {
        image: args.image.as_deref(),
        machine: &machine,
        memory: 0,
        cpus: 1,
        program: "ethtool",
    };
    let node = Rc::new(Node::open(node, &wishes)?);
    let times = Times { warm_up, time };
    let mut subjects: Vec<Box<NicSubject>> = Vec::new();
    for kind in kinds {
        subjects.push(Box::new(Interfaces::new(&node, kind, times, args.guest_cpu)));
    }
    subjects::report(subjects, plan, super::accelerator(args.accel.as_deref()))
}
