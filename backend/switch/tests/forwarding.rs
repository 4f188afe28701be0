//! Tests of the switch's forwarding, seen from programs at its memory ports.
#![allow(clippy::unwrap_used)]

mod rig;

use rig::{Rig, mac, untagged};
use slipway_ring::{Descriptor, Segmentation};
use slipway_switch::decorators::Impairment;
use slipway_switch::{
    Abilities, BadConfig, LinkSetting, PortConfig, PortTurn, Rate, VlanMode, Vlans,
};
use std::time::Duration;

/// Returns a frame with a tag.
fn tagged(from: u64, to: u64, tci: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = untagged(from, to, payload);
    frame.splice(12..12, [0x81, 0, (tci >> 8) as u8, tci as u8]);
    frame
}

/// Makes `count` ports with the default settings.
fn plain(count: usize) -> Rig {
    let mut rig = Rig::default();
    for _ in 0..count {
        rig.attach(PortConfig::default());
    }
    rig
}

#[test]
fn what_nobody_knows_goes_to_all_and_what_is_known_to_one() {
    let mut rig = plain(3);
    rig.send(0, &untagged(1, 2, b"hello"));
    assert_eq!(
        rig.received(),
        [vec![], vec![untagged(1, 2, b"hello")], vec![untagged(1, 2, b"hello")]]
    );
    rig.send(1, &untagged(2, 1, b"here"));
    assert_eq!(rig.received(), [vec![untagged(2, 1, b"here")], vec![], vec![]]);
    rig.send(0, &untagged(1, 2, b"good"));
    assert_eq!(rig.received(), [vec![], vec![untagged(1, 2, b"good")], vec![]]);
    // The station moves: the next frame follows it.
    rig.send(2, &untagged(2, 1, b"moved"));
    rig.send(0, &untagged(1, 2, b"there"));
    assert_eq!(rig.received()[2], [untagged(1, 2, b"there")]);
}

#[test]
fn order_is_kept_and_every_byte_is_right() {
    let mut rig = plain(3);
    for number in 1..3_u64 {
        rig.send(number as usize, &untagged(number, 9, b""));
    }
    rig.received();
    for round in 0..200_u64 {
        for burst in 0..3 {
            let (to, len) = (1 + (round + burst) % 2, ((round * 7 + burst * 531) % 9000) as usize);
            let payload: Vec<u8> = (0..len).map(|at| (at as u64 * 31 + round) as u8).collect();
            rig.queue(0, &untagged(0, to, &payload));
        }
        rig.run();
        let received = rig.received();
        let all: usize = received.iter().map(Vec::len).sum();
        assert_eq!(all, 3);
        for frame in received.concat() {
            let payload = &frame[14..];
            assert!(payload.iter().enumerate().all(|(at, b)| *b == (at as u64 * 31 + round) as u8));
        }
    }
}

#[test]
fn groups_and_reserved_addresses() {
    let mut rig = plain(3);
    let mut frame = untagged(1, 2, b"all");
    frame[..6].fill(0xff);
    rig.send(0, &frame);
    assert_eq!(rig.counts(), [0, 1, 1]);
    frame[..6].copy_from_slice(&[0x01, 0x80, 0xc2, 0, 0, 0x0e]);
    rig.send(0, &frame);
    assert_eq!(rig.counts(), [0, 0, 0]);
    assert_eq!(rig.dropped_in(0), [("reserved", 1)]);
}

#[test]
fn what_is_no_frame_goes_nowhere() {
    let mut rig = plain(2);
    rig.send(0, &[0; 13]);
    let mut group = untagged(1, 2, b"");
    group[6] |= 1;
    rig.send(0, &group);
    let mut nobody = untagged(1, 2, b"");
    nobody[6..12].fill(0);
    rig.send(0, &nobody);
    assert_eq!(rig.counts(), [0, 0]);
    assert_eq!(rig.dropped_in(0), [("short", 1), ("bad-source", 2)]);
}

