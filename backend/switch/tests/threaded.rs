//! Ports with a thread of their own, at switches on reactors and alone.
#![allow(clippy::unwrap_used)]

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use slipway_ram::Span;
use slipway_reactor::{Reactor, Settings};
use slipway_ring::{Consumer, Descriptor, Geometry, Link, Producer};
use slipway_switch::ports::{MemoryPort, Tell, ThreadedPort};
use slipway_switch::{
    Abilities, Burst, Delivered, Drop as Cause, Handle, Learning, LearningOptions, LinkSetting,
    Mac, Offload, Pick, Port, PortConfig, PortIndex, PortStats, Switch, spawn,
};

/// A time that no test takes.
const LONG: Duration = Duration::from_secs(60);

/// Returns a frame for all stations, of an experimental type.
fn frame(payload: &[u8]) -> Vec<u8> {
    let head = [&Mac::BROADCAST.0[..], &Mac::local(2).0, &[0x88, 0xb5]];
    [head.concat(), payload.to_vec()].concat()
}

/// Waits until `what` returns a value.
fn until<T>(mut what: impl FnMut() -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        if let Some(done) = what() {
            return done;
        }
        assert!(begin.elapsed() < LONG, "nothing happens");
        std::thread::yield_now();
    }
}

/// A port whose calls the test sees, and holds up.
struct Slow {
    /// The descriptors while it has frames, and while it has none.
    descriptors: [OwnedFd; 2],
    /// Each delivery waits for a message.
    gate: Receiver<()>,
    /// The link settings that were passed.
    links: Sender<LinkSetting>,
    /// The numbers of the frames that it has still to give, up to the second one.
    frames: (u64, u64),
    memory: Span,
}

/// The test's side of a [`Slow`] port.
struct Control {
    open: Sender<()>,
    links: Receiver<LinkSetting>,
}

impl Slow {
    /// Makes a port that gives `frames` frames.
    fn new(frames: u64) -> (Self, Control) {
        let (open, gate) = channel();
        let (tell, links) = channel();
        let descriptors = [1, 0].map(|count| eventfd(count, EventfdFlags::CLOEXEC).unwrap());
        let memory = Span::heap(2048 * 32);
        (
            Self { descriptors, gate, links: tell, frames: (0, frames), memory },
            Control { open, links },
        )
    }
}

impl Port for Slow {
    fn abilities(&self) -> Abilities {
        Abilities::ALL
    }

    fn is_up(&self) -> bool {
        true
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        for slot in 0..limit {
            if self.frames.0 == self.frames.1 {
                return false;
            }
            let frame = frame(&self.frames.0.to_le_bytes());
            self.memory.write(slot * 2048, &frame).unwrap();
            burst.push(&self.memory, slot * 2048, frame.len(), Offload::NONE).unwrap();
            self.frames.0 += 1;
        }
        true
    }

    fn release(&mut self) {}

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        // Without a gate the test has ended.
        let _ = self.gate.recv();
        let bytes = picks.iter().map(|pick| burst.len_of(*pick) as u64).sum();
        Delivered { frames: picks.len() as u32, bytes, ..Delivered::default() }
    }

    fn arm(&mut self) -> bool {
        false
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.descriptors[usize::from(self.frames.0 == self.frames.1)].as_fd())
    }

    fn set_link(&mut self, link: LinkSetting) {
        let _ = self.links.send(link);
    }
}

/// Serves a slow port on a thread. Returns the switch's side, the test's side, and a receiver that
/// is disconnected when the thread has dropped the port.
fn threaded(frames: u64) -> (ThreadedPort, Control, Receiver<()>) {
    let (slow, control) = Slow::new(frames);
    let (port, thread) = ThreadedPort::new(Abilities::ALL).unwrap();
    let (ending, ended) = channel::<()>();
    std::thread::spawn(move || {
        thread.serve(Box::new(slow));
        drop(ending);
    });
    (port, control, ended)
}

/// A program at a memory port, which is this test.
struct Program {
    input: Consumer,
    output: Producer,
    wake: OwnedFd,
}

impl Program {
    fn attach(handle: &Handle) -> Self {
        let link = Link::new(Geometry::default()).unwrap();
        let tell = Tell::new().unwrap();
        let wake = tell.server.try_clone().unwrap();
        attach(handle, MemoryPort::new(&link, tell, Abilities::ALL));
        let (input, output) = link.peer();
        Self { input, output, wake }
    }

