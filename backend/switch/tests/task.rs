//! Tests of a switch on a reactor: ports that are woken, held by their rate, and attended while
//! held.
#![allow(clippy::unwrap_used)]

mod program;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use slipway_ram::Span;
use slipway_reactor::{Reactor, Settings};
use slipway_switch::decorators::{Impairment, Timed};
use slipway_switch::{
    Abilities, Burst, Delivered, Learning, LearningOptions, Offload, Pick, Port, PortConfig, Rate,
    Switch, Waker, spawn,
};

use program::{program, send};

const PATIENCE: Duration = Duration::from_secs(100);

/// A call that a port received.
#[derive(Debug, PartialEq)]
enum PortCall {
    Take,
    Attend,
}

/// A port that has a frame in every turn.
struct Talker {
    asked: Sender<PortCall>,
    waker: Sender<Waker>,
    memory: Span,
}

impl Talker {
    fn new() -> (Box<Self>, Receiver<PortCall>, Receiver<Waker>) {
        let ((asked, was_asked), (waker, gives)) = (channel(), channel());
        let memory = Span::heap(1000);
        memory.write(0, &[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1]).unwrap();
        (Box::new(Self { asked, waker, memory }), was_asked, gives)
    }
}

impl Port for Talker {
    fn abilities(&self) -> Abilities {
        Abilities::ALL
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, burst: &mut Burst, _: usize) -> bool {
        burst.push(&self.memory, 0, 1000, Offload::NONE).unwrap();
        let _ = self.asked.send(PortCall::Take);
        true
    }

    fn release(&mut self) {}

    fn deliver(&mut self, _: &Burst, picks: &[Pick]) -> Delivered {
        Delivered { full: picks.len() as u32, ..Delivered::default() }
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn attached(&mut self, waker: Waker) {
        self.waker.send(waker).unwrap();
    }

    fn attend(&mut self) {
        let _ = self.asked.send(PortCall::Attend);
    }
}

#[test]
fn who_is_held_back_is_attended_when_woken() {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let (port, asked, wakers) = Talker::new();
    // At a byte a second, the first frame passes and is paid for after a quarter of an hour.
    let max_rate = Some(Rate { per_second: 1, burst: 1 });
    let config = PortConfig { max_rate, ..PortConfig::default() };
    let index = handle.call(move |owner| owner.attach(port, config)).unwrap().unwrap();
    let waker = wakers.recv_timeout(PATIENCE).unwrap();
    assert_eq!(asked.recv_timeout(PATIENCE), Ok(PortCall::Take));
    // A wake before the port is held has no effect, so the port is attended when it is held.
    assert_eq!(asked.recv_timeout(PATIENCE), Ok(PortCall::Attend));
    waker.wake();
    assert_eq!(asked.recv_timeout(PATIENCE), Ok(PortCall::Attend));
    let taken = handle.call(move |owner| owner.switch().stats(index).unwrap().frames_in).unwrap();
    assert_eq!(taken, 1);
    let view = handle.call(|owner| owner.inspect(|_| true)).unwrap();
    assert_eq!((view.ports.len(), view.more_ports), (1, 0));
    assert_eq!((view.ports[0].turn.as_str(), view.ports[0].frames_in), ("held", 1));
    let none = handle.call(|owner| owner.inspect(|name| name == "another")).unwrap();
    assert!(none.ports.is_empty());
    // The new rate applies at once.
    let free = PortConfig::default();
    handle.call(move |owner| owner.configure(index, free)).unwrap().unwrap();
    while asked.recv_timeout(PATIENCE).unwrap() != PortCall::Take {}
    handle.stop();
}

/// A port that sleeps in its first turn until it is told to go on.
struct Sleeper {
    told: Receiver<()>,
    slept: bool,
}

impl Port for Sleeper {
    fn abilities(&self) -> Abilities {
        Abilities::ALL
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, _: &mut Burst, _: usize) -> bool {
        if !std::mem::replace(&mut self.slept, true) {
            let _ = self.told.recv();
        }
        false
    }

