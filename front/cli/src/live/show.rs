//! The live objects as text: a line for each object, and tables of its parts below.

use std::fmt::Write;

use slipway_plane::views::{
    EndpointView, PlacedSwitch, PlacedThread, PortView, QueuesView, ReactorView, ThreadView,
};

use super::{Live, Sockets};
use crate::size::show;
use crate::table::table;

/// Formats everything.
pub fn text(live: &Live) -> String {
    let mut parts = Vec::new();
    if !live.reactors.is_empty() {
        parts.push(reactors(&live.reactors));
    }
    parts.extend(live.endpoints.iter().map(endpoint));
    parts.extend(live.switches.iter().map(switch));
    parts.extend(live.sockets.as_ref().map(sockets));
    parts.join("\n")
}

/// Puts `depth` pairs of spaces before each line.
fn indented(text: &str, depth: usize) -> String {
    text.lines().map(|line| format!("{}{line}\n", "  ".repeat(depth))).collect()
}

/// Formats the rows as an indented table, or as nothing if there are none.
fn rows<const N: usize>(header: [&str; N], rows: &[[String; N]], depth: usize) -> String {
    if rows.is_empty() { String::new() } else { indented(&table(header, rows), depth) }
}

/// Formats the number of entries that are not listed, if there are any.
fn more(count: usize, of: &str, depth: usize) -> String {
    if count == 0 { String::new() } else { indented(&format!("and {count} {of} more"), depth) }
}

fn reactors(all: &[ReactorView]) -> String {
    let row = |(number, one): (usize, &ReactorView)| {
        let busy = format!("{:.3} s", one.busy_ns as f64 / 1e9);
        let counts = [one.endpoints, one.lanes, one.switches].map(|count| count.to_string());
        let [endpoints, lanes, switches] = counts;
        [number.to_string(), busy, endpoints, lanes, switches]
    };
    let all: Vec<_> = all.iter().enumerate().map(row).collect();
    table(["REACTOR", "BUSY", "ENDPOINTS", "LANES", "SWITCHES"], &all)
}

fn endpoint(view: &EndpointView) -> String {
    let server = &view.server;
    let client = match server.client_pid {
        Some(pid) => format!(", client process {pid}"),
        None => String::new(),
    };
    let thread = match view.reactor {
        Some(_) if server.private || server.stalls > 0 => "a thread of its own".to_owned(),
        Some(number) => format!("reactor {number}"),
        None => "a thread of its own".to_owned(),
    };
    let mut text =
        format!("endpoint {} ({}): {}{client}\n", view.id, view.kind, server.stage.name());
    let (maps, bytes) = (server.maps, show(server.mapped_bytes));
    let counts = format!("{} messages, {} busy polls", server.messages, server.busy_polls);
    let _ = writeln!(text, "  on {thread}; {maps} DMA maps of {bytes}; {counts}");
    for (number, placed) in view.threads.iter().enumerate() {
        text += &indented(&controller_thread(number, placed), 1);
    }
    text
}

/// Formats a thread of a controller: 0 is the endpoint's own, all others are lanes.
fn controller_thread(number: usize, placed: &PlacedThread) -> String {
    let name = match number {
        0 => "home".to_owned(),
        lane => format!("lane {lane}"),
    };
    let on = format!("{name} on reactor {}", placed.reactor);
    let Some(view) = &placed.view else { return format!("{on}: did not answer in time\n") };
    let held = match view.held_ns {
        None => "no limits".to_owned(),
        Some(0) => "limits let commands start".to_owned(),
        Some(time) => format!("limits hold commands back for {time} ns"),
    };
    let mut text = format!("{on}: {}, {} disk requests, {held}\n", view.mode, view.requests);
    if let Some(own) = &view.controller {
        let _ = writeln!(
            text,
            "  {}, shutdown {}, CC {:#010x}, CSTS {:#010x}, {} admin commands wait",
            own.phase, own.shutdown, own.cc, own.csts, own.waiting_admin
        );
    }
    text + &queues(view)
}

