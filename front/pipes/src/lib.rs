//! Warp pipes: a small engine that moves bytes from ring to ring, transforms them on the way, and
//! shares its executors among tenants. It has no part in a node: measurements of fair shares
//! (`slipway bench socket --drf`) and tests of `slipway_warp` run on it.
//!
//! - A [`Stretch`] is the part of a ring that may be read or written: position, length and size. It
//!   may wrap.
//! - A [`Rule`] cuts two stretches into [`Piece`]s that an executor can do in one go: eight cases,
//!   and one recursive rule (module [`generate`]).
//! - A [`Worker`] has a host core's transforms: copy, CRC32C, and records, which may be compressed
//!   (LZ4, zstd) and sealed. No transform allocates, once warm.
//! - An [`Executor`] takes [`Job`]s and returns [`Completion`]s. [`Core`] is the calling thread;
//!   [`Simulated`] is an accelerator with a set rate in a clock's time.
//! - A [`Pipe`] makes jobs from the bytes in a [`Source`] and the room in a [`Sink`], and moves
//!   both on when the jobs end. A chain is a sequence of pipes with a [`Fifo`] of the engine's own
//!   between each two. `tests/engine.rs` is a small but complete engine.
//!
//! Dependencies: `slipway-warp` for records, keys and the scheduler, `slipway-ram` for memory that
//! others change, `slipway-telemetry` for clocks; `crc-fast` for CRC32C with the processor's
//! instructions; `lz4_flex` and `zstd`; `thiserror` for the errors.

mod error;
mod executor;
mod fifo;
#[cfg(feature = "fuzz")]
pub mod fuzz;
pub mod generate;
mod job;
mod memory;
mod pipe;
mod stretch;
mod transform;

pub use error::TransformError;
pub use executor::{Core, Executor, Simulated};
pub use fifo::Fifo;
pub use generate::{Needs, Piece, Pieces, Rule, Sizes};
pub use job::{Completion, Job, JobEnd, KeyId, Moved, Work};
pub use memory::{Input, Output};
pub use pipe::{BrokenFifo, Pipe, Sink, Source};
pub use stretch::Stretch;
pub use transform::{Compression, Options, Worker, records};

#[cfg(test)]
mod tests;
