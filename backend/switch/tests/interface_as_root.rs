//! A port at an interface of the host, whose wire is a TAP port, in a network namespace of the
//! test's own.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::time::{Duration, Instant};

use slipway_netlink::{LinkChange, Netlink};
use slipway_ram::Span;
use slipway_switch::ports::{PacketPort, TapPort};
use slipway_switch::{Burst, Offload, Pick, Port};

/// Sends frames through one port, and returns those of the experimental type that come out of the
/// other.
fn through(from: &mut dyn Port, to: &mut dyn Port, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut burst = Burst::new();
    for frame in frames {
        let span = Span::heap(frame.len());
        span.write(0, frame).unwrap();
        burst.push(&span, 0, frame.len(), Offload::NONE).unwrap();
    }
    let picks: Vec<Pick> = (0..frames.len() as u16).map(|frame| Pick { frame, tci: 0 }).collect();
    let delivered = from.deliver(&burst, &picks);
    assert_eq!(delivered.frames as usize, frames.len(), "{delivered:?}");
    let (mut received, begin) = (Vec::new(), Instant::now());
    while received.len() < frames.len() && begin.elapsed() < Duration::from_secs(100) {
        let mut burst = Burst::new();
        to.take(&mut burst, 256);
        for frame in 0..burst.len() as u16 {
            let pick = Pick { frame, tci: 0 };
            let mut bytes = vec![0; burst.len_of(pick)];
            burst.read(pick).read(&mut bytes).unwrap();
            // The kernel sends frames of its own on a new interface.
            if bytes.windows(2).skip(12).step_by(4).take(2).any(|kind| kind == [0x88, 0xb5]) {
                received.push(bytes);
            }
        }
        to.release();
    }
    received
}

fn frames() -> Vec<Vec<u8>> {
    let frame = |number: usize| {
        let mut frame = vec![2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8];
        match number % 3 {
            0 => frame.extend([0x81, 0, 0x60, 5]),
            1 => frame.extend([0x88, 0xa8, 0x60, 5]),
            _ => {}
        }
        frame.extend([0x88, 0xb5]);
        frame.extend((0..60 + number * 20).map(|at| (at + number) as u8));
        frame
    };
    (0..50).map(frame).collect()
}

#[test]
fn frames_and_their_tags_cross_an_interface_as_root() {
    let thread = std::thread::spawn(|| {
        // SAFETY: unshare(2) takes no pointers; it concerns this thread.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            println!("SKIPPED: frames_and_their_tags_cross_an_interface_as_root: needs root");
            return;
        }
        let mut wire = TapPort::open("wire0").unwrap();
        let mut netlink = Netlink::open().unwrap();
        let link = netlink.link("wire0").unwrap().unwrap();
        netlink.change(link.index, LinkChange { up: Some(true), ..Default::default() }).unwrap();
        let mut interface = PacketPort::open("wire0").unwrap();
        assert_eq!(through(&mut wire, &mut interface, &frames()), frames(), "in");
        assert_eq!(through(&mut interface, &mut wire, &frames()), frames(), "out");
        let error = PacketPort::open("none0").err().unwrap();
        assert!(error.to_string().contains("no network interface none0"), "{error}");
    });
    thread.join().unwrap();
}
