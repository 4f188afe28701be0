//! Metrics of the plane's reactors.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use slipway_plane_api::v1;

use super::encoding::{Sum, gauges, seconds_total};

/// Encodes what each reactor serves, and for how long it has had work.
pub(super) fn encode(to: &mut DescriptorEncoder<'_>, reactors: &[v1::Reactor]) -> fmt::Result {
    let numbers: Vec<String> = (0..reactors.len()).map(|number| number.to_string()).collect();
    let all = || numbers.iter().map(|number| [("reactor", number.as_str())]).zip(reactors);
    let help = "Time for which a reactor has had work";
    let busy = all().map(|(label, one)| (label, one.busy_ns));
    seconds_total(to, ("reactor_busy", help), busy)?;
    let present: [Sum<v1::Reactor>; 3] = [
        ("reactor_endpoints", "Endpoints whose messages a reactor serves", |one| one.endpoints),
        ("reactor_lanes", "Lanes of NVMe controllers on a reactor", |one| one.lanes),
        ("reactor_switches", "Switches on a reactor", |one| one.switches),
    ];
    for (name, help, value) in present {
        gauges(to, (name, help, None), all().map(|(label, one)| (label, value(one))))?;
    }
    Ok(())
}
