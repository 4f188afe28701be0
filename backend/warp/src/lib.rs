//! Warp pipes: how the socket engine moves bytes, transforms them on the way, and shares the
//! executors among tenants. SG-IOV's terms: a *warp pipe* is a chain from a source FIFO through
//! *executors* to a sink FIFO, and a *job* is one piece of work of such a chain.
//!
//! # How the pieces meet
//!
//! - A [`Stretch`] is the part of a ring that may be read or written: position, length and size. It
//!   may wrap.
//! - A [`Rule`] cuts two stretches into [`Piece`]s that an executor can do in one go: eight cases,
//!   and one recursive rule (module [`generate`]).
//! - A [`Worker`] has a host core's transforms: copy, CRC32C, and [`record`]s, which may be
//!   compressed (LZ4, zstd) and sealed (AES-GCM, by a [`Sealer`] and an [`Opener`]). No transform
//!   allocates, once warm.
//! - An [`Executor`] takes [`Job`]s and returns [`Completion`]s. [`Core`] is the calling thread;
//!   [`Simulated`] is an accelerator with a set rate in a clock's time. An executor's [`Class`] is
//!   one of SG-IOV's letters.
//! - A [`share::Scheduler`] picks the tenant whose job is next: dominant resource fairness (module
//!   [`share`]).
//! - A [`Pipe`] makes jobs from the bytes in a [`Source`] and the room in a [`Sink`], and moves
//!   both on when the jobs end. A chain is a sequence of pipes with a [`Fifo`] of the engine's own
//!   between each two. `tests/engine.rs` is a small but complete engine.
//!
//! # Using it
//!
//! An engine that seals the bytes of a socket's FIFO straight into its link's send buffer:
//!
//! ```
//! use slipway_warp::{Cipher, Input, Opener, Options, Output, Sealer, Secret};
//! use slipway_warp::{Stretch, Worker, record};
//!
//! let secret = Secret::derive(&[7; 32], &[b"tenant 4", b"link 1", b"to the right"]);
//! let mut sealer = Sealer::new(Cipher::Aes128Gcm, &secret);
//! let mut opener = Opener::new(Cipher::Aes128Gcm, &secret);
//! let mut worker = Worker::new();
//!
//! // A ring of 64 bytes with 20 to be read, which wrap.
//! let fifo = slipway_ram::Span::heap(64);
//! let readable = Stretch::new(54, 20, 64).unwrap();
//! let mut link = [0; 20 + record::OVERHEAD];
//! let input = Input::Ring(&fifo, readable);
//! let mut output = Output::Bytes(&mut link);
//! let length = worker.seal(Some(&mut sealer), Options::default(), &input, &mut output)?;
//!
//! // The other side: the header tells how much belongs to the record.
//! let header = record::Header::parse(&link)?.unwrap();
//! assert_eq!(header.record(), length);
//! let mut output = Output::Ring(&fifo, readable);
//! let payload = worker.open(Some(&mut opener), &mut link[..length], &mut output)?;
//! assert_eq!(payload, 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Not here: FIFOs (`base/ring`), sockets, links, tenants' names and policy (`host/sgiov`). Real
//! accelerators would be further [`Executor`]s.
//!
//! Dependencies: `slipway-ram` for memory that others change, `slipway-telemetry` for clocks,
//! `slipway-rate` for caps; `ring` for AES-GCM and HKDF, since it has the assembly with VAES and
//! VPCLMULQDQ and rustls already brings it into the tree; `crc-fast` for CRC32C with the same
//! instructions; `lz4_flex` and `zstd`; `zerocopy` for a record's header; `thiserror` for the
//! errors.

mod error;
mod executor;
mod fifo;
#[cfg(feature = "fuzz")]
pub mod fuzz;
pub mod generate;
mod header;
mod job;
mod key;
mod memory;
mod pipe;
pub mod record;
pub mod share;
mod stretch;
mod transform;

pub use error::TransformError;
pub use executor::{Class, Core, Executor, Simulated};
pub use fifo::Fifo;
pub use generate::{Needs, Piece, Pieces, Rule, Sizes};
pub use header::{Header, HeaderError};
pub use job::{Completion, Job, JobEnd, KeyId, Moved, Work};
pub use key::{Cipher, KeyError, Opener, RECORDS_PER_KEY, Sealer, Secret};
pub use memory::{Input, Output};
pub use pipe::{BrokenFifo, Pipe, Sink, Source};
pub use stretch::Stretch;
pub use transform::{Compression, Options, Worker, records};

#[cfg(test)]
mod tests;
