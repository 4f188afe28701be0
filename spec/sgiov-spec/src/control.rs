//! Requests of a process and the engine's replies, one message each, in turn: a reply to every
//! request but [`Request::Close`] and [`Request::Share`], which have none.
//!
//! # Requests
//! A request has [`REQUEST`] bytes:
//!
//! | offset | what |
//! |---|---|
//! | 0 | operation, `u32` |
//! | 4 | flags, `u32`: 1 `SHARED`, 2 `V6_ONLY` |
//! | 8 | number, `u64` |
//! | 16 | first address |
//! | 40 | second address |
//!
//! An address has 24 bytes: 16 of the address, `u16` of the port, 6 of 0. What a request does not
//! use is 0, or the request is refused: a later version may give it a meaning.
//!
//! | operation | number | addresses | flags |
//! |---|---|---|---|
//! | 1 `ATTACH` | version | | |
//! | 2 `FORK` | | | |
//! | 3 `LISTEN` | backlog | the listener's | `SHARED`, `V6_ONLY` |
//! | 4 `UNLISTEN` | listener | | |
//! | 5 `ACCEPT` | listener | | |
//! | 6 `CONNECT` | | destination, source | |
//! | 7 `CLOSE` | entry | | |
//! | 8 `REPORT` | | | |
//! | 9 `FUNCTION` | bytes of the JSON | | |
//! | 10 `EXEC` | | | |
//! | 11 `RESUME` | | | |
//! | 12 `HELD` | lowest entry | | |
//! | 13 `HELD_LISTENER` | lowest listener | | |
//! | 14 `SHARE` | 1: on, 0: off | | |
//! | 15 `PEER` | entry | | |
//!
//! # Replies
//! A reply has [`REPLY`] bytes:
//!
//! | offset | what |
//! |---|---|
//! | 0 | status, `u32`: 0, or a number of errno(3); nothing else counts then |
//! | 4 | kind in bits 7 to 0, and flags, `u32`: 0x100 `NEW_LINK`, 0x200 `PEER_LATER` |
//! | 8 | numbers, `u64` × 4 |
//! | 40 | first address |
//! | 64 | second address |
//! | 88 | zeros |
//!
//! | kind | numbers | addresses | flags |
//! |---|---|---|---|
//! | 1 `DONE` | | | |
//! | 2 `ATTACHED` | entries, links | | |
//! | 3 `LISTENING` | listener | the listener's | |
//! | 4 `CONNECTED` | entry, [`Place`], group | the endpoint's, the other side's | `NEW_LINK`, `PEER_LATER` |
//! | 5 `REPORT` | bytes of the JSON | | |
//!
//! A process ignores what a reply's kind does not use: it trusts its engine, and a later engine may
//! fill it.
//!
//! # A new request
//! It has an operation in `op`, a variant of `Request` with its arms in `encode` and `decode`, and
//! a row above; `control/tests.rs` has it. The engine answers it in `Broker::request`
//! (`host/sgiov`, `broker`), the library asks in `host/socket` (`family`), and the fuzz target
//! `sgiov-control` sends it. An engine hangs up on who sends an operation that it does not know:
//! `ATTACH` has the version.

use crate::Address;
use crate::table::Place;
use crate::words::{address, put_address, word32, word64};

/// Bytes of a request.
pub const REQUEST: usize = 64;
/// Bytes of a reply.
pub const REPLY: usize = 128;
/// Version of the messages.
pub const VERSION: u32 = 2;
/// The largest number of endpoints that share an eventfd.
pub const SHARERS: usize = 16;
/// The largest number of descriptors that come with a message.
pub const DESCRIPTORS: usize = 4;