    fn send(&mut self, frame: &[u8]) {
        assert!(self.output.free(1).unwrap() > 0);
        self.output.write(0, frame);
        self.output.describe(0, Descriptor::new(frame.len() as u32));
        self.output.publish(1);
        slipway_ring::barrier();
        if self.output.must_tell() {
            rustix::io::write(&self.wake, &1_u64.to_ne_bytes()).unwrap();
        }
    }

    fn receive(&mut self) {
        until(|| (self.input.available(1).unwrap() > 0).then_some(()));
        self.input.release(1);
    }
}

fn attach(handle: &Handle, port: impl Port + 'static) -> PortIndex {
    handle.call(|owner| owner.attach(Box::new(port), PortConfig::default())).unwrap().unwrap()
}

fn stats(handle: &Handle, port: PortIndex) -> PortStats {
    handle.call(move |owner| owner.switch().stats(port).unwrap().clone()).unwrap()
}

/// Starts a switch with a slow port, a program that sends, and one that receives.
fn switch() -> (Reactor, Handle, Program, Program) {
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let table = Learning::new(LearningOptions::default(), 1);
    let handle = spawn(&reactor.handle(), Switch::new(Box::new(table))).unwrap();
    let (sender, neighbour) = (Program::attach(&handle), Program::attach(&handle));
    (reactor, handle, sender, neighbour)
}

#[test]
fn a_port_that_never_returns_holds_nobody_up() {
    let (_reactor, handle, mut sender, mut neighbour) = switch();
    let (port, control, ended) = threaded(0);
    let slow = attach(&handle, port);
    for _ in 0..2000 {
        sender.send(&frame(&[7; 50]));
        neighbour.receive();
    }
    // The port's ring has 512 slots, and the port is at the first frame.
    let counted = stats(&handle, slow);
    assert_eq!((counted.frames_out, counted.dropped_out[Cause::Full as usize]), (0, 1488));
    handle.call(move |owner| drop(owner.detach(slow).unwrap())).unwrap();
    sender.send(&frame(&[7; 50]));
    neighbour.receive();
    assert!(ended.try_recv().is_err_and(|error| error == std::sync::mpsc::TryRecvError::Empty));
    // The thread ends after the frame that it is at.
    control.open.send(()).unwrap();
    assert!(
        ended
            .recv_timeout(LONG)
            .is_err_and(|error| { error == std::sync::mpsc::RecvTimeoutError::Disconnected })
    );
}

#[test]
fn frames_are_counted_when_the_port_has_taken_them() {
    let (_reactor, handle, mut sender, mut neighbour) = switch();
    let (port, control, _ended) = threaded(0);
    let slow = attach(&handle, port);
    let frame = frame(&[7; 50]);
    for count in 1..=100 {
        sender.send(&frame);
        neighbour.receive();
        assert_eq!(stats(&handle, slow).frames_out, count - 1);
        control.open.send(()).unwrap();
        until(|| (stats(&handle, slow).frames_out == count).then_some(()));
    }
    assert_eq!(stats(&handle, slow).bytes_out, 100 * frame.len() as u64);
}

#[test]
fn frames_from_the_peer_wait_with_the_peer() {
    const FRAMES: u64 = 20_000;
    let (mut port, _control, _ended) = threaded(FRAMES);
    let mut burst = Burst::new();
    let mut next = 0_u64;
    while next < FRAMES {
        until(|| {
            burst.clear();
            port.take(&mut burst, slipway_switch::BURST);
            (!burst.is_empty()).then_some(())
        });
        for frame in 0..burst.len() {
            assert_eq!(burst.head(frame)[14..], next.to_le_bytes());
            next += 1;
        }
        port.release();
    }
}

#[test]
fn a_link_setting_reaches_the_port() {
    let (_reactor, handle, ..) = switch();
    let (port, control, _ended) = threaded(0);
    let slow = attach(&handle, port);
    let down = PortConfig { link: LinkSetting::Down, ..PortConfig::default() };
    handle.call(move |owner| owner.configure(slow, down).unwrap()).unwrap();
    assert_eq!(control.links.recv_timeout(LONG), Ok(LinkSetting::Down));
}
