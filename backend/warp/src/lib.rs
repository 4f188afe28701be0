//! Warp pipes: how the socket plane's engine moves bytes, transforms them on the way, and shares what does
//! it among tenants. (SG-IOV's words: a *warp pipe* is a chain from a source FIFO through *executors* to a
//! sink FIFO; a *job* is one piece of it.)
//!
//! # How the pieces meet
//!
//! - A [`Stretch`] is what of a ring may be read or written: position, length, size; it wraps or not.
//! - A [`Rule`] cuts two stretches into [`Piece`]s that an executor can do in one go: eight cases, and one
//!   recursive rule (module [`generate`]).
//! - A [`Worker`] has a host core's transforms: copy, CRC32C, and [`record`]s, which may be compressed
//!   (LZ4, zstd) and sealed (AES-GCM, by a [`Sealer`] and an [`Opener`]). Nothing there allocates, once
//!   warm.
//! - An [`Executor`] takes [`Job`]s and gives [`Completion`]s: [`Core`], the calling thread; [`Simulated`],
//!   an accelerator of a set rate in a clock's time. Its [`Class`] is one of SG-IOV's letters.
//! - A [`share::Scheduler`] says whose job is next: dominant resource fairness (module [`share`]).
//! - A [`Pipe`] makes jobs of what a [`Source`] has and a [`Sink`] takes, and moves both on when they end.
//!   A chain is pipes with a [`Fifo`] of the engine's own between two. `tests/engine.rs` is a whole engine,
//!   small.
//!
//! # Using it
//!
//! An engine that seals what a socket's FIFO has, straight into what its link sends:
//!
//! ```
//! use slipway_warp::{Cipher, Input, Opener, Options, Output, Sealer, Secret, Stretch, Worker, record};
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
//! Not here: FIFOs (`base/ring`), sockets, links, tenants' names and policy (`host/sgiov`); real
//! accelerators, which would be further [`Executor`]s.
//!
//! Dependencies: `slipway-ram` for memory that others change, `slipway-telemetry` for clocks,
//! `slipway-rate` for caps; `ring` for
//! AES-GCM and HKDF: it has the assembly with VAES and VPCLMULQDQ, and the tree has it through rustls;
//! `crc-fast` for CRC32C with the same instructions; `lz4_flex` and `zstd`; `zerocopy` for a record's
//! header, `thiserror` for the errors.

mod executor;
mod fifo;
#[cfg(feature = "fuzz")]
pub mod fuzz;
pub mod generate;
mod job;
mod key;
mod memory;
mod pipe;
pub mod record;
pub mod share;
mod stretch;
mod transform;

pub use executor::{Class, Core, Executor, Simulated};
pub use fifo::Fifo;
pub use generate::{Needs, Piece, Pieces, Rule, Sizes};
pub use job::{Completion, Job, KeyId, Moved, Place, Work};
pub use key::{Cipher, KeyError, Opener, RECORDS_PER_KEY, Sealer, Secret};
pub use memory::{Input, Output};
pub use pipe::{BrokenFifo, Pipe, Sink, Source};
pub use record::{Header, HeaderError};
pub use stretch::Stretch;
pub use transform::{Compression, Options, TransformError, Worker, records};

#[cfg(test)]
mod tests;
