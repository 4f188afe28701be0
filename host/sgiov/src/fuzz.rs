//! The entry of the fuzz target `sgiov-control`: clients that send any request, and write anything
//! into their tables.

use std::os::fd::AsFd;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{REQUEST, Request, VERSION};

use crate::broker::{Broker, Outcome};
use crate::peer::{Peer, peer};

/// The most clients at a time.
const CLIENTS: usize = 6;

/// Returns this process as the engine sees it.
fn own() -> Option<&'static Peer> {
    static OWN: OnceLock<Option<Peer>> = OnceLock::new();
    let found = || {
        let flags = SocketFlags::CLOEXEC;
        let (a, _b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
        peer(a.as_fd()).ok()
    };
    OWN.get_or_init(found).as_ref()
}

/// The fuzzer's input, consumed from its beginning.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    /// Takes a request from the input. It is valid more often than raw bytes would be.
    fn request(&mut self) -> Option<Request> {
        let kind = self.byte()?;
        let number = u64::from(self.byte()?);
        let at = Address::v4([127, 0, 0, 1 + (kind >> 6)], 9000 + (number % 4) as u16);
        Some(match kind % 16 {
            0 => Request::Attach { version: VERSION + u32::from(kind >> 7) },
            1 => Request::Fork,
            2 => Request::Listen { at, backlog: 2, shared: kind & 64 != 0, v6_only: false },
            3 => Request::Unlisten { listener: number },
            4 | 5 => Request::Accept { listener: number },
            6 | 7 => Request::Connect { to: at, from: Address::ANY },
            8 => Request::Close { entry: number },
            9 => Request::Exec,
            10 => Request::Resume,
            11 => Request::Held { entry: number },
            12 => Request::HeldListener { listener: number },
            13 => Request::Share { on: kind & 64 == 0 },
            14 => Request::Peer { entry: number },
            _ => {
                let (raw, rest) = self.0.split_at_checked(REQUEST)?;
                self.0 = rest;
                Request::decode(raw)?
            }
        })
    }
}

/// Carries out what `data` encodes, ends all clients, and checks that the broker is empty.
///
/// # Panics
/// If the broker still holds something of a client.
pub fn control(data: &[u8]) {
    let Some(own) = own() else { return };
    let mut broker = Broker::default();
    let mut clients: Vec<u32> = Vec::new();
    let mut bytes = Bytes(data);
    while let Some(step) = bytes.byte() {
        let at = usize::from(step >> 4) % CLIENTS;
        match step & 15 {
            0 if clients.len() < CLIENTS => {
                clients.push(broker.join(own.clone(), false).expect("there is room for a few").0)
            }
            1 if at < clients.len() => broker.leave(clients.swap_remove(at)),
            2 | 3 => {
                let (Some(place), Some(value)) = (bytes.word(), bytes.word()) else { break };
                broker.spoil(place, value);
            }
            4 => broker.sweep_now(),
            _ => {
                let Some(client) = clients.get(at).copied() else { continue };
                let Some(request) = bytes.request() else { continue };
                match broker.request(client, request, Vec::new()) {
                    Outcome::Forked { client, .. } if clients.len() < CLIENTS => {
                        clients.push(client)
                    }
                    Outcome::Forked { client, .. } => broker.leave(client),
                    Outcome::HangUp(_) => broker.leave(clients.swap_remove(at)),
                    Outcome::Nothing | Outcome::Answer(..) | Outcome::Moved { .. } => {}
                }
            }
        }
    }
    clients.into_iter().for_each(|client| broker.leave(client));
    assert!(broker.is_empty(), "something is left of clients that have gone");
}

impl Broker {
    /// Writes a word somewhere into memory that a family can write.
    fn spoil(&self, place: u64, value: u64) {
        for memory in self.writable() {
            let words = memory.words();
            // The words beyond the first entries and streams are like these. The first 512 are the
            // header's.
            let at = (place >> 1) as usize % words.len().min(2048);
            if at >= 512 {
                words[at].store(value, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    /// Runs the fuzz target on bytes of a plain generator.
    #[test]
    fn nothing_is_left_of_clients_that_ask_for_anything() {
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        let mut byte = || {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 32) as u8
        };
        for _ in 0..60 {
            let data: Vec<u8> = (0..2000).map(|_| byte()).collect();
            super::control(&data);
        }
    }
}
