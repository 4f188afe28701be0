//! Images that are there before their layers are.
//!
//! An eStargz layer (stargz-snapshotter, *eStargz: Standard-Compatible Extension to Container Image
//! Layers for Lazy Pulling*) has every chunk of its files in a gzip member of its own, or at a
//! known place of one, and at its end an index (TOC) of all files and chunks. [`Cache::pull_lazy`]
//! fetches only the indexes of an image (`pull`). They are read ([`toc`], [`index`]) and merged as
//! layers are, the image's file is written with holes where file data belongs, and a [`map`] tells
//! for every hole which bytes of which layer fill it. The process that fetches ([`serve()`]) fills
//! the holes that disks ask for, and then the others.
//!
//! The digest of an index is in the image's manifest, and the index has the digest of every chunk.
//! So all that is fetched later can be checked. Until then an index is as hostile as a layer, and a
//! map is read as hostile input, too.
//!
//! [`Cache::pull_lazy`]: crate::Cache::pull_lazy

pub(crate) mod budget;
mod extract;
mod fill;
#[cfg(feature = "fuzz")]
pub(crate) mod fuzz;
mod have;
pub(crate) mod index;
pub(crate) mod map;
mod members;
mod origins;
pub(crate) mod partial;
mod pull;
mod refused;
mod request;
mod rest;
pub(crate) mod serve;
mod stamp;
mod state;
mod toc;

pub use serve::serve;

/// The most uncompressed bytes from the beginning of a gzip member to the end of a chunk in it,
/// which a fetcher holds in memory. Makers of eStargz layers write chunks of 4 MiB.
pub(crate) const MOST_MEMBER: u64 = 64 << 20;
