//! Peers in the kernel: a Linux bridge between two veth pairs, or between two TAP interfaces.

use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use slipway_ram::Span;
use slipway_switch::ports::{PacketPort, TapPort};
use slipway_switch::{Burst, Offload, Pick, Port};

use super::native::frame;
use super::process::{find, in_namespace, run};
use super::{PacketLoad, PacketMeasured, Times};
use crate::block::native::{Cpus, pin};
use crate::measurement::Subject;

/// The most frames that the source passes to the kernel in a call, if there is such a call.
const BATCH: u16 = 32;

/// The interfaces at both ends of the bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// veth pairs, with packet sockets (sendmmsg, recvmmsg) at their far ends.
    Veth,
    /// TAP interfaces: a system call for each frame.
    Tap,
}

/// A Linux bridge in a network namespace of its own. Our own programs send and receive: the kernel
/// forwards on the sender's processor.
pub struct Bridge {
    ends: Ends,
    cpus: Cpus,
    times: Times,
}

impl Bridge {
    /// Returns the subject, or `None` unless this process is root and has `ip` and, for TAP
    /// interfaces, /dev/net/tun.
    pub fn find(cpus: &Cpus, times: Times, ends: Ends) -> Option<Self> {
        let able = rustix::process::geteuid().is_root()
            && find(&["ip"]).is_some()
            && (ends == Ends::Veth || std::path::Path::new("/dev/net/tun").exists());
        able.then(|| Self { ends, cpus: cpus.clone(), times })
    }

    /// Makes the bridge. Returns the ports of the source and of the sink.
    fn make(&self) -> Result<[Box<dyn Port>; 2]> {
        for scope in ["all", "default"] {
            // Fails without IPv6, and then nothing needs to be disabled.
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{scope}/disable_ipv6"), "1");
        }
        ip("link add br0 type bridge mcast_snooping 0")?;
        ip("link set br0 up")?;
        let open = |name: &str| -> Result<Box<dyn Port>> {
            if self.ends == Ends::Tap {
                let port = TapPort::open(name).context("a TAP interface")?;
                ip(&format!("link set {name} master br0 up"))?;
                return Ok(Box::new(port));
            }
            ip(&format!("link add {name} type veth peer name {name}-br"))?;
            ip(&format!("link set {name}-br master br0 up"))?;
            ip(&format!("link set {name} up"))?;
            Ok(Box::new(PacketPort::open(name).context("a packet socket")?))
        };
        Ok([open("source")?, open("sink")?])
    }