/// A request of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Begins a family. The reply is [`Reply::Attached`] with two descriptors: the table, and the
    /// bell (an eventfd that the family raises when the engine sleeps, see
    /// [`crate::table::ASLEEP`]). The reply is `EDQUOT` if the process's user or its network
    /// namespace has reached its limits; this reply may also come before any request. A process
    /// that does not attach within five seconds is disconnected.
    Attach {
        /// [`VERSION`].
        version: u32,
    },
    /// Announces a fork. The reply is [`Reply::Done`] with one descriptor: the child's connection,
    /// which from now on holds everything that this one holds, and knows all links that this one
    /// knows. The engine makes the socket pair: a process could send it both ends of a pair of its
    /// own, which would then never end.
    Fork,
    /// Announces an execve(2) of the process, or of a child that shares its memory. The reply is
    /// that to [`Request::Fork`], and the connection is a ticket: its holder may send
    /// [`Request::Resume`] over it within ten seconds, and nothing else.
    Exec,
    /// Continues in a new image of the process; sent over a ticket. The reply is
    /// [`Reply::Attached`] with three descriptors: the table, the bell, and the connection to
    /// continue with, which holds everything that the ticket held and knows no link. The ticket is
    /// disconnected.
    Resume,
    /// Asks for the endpoint that this process holds with the lowest entry from `entry` on. The
    /// reply is [`Reply::Connected`] or `ENOENT`.
    Held {
        /// Entry of the table.
        entry: u64,
    },
    /// Asks for the listener that this process holds with the lowest number from `listener` on. The
    /// reply is [`Reply::Listening`] with the eventfd, or `ENOENT`.
    HeldListener {
        /// A number, as [`Reply::Listening`]'s.
        listener: u64,
    },
    /// Listens. An unspecified address means every address of the network namespace. The reply is
    /// [`Reply::Listening`] with an eventfd that is raised when a connection waits; `EADDRINUSE`,
    /// if another listener has the address, or no port is free; `EACCES`, without the proof that is
    /// asked for; or `ENOBUFS`, for want of memory or descriptors, or at a limit.
    ///
    /// One descriptor may come with it: the kernel's own listening TCP socket of this address,
    /// which proves that the kernel gave it to the process. An engine whose settings require a
    /// proof refuses a request without one (`EACCES`). With a proof the address is the socket's
    /// own, whatever the message says.
    Listen {
        /// The address.
        at: Address,
        /// The number of connections that may wait to be accepted: 1 to 4,096.
        backlog: u32,
        /// Other listeners of the same tenant and user may have the same address (`SO_REUSEPORT`).
        shared: bool,
        /// An unspecified IPv6 address means IPv6 only.
        v6_only: bool,
    },
    /// Removes this process from the holders of a listener.
    Unlisten {
        /// [`Reply::Listening`]'s.
        listener: u64,
    },
    /// Accepts the next waiting connection. The reply is [`Reply::Connected`] or `EAGAIN`.
    Accept {
        /// [`Reply::Listening`]'s.
        listener: u64,
    },
    /// Connects. The reply is [`Reply::Connected`]; [`NOT_OURS`] if the connection is left to the
    /// kernel; `EHOSTUNREACH`, if the network namespace has no source address; `EADDRNOTAVAIL`, if
    /// the source's port is in use, or none is free; or `ENOBUFS`, for want of memory or
    /// descriptors, or at a limit. A connection to another node or to a guest may also get
    /// `ECONNREFUSED`, `ECONNRESET`, `ETIMEDOUT`, or another error of the way there.
    Connect {
        /// The destination address.
        to: Address,
        /// The source address. The engine chooses for [`Address::ANY`], or for port 0.
        from: Address,
    },
    /// Reports that the process has closed its last descriptor of the endpoint. There is no reply.
    Close {
        /// Entry of the table.
        entry: u64,
    },
    /// Allows endpoints that this process accepts or connects from now on to share an eventfd with
    /// others of the process, up to [`SHARERS`] of those whose other sides are one family.
    /// [`Reply::Connected`] says which ones do. No process drains such an eventfd; a sleeper waits
    /// for its edge. There is no reply.
    Share {
        /// `false` ends the permission.
        on: bool,
    },
    /// Asks for the eventfd that the other side of an endpoint of this process sleeps on, which
    /// [`Reply::Connected`] left for later. The reply is [`Reply::Done`] with one descriptor, or
    /// `EAGAIN` if no process has accepted the connection yet, or none has it any more.
    Peer {
        /// Entry of the table.
        entry: u64,
    },
    /// Asks for a report: [`Reply::Report`] with a sealed memfd of JSON. It covers everything over
    /// the administrator's socket, and the own user in the own tenant over the programs' socket.
    Report,
    /// Serves a guest's socket function ([`crate::function`]). Allowed over the administrator's
    /// socket only, otherwise `EPERM`. Two or three descriptors come with it: a Unix socket that
    /// listens for the guest's VMM (vfio-user), and a memfd of JSON, sealed against any change
    /// (`F_SEAL_SHRINK`, `F_SEAL_GROW`, `F_SEAL_WRITE`), with the function's name, its tenant and
    /// its addresses. A third one is the file of the guest's memory, which the JSON names then, for
    /// a VMM whose own descriptor of that file only names it: all of it has the bytes that the
    /// guest sees. After [`Reply::Done`] the VMM may connect. The function exists until the VMM has
    /// connected and gone or, if none connects, until the connection ends over which it was asked
    /// for.
    Function {
        /// Length of the JSON in bytes.
        bytes: u64,
    },
}

/// The status of a reply to [`Request::Connect`] if the engine knows no listener there, or policy
/// leaves the address to the kernel (`EPROTONOSUPPORT`).
pub const NOT_OURS: u32 = 93;