#[test]
fn an_address_that_is_assigned_is_nobody_elses() {
    let mut rig = Rig::default();
    for number in 0..2 {
        rig.attach(PortConfig { mac: Some(mac(number)), ..PortConfig::default() });
    }
    rig.attach(PortConfig::default());
    // The address needs no learning, and a port with an address gets no frames for unknown
    // stations.
    rig.send(0, &untagged(0, 1, b"a"));
    rig.send(0, &untagged(0, 99, b"b"));
    assert_eq!(rig.counts(), [0, 1, 1]);
    // A frame from another port with that source address changes nothing.
    rig.send(2, &untagged(1, 0, b"thief"));
    assert_eq!(rig.counts(), [1, 0, 0]);
    rig.send(0, &untagged(0, 1, b"c"));
    assert_eq!(rig.counts(), [0, 1, 0]);
    assert_eq!(
        rig.attach_refused(PortConfig { mac: Some(mac(1)), ..PortConfig::default() }),
        BadConfig::MacTaken(mac(1))
    );
    rig.detach(1);
    rig.attach(PortConfig { mac: Some(mac(1)), ..PortConfig::default() });
    rig.send(0, &untagged(0, 1, b"d"));
    assert_eq!(rig.counts(), [0, 1, 0]);
}

fn guarded(number: u64) -> PortConfig {
    PortConfig {
        mac: Some(mac(number)),
        addresses: vec![[10, 0, 0, number as u8].into(), "fd00::5".parse().unwrap()],
        spoof_check: true,
        ..PortConfig::default()
    }
}

fn ipv4(from: [u8; 4]) -> Vec<u8> {
    let mut packet = vec![0x45; 20];
    packet[12..16].copy_from_slice(&from);
    packet
}

fn with_type(mut frame: Vec<u8>, kind: u16) -> Vec<u8> {
    frame[12..14].copy_from_slice(&kind.to_be_bytes());
    frame
}

fn arp(sender: u64, ip: [u8; 4]) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 1];
    packet.extend(mac(sender).0);
    packet.extend(ip);
    packet.resize(28, 0);
    packet
}

/// Returns an ICMPv6 message of type `kind`, as a neighbour advertisement for `target`, behind
/// `options` bytes of destination options.
fn advertisement(kind: u8, from: &str, target: &str, options: usize) -> Vec<u8> {
    let mut packet = vec![0; 40];
    packet[0] = 0x60;
    packet[6] = if options == 0 { 58 } else { 60 };
    packet[8..24].copy_from_slice(&from.parse::<std::net::Ipv6Addr>().unwrap().octets());
    if options > 0 {
        packet.extend([58, (options / 8 - 1) as u8]);
        packet.resize(40 + options, 0);
    }
    packet.extend([kind, 0, 0, 0, 0, 0, 0, 0]);
    packet.extend(target.parse::<std::net::Ipv6Addr>().unwrap().octets());
    packet
}

