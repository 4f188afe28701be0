//! An NVMe controller: a PCI function that connects namespaces (disks) to a guest.
//!
//! It follows *NVM Express Base Specification, Revision 1.4*; section numbers in this crate are of
//! that document. It serves Linux's and SPDK's drivers: PRPs and SGLs, MSI-X, up to 64 I/O queue pairs of
//! up to 1,024 entries, several namespaces, any number of commands in flight up to
//! [`Limits::in_flight`].
//!
//! How the pieces meet. [`Controller`] is made of [`Parts`] and implements
//! [`slipway_pci::Function`]; all work happens in its `poll`, on the host's thread, in this order:
//! 1. `lifecycle`: enable, reset and shutdown make progress;
//! 2. `queue`: doorbell cells are looked at, submission queue entries are copied in, once;
//! 3. `admin` or `io` decide on the copy; a command ends at once or becomes disk requests, whose
//!    data places `prp` or `sgl` found and pinned; `inflight` remembers it;
//!    what follows a request of a command with several is in `steps`. A read or write of a disk that
//!    copies in place is carried out here and then, and is nothing of this;
//! 4. the disks take the requests and give completions; completion queue entries are written;
//! 5. each completion queue that got entries interrupts once (`interrupts`).
//!
//! `lane` and `lanes`: some of the I/O queues may have other threads ([`Limits::lanes`]); each such lane
//! takes steps 2 to 5 for itself, and no command knows of another lane.
//!
//! `journal` and `recover`: with memory that outlives the process a successor goes on where the
//! controller was killed, at whatever instruction.
//!
//! Other threads never touch a controller: they post jobs ([`Mailbox`]), which its next poll runs
//! first. One such job has the controller tell where the time of commands goes ([`Tracer`]).
//!
//! Namespaces come, go and grow while it runs ([`Controller::attach`], [`Controller::detach`],
//! [`Controller::refresh`]); a disk may be one of several on the same medium, for several
//! controllers. Other threads post such calls to the [`Mailbox`].
//!
//! A host may limit a controller's commands and bytes per second ([`Controller::limit`]), all lanes
//! together. Lanes that wait for the same limit race for it; within a lane queues have turns.
//!
//! Decisions where the specification leaves room:
//! - NN is 1,024 whichever namespaces there are, so that it is constant. A namespace that is not
//!   there, or no longer, is Invalid Namespace or Format (0Bh) to a command; what its disk had begun
//!   ends as the disk ends it.
//! - The Changed Namespace List forgets what was read of it without Retain Asynchronous Event.
//! - A command is fetched only when its completion queue has a slot for it, so a full queue makes
//!   commands wait where they are, in the guest's memory. Nothing is lost and nothing is kept here.
//! - Queue memory, or a shadow doorbell page, that cannot be read or written is fatal: CSTS.CFS,
//!   until the host resets (9.5).
//! - Shadow doorbells (Doorbell Buffer Config) are offered where doorbells are trapped, since there
//!   each register write is an exit of the guest and a message. A mapped page needs none: a store
//!   to it costs what a store to the shadow page does. `cell` has the protocol.
//! - A wrong doorbell value changes nothing and raises an asynchronous event (5.2.1).
//! - After CC.EN falls, CSTS.RDY stays until the disks gave all guest memory back; completions of
//!   that time go nowhere.
//! - No space on the disk is Capacity Exceeded (81h), which Linux reports as ENOSPC. A write to a
//!   read-only namespace is Namespace is Write Protected (20h), announced in NSATTR.
//! - Interrupts are one per queue and poll, or fewer with Interrupt Coalescing, whose threshold and
//!   time count for each completion queue by itself. They are not held back on the ground that the
//!   guest is behind: `interrupts` says why that could lose one.
//! - With lanes, of more than 64 errors that come between two polls of the home the newest 64 are logged
//!   and counted; SMART counters trail a lane by one poll.
//! - Command identifiers are not compared with those in flight: a host that uses one twice gets two
//!   completions.
//! - Commands are processed whether or not Bus Master Enable is set: the host of the function
//!   knows what memory it lends.
//! - Features are not saveable; they return to their defaults on every controller reset.
//! - An SGL may have up to 4,096 descriptors, which bounds the work of one that points at itself;
//!   longer ones are refused with Invalid Number of SGL Descriptors (0Eh). Its data is aligned to
//!   dwords; bit buckets are not supported.
//! - Compare, Verify and Copy pass the data through a buffer of the controller's, in steps of at
//!   most 1 MiB, which is used again (`spares`): in the steady state no command allocates, but for
//!   those whose data is in message-only memory. Copy is that of TP 4065 with source ranges of format 0; ranges that overlap the
//!   destination are copied piece by piece from their start.
//! - A fused Compare and Write has the disk for itself, as far as this controller goes: its other
//!   commands to that namespace end before the compare or start after the write. With a journal it has
//!   the controller for itself, as what is carried out again after a restart must not come between
//!   (`journal`). Other controllers of the same disk are not held back, nor are other lanes, so for a
//!   shared namespace and on a controller with lanes it is refused (Invalid Field), and not advertised
//!   (FUSES). Its halves must come with one doorbell (section 4.11); a half without the other is
//!   refused.
//! - A write is atomic in units of one block (AWUN, AWUPF and ACWU are 0), whatever disks do better. Not
//!   on a RAM disk that several threads have, of lanes or of several controllers: of two commands at
//!   one block at the same time a reader may see parts of both, which AWUN does not allow.
//! - Switching the volatile write cache off flushes what was written before. A write that was under way
//!   then, or on another lane just then, may end without being flushed; section 5.21.1.6 says nothing
//!   of commands that run beside it.
//! - An admin command that waits for a lane when a controller is saved ([`slipway_pci::Function::save`])
//!   is not in the state, and never ends. With a journal it is carried out again.
//! - A successor may have another number of lanes than its predecessor. Only one that has the same as
//!   before, or none, is sure to take fused pairs if Identify said so.
//! - Abort gives up what waits for a disk, what the disk has not begun with ([`Disk::cancel`]), and
//!   Verify, Copy and Compare between their steps. Everything else ends by itself, as does a command
//!   that several requests of a disk work on.
//!
//! [`Disk::cancel`]: slipway_block::Disk::cancel
//!
//! Not implemented, and refused with the status that the specification asks for: SGLs of admin
//! commands (section 4.4 forbids them), metadata and protection information, Write Uncorrectable,
//! reservations, namespace management, firmware update, Format (a namespace has the block size that
//! it was made with), Sanitize, self-test, directives, NVMe-MI, controller memory buffer,
//! weighted round robin, MSI (MSI-X and the pin are there).
//!
//! `host/vfio-user/examples/ramdisk.rs` puts one behind a socket in 40 lines.
//!
//! Features: `driver` is a small real driver, for tests and benches; `fuzz` the fuzz targets' bodies.
//!
//! Dependencies: `zerocopy` for structures from bytes, `serde` and `serde_json` for saved state
//! (rare, small, and readable when it is refused), `thiserror` for [`PartsError`].