/// A connection as one family sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Entry of the family's table.
    pub entry: u64,
    /// The place of its stream.
    pub place: Place,
    /// The endpoint's own address.
    pub local: Address,
    /// The other side's address.
    pub peer: Address,
}

/// An answer of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The request failed, with a number of errno(3).
    Refused(u32),
    /// The request is done.
    Done,
    /// The process has attached.
    Attached {
        /// Entries of the table.
        entries: u64,
        /// Links of the table.
        links: u64,
    },
    /// The process listens.
    Listening {
        /// The listener's number in this family.
        listener: u64,
        /// The address, with its port.
        at: Address,
    },
    /// A connection. Descriptors, in this order: the eventfd that the family sleeps on; if the
    /// other side is not the engine, and unless `peer_later`, the eventfd that the other side
    /// sleeps on; with `new_link` the link's arena.
    Connected {
        /// The family's side of it.
        endpoint: Endpoint,
        /// This process has not been given the link's arena yet.
        new_link: bool,
        /// The number of the group of the process's endpoints that share the eventfd, or 0 if the
        /// eventfd is not shared: see [`Request::Share`].
        group: u32,
        /// Set if the other side's eventfd is to be asked for when it is needed: see
        /// [`Request::Peer`].
        peer_later: bool,
    },
    /// A report is in the descriptor that comes with it.
    Report {
        /// Its length in bytes.
        bytes: u64,
    },
}

/// Operations of requests, with their fields in the head.
mod op {
    pub const ATTACH: u32 = 1;
    pub const FORK: u32 = 2;
    pub const LISTEN: u32 = 3;
    pub const UNLISTEN: u32 = 4;
    pub const ACCEPT: u32 = 5;
    pub const CONNECT: u32 = 6;
    pub const CLOSE: u32 = 7;
    pub const REPORT: u32 = 8;
    pub const FUNCTION: u32 = 9;
    pub const EXEC: u32 = 10;
    pub const RESUME: u32 = 11;
    pub const HELD: u32 = 12;
    pub const HELD_LISTENER: u32 = 13;
    pub const SHARE: u32 = 14;
    pub const PEER: u32 = 15;
}

/// Kinds of replies whose status is 0, with their fields in the head.
mod kind {
    pub const DONE: u8 = 1;
    pub const ATTACHED: u8 = 2;
    pub const LISTENING: u8 = 3;
    pub const CONNECTED: u8 = 4;
    pub const REPORT: u8 = 5;
}

/// Flags of messages.
mod flag {
    /// Of `LISTEN`: other listeners may have the address.
    pub const SHARED: u32 = 1;
    /// Of `LISTEN`: an unspecified IPv6 address means IPv6 only.
    pub const V6_ONLY: u32 = 2;
    /// Of `CONNECTED`: the link's arena comes with the reply.
    pub const NEW_LINK: u32 = 1 << 8;
    /// Of `CONNECTED`: the other side's eventfd is to be asked for.
    pub const PEER_LATER: u32 = 1 << 9;
}

/// Returns the flag `bit` if `is` is set, otherwise 0.
fn flag_if(is: bool, bit: u32) -> u32 {
    if is { bit } else { 0 }
}

impl Request {
    /// Returns the message as it goes over the socket.
    pub fn encode(&self) -> [u8; REQUEST] {
        let none = (Address::ANY, Address::ANY);
        let (op, flags, number, (first, second)) = match *self {
            Self::Attach { version } => (op::ATTACH, 0, version.into(), none),
            Self::Fork => (op::FORK, 0, 0, none),
            Self::Exec => (op::EXEC, 0, 0, none),
            Self::Resume => (op::RESUME, 0, 0, none),
            Self::Held { entry } => (op::HELD, 0, entry, none),
            Self::HeldListener { listener } => (op::HELD_LISTENER, 0, listener, none),
            Self::Listen { at, backlog, shared, v6_only } => {
                let flags = flag_if(shared, flag::SHARED) | flag_if(v6_only, flag::V6_ONLY);
                (op::LISTEN, flags, backlog.into(), (at, Address::ANY))
            }
            Self::Unlisten { listener } => (op::UNLISTEN, 0, listener, none),
            Self::Accept { listener } => (op::ACCEPT, 0, listener, none),
            Self::Connect { to, from } => (op::CONNECT, 0, 0, (to, from)),
            Self::Close { entry } => (op::CLOSE, 0, entry, none),
            Self::Share { on } => (op::SHARE, 0, on.into(), none),
            Self::Peer { entry } => (op::PEER, 0, entry, none),
            Self::Report => (op::REPORT, 0, 0, none),
            Self::Function { bytes } => (op::FUNCTION, 0, bytes, none),
        };
        let mut bytes = [0; REQUEST];
        bytes[..4].copy_from_slice(&op.to_le_bytes());
        bytes[4..8].copy_from_slice(&flags.to_le_bytes());
        bytes[8..16].copy_from_slice(&number.to_le_bytes());
        put_address(&mut bytes[16..40], first);
        put_address(&mut bytes[40..64], second);
        bytes
    }