#[test]
fn nobody_speaks_for_another() {
    let mut rig = Rig::default();
    rig.attach(guarded(1));
    rig.attach(PortConfig::default());
    let mut passes = |frame: &[u8]| {
        rig.send(0, frame);
        rig.counts() == [0, 1]
    };
    let v4 = |from| with_type(untagged(1, 9, &ipv4(from)), 0x0800);
    assert!(passes(&v4([10, 0, 0, 1])) && passes(&v4([0; 4])));
    assert!(
        !passes(&v4([10, 0, 0, 2])) && !passes(&with_type(untagged(1, 9, &[0x45; 15]), 0x0800))
    );
    assert!(!passes(&with_type(untagged(2, 9, &ipv4([10, 0, 0, 1])), 0x0800)));
    let arp_frame = |sender, ip| with_type(untagged(1, 9, &arp(sender, ip)), 0x0806);
    assert!(passes(&arp_frame(1, [10, 0, 0, 1])) && passes(&arp_frame(1, [0; 4])));
    assert!(!passes(&arp_frame(2, [10, 0, 0, 1])) && !passes(&arp_frame(1, [10, 0, 0, 2])));
    let v6 = |kind, from, target, options| {
        with_type(untagged(1, 9, &advertisement(kind, from, target, options)), 0x86dd)
    };
    let local = std::net::Ipv6Addr::from(slipway_switch::link_local(mac(1))).to_string();
    assert!(passes(&v6(136, "fd00::5", "fd00::5", 0)) && passes(&v6(136, &local, &local, 0)));
    assert!(passes(&v6(135, "fd00::5", "fd00::6", 0)) && passes(&v6(136, "::", &local, 0)));
    assert!(!passes(&v6(136, "fd00::5", "fd00::6", 0)), "an address of somebody else's");
    assert!(!passes(&v6(136, "fd00::5", "fd00::6", 8)), "behind options");
    assert!(passes(&v6(136, "fd00::5", "fd00::5", 8)));
    assert!(!passes(&v6(136, "fd00::5", "fd00::5", 64)), "farther than anybody looks");
    assert!(!passes(&v6(134, &local, &local, 0)), "it is no router");
    assert!(!passes(&v6(135, "fd00::6", "fd00::5", 0)));
    // A tagged frame within another tag.
    let mut twice = untagged(1, 9, &[]);
    twice.truncate(12);
    twice.extend([0x81, 0, 0, 1, 0x81, 0, 0, 1, 8, 0]);
    twice.extend(ipv4([10, 0, 0, 2]));
    assert!(!passes(&twice));
    twice.drain(12..16);
    assert!(!passes(&twice));
    // Provider tags, which kernels take off as well.
    for kind in [[0x88, 0xa8], [0x91, 0x00]] {
        twice[12..14].copy_from_slice(&kind);
        twice[14..16].fill(0);
        assert!(!passes(&twice));
    }
    assert!(!passes(&untagged(1, 9, b"what is this")), "who has IP addresses speaks IP");
}

#[test]
fn a_checksum_changes_no_address() {
    let mut rig = Rig::default();
    rig.attach(guarded(1));
    rig.attach_able(PortConfig::default(), Abilities::NONE);
    let mut passes = |frame: &[u8], start: u16, offset: u16| {
        rig.queue_described(0, frame, |descriptor| descriptor.unsummed(start, offset).unwrap());
        rig.run();
        rig.counts() == [0, 1]
    };
    let mut tcp = with_type(untagged(1, 9, &ipv4([10, 0, 0, 1])), 0x0800);
    tcp.extend([0; 20]);
    assert!(passes(&tcp, 34, 16));
    for (start, offset) in [(0, 0), (0, 6), (14, 12), (33, 0), (34, 19), (1023, 127)] {
        assert!(!passes(&tcp, start, offset), "{start} {offset}");
    }
    assert!(!passes(&with_type(untagged(1, 9, &arp(1, [10, 0, 0, 1])), 0x0806), 34, 0));
    let own = advertisement(136, "fd00::5", "fd00::5", 0);
    assert!(!passes(&with_type(untagged(1, 9, &own), 0x86dd), 62, 14), "into the target");
    // An echo request that the checksum would turn into an advertisement.
    let mut echo = advertisement(128, "fd00::5", "fd00::6", 0);
    echo[40] = 128;
    assert!(!passes(&with_type(untagged(1, 9, &echo), 0x86dd), 54, 0), "into the type");
    assert_eq!(rig.dropped_in(0), [("spoofed-address", 2), ("bad-offload", 7)]);
}

#[test]
fn pieces_have_a_length_and_a_checksum() {
    let mut rig = Rig::default();
    rig.attach_able(PortConfig::default(), Abilities::ALL);
    rig.attach_able(PortConfig::default(), Abilities::ALL);
    let mut tcp = with_type(untagged(1, 9, &ipv4([10, 0, 0, 1])), 0x0800);
    tcp.extend([0; 100]);
    let mut passes = |describe: fn(Descriptor) -> Descriptor| {
        rig.queue_described(0, &tcp, describe);
        rig.run();
        rig.counts() == [0, 1]
    };
    assert!(passes(|it| it.unsummed(34, 16).unwrap().uncut(Segmentation::Tcp4, 20, false)));
    assert!(!passes(|it| it.unsummed(34, 16).unwrap().uncut(Segmentation::Tcp4, 0, false)));
    assert!(!passes(|it| it.uncut(Segmentation::Tcp4, 20, false)));
    assert_eq!(rig.dropped_in(0), [("bad-offload", 2)]);
}

