//! Tests that ports which always have frames take no other port's turn. The tests check the order
//! in which ports were asked, and no times.
#![allow(clippy::unwrap_used)]

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use slipway_ram::Span;
use slipway_reactor::{Reactor, Settings};
use slipway_switch::{
    Abilities, BURST, Burst, Delivered, Learning, LearningOptions, Offload, Pick, Port, PortConfig,
    Switch, Waker, spawn,
};

const PATIENCE: Duration = Duration::from_secs(100);
/// The number of ports that flood.
const FLOODS: u8 = 6;
/// The neighbour's name, and the mark that it was woken.
const NEIGHBOUR: u8 = 100;
const WOKEN: u8 = 101;
/// Turns in a step of the switch's task: the switch handles wake-ups between two steps.
const STEP: usize = 4;

/// A port that logs when it is asked for frames.
struct LoggingPort {
    name: u8,
    log: Sender<u8>,
    /// The port gives as many frames as it is asked for, and not one.
    all: bool,
    memory: Span,
    /// Wakes another port once in this many turns.
    wakes: Option<(Arc<OnceLock<Waker>>, u32)>,
    own: Arc<OnceLock<Waker>>,
    turns: u32,
    /// The port has a frame only after it was woken.
    quiet: bool,
}

impl LoggingPort {
    fn new(name: u8, log: &Sender<u8>) -> Self {
        let memory = Span::heap(64);
        memory.write(0, &[2, 0, 0, 0, 0, 200, 2, 0, 0, 0, 0, name]).unwrap();
        let (wakes, own) = (None, Arc::default());
        let all = name != NEIGHBOUR;
        Self { name, log: log.clone(), all, memory, wakes, own, turns: 0, quiet: false }
    }
}

impl Port for LoggingPort {
    fn abilities(&self) -> Abilities {
        Abilities::ALL
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        assert!(limit <= BURST, "a turn is bounded");
        self.turns += 1;
        let _ = self.log.send(self.name);
        if let Some((waker, every)) = &self.wakes
            && self.turns.is_multiple_of(*every)
            && let Some(waker) = waker.get()
        {
            let _ = self.log.send(WOKEN);
            waker.wake();
        }
        if self.quiet {
            return false;
        }
        for _ in 0..if self.all { limit } else { 1 } {
            burst.push(&self.memory, 0, 64, Offload::NONE).unwrap();
        }
        true
    }

    fn release(&mut self) {}

    fn deliver(&mut self, _: &Burst, picks: &[Pick]) -> Delivered {
        // The ports read nothing: every frame finds its destination full.
        Delivered { full: picks.len() as u32, ..Delivered::default() }
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn attached(&mut self, waker: Waker) {
        let _ = self.own.set(waker);
    }
}

/// Returns the first `count` entries of the log.
fn order(ports: Vec<LoggingPort>, log: std::sync::mpsc::Receiver<u8>, count: usize) -> Vec<u8> {
    let settings = Settings { poll_budget: Duration::ZERO, ..Settings::default() };
    let reactor = Reactor::spawn(settings).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let attached = handle.call(move |owner| {
        for port in ports {
            owner.attach(Box::new(port), PortConfig::default()).unwrap();
        }
    });
    attached.unwrap();
    let order = (0..count).map(|_| log.recv_timeout(PATIENCE).unwrap()).collect();
    handle.stop();
    order
}

#[test]
fn a_flood_takes_no_turn_of_a_neighbour() {
    let (log, asked) = channel();
    let floods = (0..FLOODS).map(|name| LoggingPort::new(name, &log));
    let ports = floods.chain([LoggingPort::new(NEIGHBOUR, &log)]).collect();
    let order = order(ports, asked, 2000);
    // Each port has one turn in every round.
    let everybody = usize::from(FLOODS) + 1;
    for round in order.chunks_exact(everybody) {
        let mut names = round.to_vec();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), everybody, "somebody had two turns in {round:?}");
    }
}

#[test]
fn who_is_woken_beside_floods_has_its_turn_soon() {
    let (log, asked) = channel();
    let mut neighbour = LoggingPort::new(NEIGHBOUR, &log);
    neighbour.quiet = true;
    let mut ports: Vec<_> = (0..FLOODS).map(|name| LoggingPort::new(name, &log)).collect();
    ports[0].wakes = Some((Arc::clone(&neighbour.own), 10));
    ports.push(neighbour);
    let order = order(ports, asked, 2000);
    let mut woken = 0;
    for (at, _) in order.iter().enumerate().filter(|(_, what)| **what == WOKEN) {
        // The rest of the step, and a turn of each port.
        let soon = order.iter().skip(at).take(STEP + usize::from(FLOODS) + 2);
        if soon.len() < STEP + usize::from(FLOODS) + 2 {
            break;
        }
        assert!(soon.into_iter().any(|what| *what == NEIGHBOUR), "woken at {at}: {order:?}");
        woken += 1;
    }
    assert!(woken > 10, "{woken}");
}
