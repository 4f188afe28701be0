//! Loads on guests' network interfaces.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The data that is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Traffic {
    /// UDP datagrams with this many bytes of payload, 8 to 1472: as many as the sender's socket
    /// takes.
    Udp(u16),
    /// A TCP stream, written in pieces of this many bytes, 1 to 65,535.
    Tcp(u16),
    /// One byte there and one byte back over a TCP connection, one at a time (netperf's TCP_RR).
    RequestResponse,
}

/// The two ends of the traffic, in the paper's letters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ends {
    /// From a guest to the host, whose end is a TAP interface. Requests come from the guest.
    GuestHost,
    /// From the host's TAP interface to a guest.
    HostGuest,
    /// From a guest to another one of the same kind.
    GuestGuest,
    /// From a program at a memory port of the switch to a guest, in bursts of 100: for rates that
    /// no socket gives.
    SwitchGuest,
}

impl Ends {
    const ALL: [(Self, &'static str); 4] = [
        (Self::GuestHost, "gh"),
        (Self::HostGuest, "hg"),
        (Self::GuestGuest, "gg"),
        (Self::SwitchGuest, "sg"),
    ];

    /// Returns the number of guests.
    pub fn guests(self) -> usize {
        if self == Self::GuestGuest { 2 } else { 1 }
    }
}

/// A load: traffic between two ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NicLoad {
    /// The data.
    pub traffic: Traffic,
    /// Its two ends.
    pub ends: Ends,
    /// CPUs of each guest, 1 to 32.
    pub cpus: u32,
    /// TCP segmentation offload of the sending guest.
    pub segmentation: bool,
    /// Datagrams offered per second; 0: as many as the sender can send.
    pub offered: u64,
}

impl NicLoad {
    /// Returns the bytes of payload of a datagram, a piece of a stream, or a request.
    pub fn bytes(&self) -> usize {
        match self.traffic {
            Traffic::Udp(bytes) | Traffic::Tcp(bytes) => bytes.into(),
            Traffic::RequestResponse => 1,
        }
    }

    /// Returns the load without its rate: loads that differ in that only are points of a curve.
    pub fn without_rate(self) -> Self {
        Self { offered: 0, ..self }
    }
}

impl fmt::Display for NicLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.traffic {
            Traffic::Udp(bytes) => write!(f, "udp{bytes}")?,
            Traffic::Tcp(bytes) => write!(f, "tcp{bytes}")?,
            Traffic::RequestResponse => f.write_str("rr")?,
        }
        let ends = Ends::ALL.iter().find(|(ends, _)| *ends == self.ends);
        write!(f, "-{}", ends.map_or("", |(_, letters)| letters))?;
        if self.cpus > 1 {
            write!(f, "-c{}", self.cpus)?;
        }
        if self.segmentation {
            f.write_str("-tso")?;
        }
        match self.offered {
            0 => Ok(()),
            rate if rate.is_multiple_of(1_000_000) => write!(f, "-o{}M", rate / 1_000_000),
            rate if rate.is_multiple_of(1_000) => write!(f, "-o{}k", rate / 1_000),
            rate => write!(f, "-o{rate}"),
        }
    }
}

impl FromStr for NicLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let about = "udp8-gh: datagrams of 8 bytes (8 to 1472) from a guest to the host; tcp1460, \
                     a stream in pieces of so many bytes (1 to 65535); rr, requests and responses; \
                     -hg from the host to a guest, -gg between two guests, -sg from a port of the \
                     switch (udp18 to udp1472 only); -c2, CPUs of a guest (1 to 32); -tso (tcp \
                     only, not -hg); -o5k, datagrams offered a second (udp only)";
        parse(text).ok_or_else(|| format!("\"{text}\" is no load such as {about}"))
    }
}

fn parse(text: &str) -> Option<NicLoad> {
    let mut parts = text.split('-');
    let traffic = traffic(parts.next()?)?;
    let ends = parts.next()?;
    let ends = Ends::ALL.iter().find(|(_, letters)| *letters == ends)?.0;
    let mut load = NicLoad { traffic, ends, cpus: 1, segmentation: false, offered: 0 };
    for part in parts {
        match part.split_at_checked(1)? {
            ("c", value) => load.cpus = cpus(value)?,
            ("t", "so") => load.segmentation = true,
            ("o", value) => load.offered = parse_count(value)?,
            _ => return None,
        }
    }
    fits(&load).then_some(load)
}

/// Parses a number with an optional `k` or `M`. Returns `None` if `text` is none, or is 0.
pub fn parse_count(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix('M') {
        Some(digits) => (digits, 1_000_000),
        None => text.strip_suffix('k').map_or((text, 1), |digits| (digits, 1_000)),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit).filter(|count| *count > 0)
}

fn cpus(text: &str) -> Option<u32> {
    text.parse().ok().filter(|cpus| (1..=32).contains(cpus))
}

fn traffic(text: &str) -> Option<Traffic> {
    if let Some(bytes) = text.strip_prefix("udp") {
        let bytes = bytes.parse().ok().filter(|bytes| (8..=1472).contains(bytes))?;
        return Some(Traffic::Udp(bytes));
    }
    if let Some(bytes) = text.strip_prefix("tcp") {
        return Some(Traffic::Tcp(bytes.parse().ok().filter(|bytes| *bytes > 0)?));
    }
    (text == "rr").then_some(Traffic::RequestResponse)
}

/// Returns whether the parts of a load fit together.
fn fits(load: &NicLoad) -> bool {
    let (udp, stream) = match load.traffic {
        Traffic::Udp(bytes) => (Some(bytes), false),
        Traffic::Tcp(_) => (None, true),
        Traffic::RequestResponse => (None, false),
    };
    // The shortest frame has 18 bytes of payload: its number and its time.
    let from_switch = load.ends != Ends::SwitchGuest || udp.is_some_and(|bytes| bytes >= 18);
    let segments = !load.segmentation || stream && load.ends != Ends::HostGuest;
    from_switch && segments && (load.offered == 0 || udp.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in
            ["udp8-gh", "udp1460-gg-c2", "tcp1460-hg", "tcp16384-gg-tso", "rr-gh", "udp18-sg-o200k"]
        {
            assert_eq!(text.parse::<NicLoad>().unwrap().to_string(), text);
        }
        let load: NicLoad = "udp18-sg-o5M".parse().unwrap();
        assert_eq!((load.bytes(), load.offered, load.ends.guests()), (18, 5_000_000, 1));
        assert_eq!(load.without_rate().to_string(), "udp18-sg");
    }

    #[test]
    fn what_is_no_load_is_refused() {
        for text in [
            "",
            "udp8",
            "udp7-gh",
            "udp1473-gh",
            "tcp0-gh",
            "tcp65536-gh",
            "rr-gx",
            "udp8-gh-c0",
            "udp8-gh-c33",
            "udp8-gh-tso",
            "tcp8-hg-tso",
            "rr-gh-tso",
            "tcp8-gh-o5k",
            "rr-gh-o5",
            "udp17-sg",
            "tcp1460-sg",
            "rr-sg",
            "udp8-gh-",
            "udp8-gh-o0",
            "udp8-gh-x",
        ] {
            assert!(text.parse::<NicLoad>().is_err(), "{text}");
        }
    }
}