    fn carry(&self, load: &PacketLoad) -> Result<PacketMeasured> {
        let Times { warm_up, time } = self.times;
        let [mut source, mut sink] = self.make()?;
        open_path(&mut *source, &mut *sink, load.bytes)?;
        let (received, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let frames = Frames::new(0, 1, load.bytes, BATCH)?;
        let drain = || -> Result<()> {
            pin(&self.cpus.client)?;
            let mut burst = Burst::new();
            while !stop.load(Ordering::Relaxed) {
                received.fetch_add(receive(&mut *sink, &mut burst), Ordering::Relaxed);
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let drained = scope.spawn(drain);
            let measured = pin(&self.cpus.target).map(|()| {
                send_for(&frames, &mut *source, warm_up);
                let before = received.load(Ordering::Relaxed);
                let (sent, elapsed) = send_for(&frames, &mut *source, time);
                let delivered = received.load(Ordering::Relaxed) - before;
                let elapsed_ns = elapsed.as_nanos() as u64;
                PacketMeasured { sent, delivered, elapsed_ns, ..PacketMeasured::default() }
            });
            stop.store(true, Ordering::Relaxed);
            drained.join().map_err(|_| anyhow::anyhow!("the sink's thread panicked"))??;
            measured
        })
    }
}

/// Sends frames from the sink until one arrives at the source: the first ones teach the bridge
/// where the sink is, and show that the path is open.
fn open_path(source: &mut dyn Port, sink: &mut dyn Port, bytes: u32) -> Result<()> {
    let hello = Frames::new(1, 0, bytes, 1)?;
    let until = Instant::now() + Duration::from_secs(10);
    let mut burst = Burst::new();
    loop {
        hello.send(sink);
        if receive(source, &mut burst) > 0 {
            return Ok(());
        }
        anyhow::ensure!(Instant::now() < until, "the bridge forwards nothing");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends frames for `time`. Returns how many the kernel took, and the time until the last one.
fn send_for(frames: &Frames, source: &mut dyn Port, time: Duration) -> (u64, Duration) {
    let (begin, mut sent) = (Instant::now(), 0);
    while begin.elapsed() < time {
        sent += frames.send(source);
    }
    (sent, begin.elapsed())
}

/// Frames that are sent repeatedly.
struct Frames {
    burst: Burst,
    picks: Vec<Pick>,
}

impl Frames {
    fn new(from: u32, to: u32, bytes: u32, count: u16) -> Result<Self> {
        let bytes = frame(from, to, bytes);
        let memory = Span::heap(bytes.len());
        memory.write(0, &bytes)?;
        let mut burst = Burst::new();
        for _ in 0..count {
            burst.push(&memory, 0, bytes.len(), Offload::NONE)?;
        }
        Ok(Self { burst, picks: (0..count).map(|frame| Pick { frame, tci: 0 }).collect() })
    }

    /// Sends the frames. Returns how many the kernel took.
    fn send(&self, port: &mut dyn Port) -> u64 {
        port.deliver(&self.burst, &self.picks).frames.into()
    }
}

/// Counts our frames that have arrived at a port, by their headers.
fn receive(port: &mut dyn Port, burst: &mut Burst) -> u64 {
    burst.clear();
    port.take(burst, BATCH.into());
    let ours = |frame: &usize| burst.head(*frame).get(12..14) == Some(&[0x88, 0xb5]);
    let count = (0..burst.len()).filter(ours).count();
    port.release();
    count as u64
}

fn ip(arguments: &str) -> Result<()> {
    let program = find(&["ip"]).context("`ip` is not installed")?;
    run(Command::new(program).args(arguments.split(' ')))
}

impl Subject for Bridge {
    type Load = PacketLoad;
    type Measured = PacketMeasured;

    fn name(&self) -> &'static str {
        match self.ends {
            Ends::Veth => "bridge-veth",
            Ends::Tap => "bridge-tap",
        }
    }

    fn about(&self) -> String {
        let ends = match self.ends {
            Ends::Veth => "veth pairs, with packet sockets",
            Ends::Tap => "TAP interfaces",
        };
        format!("a Linux bridge between two {ends}; source and bridge share a processor")
    }

    fn takes(&self, load: &PacketLoad) -> bool {
        load.is_plain() && load.bytes <= 1514
    }

    fn run(&mut self, load: &PacketLoad) -> Result<PacketMeasured> {
        in_namespace(|| self.carry(load))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bridges_forward_as_root() {
        let (cpus, ms) = (Cpus::split(1).unwrap(), Duration::from_millis);
        let times = Times { warm_up: ms(10), time: ms(100) };
        for ends in [Ends::Veth, Ends::Tap] {
            let Some(mut bridge) = Bridge::find(&cpus, times, ends) else {
                eprintln!("SKIPPED: bridges_forward_as_root: needs root, ip, /dev/net/tun");
                continue;
            };
            let load: PacketLoad = "64b-p2".parse().unwrap();
            match bridge.run(&load) {
                Ok(measured) => assert!(measured.delivered > 0, "{measured:?}"),
                // Root in a container may lack the right to make namespaces and bridges.
                Err(error) => eprintln!("SKIPPED: bridges_forward_as_root: {error:#}"),
            }
        }
    }
}