mod admin;
mod attachment;
mod cell;
mod controller;
#[cfg(any(test, feature = "driver", feature = "fuzz"))]
pub mod driver;
mod events;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
mod health;
mod inflight;
mod interrupts;
mod io;
mod journal;
mod lane;
mod lanes;
mod lifecycle;
mod limiter;
mod mailbox;
mod namespace;
mod nap;
mod parts;
mod prp;
mod queue;
mod recover;
mod registers;
mod serve;
mod sgl;
mod spares;
mod state;
mod steps;
#[cfg(test)]
mod tests;
mod trace;
mod turn;

pub use attachment::{ChangeError, Done};
/// What `cell` and `nap` need of elsewhere: their tests put loom's atomics in its place.
mod outside {
    pub(crate) use std::sync::atomic::{AtomicBool, Ordering, fence};

    pub(crate) use slipway_pci::Doorbells;
    pub(crate) use slipway_ram::{Fault, Memory};
}

pub use controller::Controller;
pub use journal::{JOURNAL_VERSION, journal_len};
pub use limiter::{Rate, Rates};
pub use mailbox::Mailbox;
pub use namespace::Namespace;
pub use parts::{Identity, Limits, Parts, PartsError};
pub use trace::{Latencies, Layer, OpcodeClass, Tracer};

/// Size of BAR0, bytes: registers, doorbells, MSI-X table, MSI-X pending bits; 4 KiB each.
pub const BAR_SIZE: u64 = 0x4000;
/// Number of doorbell registers with `queue_pairs` I/O queue pairs: two each, and the admin queue's.
pub const fn doorbell_count(queue_pairs: u16) -> usize {
    2 * (queue_pairs as usize + 1)
}
