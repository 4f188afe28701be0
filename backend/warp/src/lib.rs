//! The way of the socket engine's bytes to another node: records that are sealed, and fair shares
//! of the work. SG-IOV's terms: a *warp pipe* is a chain from a source FIFO through *executors* to
//! a sink FIFO.
//!
//! - A [`record`] is sealed (AES-GCM) by a [`Sealer`] and opened by an [`Opener`], in place, under
//!   keys derived from a [`Secret`].
//! - A [`share::Scheduler`] picks the tenant whose work is next: dominant resource fairness (module
//!   [`share`]). An executor's [`Class`] is one of SG-IOV's letters.
//!
//! ```
//! use slipway_warp::{Cipher, Opener, Sealer, Secret, record};
//!
//! let secret = Secret::derive(&[7; 32], &[b"tenant 4", b"link 1", b"to the right"]);
//! let mut sealer = Sealer::new(Cipher::Aes128Gcm, &secret);
//! let mut opener = Opener::new(Cipher::Aes128Gcm, &secret);
//!
//! // The payload has room for the header before it and for the tag behind it.
//! let mut bytes = vec![0; record::HEADER + 20 + record::TAG];
//! bytes[record::HEADER..][..20].copy_from_slice(b"twenty bytes of text");
//! record::seal(&mut sealer, &mut bytes)?;
//! assert_eq!(record::open(&mut opener, &mut bytes)?, b"twenty bytes of text");
//! # Ok::<(), slipway_warp::RecordError>(())
//! ```
//!
//! Not here: links (`host/link`), tenants' names and policy (`host/sgiov`), and executors that
//! measurements of fair shares need (`front/pipes`).
//!
//! Dependencies: `slipway-rate` for caps; `ring` for AES-GCM and HKDF, since it has the assembly
//! with VAES and VPCLMULQDQ and rustls already brings it into the tree; `zerocopy` for a record's
//! header; `thiserror` for the errors.

mod error;
mod header;
mod key;
pub mod record;
pub mod share;

pub use error::RecordError;
pub use header::{Header, HeaderError};
pub use key::{Cipher, KeyError, Opener, RECORDS_PER_KEY, Sealer, Secret, Ticket};
pub use share::Class;

#[cfg(test)]
mod tests;
