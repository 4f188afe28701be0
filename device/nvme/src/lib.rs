//! An NVMe controller: a PCI function that connects namespaces (disks) to a guest.
//!
//! It follows *NVM Express Base Specification, Revision 1.4*; section numbers in this crate are of
//! that document. It serves Linux's and SPDK's drivers: PRPs and SGLs, MSI-X, up to 64 I/O queue
//! pairs of up to 1,024 entries, several namespaces, any number of commands in flight up to
//! [`Limits::in_flight`].
//!
//! How the pieces meet. [`Controller`] is made of [`Parts`] and implements
//! [`slipway_pci::Function`]. All work happens in its `poll`, on the host's thread, in this order:
//! 1. messages of other threads are taken ([`Mailbox`]);
//! 2. `home::lifecycle`: enable, reset and shutdown make progress;
//! 3. admin commands are carried out (`admin`);
//! 4. `engine::fetch` looks at the doorbells of I/O queues and copies submission queue entries in,
//!    once. `engine::io` decides on the copy: a command ends at once or becomes disk requests.
//!    `prp` or `sgl` finds the places of its data, and `engine::inflight` remembers it. A read or
//!    write of a disk that copies in place is carried out at once and takes none of these ways;
//! 5. the disks take the requests and give completions, completion queue entries are written, and
//!    commands of several steps take their next one (`engine::complete`, `engine::steps`);
//! 6. each completion queue that got entries raises one interrupt (`engine::interrupts`).
//!
//! The modules by layer; each uses those above it in this table, never those below:
//!
//! | layer | modules | |
//! |---|---|---|
//! | values | `registers`, `phase`, `features`, `events`, `health`, `parts`, `namespace` | what a controller has |
//! | mechanisms | `cell`, `queue`, `prp`, `sgl`, `turn`, `limiter`, `journal`, `permit`, `mailbox`, `nap`, `trace`, `activity` | each can be understood alone |
//! | engine | `engine` | carries out I/O commands on one thread, and calls nobody |
//! | fleet | `fleet` | the lanes: which engine has which queue, orders and replies |
//! | home | `home` | everything that exists once, with the engine of its thread |
//! | persistence | `persist` | saved state, snapshots, going on from a journal |
//! | admin | `admin` | admin commands |
//! | function | `requests`, `controller` | what the host and other threads see |
//!
//! A command that was fetched is a permit (`permit`), which is used up where the command ends. A
//! lane (`fleet::lane`) is an I/O engine with a thread of its own ([`Limits::lanes`]): it takes
//! steps 4 to 6 for some of the I/O queues. With memory that outlives the process (`journal`), a
//! successor goes on where the controller was killed, at any instruction (`persist::recover`).
//!
//! Other threads never touch a controller: they post a [`Request`], which the controller's next
//! poll carries out first. One of them makes the controller measure where the time of commands goes
//! ([`Tracer`]). What I/O commands have moved is published after each poll ([`Activity`]).
//!
//! Namespaces come, go and grow while the controller runs ([`Controller::attach`],
//! [`Controller::detach`], [`Controller::refresh`]). Several disks, for several controllers, may
//! share one medium.
//!
//! A host may limit a controller's commands and bytes per second ([`Controller::limit`]); the limit
//! holds for all lanes together. Lanes that wait for the same limit race for it; within a lane,
//! queues take turns.
//!
//! Decisions where the specification leaves room:
//! - NN is always 1,024, whichever namespaces exist. A command to a namespace that does not exist,
//!   or no longer exists, ends with Invalid Namespace or Format (0Bh). Commands that the disk of a
//!   removed namespace had begun end as the disk ends them.
//! - A read of the Changed Namespace List without Retain Asynchronous Event clears what was read.
//! - A command is fetched only when its completion queue has a slot for it. A full completion queue
//!   makes commands wait in the guest's memory: nothing is lost, and nothing is queued here.
//! - Queue memory or a shadow doorbell page that cannot be read or written is fatal: CSTS.CFS,
//!   until the host resets the controller (9.5).
//! - Shadow doorbells (Doorbell Buffer Config) are offered where doorbells are trapped, since there
//!   each register write is an exit of the guest and a message. A mapped doorbell page needs no
//!   shadow: a store to it costs as much as a store to a shadow page. `cell` has the protocol.
//! - A wrong doorbell value changes nothing and raises an asynchronous event (5.2.1).
//! - After CC.EN falls, CSTS.RDY stays until the disks have given back all guest memory.
//!   Completions of that time are dropped.
//! - No space on the disk is Capacity Exceeded (81h), which Linux reports as ENOSPC. A write to a
//!   read-only namespace is Namespace is Write Protected (20h), announced in NSATTR.
//! - A completion queue raises at most one interrupt per poll, or fewer with Interrupt Coalescing,
//!   whose threshold and time apply to each completion queue separately. Interrupts are not held
//!   back because the guest is behind: `engine::interrupts` says why that could lose one.
//! - With lanes, at most the newest 64 errors between two polls of the home are logged and counted.
//!   SMART counters lag behind a lane by one poll.
//! - Command identifiers are not compared with those in flight: a host that uses one twice gets two
//!   completions.
//! - Commands are processed whether or not Bus Master Enable is set: the host of the function knows
//!   what memory it lends.
//! - Features are not saveable; they return to their defaults on every controller reset.
//! - An SGL may have up to 4,096 descriptors, which bounds the work of an SGL that points at
//!   itself. Longer SGLs are refused with Invalid Number of SGL Descriptors (0Eh). The data of an
//!   SGL is aligned to dwords; bit buckets are not supported.
//! - Compare, Verify and Copy pass the data through a buffer of the controller, in steps of at most
//!   1 MiB. Buffers are reused (`engine::spares`): in the steady state no command allocates, except
//!   commands whose data is in message-only memory. Copy is that of TP 4065 with source ranges of
//!   format 0; ranges that overlap the destination are copied piece by piece from their start.
//! - A fused Compare and Write has the disk for itself as far as this controller goes: the
//!   controller's other commands to that namespace end before the compare or start after the write.
//!   With a journal the pair has the whole controller for itself, since commands that are carried
//!   out again after a restart must not come between (`journal`). Other controllers of the same
//!   disk and other lanes are not held back, so a pair is refused (Invalid Field), and not
//!   advertised (FUSES), for a shared namespace and on a controller with lanes. Both halves must
//!   come with one doorbell (section 4.11); a half without the other is refused.
//! - A write is atomic in units of one block (AWUN, AWUPF and ACWU are 0), even on disks that do
//!   better. A RAM disk that several threads have, as lanes or as several controllers, does not
//!   keep this promise: if two commands access one block at the same time, a reader may see parts
//!   of both, which AWUN does not allow.
//! - Switching the volatile write cache off flushes what was written before. A write that was in
//!   flight at that moment, on this or another lane, may end without being flushed; section
//!   5.21.1.6 says nothing about commands that run beside it.
//! - An admin command that waits for a lane when a controller is saved
//!   ([`slipway_pci::Function::save`]) is not in the state, and never ends. With a journal it is
//!   carried out again.
//! - A successor may have another number of lanes than its predecessor. If Identify advertised
//!   fused pairs, only a successor with the same number of lanes, or with none, is sure to accept
//!   them.
//! - Abort cancels commands that wait for a disk, commands that the disk has not begun
//!   ([`Disk::cancel`]), and Verify, Copy and Compare between their steps. All other commands end
//!   by themselves, as does a command that is split into several requests to a disk.
//!
//! [`Disk::cancel`]: slipway_block::Disk::cancel
//!
//! Not implemented, and refused with the status that the specification asks for: SGLs of admin
//! commands (section 4.4 forbids them), metadata and protection information, Write Uncorrectable,
//! reservations, namespace management, firmware update, Format (a namespace keeps the block size
//! that it was made with), Sanitize, self-test, directives, NVMe-MI, controller memory buffer,
//! weighted round robin, MSI (MSI-X and the pin are implemented).
//!
//! `host/vfio-user/examples/ramdisk.rs` puts a controller behind a socket in 40 lines.
//!
//! Features: `driver` is a small real driver for tests and benches; `fuzz` has the bodies of the
//! fuzz targets.
//!
//! Dependencies: `zerocopy` for structures from bytes, `serde` and `serde_json` for saved state
//! (rare, small, and readable when it is refused) and for views, `thiserror` for [`PartsError`].