    /// Returns the request in `bytes`, or `None` if they hold no request of this version.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; REQUEST] = bytes.try_into().ok()?;
        let (op, flags, number) = (word32(bytes, 0)?, word32(bytes, 4)?, word64(bytes, 8)?);
        let (first, second) = (address(bytes, 16)?, address(bytes, 40)?);
        let request = match op {
            op::ATTACH => Self::Attach { version: u32::try_from(number).ok()? },
            op::FORK => Self::Fork,
            op::LISTEN => Self::Listen {
                at: first,
                backlog: u32::try_from(number).ok()?,
                shared: flags & flag::SHARED != 0,
                v6_only: flags & flag::V6_ONLY != 0,
            },
            op::UNLISTEN => Self::Unlisten { listener: number },
            op::ACCEPT => Self::Accept { listener: number },
            op::CONNECT => Self::Connect { to: first, from: second },
            op::CLOSE => Self::Close { entry: number },
            op::SHARE => Self::Share { on: number != 0 },
            op::PEER => Self::Peer { entry: number },
            op::REPORT => Self::Report,
            op::FUNCTION => Self::Function { bytes: number },
            op::EXEC => Self::Exec,
            op::RESUME => Self::Resume,
            op::HELD => Self::Held { entry: number },
            op::HELD_LISTENER => Self::HeldListener { listener: number },
            _ => return None,
        };
        // Unused fields are zero: the sender is a program, and a later version may use them.
        (request.encode() == *bytes).then_some(request)
    }
}

impl Reply {
    /// Returns the message as it goes over the socket. Its meaning depends on the request that it
    /// answers.
    pub fn encode(&self) -> [u8; REPLY] {
        let (mut status, mut flags, mut numbers) = (0, 0, [0; 4]);
        let (mut first, mut second) = (Address::ANY, Address::ANY);
        let kind = match *self {
            Self::Refused(errno) => {
                status = errno;
                0
            }
            Self::Done => kind::DONE,
            Self::Attached { entries, links } => {
                numbers = [entries, links, 0, 0];
                kind::ATTACHED
            }
            Self::Listening { listener, at } => {
                (numbers[0], first) = (listener, at);
                kind::LISTENING
            }
            Self::Connected { endpoint, new_link, group, peer_later } => {
                flags = flag_if(new_link, flag::NEW_LINK) | flag_if(peer_later, flag::PEER_LATER);
                numbers = [endpoint.entry, endpoint.place.encode(), group.into(), 0];
                (first, second) = (endpoint.local, endpoint.peer);
                kind::CONNECTED
            }
            Self::Report { bytes } => {
                numbers[0] = bytes;
                kind::REPORT
            }
        };
        let mut bytes = [0; REPLY];
        bytes[..4].copy_from_slice(&u32::to_le_bytes(status));
        bytes[4..8].copy_from_slice(&u32::to_le_bytes(u32::from(kind) | flags));
        for (place, number) in bytes[8..40].chunks_mut(8).zip(numbers) {
            place.copy_from_slice(&u64::to_le_bytes(number));
        }
        put_address(&mut bytes[40..64], first);
        put_address(&mut bytes[64..88], second);
        bytes
    }

    /// Returns the reply in `bytes`, or `None` if they hold none. Bytes that the reply's kind does
    /// not use are ignored.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; REPLY] = bytes.try_into().ok()?;
        let (status, flags) = (word32(bytes, 0)?, word32(bytes, 4)?);
        let number = |at: usize| word64(bytes, 8 + at * 8);
        if status != 0 {
            return Some(Self::Refused(status));
        }
        Some(match flags as u8 {
            kind::DONE => Self::Done,
            kind::ATTACHED => Self::Attached { entries: number(0)?, links: number(1)? },
            kind::LISTENING => Self::Listening { listener: number(0)?, at: address(bytes, 40)? },
            kind::CONNECTED => Self::Connected {
                endpoint: Endpoint {
                    entry: number(0)?,
                    place: Place::decode(number(1)?)?,
                    local: address(bytes, 40)?,
                    peer: address(bytes, 64)?,
                },
                new_link: flags & flag::NEW_LINK != 0,
                group: u32::try_from(number(2)?).ok()?,
                peer_later: flags & flag::PEER_LATER != 0,
            },
            kind::REPORT => Self::Report { bytes: number(0)? },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests;
