//! Sockets of the socket plane (SG-IOV) in a program: byte streams to other programs of the node through
//! shared memory, which an engine introduces to each other and then leaves alone.
//!
//! [`Family::attach`] says hello to the engine; [`Family::connect`], [`Family::listen`] and
//! [`Family::accept`] ask it for connections. An [`Endpoint`] is one side of a connection:
//! [`Endpoint::send`] and [`Endpoint::recv`] copy into and out of its FIFOs without a system call and never
//! wait; [`Endpoint::wait`] polls for a while, if traffic was recent, and then sleeps on the endpoint's
//! eventfd, which the program may also have in its own poll set, after [`Endpoint::arm`].
//!
//! `libslipway.so` (`front/preload`) puts libc's socket functions on top of it.
//!
//! # Who shares what
//! Processes that come of each other by fork(2) are a *family*: both halves' indices, locks and options of an
//! open socket lie in a table that they share (`slipway_sgiov_spec::table`), and so belong to the open
//! file description, as POSIX has it. A lock is a word with the holder's thread id; that of a holder who died is
//! taken over. What is the process's own: the connection to the engine, and the mappings.
//!
//! # Descriptors
//! Those that a program does not know of are moved out of its way ([`hidden`]), so that it neither
//! meets nor closes them.
//!
//! # Eventfds
//! An endpoint sleeps on an eventfd, which the other side raises. With very many endpoints that would be most of what
//! an idle one costs; then some share one ([`Endpoint::is_shared`]).
//!
//! # When the engine dies
//! All endpoints of the family are reset: whoever sleeps has the engine's connection in the poll set.
//!
//! Dependencies: `rustix` for system calls with no C library in between, since the C library's are what
//! `front/preload` replaces.
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
pub use endpoint::{Endpoint, Half, option};
pub use family::{Family, Listening, NotConnected, Opened, engine_path};
pub use rustix::io::Errno;
pub use slipway_ring::cross::{fetch, fetch_to_write, heavy, is_told_surely};
pub use slipway_sgiov_spec::Address;
pub use spin::Spin;
pub use table::{Table, forget_thread};
pub use wait::Deadline;
