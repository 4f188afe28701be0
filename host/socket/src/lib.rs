//! Sockets of the socket plane (SG-IOV) in a program: byte streams to other programs of the node
//! through shared memory. An engine introduces the programs to each other, and then takes no part.
//!
//! [`Family::attach`] attaches to the engine; [`Family::connect`], [`Family::listen`] and
//! [`Family::accept`] ask it for connections. An [`Endpoint`] is one side of a connection:
//! [`Endpoint::send`] and [`Endpoint::recv`] copy into and out of its FIFOs without a system call
//! and never wait; [`Endpoint::wait`] polls for a while, if traffic was recent, and then sleeps on
//! the endpoint's eventfd. After [`Endpoint::arm`], a program may also have the eventfd in its own
//! poll set.
//!
//! `libslipway.so` (`front/preload`) implements libc's socket functions with this crate.
//!
//! # Sharing
//! Processes that come of each other by fork(2) are a *family*. The indices of both halves, the
//! locks and the options of an open socket lie in a table that the family shares
//! (`slipway_sgiov_spec::table`), and so belong to the open file description, as POSIX demands. A
//! lock is a word with the holder's thread id; the lock of a holder that died is taken over. Each
//! process has its own connection to the engine and its own mappings.
//!
//! # Descriptors
//! Descriptors that the program does not know of are moved to high numbers ([`hidden`]), so that it
//! neither meets nor closes them.
//!
//! # Eventfds
//! An endpoint sleeps on an eventfd, which the other side raises. With very many endpoints, the
//! eventfds would be most of an idle endpoint's cost; then some endpoints share one
//! ([`Endpoint::is_shared`]).
//!
//! # When the engine dies
//! All endpoints of the family are reset: every sleeping thread has the engine's connection in its
//! poll set.
//!
//! Dependencies: `rustix` for system calls without the C library, since `front/preload` replaces
//! functions of the C library.
#![allow(unsafe_code)] // a futex is half of a shared word; a lock that a fork holds

mod connection;
mod edge;
mod endpoint;
mod family;
pub mod hidden;
pub mod lock;
mod sharing;
mod spin;
mod table;
mod wait;

pub use edge::Edge;
pub use endpoint::{Endpoint, Half, Raises, option};
pub use family::{Family, Listening, NotConnected, Opened, engine_path};
pub use rustix::io::Errno;
pub use slipway_ring::cross::{fetch, fetch_to_write, heavy, is_told_surely};
pub use slipway_sgiov_spec::Address;
pub use spin::Spin;
pub use table::{Table, forget_thread};
pub use wait::Deadline;