    fn release(&mut self) {}

    fn deliver(&mut self, _: &Burst, picks: &[Pick]) -> Delivered {
        Delivered { full: picks.len() as u32, ..Delivered::default() }
    }

    fn arm(&mut self) -> bool {
        true
    }

    fn attached(&mut self, _: Waker) {}
}

/// Stands for a switch that sleeps while it copies from pages that a client has taken away.
#[test]
fn a_switch_that_slept_in_a_turn_goes_on_with_all_its_ports() {
    let (stalled, is_stalled) = channel();
    let stalled = std::sync::Mutex::new(stalled);
    let on_stall = std::sync::Arc::new(move |_: &str| {
        stalled.lock().unwrap().send(()).unwrap_or(());
    });
    let reactor = Reactor::spawn(Settings { on_stall, ..Settings::default() }).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let (port, link, wake, config) = program(1);
    let index = handle.call(move |owner| owner.attach(port, config)).unwrap().unwrap();
    let (go_on, told) = channel();
    let sleeper = Box::new(Sleeper { told, slept: false });
    handle.call(move |owner| owner.attach(sleeper, PortConfig::default())).unwrap().unwrap();
    is_stalled.recv_timeout(PATIENCE).unwrap();
    go_on.send(()).unwrap();
    // The switch answers jobs, and a port's descriptor wakes it.
    let taken = |handle: &slipway_switch::Handle| {
        handle.call(move |owner| owner.switch().stats(index).unwrap().frames_in).unwrap()
    };
    assert_eq!(taken(&handle), 0);
    let (_, mut output) = link.peer();
    send(&mut output, &wake);
    let begun = std::time::Instant::now();
    while taken(&handle) == 0 {
        assert!(begun.elapsed() < PATIENCE, "the switch does not hear its port");
        std::thread::sleep(Duration::from_millis(1));
    }
    handle.stop();
}

/// A port with timed work in which no frame waits. It counts how often it is asked for its time.
struct Clocked {
    asked: Arc<AtomicU64>,
    armed: Sender<()>,
}

impl Timed for Clocked {
    fn tick(&mut self, _: Duration) -> bool {
        false
    }

    fn due(&mut self, _: bool) -> Option<Duration> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        None
    }

    fn close(&mut self) {}
}

impl Port for Clocked {
    fn abilities(&self) -> Abilities {
        Abilities::ALL
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, _: &mut Burst, _: usize) -> bool {
        false
    }

    fn release(&mut self) {}

    fn deliver(&mut self, _: &Burst, picks: &[Pick]) -> Delivered {
        Delivered { full: picks.len() as u32, ..Delivered::default() }
    }

    fn arm(&mut self) -> bool {
        let _ = self.armed.send(());
        false
    }

    fn timed(&mut self) -> Option<&mut dyn Timed> {
        Some(self)
    }
}

#[test]
fn a_port_that_a_switch_had_before_it_was_spawned_has_turns_and_can_be_replaced_and_detached() {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let mut switch = Switch::new(Box::new(Learning::new(LearningOptions::default(), 1)));
    let clocked = || {
        let (armed, is_armed) = channel();
        (Box::new(Clocked { asked: Arc::default(), armed }), is_armed)
    };
    let ((port, is_armed), (next, next_is_armed)) = (clocked(), clocked());
    let attached = switch.attach(port, PortConfig::default()).map_err(|(error, _)| error);
    let index = attached.unwrap();
    let handle = spawn(&reactor.handle(), switch).unwrap();
    // A port is armed only after a turn.
    is_armed.recv_timeout(PATIENCE).unwrap();
    handle.call(move |owner| drop(owner.replace(index, next).unwrap())).unwrap();
    next_is_armed.recv_timeout(PATIENCE).unwrap();
    handle.call(move |owner| drop(owner.detach(index).unwrap())).unwrap();
    assert_eq!(handle.call(|owner| owner.switch().ports().count()), Ok(0));
    handle.stop();
}

