//! A switch on a reactor: ports that are woken, held back by their rate, and attended all the same.
#![allow(clippy::unwrap_used)]

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use slipway_ram::Span;
use slipway_reactor::{Reactor, Settings};
use slipway_switch::{
    Abilities, Burst, Delivered, Learning, LearningOptions, Offload, Pick, Port, PortConfig, Rate,
    Switch, Waker, spawn,
};

const PATIENCE: Duration = Duration::from_secs(20);

/// What a port was asked to do.
#[derive(Debug, PartialEq)]
enum Asked {
    Take,
    Attend,
}

/// Has a frame in every turn.
struct Talker {
    asked: Sender<Asked>,
    waker: Sender<Waker>,
    memory: Span,
}

impl Talker {
    fn new() -> (Box<Self>, Receiver<Asked>, Receiver<Waker>) {
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
        let _ = self.asked.send(Asked::Take);
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
        let _ = self.asked.send(Asked::Attend);
    }
}

#[test]
fn who_is_held_back_is_attended_when_woken() {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let (port, asked, wakers) = Talker::new();
    // A byte a second: the first frame passes, and is paid for after a quarter of an hour.
    let max_rate = Some(Rate { per_second: 1, burst: 1 });
    let config = PortConfig { max_rate, ..PortConfig::default() };
    let index = handle.call(move |owner| owner.attach(port, config)).unwrap().unwrap();
    let waker = wakers.recv_timeout(PATIENCE).unwrap();
    assert_eq!(asked.recv_timeout(PATIENCE), Ok(Asked::Take));
    // Until its next turn it is not held yet, and a wake is nothing new to it.
    let attended = (0..2000).any(|_| {
        waker.wake();
        asked.recv_timeout(Duration::from_millis(10)).is_ok_and(|asked| asked == Asked::Attend)
    });
    assert!(attended);
    let taken = handle.call(move |owner| owner.switch().stats(index).unwrap().frames_in).unwrap();
    assert_eq!(taken, 1);
    handle.stop();
}