fn queues(view: &ThreadView) -> String {
    let submission = view.submission.iter().map(|queue| {
        let deleting = if queue.deleting { " (ends)" } else { "" };
        [
            format!("{}{deleting}", queue.id),
            queue.completion.to_string(),
            queue.size.to_string(),
            queue.head.to_string(),
            queue.tail.to_string(),
            queue.doorbell.to_string(),
            queue.in_flight.to_string(),
            queue.fetched.to_string(),
        ]
    });
    let completion = view.completion.iter().map(|queue| {
        [
            queue.id.to_string(),
            queue.vector.map_or_else(|| "-".to_owned(), |vector| vector.to_string()),
            queue.size.to_string(),
            queue.head.to_string(),
            queue.tail.to_string(),
            queue.doorbell.to_string(),
            u8::from(queue.phase).to_string(),
            queue.reserved.to_string(),
            queue.posted.to_string(),
        ]
    });
    let header = ["SQ", "CQ", "SIZE", "HEAD", "TAIL", "DOORBELL", "IN FLIGHT", "FETCHED"];
    let mut text = rows(header, &submission.collect::<Vec<_>>(), 1);
    let header =
        ["CQ", "VECTOR", "SIZE", "HEAD", "TAIL", "DOORBELL", "PHASE", "RESERVED", "POSTED"];
    text += &rows(header, &completion.collect::<Vec<_>>(), 1);
    text + &more(view.more_queues, "queues", 1)
}

fn switch(placed: &PlacedSwitch) -> String {
    let mut text = format!("switch {} on reactor {}", placed.name, placed.reactor);
    let Some(view) = &placed.view else { return text + ": did not answer in time\n" };
    text.push('\n');
    let ports: Vec<_> = view.ports.iter().map(port).collect();
    let header = ["PORT", "NAME", "LINK", "TURN", "IN", "OUT", "DROPPED", "WAITING", "FILTER"];
    text += &rows(header, &ports, 1);
    let rings: Vec<_> = view.ports.iter().flat_map(rings).collect();
    text += &rows(["PORT", "RING", "SIZE", "NEXT", "WAITING"], &rings, 1);
    text += &more(view.ports.iter().map(|port| port.queues.more_rings).sum(), "rings", 1);
    text + &more(view.more_ports, "ports", 1)
}

fn port(view: &PortView) -> [String; 9] {
    [
        view.index.to_string(),
        view.name.clone(),
        if view.up { "up" } else { "down" }.to_owned(),
        view.turn.clone(),
        view.frames_in.to_string(),
        view.frames_out.to_string(),
        format!("{}/{}", view.dropped_in, view.dropped_out),
        format!("{}/{}", view.queues.waiting_in, view.queues.waiting_out),
        filter(&view.queues),
    ]
}

/// Formats a receive filter: "all", or what passes of unicast addresses, groups and VLANs.
fn filter(queues: &QueuesView) -> String {
    let Some(filter) = &queues.filter else { return "-".to_owned() };
    let count = |count: Option<usize>| count.map_or_else(|| "all".to_owned(), |n| n.to_string());
    let groups = if filter.all_multicast { None } else { filter.multicast };
    let frames = match filter.promiscuous {
        true => "all".to_owned(),
        false => format!("{} unicast, {} groups", count(filter.unicast), count(groups)),
    };
    match filter.vlans {
        None => frames,
        Some(vlans) => format!("{frames}, {vlans} VLANs"),
    }
}

fn rings(port: &PortView) -> impl Iterator<Item = [String; 5]> {
    port.queues.rings.iter().map(|ring| {
        let numbers = [ring.size, ring.next, ring.waiting].map(|number| number.to_string());
        let [size, next, waiting] = numbers;
        [port.index.to_string(), ring.name.clone(), size, next, waiting]
    })
}

