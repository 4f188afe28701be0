//! Loads on a switch.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use slipway_load::nic::parse_count;

/// A load: frames of one length from one port to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PacketLoad {
    /// Bytes of a frame, its header included: 60 to 2,048.
    pub bytes: u32,
    /// Ports of the switch, that of the source included: 2 to 4,096.
    pub ports: u32,
    /// The number of consecutive frames to the same port.
    pub row: u32,
    /// Frames offered per second, in bursts of 100; 0: as many as the source can send.
    pub offered: u64,
    /// Slots of a ring and bytes of a slot. `None` stands for 512 of 2,048, or 64 of 2,048 with
    /// more than 64 ports.
    pub ring: Option<(u32, u32)>,
    /// Frames per second that a neighbour offers, one at a time, from a port of its own to another;
    /// 0: there is no neighbour.
    pub neighbour: u64,
    /// Frames on their way at a time, each of which comes back before the next; 0: as many as fit,
    /// one way.
    pub window: u32,
}

impl Default for PacketLoad {
    fn default() -> Self {
        Self { bytes: 64, ports: 2, row: 1, offered: 0, ring: None, neighbour: 0, window: 0 }
    }
}

impl PacketLoad {
    /// Returns whether any subject can carry the load: from one port to another, as fast as
    /// possible, in rings of the default shape and without a neighbour.
    pub fn is_plain(&self) -> bool {
        self.ports == 2
            && self.ring.is_none()
            && (self.offered, self.neighbour) == (0, 0)
            && self.window == 0
    }
}

impl fmt::Display for PacketLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}b-p{}", self.bytes, self.ports)?;
        if self.ports > 2 {
            write!(f, "-r{}", self.row)?;
        }
        if let Some((slots, payload)) = self.ring {
            write!(f, "-s{slots}x{payload}")?;
        }
        let window = u64::from(self.window);
        for (letter, rate) in [('o', self.offered), ('n', self.neighbour), ('w', window)] {
            match rate {
                0 => {}
                _ if rate.is_multiple_of(1_000_000) => write!(f, "-{letter}{}M", rate / 1_000_000)?,
                _ if rate.is_multiple_of(1_000) => write!(f, "-{letter}{}k", rate / 1_000)?,
                _ => write!(f, "-{letter}{rate}")?,
            }
        }
        Ok(())
    }
}

impl FromStr for PacketLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let about = "64b-p2: bytes of a frame (60 to 2048) and ports (2 to 4096); with more than \
                     two ports -r32, frames in a row to one of them; -s64x256, slots of a ring \
                     (16 to 32768) and bytes of each (64 to 65536); -o5M, frames offered a second; \
                     -n100k, frames that a neighbour offers; -w1, frames that go there and back";
        parse(text).ok_or_else(|| format!("\"{text}\" is no load such as {about}"))
    }
}

fn parse(text: &str) -> Option<PacketLoad> {
    let mut parts = text.split('-');
    let mut load = PacketLoad {
        bytes: parts.next()?.strip_suffix('b')?.parse().ok()?,
        ..PacketLoad::default()
    };
    for part in parts {
        let (kind, value) = part.split_at_checked(1)?;
        match kind {
            "p" => load.ports = value.parse().ok()?,
            "r" => load.row = value.parse().ok()?,
            "o" => load.offered = parse_count(value)?,
            "s" => load.ring = Some(ring(value)?),
            "n" => load.neighbour = parse_count(value)?,
            "w" => load.window = value.parse().ok().filter(|one| (1..=64).contains(one))?,
            _ => return None,
        }
    }
    let fits =
        (60..=2048).contains(&load.bytes) && (2..=4096).contains(&load.ports) && load.row > 0;
    let slots_fit = load.ring.is_none_or(|(_, payload)| payload >= load.bytes);
    (fits && slots_fit).then_some(load)
}

/// Parses slots and the bytes of each, within the limits of `slipway_ring::Geometry`.
fn ring(text: &str) -> Option<(u32, u32)> {
    let (slots, payload) = text.split_once('x')?;
    let (slots, payload): (u32, u32) = (slots.parse().ok()?, payload.parse().ok()?);
    let fits = slots.is_power_of_two()
        && (16..=32_768).contains(&slots)
        && payload.is_multiple_of(64)
        && (64..=65_536).contains(&payload);
    fits.then_some((slots, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in [
            "64b-p2",
            "1500b-p2",
            "64b-p1024-r32",
            "64b-p2-o5M",
            "60b-p3-r1-o1500k",
            "64b-p2-o17",
            "64b-p2-s64x256-o5M",
            "64b-p2-n100k",
            "64b-p2-o20M-n5k",
            "64b-p2-w1",
        ] {
            assert_eq!(text.parse::<PacketLoad>().unwrap().to_string(), text);
        }
        assert_eq!("64b".parse::<PacketLoad>().unwrap(), PacketLoad::default());
    }

    #[test]
    fn what_is_no_load_is_refused() {
        for text in [
            "",
            "64",
            "59b",
            "2049b",
            "64b-p1",
            "64b-p4097",
            "64b-r0",
            "64b-o0",
            "64b-x",
            "64b-",
            "64b-oM",
            "64b-s63x256",
            "64b-s64x100",
            "65b-s64x64",
            "64b-s64",
            "64b-n0",
            "64b-w0",
            "64b-w65",
        ] {
            assert!(text.parse::<PacketLoad>().is_err(), "{text}");
        }
    }
}
