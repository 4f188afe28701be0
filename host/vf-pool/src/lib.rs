//! A pool of virtual functions (VFs) that are open, reset and scrubbed before anybody asks for one.
//!
//! Opening a VF, its function-level reset (100 ms by the PCIe specification) and the removal of the
//! last owner's data are the slow part of an attachment (FastIOV, section 3.2.2). The pool does all
//! three when the pool is made and when a VF returns. [`Pool::take`] moves a ready VF to its owner
//! and writes that down; it never waits for a reset, whatever other VFs do.
//!
//! The pieces:
//! - [`Device`] is the contract of a VF. The pool does not know what a VF is: a function of the
//!   plane, or hardware.
//! - [`Devset`] holds the devices of VFs that share a reset, behind the locks of FastIOV, section
//!   4.2.1: a read/write lock for the set, a mutex for each VF. Operations on different VFs run in
//!   parallel, and an operation on the set excludes them all. `tests/locks.rs` has loom go through
//!   the interleavings.
//! - `table` has the state of each VF, the queue of ready ones and the owners. Its mutex is held
//!   for a few instructions. Operations on devices happen outside.
//! - `workers` resets and scrubs what returns, on a bounded number of threads. A device that does
//!   not answer until a deadline leaves the pool; its thread is replaced, so that nobody waits. A
//!   VF that failed is tried again after pauses ([`Retries`]), and comes back when that succeeds.
//! - [`Ledger`] is a file of [`Record`]s that outlives the process: which VF has which owner. A
//!   record is written before the VF is handed over. [`Pool::reconcile`] compares it with the
//!   owners that still live.
//!
//! A VF has one [`VfState`]: ready, taken, returning, failed, stuck, or drained.
//!
//! Not implemented: operations that wait for a VF of an empty pool (the caller decides), growth of
//! a pool.
//!
//! # Where the ledger lies
//!
//! On a tmpfs such as `/run`. Owners are processes and containers of this boot, and so are the VFs:
//! a reboot ends all of them, and a ledger that survived it would name nothing. Each write is a
//! durable transaction. On tmpfs that costs processor time only (`examples/ledger.rs` prints it);
//! on a disk each would wait for the disk. Writers that come at the same time share a transaction.
//!
//! # Dependencies
//!
//! `redb` for the ledger: an embedded store in pure Rust with a stable file format, transactions
//! that a killed process cannot tear, and a check of every page when a file is opened. A map in a
//! JSON file would be written as a whole for each VF; SQLite and LMDB are C. `rustix` opens the
//! ledger's file without following links, `serde` and `serde_json` encode records, `thiserror`,
//! `tracing` for VFs that fail with nobody waiting.

mod device;
mod devset;
mod error;
mod ledger;
mod outside;
mod owner;
mod pool;
mod shelf;
mod table;
mod workers;

pub use device::{Device, Fault};
pub use devset::{Attached, Busy, Devset};
pub use error::Error;
pub use ledger::{Ledger, LedgerError, Record, Standing};
pub use owner::{BadOwner, Owner};
pub use pool::{Health, Lease, Pool, Reconciled, Retries, Settings};
pub use table::{Counts, VfState, VfStatus};