fn sockets(all: &Sockets) -> String {
    let mut text = format!("sockets: {} arenas, {} tickets\n", all.arenas, all.tickets);
    let guests = all.guests.iter().map(|guest| {
        let state = if guest.running { "running" } else { "-" }.to_owned();
        let (streams, listens) = (guest.streams.to_string(), guest.listeners.len().to_string());
        [guest.name.clone(), state, streams, listens, show(guest.sent), show(guest.received)]
    });
    let header = ["GUEST", "STATE", "STREAMS", "LISTENS", "SENT", "RECEIVED"];
    text += &rows(header, &guests.collect::<Vec<_>>(), 1);
    let listeners = all.listeners.iter().map(|one| {
        let waiting = format!("{}/{}", one.waiting, one.backlog);
        [one.address.clone(), one.pid.to_string(), waiting]
    });
    text += &rows(["LISTENS", "PID", "WAITING"], &listeners.collect::<Vec<_>>(), 1);
    let connections = all.connections.iter().map(|one| {
        let in_flight = one.in_flight.map_or_else(|| "-".to_owned(), show);
        [one.from.clone(), one.to.clone(), show(one.sent), show(one.received), in_flight]
    });
    let header = ["FROM", "TO", "SENT", "RECEIVED", "IN FLIGHT"];
    text += &rows(header, &connections.collect::<Vec<_>>(), 1);
    text + &more(all.more, "listeners and connections", 1)
}

#[cfg(test)]
mod tests {
    use slipway_plane::views::{
        CompletionView, ControllerView, FilterView, RingView, ServerView, Stage, SubmissionView,
        SwitchView,
    };

    use super::*;

    fn controller() -> EndpointView {
        let queue =
            SubmissionView { id: 1, completion: 1, size: 64, fetched: 9, ..Default::default() };
        let posted = CompletionView { id: 1, size: 64, vector: Some(1), ..Default::default() };
        let own = ControllerView { phase: "enabled".into(), cc: 0x46_0001, ..Default::default() };
        let thread = ThreadView {
            controller: Some(own),
            mode: "running".into(),
            submission: vec![queue],
            completion: vec![posted],
            more_queues: 3,
            ..Default::default()
        };
        let server =
            ServerView { stage: Stage::Connected, client_pid: Some(7), ..Default::default() };
        EndpointView {
            id: "0a".into(),
            kind: "nvme".into(),
            reactor: Some(0),
            server,
            threads: vec![
                PlacedThread { reactor: 0, view: Some(thread) },
                PlacedThread { reactor: 1, view: None },
            ],
        }
    }

    #[test]
    fn an_endpoint_has_its_threads_and_queues_below() {
        let text = endpoint(&controller());
        for line in [
            "endpoint 0a (nvme): connected, client process 7",
            "  home on reactor 0: running, 0 disk requests, no limits",
            "    SQ  CQ  SIZE  HEAD  TAIL  DOORBELL  IN FLIGHT  FETCHED",
            "    1   1   64    0     0     0         0          9",
            "    and 3 queues more",
            "  lane 1 on reactor 1: did not answer in time",
        ] {
            assert!(text.lines().any(|one| one == line), "no {line:?} in\n{text}");
        }
        assert!(text.contains("CC 0x00460001"), "{text}");
    }

    #[test]
    fn a_switch_has_its_ports_and_their_rings_below() {
        let ring = RingView { name: "rx0".into(), size: 256, next: 5, waiting: 4 };
        let filter = Some(FilterView { multicast: Some(2), ..Default::default() });
        let queues = QueuesView { rings: vec![ring], filter, ..Default::default() };
        let port =
            PortView { name: "0a.net".into(), turn: "armed".into(), queues, ..Default::default() };
        let view = SwitchView { ports: vec![port], more_ports: 1 };
        let text = switch(&PlacedSwitch { name: "blue".into(), reactor: 2, view: Some(view) });
        assert!(text.starts_with("switch blue on reactor 2\n"), "{text}");
        assert!(text.contains("all unicast, 2 groups"), "{text}");
        assert!(text.lines().any(|line| line == "  0     rx0   256   5     4"), "{text}");
        assert!(text.ends_with("  and 1 ports more\n"), "{text}");
    }

    #[test]
    fn nothing_is_an_empty_text() {
        assert_eq!(text(&Live::default()), "");
    }
}
