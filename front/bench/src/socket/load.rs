//! Loads on sockets.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The kind of traffic between the two sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Traffic {
    /// One side sends without a pause, the other reads: measures bandwidth and messages per second.
    Stream,
    /// One side sends, with at most [`SocketLoad::WINDOW`] bytes in flight over all sockets
    /// together: the other side answers each message with a byte.
    Window,
    /// A message there and the same message back.
    Pingpong(Pace),
    /// No traffic.
    Idle,
}

/// The way in which the two sides of a ping-pong wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pace {
    /// Neither side sleeps: both poll.
    Busy,
    /// Both sides block; the next message follows the last at once.
    Block,
    /// Both sides block, and there is a pause of [`SocketLoad::PAUSE`] before each message.
    Asleep,
}

/// A load: the traffic, the size of messages, and the number of sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SocketLoad {
    /// The kind of traffic.
    pub traffic: Traffic,
    /// Bytes of a message: 1 to 4 MiB; 0 if nothing is sent.
    pub bytes: u32,
    /// Sockets on each side: 1 to 200,000; 1 for a ping-pong.
    pub sockets: u32,
}

impl SocketLoad {
    /// The most bytes in flight with [`Traffic::Window`]: 16 MiB.
    pub const WINDOW: u32 = 16 << 20;
    /// The time between two messages of [`Pace::Asleep`]: longer than any implementation would
    /// poll.
    pub const PAUSE: std::time::Duration = std::time::Duration::from_millis(1);

    /// Returns the most messages in flight on each socket with [`Traffic::Window`].
    pub fn credit(&self) -> u32 {
        (Self::WINDOW / self.bytes.max(1) / self.sockets).max(1)
    }

    /// Returns whether the load measures a latency.
    pub fn is_latency(&self) -> bool {
        matches!(self.traffic, Traffic::Pingpong(_))
    }
}

impl fmt::Display for SocketLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.traffic {
            Traffic::Stream => "stream",
            Traffic::Window => "window",
            Traffic::Pingpong(_) => "pingpong",
            Traffic::Idle => return write!(f, "idle-c{}", self.sockets),
        };
        match self.bytes {
            bytes if bytes.is_multiple_of(1024) => write!(f, "{name}-{}k", bytes / 1024)?,
            bytes => write!(f, "{name}-{bytes}b")?,
        }
        match self.traffic {
            Traffic::Pingpong(Pace::Busy) => f.write_str("-busy"),
            Traffic::Pingpong(Pace::Block) => f.write_str("-block"),
            Traffic::Pingpong(Pace::Asleep) => f.write_str("-asleep"),
            _ => write!(f, "-c{}", self.sockets),
        }
    }
}

impl FromStr for SocketLoad {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let about = "stream-128k-c16 (bytes of a message, sockets), window-4k-c256, \
                     pingpong-64b-busy (or -block, -asleep), idle-c4096: messages of 1b to 4096k, \
                     1 to 200000 sockets";
        parse(text).ok_or_else(|| format!("\"{text}\" is no load such as {about}"))
    }
}

fn parse(text: &str) -> Option<SocketLoad> {
    let mut parts = text.split('-');
    let name = parts.next()?;
    let bytes = if name == "idle" { 0 } else { size(parts.next()?)? };
    let last = parts.next();
    let (traffic, sockets) = match (name, last) {
        ("pingpong", Some("busy")) => (Traffic::Pingpong(Pace::Busy), 1),
        ("pingpong", Some("block")) => (Traffic::Pingpong(Pace::Block), 1),
        ("pingpong", Some("asleep")) => (Traffic::Pingpong(Pace::Asleep), 1),
        ("stream", None) => (Traffic::Stream, 1),
        ("stream", Some(last)) => (Traffic::Stream, count(last)?),
        ("window", Some(last)) => (Traffic::Window, count(last)?),
        ("idle", Some(last)) => (Traffic::Idle, count(last)?),
        _ => return None,
    };
    parts.next().is_none().then_some(SocketLoad { traffic, bytes, sockets })
}

/// Parses the bytes of a message.
fn size(text: &str) -> Option<u32> {
    let bytes = match text.strip_suffix('k') {
        Some(digits) => digits.parse::<u32>().ok()?.checked_mul(1024)?,
        None => text.strip_suffix('b')?.parse().ok()?,
    };
    (1..=4 << 20).contains(&bytes).then_some(bytes)
}

fn count(text: &str) -> Option<u32> {
    let count = text.strip_prefix('c')?.parse().ok()?;
    (1..=200_000).contains(&count).then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_reads_as_it_prints() {
        for text in [
            "stream-128k-c1",
            "stream-128k-c16",
            "stream-64b-c1",
            "window-4k-c4096",
            "pingpong-64b-busy",
            "pingpong-4k-block",
            "pingpong-4k-asleep",
            "idle-c100000",
        ] {
            assert_eq!(text.parse::<SocketLoad>().unwrap().to_string(), text);
        }
        assert_eq!("stream-1000b".parse::<SocketLoad>().unwrap().to_string(), "stream-1000b-c1");
    }

    #[test]
    fn the_same_bytes_are_under_way_over_any_number_of_sockets() {
        for sockets in [1, 16, 256, 4096] {
            let load = SocketLoad { traffic: Traffic::Window, bytes: 4096, sockets };
            assert_eq!(load.credit() * load.bytes * sockets, SocketLoad::WINDOW);
        }
    }

    #[test]
    fn what_is_no_load_is_refused() {
        for text in [
            "",
            "stream",
            "stream-0b",
            "stream-4097k",
            "stream-64",
            "stream-64b-c0",
            "stream-64b-c200001",
            "stream-64b-c1-c1",
            "pingpong-64b",
            "pingpong-64b-c2",
            "window-4k",
            "idle-64b",
            "idle-busy",
            "tape-64b-c1",
            "stream-4194305k",
        ] {
            assert!(text.parse::<SocketLoad>().is_err(), "{text}");
        }
    }
}