#[test]
fn a_port_that_had_no_frames_is_armed_at_once() {
    let settings = Settings { poll_budget: 10 * PATIENCE, ..Settings::default() };
    let reactor = Reactor::spawn(settings).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let (armed, is_armed) = channel();
    let port = Box::new(Clocked { asked: Arc::default(), armed });
    handle.call(move |owner| owner.attach(port, PortConfig::default())).unwrap().unwrap();
    is_armed.recv_timeout(PATIENCE).unwrap();
    handle.stop();
}

#[test]
fn a_port_that_the_task_was_not_told_of_can_be_detached() {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let (port, _asked, _wakers) = Talker::new();
    let detached = handle.call(move |owner| {
        let attached = owner.switch().attach(port, PortConfig::default());
        let index = attached.map_err(|(error, _)| error).unwrap();
        owner.detach(index).is_ok()
    });
    assert_eq!(detached, Ok(true));
    handle.stop();
}

#[test]
fn a_port_in_which_nothing_waits_costs_no_step() {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let (asked, (armed, is_armed)) = (Arc::new(AtomicU64::new(0)), channel());
    let port = Box::new(Clocked { asked: Arc::clone(&asked), armed });
    handle.call(move |owner| owner.attach(port, PortConfig::default())).unwrap().unwrap();
    is_armed.recv_timeout(PATIENCE).unwrap();
    // Each call is one step at least: the step of the last one may go on while the next begins.
    let steps = |count: usize| (0..count).for_each(|_| handle.call(|_| ()).unwrap());
    steps(3);
    let before = asked.load(Ordering::Relaxed);
    assert!(before > 0, "it was never asked");
    steps(100);
    assert_eq!(asked.load(Ordering::Relaxed), before);
    handle.stop();
}

#[test]
fn what_waits_for_a_receive_rate_comes_though_nobody_wakes_the_switch() {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let ((a, from, wake, a_config), (b, to, _, b_config)) = (program(1), program(2));
    handle
        .call(move |owner| {
            owner.attach(a, a_config).unwrap();
            let index = owner.attach(b, b_config.clone()).unwrap();
            // A frame of 16 bytes takes 20 ms. The rate is set on a port that is there already.
            let receive_rate = Some(Rate { per_second: 800, burst: 1 });
            owner.configure(index, PortConfig { receive_rate, ..b_config }).unwrap();
        })
        .unwrap();
    let ((_, mut output), (mut input, _)) = (from.peer(), to.peer());
    send(&mut output, &wake);
    send(&mut output, &wake);
    let begin = std::time::Instant::now();
    while input.available(2).unwrap() < 2 && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(input.available(2), Ok(2));
    handle.stop();
}

#[test]
fn what_is_delayed_comes_though_nobody_wakes_the_switch() {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let ((a, from, wake, a_config), (b, to, _, b_config)) = (program(1), program(2));
    let delay = Duration::from_millis(500);
    handle
        .call(move |owner| {
            let (a, b) = (owner.attach(a, a_config).unwrap(), owner.attach(b, b_config).unwrap());
            // A frame waits on its way in, and again on its way out.
            for port in [a, b] {
                let impairment = Impairment { delay, ..Impairment::default() };
                owner.switch().impair(port, Some(impairment)).unwrap();
            }
        })
        .unwrap();
    let (_, mut output) = from.peer();
    let (mut input, _) = to.peer();
    let begin = std::time::Instant::now();
    send(&mut output, &wake);
    // Nothing else wakes the switch after that.
    while input.available(1).unwrap() == 0 && begin.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(input.available(1), Ok(1));
    // A turn has one time, that of its beginning: a frame that came during it is early by the
    // difference.
    assert!(begin.elapsed() >= delay, "{:?}", begin.elapsed());
    handle.stop();
}