mod activity;
mod admin;
mod cell;
mod controller;
#[cfg(any(test, feature = "driver", feature = "fuzz"))]
pub mod driver;
mod engine;
mod events;
mod features;
mod fleet;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod health;
mod home;
mod inspect;
mod journal;
mod limiter;
mod mailbox;
mod namespace;
mod nap;
mod parts;
mod permit;
mod persist;
mod phase;
mod prp;
mod queue;
mod queue_state;
mod registers;
mod requests;
mod sgl;
#[cfg(test)]
mod tests;
mod trace;
mod turn;

/// The external items that `cell` and `nap` use: their tests put loom's atomics in this place.
mod outside {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering, fence};

    pub(crate) use slipway_doorbells::Doorbells;
    pub(crate) use slipway_ram::{Fault, Memory};
}

pub use activity::{Activity, Io};
pub use controller::Controller;
pub use fleet::Answer;
pub use inspect::{CompletionView, ControllerView, SubmissionView, ThreadView};
pub use journal::journal_len;
pub use limiter::{Rate, Rates};
pub use namespace::{ChangeError, Done, Namespace};
pub use parts::{Identity, Limits, Parts, PartsError};
pub use persist::JOURNAL_VERSION;
pub use requests::{Mailbox, Posted, Request, Threads};
pub use trace::{Latencies, Layer, OpcodeClass, Tracer};

/// Size of BAR0 in bytes: registers, doorbells, MSI-X table and MSI-X pending bits, 4 KiB each.
pub const BAR_SIZE: u64 = 0x4000;
/// Returns the number of doorbell registers with `queue_pairs` I/O queue pairs: two for each pair,
/// and two for the admin queue.
pub const fn doorbell_count(queue_pairs: u16) -> usize {
    2 * (queue_pairs as usize + 1)
}
