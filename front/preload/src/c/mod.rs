//! C's interface: all functions that the library exports, and no logic of its own.
//!
//! A function looks its descriptor up. If it is not ours, the function makes the system call.
//! Otherwise it turns the caller's pointers into slices, references and values ([`memory`]), calls
//! a function of the library within [`guard`], and returns its result as C does. The manual page of
//! each function is its contract. `_FORTIFY_SOURCE` calls some of them by names that end in `_chk`.
//!
//! Unit tests are compiled without this module: the names are libc's, which tests call.

mod copies;
mod data;
mod epoll;
mod exec;
mod files;
mod guard;
mod list;
mod memory;
mod messages;
mod open;
mod options;
mod polling;
mod select;
mod spawn;
mod start;
mod syscall;
