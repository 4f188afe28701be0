//! The protocol by which a sandbox gets memory of a pool of recycled pages, for the launcher and
//! the VMM. Its messages are `slipway-pool-spec`'s.
//!
//! 1. The launcher connects to the pool's socket and asks for memory ([`Lease::ask`]), of a NUMA
//!    node, or as a copy of a template ([`TemplateName`]), if it likes. It gets the file of the
//!    memory, whose bytes may still be those of an earlier user, with the node of its pages, and
//!    passes the file and the connection to the VMM.
//! 2. The VMM maps the file, registers the mappings with userfaultfd(2), and hands the userfaultfd
//!    over ([`HandOver`]). From the pool's answer on, a page that it touches is zero, or
//!    the template's. It closes the
//!    file, which shows the earlier user's bytes, and keeps the *token* that came from the pool: a
//!    descriptor that names the file to the servers of its functions, and can be neither read, nor
//!    written, nor mapped.
//!    Memory that begins as a template is a file without pages: its mappings are registered for
//!    missing pages, too, and the template's bytes are never in the VMM's hands but through faults.
//! 3. The pool serves the faults. It takes the memory back when the VMM's process is gone, whatever
//!    becomes of the connection.
//!
//! After the last message of step 2 neither end sends or reads: the connection's end only has the
//! pool look whether the process is gone. A keeper has the connection, if there is one, so a
//! further message must be one that the next daemon's pool understands, too.
//!
//! Another process that serves the guest of a fork, with no pool of its own, needs all of the
//! template in the fork's memory, and a descriptor that it can map: [`complete`].
//!
//! The VMM must not read its mappings between the first and the last message of step 2, and never
//! gets another way to the bytes later: its filter of system calls denies fork, mremap and mappings
//! of files.
//!
//! Feature `launcher` has the launcher's side of step 1, which a VMM does without.
//!
//! Dependencies: `slipway-peer` to receive descriptors, `slipway-numa` for nodes, `rustix` for
//! sockets, `libc` for the requests of userfaultfd(2), for which rustix has no safe form.

mod hand_over;
#[cfg(any(test, feature = "launcher"))]
mod lease;
mod message;
mod userfault;

pub use hand_over::HandOver;
#[cfg(any(test, feature = "launcher"))]
pub use lease::{Lease, complete};
pub use message::{WireError, receive, send};
pub use slipway_numa::NumaNode;
pub use slipway_pool_spec::{Completion, Page, Range, Request, TemplateName};
