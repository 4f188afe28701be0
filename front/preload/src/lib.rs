//! `libslipway.so`: gives unmodified programs the sockets of the socket plane. It exports libc's socket
//! functions; loaded by `LD_PRELOAD` it is asked before libc is.
//!
//! - [`fds`]: which descriptors are ours, a table by number;
//! - [`session`]: the family that this process belongs to, attached when it is first needed;
//! - [`open`]: socket calls that make and end connections;
//! - [`transfer`]: how bytes move; [`data`], [`vectors`], [`files`]: the calls that move them;
//! - [`options`]: getsockopt(2), fcntl(2), ioctl(2) and names; [`copies`]: close(2), dup(2);
//! - [`polling`]: poll(2) and select(2); [`epoll`];
//! - [`process`] follows fork(2); [`exec`], [`spawn`], [`numbers`] and [`inherit`] execve(2) and posix_spawn(3), [`program`] says whether a program will have
//!   the library, [`descriptors`] what the kernel says of descriptors;
//! - [`real`]: the system calls themselves.
//!
//! # What is ours
//! A TCP socket begins as the kernel's. connect(2) asks the engine; if it knows who listens there, the
//! endpoint's eventfd takes the socket's number, and with it what the kernel does for descriptors: copies by
//! dup(2) and fork(2), close-on-exec, an end. Of a process with very many, some share one (`slipway_socket`). A listener stays the kernel's as well, so that peers without the
//! library reach it, and has a second queue, the engine's. Everything else goes to the kernel, for the price of
//! a look into the table. Without an engine everything is the kernel's.
//!
//! # What it must not do
//! Take a lock or memory while bytes move; unwind into C (a panic becomes `EIO`); call the C library's
//! functions that it replaces (all go to the system calls); change what is the parent's in a child of
//! vfork(2), which shares its memory.
//!
//! # What does not work
//! Programs that do without libc's functions: static ones, Go's, io_uring; stdio on a socket (`fdopen`), since
//! libc's streams call their own copies; a set of epoll(7) that is itself in a set of poll(2) or epoll(7).
//! `docs/sockets.md` is the list for users.
//!
//! Dependencies: `libc` for the types of the interface, `rustix` for descriptors' types.
#![allow(unsafe_code)] // C's interface: pointers and descriptors as the caller says
#![allow(clippy::missing_safety_doc)] // the manual page of each function is the contract
#![allow(missing_docs)] // as above

mod copies;
mod data;
mod descriptors;
mod epoll;
mod exec;
mod fds;
mod files;
mod guard;
mod inherit;
mod numbers;
mod open;
mod options;
mod polled;
mod polling;
mod process;
mod program;
mod real;
mod session;
mod spawn;
mod transfer;
mod vectors;