#[test]
fn vlans_are_apart() {
    let mut rig = Rig::default();
    let access = |vlan| PortConfig { vlans: VlanMode::Access(vlan), ..PortConfig::default() };
    let mut allowed = Vlans::none();
    assert!(allowed.insert(5) && !allowed.insert(0) && !allowed.insert(4095));
    let trunk = VlanMode::Trunk { native: Some(7), allowed };
    rig.attach(access(5));
    rig.attach(access(5));
    rig.attach(access(6));
    rig.attach(PortConfig { vlans: trunk, ..PortConfig::default() });
    rig.send(0, &untagged(0, 1, &[3; 200]));
    let received = rig.received();
    assert_eq!(received[1], [untagged(0, 1, &[3; 200])]);
    assert_eq!(received[3], [tagged(0, 1, 5, &[3; 200])], "the trunk has tags");
    assert_eq!(received[2].len(), 0);
    // A tagged frame with a priority enters the VLAN by the trunk, and leaves it untagged.
    rig.send(3, &tagged(3, 0, 0x6005, &[4; 200]));
    assert_eq!(rig.received()[0], [untagged(3, 0, &[4; 200])]);
    // The native VLAN, VLANs that are not let through, and tags at an access port.
    rig.send(3, &untagged(3, 0, b"native"));
    rig.send(3, &tagged(3, 0, 6, b"no"));
    rig.send(0, &tagged(0, 1, 5, b"no"));
    assert_eq!(rig.counts(), [0; 4]);
    assert_eq!(
        (rig.dropped_in(3), rig.dropped_in(0)),
        (vec![("vlan", 1), ("nobody", 1)], vec![("vlan", 1)])
    );
    // A priority tag has no VLAN.
    rig.send(0, &tagged(0, 1, 0x2000, b"prio"));
    assert_eq!(rig.received()[1], [untagged(0, 1, b"prio")]);
}

#[test]
fn a_full_port_drops_its_own_frames_and_nobody_elses() {
    let mut rig = plain(3);
    for number in 1..3 {
        rig.send(number, &untagged(number as u64, 9, b""));
    }
    rig.received();
    for _ in 0..10 {
        for _ in 0..8 {
            rig.queue(0, &untagged(0, 1, b"x"));
            rig.queue(0, &untagged(0, 2, b"y"));
        }
        rig.run();
        assert_eq!(rig.received_at(2).len(), 8);
    }
    let kept = rig.received_at(1).len() as u64;
    assert_eq!((kept, rig.stats(1).causes_out().collect::<Vec<_>>()), (16, vec![("full", 64)]));
}

#[test]
fn links_that_are_down() {
    let mut rig = plain(2);
    rig.configure(1, PortConfig { link: LinkSetting::Down, ..PortConfig::default() });
    rig.send(0, &untagged(0, 1, b"x"));
    rig.send(1, &untagged(1, 0, b"x"));
    assert_eq!(rig.counts(), [0, 0]);
    assert_eq!(rig.stats(1).causes_out().collect::<Vec<_>>(), [("down", 1)]);
    assert_eq!(rig.dropped_in(1), [("down", 1)]);
    rig.configure(1, PortConfig::default());
    rig.send(0, &untagged(0, 1, b"x"));
    assert_eq!(rig.counts(), [0, 1]);
}

#[test]
fn an_assigned_address_has_interfaces_in_other_vlans() {
    let mut rig = plain(1);
    for number in 1..3 {
        rig.attach(PortConfig { mac: Some(mac(number)), ..PortConfig::default() });
    }
    // No station is known in VLAN 7: the frame goes to the port with its address, and to the port
    // without an address.
    rig.send(2, &tagged(2, 1, 7, b"x"));
    assert_eq!(rig.counts(), [1, 1, 0]);
}

