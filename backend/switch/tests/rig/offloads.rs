//! Tests of frames whose checksum and segmentation were left to the switch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use slipway_ring::{Descriptor, Segmentation};
use slipway_switch::ports::MemoryPort;
use slipway_switch::{Abilities, BURST, Burst, Delivered, Pick, Port, PortConfig, Rate, VlanMode};

use super::Rig;

/// Returns the folded Internet checksum of all bytes; 0 if they contain a right checksum.
fn sum(bytes: &[u8], pseudo: u32) -> u16 {
    let words = bytes.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
    let mut sum = words.sum::<u32>() + pseudo;
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    !(sum as u16)
}

/// A TCP or UDP segment over IPv4 or IPv6 whose checksum field holds the pseudo header's sum.
struct Segment {
    frame: Vec<u8>,
    ipv6: bool,
    tcp: bool,
    transport: usize,
    payload_at: usize,
}

fn segment(ipv6: bool, tcp: bool, payload: usize) -> Segment {
    let mut frame = super::untagged(1, 2, &[]);
    frame[12..14].copy_from_slice(&if ipv6 { [0x86, 0xdd] } else { [8, 0] });
    let header = if tcp { 32 } else { 8 };
    let protocol = if tcp { 6 } else { 17 };
    let above = (header + payload) as u16;
    if ipv6 {
        let mut ip = vec![0; 40];
        ip[0] = 0x60;
        ip[4..6].copy_from_slice(&above.to_be_bytes());
        (ip[6], ip[7], ip[23], ip[39]) = (protocol, 64, 1, 2);
        frame.extend(ip);
    } else {
        let mut ip =
            vec![0x45, 0, 0, 0, 0xff, 0xfe, 0x40, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        ip[2..4].copy_from_slice(&(20 + above).to_be_bytes());
        let checksum = sum(&ip, 0);
        ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        frame.extend(ip);
    }
    let transport = frame.len();
    let mut header = vec![0; header];
    header[..4].copy_from_slice(&[0x12, 0x34, 0, 80]);
    if tcp {
        header[4..8].copy_from_slice(&0xffff_ff00_u32.to_be_bytes());
        (header[12], header[13]) = (0x80, 0x80 | 0x10 | 8 | 1);
    } else {
        header[4..6].copy_from_slice(&above.to_be_bytes());
    }
    let place = if tcp { 16 } else { 6 };
    let start = !pseudo(&frame, ipv6, tcp, transport, above);
    header[place..place + 2].copy_from_slice(&(!start).to_be_bytes());
    frame.extend(header);
    let payload_at = frame.len();
    frame.extend((0..payload).map(|at| (at * 7 + at / 251) as u8));
    Segment { frame, ipv6, tcp, transport, payload_at }
}

fn pseudo(frame: &[u8], ipv6: bool, tcp: bool, transport: usize, above: u16) -> u16 {
    let addresses =
        if ipv6 { &frame[transport - 32..transport] } else { &frame[transport - 8..transport] };
    !sum(addresses, u32::from(above) + if tcp { 6 } else { 17 })
}

impl Segment {
    fn describe(&self, size: u16) -> impl Fn(Descriptor) -> Descriptor {
        let place = if self.tcp { 16 } else { 6 };
        let (transport, ipv6, tcp) = (self.transport as u16, self.ipv6, self.tcp);
        move |descriptor| {
            let descriptor = descriptor.unsummed(transport, place).unwrap();
            match (size, tcp, ipv6) {
                (0, ..) => descriptor,
                (_, true, false) => descriptor.uncut(Segmentation::Tcp4, size, true),
                (_, true, true) => descriptor.uncut(Segmentation::Tcp6, size, true),
                (_, false, _) => descriptor.uncut(Segmentation::Udp, size, false),
            }
        }
    }

    /// Checks that the pieces make up the whole frame. With `summed` their checksums are filled in;
    /// otherwise they are left to the peer.
    fn check(&self, pieces: &[Vec<u8>], size: usize, summed: bool) {
        let payload = &self.frame[self.payload_at..];
        assert_eq!(pieces.len(), payload.len().div_ceil(size));
        let mut whole: Vec<u8> = Vec::new();
        for (number, piece) in pieces.iter().enumerate() {
            let part = &piece[self.payload_at..];
            assert!(part.len() == size || number + 1 == pieces.len());
            let above = (piece.len() - self.transport) as u16;
            if !self.ipv6 {
                assert_eq!(sum(&piece[14..34], 0), 0, "IPv4 header");
                assert_eq!(piece[16..18], (20 + above).to_be_bytes());
                assert_eq!(piece[18..20], 0xfffe_u16.wrapping_add(number as u16).to_be_bytes());
            } else {
                assert_eq!(piece[18..20], above.to_be_bytes());
            }
            let place = self.transport + if self.tcp { 16 } else { 6 };
            let pseudo = pseudo(piece, self.ipv6, self.tcp, self.transport, above);
            if summed {
                assert_eq!(sum(&piece[self.transport..], pseudo.into()), 0, "checksum");
            } else {
                assert_eq!(piece[place..place + 2], pseudo.to_be_bytes());
            }
            if self.tcp {
                let sequence = 0xffff_ff00_u32.wrapping_add(whole.len() as u32);
                assert_eq!(piece[self.transport + 4..self.transport + 8], sequence.to_be_bytes());
                let mut flags = 0x10;
                flags |= if number == 0 { 0x80 } else { 0 };
                flags |= if number + 1 == pieces.len() { 9 } else { 0 };
                assert_eq!(piece[self.transport + 13], flags);
            } else {
                assert_eq!(piece[self.transport + 4..self.transport + 6], above.to_be_bytes());
            }
            whole.extend(part);
        }
        assert!(whole == payload);
    }
}

/// Sends every kind of frame to a port with `abilities`.
pub fn check(abilities: Abilities) {
    let mut rig = Rig::default();
    rig.attach(PortConfig::default());
    rig.attach_able(PortConfig::default(), abilities);
    for (ipv6, tcp) in [(false, true), (true, true), (false, false), (true, false)] {
        for (payload, size) in
            [(1, 0), (777, 0), (1460, 1460), (1461, 1460), (8000, 700), (9999, 1448)]
        {
            let segment = segment(ipv6, tcp, payload);
            rig.queue_described(0, &segment.frame, segment.describe(size));
            rig.run();
            let got = rig.received_at(1);
            let cut = match (tcp, ipv6) {
                (true, false) => abilities.tcp4,
                (true, true) => abilities.tcp6,
                (false, _) => abilities.udp,
            };
            if size == 0 || cut {
                assert_eq!(got.len(), 1, "whole");
                if abilities.checksum {
                    assert_eq!(got[0], segment.frame);
                } else {
                    segment.check(&got, payload, true);
                }
            } else {
                segment.check(&got, size.into(), !abilities.checksum);
            }
        }
    }
    hostile(&mut rig, abilities);
}

/// Sends frames to be cut to ports whose longest frame is as long as a piece, or shorter.
pub fn pieces_are_held_to_the_longest_frame() {
    let segment = segment(false, true, 3000);
    // With 1,448 bytes of payload, a piece has 1,514 bytes without its tag.
    for (max_frame, tagged, pieces) in
        [(1514, false, 3), (1513, false, 0), (1514, true, 3), (1513, true, 0), (0, false, 3)]
    {
        let mut rig = Rig::default();
        let vlan = if tagged { 7 } else { 1 };
        rig.attach(PortConfig { vlans: VlanMode::Access(vlan), ..PortConfig::default() });
        rig.attach_able(PortConfig { max_frame, ..PortConfig::default() }, Abilities::NONE);
        rig.queue_described(0, &segment.frame, segment.describe(1448));
        rig.run();
        let got = rig.received_at(1);
        assert_eq!(got.len(), pieces, "{max_frame}, {tagged}");
        let longest = got.iter().map(Vec::len).max();
        let tag = if tagged { 4 } else { 0 };
        assert_eq!(longest, (pieces > 0).then_some(1514 + tag));
        let refused = rig.stats(1).causes_out().find(|(cause, _)| *cause == "refused");
        assert_eq!(refused.map_or(0, |(_, count)| count), u64::from(pieces == 0));
    }
}

/// A port whose peer loses its abilities.
struct Losing {
    port: Box<MemoryPort>,
    has_lost: Arc<AtomicBool>,
}

impl Port for Losing {
    fn abilities(&self) -> Abilities {
        match self.has_lost.load(Ordering::Relaxed) {
            true => Abilities::NONE,
            false => self.port.abilities(),
        }
    }

    fn is_up(&self) -> bool {
        self.port.is_up()
    }

    fn take(&mut self, burst: &mut Burst, limit: usize) -> bool {
        self.port.take(burst, limit)
    }

    fn release(&mut self) {
        self.port.release();
    }

    fn deliver(&mut self, burst: &Burst, picks: &[Pick]) -> Delivered {
        self.port.deliver(burst, picks)
    }

    fn notify(&mut self) {
        self.port.notify();
    }

    fn arm(&mut self) -> bool {
        self.port.arm()
    }
}

/// Sends a frame that waits for the receiver's rate while the receiver loses its abilities.
pub fn a_frame_that_waited_is_completed() {
    let mut rig = Rig::default();
    rig.attach(PortConfig::default());
    let receive_rate = Some(Rate { per_second: 100_000, burst: 1 });
    let has_lost = Arc::new(AtomicBool::new(false));
    let its = Arc::clone(&has_lost);
    let receiver = rig.attach_wrapped(
        PortConfig { receive_rate, ..PortConfig::default() },
        Abilities::ALL,
        |port| Box::new(Losing { port, has_lost: its }),
    );
    let segment = segment(false, true, 3000);
    for _ in 0..2 {
        rig.queue_described(0, &segment.frame, segment.describe(1448));
    }
    rig.run();
    assert_eq!(rig.received_at(1), std::slice::from_ref(&segment.frame), "the first is whole");
    has_lost.store(true, Ordering::Relaxed);
    rig.switch.turn(receiver, BURST, Duration::from_secs(1));
    segment.check(&rig.received_at(1), 1448, true);
}

/// Sends frames that do not match their descriptions; they may at most be dropped.
fn hostile(rig: &mut Rig, abilities: Abilities) {
    let good = segment(false, true, 3000);
    let before = rig.stats(1).frames_out;
    for size in [0_u16, 1, 10, u16::MAX] {
        for at in 12..70 {
            for value in [0, 0xff, 0x4f, 0x60] {
                let mut frame = good.frame.clone();
                frame[at] = value;
                rig.queue_described(0, &frame, good.describe(size));
                rig.run();
                rig.received_at(1);
            }
        }
    }
    for (start, offset) in [(1023, 127), (3000, 0), (0, 0), (66, 127)] {
        let short = &good.frame[..80];
        rig.queue_described(0, short, |d| d.unsummed(start.min(1023), offset).unwrap());
        rig.run();
        rig.received_at(1);
    }
    let stats = rig.stats(1);
    if abilities == Abilities::NONE {
        assert!(stats.causes_out().any(|(cause, count)| cause == "refused" && count > 0));
    }
    assert!(stats.frames_out > before);
}
