//! `libslipway.so`: gives unmodified programs the sockets of the socket plane. The library exports
//! libc's socket functions. Loaded by `LD_PRELOAD`, its functions are found before libc's.
//!
//! Two parts meet here. `c` is C's interface: all exported functions, which turn pointers into
//! slices, references and values, call the other part, and return its results as C does. The other
//! part is a plain library, which knows no caller's pointer:
//!
//! - [`fds`]: the table of our descriptors, by number, and the objects that they stand for;
//! - [`attach`]: attaches this process to the engine when a call first needs it
//!   (`attach::family`); [`session`]: the family that the process belongs to then;
//! - [`open`]: how connections begin and end; [`listener`]: a kernel's listener with a second queue
//!   at the engine; [`dissolve`]: how either ends before it is closed;
//! - [`transfer`]: how bytes move; [`vectors`]: pieces and messages of one call; [`files`]: between
//!   a FIFO and another descriptor;
//! - [`options`]: options of sockets; [`switches`] and [`halves`]: where their values lie;
//!   [`taken`]: those that connections begin with; [`copies`]: closed and copied descriptors;
//! - [`polling`]: poll(2); [`select`]: select(2), which is a poll(2); [`polled`]: the descriptors
//!   that the kernel polls for them; [`epoll`]: epoll(7);
//! - [`process`]: fork(2); [`exec`], [`spawn`], [`numbers`] and [`inherit`]: execve(2) and
//!   posix_spawn(3); [`program`]: whether a program will load the library; [`descriptors`]: what
//!   the kernel reports about descriptors in `/proc`;
//! - [`real`]: the system calls themselves; [`libcs`]: libc's functions of names that are exported;
//! - [`signals`]: what calls need of them; [`address`], [`time`], [`strings`]: C's formats.
//!
//! `unsafe` is allowed in `c`, and in each module of the library whose head says why.
//!
//! # What is ours
//! A TCP socket begins as a kernel socket. connect(2) asks the engine. If the engine knows a
//! listener at the address, the endpoint's eventfd replaces the socket under its number, and
//! inherits what the kernel does for descriptors: copies by dup(2) and fork(2), close-on-exec,
//! release at exit. In a process with very many connections, some share an eventfd
//! (`slipway_socket`). A listener stays a kernel listener, so that peers without the library reach
//! it, and gets the engine's queue as a second one. Everything else goes to the kernel, for the
//! price of a look into the table. Without an engine everything goes to the kernel.
//!
//! # A function, an option
//! A further function of libc is exported by the module of its kind in `c`. It asks [`fds`] for the
//! descriptor. If that is not ours it makes the system call ([`real`]), and otherwise it calls a
//! function of the library within `c::guard`. Its name of `_FORTIFY_SOURCE` (`__read_chk`) is
//! beside it, and its number in `c::syscall` if programs call it so.
//!
//! An option of sockets without an effect is a row of `SWITCHES` in [`switches`], or of `NUMBERS`
//! in [`options`]. Another one has no row, but an arm of `read_option` and of `write_option` there.
//! In `write_option` it comes before the arms for all of `IPPROTO_IP` and `IPPROTO_IPV6`: those
//! take any value for any option of these levels and have no effect. The effect is in the call that
//! moves bytes, as that of timeouts ([`transfer`]), or in `host/socket`, which reads the entry's
//! word itself: `Endpoint::most` in `endpoint/transfer.rs`, `endpoint/readiness.rs` for the bits
//! of poll(2). How many bytes wake a sleeper is another matter: the argument `least` of
//! `Endpoint::wish` and `Endpoint::arm`, which the sleeper gives (`wishes` of [`polling`] and of
//! `epoll::active`; `Endpoint::wait` of `host/socket` for a call that waits itself).
//!
//! An option that is on or off is a bit of the entry's word `FLAGS` (`slipway_socket::option`). A
//! value needs a half of another word of the entry, and gets a row of [`halves`]. The doc comment
//! of `slipway_socket::option` (`host/socket/src/endpoint.rs`) says which halves and words are
//! left. `c::options` hands `write_option` the first 16 bytes of a value, as many as a timeout has.
//! Programs set many options before connect(2), or at a listener: [`taken`] copies those that
//! matter from the kernel's socket.
//!
//! Unit tests are beside what they test, and compiled without `c`: its names are libc's, and a test
//! program that had them would be its own subject. `tests/semantics.py` gets a case of each
//! function, and of each option that has an effect, which has to come out as with the kernel.
//! `docs/sockets.md` names functions and such options under "What works", and options without an
//! effect under "What does not".
//!
//! # What it must not do
//! Take a lock or allocate memory while bytes move; unwind into C (a panic becomes `EIO`); call
//! those C library functions that it replaces (it makes system calls instead); change the parent's
//! state in a child of vfork(2), which shares the parent's memory.
//!
//! # What does not work
//! Programs that bypass libc's functions: static programs, Go programs, io_uring. Stdio on a socket
//! (`fdopen`), since libc's streams call libc's internal functions. An epoll(7) set that is itself
//! polled by poll(2) or epoll(7). `docs/sockets.md` has the list for users.
//!
//! Dependencies: `libc` for the types of the interface, `rustix` for descriptors' types.
#![cfg_attr(test, allow(dead_code, unused_imports))] // what only `c` uses

mod address;
mod attach;
#[cfg(not(test))]
#[allow(unsafe_code)] // C's interface: the caller vouches for pointers and descriptors
#[allow(clippy::missing_safety_doc, missing_docs)] // the manual page of each function has both
mod c;
mod copies;
mod descriptors;
mod dissolve;
mod epoll;
mod exec;
mod fds;
mod files;
mod halves;
mod inherit;
mod libcs;
mod listener;
mod numbers;
mod open;
mod options;
mod polled;
mod polling;
mod process;
mod program;
mod real;
mod select;
mod session;
mod signals;
mod spawn;
mod strings;
mod switches;
mod taken;
mod time;
mod transfer;
mod vectors;