#[test]
fn a_rate_holds_in_the_long_run() {
    let mut rig = plain(1);
    let rate = Rate { per_second: 100_000, burst: 1000 };
    rig.attach(PortConfig { max_rate: Some(rate), ..PortConfig::default() });
    let mut now = Duration::ZERO;
    while now < Duration::from_secs(2) {
        rig.fill(1, &untagged(1, 9, &[0; 86]));
        match rig.switch.turn(1, 4, now) {
            PortTurn::Held(until) => now = until.max(now + Duration::from_nanos(1)),
            _ => drop(rig.received_at(0)),
        }
    }
    let bytes = rig.stats(1).bytes_in;
    assert!((200_000..203_000).contains(&bytes), "{bytes}");
}

#[test]
fn settings_that_cannot_be() {
    let mut rig = Rig::default();
    let vlan = |vlan| PortConfig { vlans: VlanMode::Access(vlan), ..PortConfig::default() };
    assert_eq!(rig.attach_refused(vlan(0)), BadConfig::Vlan(0));
    assert_eq!(rig.attach_refused(vlan(4095)), BadConfig::Vlan(4095));
    let group = slipway_switch::Mac([1, 0, 0, 0, 0, 0]);
    assert_eq!(
        rig.attach_refused(PortConfig { mac: Some(group), ..PortConfig::default() }),
        BadConfig::Mac(group)
    );
    let rate = Some(Rate { per_second: 0, burst: 0 });
    assert_eq!(
        rig.attach_refused(PortConfig { max_rate: rate, ..PortConfig::default() }),
        BadConfig::Rate
    );
    assert_eq!(
        rig.attach_refused(PortConfig { receive_rate: rate, ..PortConfig::default() }),
        BadConfig::Rate
    );
    let check = PortConfig { spoof_check: true, ..PortConfig::default() };
    assert_eq!(rig.attach_refused(check), BadConfig::NothingToCheck);
    assert_eq!(rig.switch.ports().count(), 0);
}

#[test]
fn checksums_and_cuts_are_made_for_who_needs_them() {
    for abilities in
        [Abilities::NONE, Abilities { checksum: true, ..Abilities::NONE }, Abilities::ALL]
    {
        rig::offloads::check(abilities);
    }
}

#[test]
fn pieces_of_a_cut_frame_are_held_to_the_longest_frame() {
    rig::offloads::pieces_are_held_to_the_longest_frame();
}

#[test]
fn a_frame_that_waited_is_completed_for_a_peer_that_cannot_any_more() {
    rig::offloads::a_frame_that_waited_is_completed();
}

#[test]
fn another_program_comes_in_the_place_of_a_port() {
    let mut rig = Rig::default();
    for number in 0..2 {
        rig.attach(PortConfig { mac: Some(mac(number)), ..PortConfig::default() });
    }
    rig.send(0, &untagged(0, 1, b"before"));
    rig.queue(1, &untagged(1, 0, b"never seen"));
    rig.replace(1);
    rig.send(0, &untagged(0, 1, b"after"));
    rig.send(1, &untagged(1, 0, b"back"));
    assert_eq!(rig.received(), [vec![untagged(1, 0, b"back")], vec![untagged(0, 1, b"after")]]);
    // Settings, counters and impairment belong to the port, not to the program.
    assert_eq!(rig.switch.config(1).unwrap().mac, Some(mac(1)));
    assert_eq!((rig.stats(1).frames_out, rig.stats(1).frames_in), (2, 1));
    let lossy = Impairment { loss: 1.0, ..Impairment::default() };
    rig.switch.impair(1, Some(lossy)).unwrap();
    rig.replace(1);
    rig.send(0, &untagged(0, 1, b"lost"));
    assert_eq!(rig.counts(), [0, 0]);
    rig.switch.impair(1, None).unwrap();
    rig.send(0, &untagged(0, 1, b"found"));
    assert_eq!(rig.received_at(1), [untagged(0, 1, b"found")]);
    assert!(rig.switch.replace(2, Box::new(slipway_switch::ports::UnpluggedPort)).is_err());
    // The link of an unplugged port is down.
    drop(rig.switch.replace(1, Box::new(slipway_switch::ports::UnpluggedPort)));
    rig.send(0, &untagged(0, 1, b"nobody"));
    assert!(rig.stats(1).causes_out().any(|cause| cause == ("down", 1)));
}
