//! Container images: from a registry, an archive or a folder to one read-only EROFS file, kept by
//! digest.
//!
//! # How the pieces meet
//!
//! [`Cache`] is the whole interface: [`pull`](Cache::pull), [`import`](Cache::import) and
//! [`ensure`](Cache::ensure) put an [`Image`] into a folder, [`get`](Cache::get),
//! [`list`](Cache::list), [`remove`](Cache::remove) and [`prune`](Cache::prune) manage it.
//!
//! 1. A [`Reference`] or a [`Source`] is opened (`source`), and its documents lead through an index
//!    to the manifest for linux/amd64 and to the config (`manifest`, `config`).
//! 2. Each layer streams through two digests and a decompressor into an unnamed file (`spool`). It
//!    is used only if both digests are the announced ones.
//! 3. The layers are merged in memory into one tree (`root::merge`). **No file of an image is ever
//!    created on the host**, so neither `..` nor a symbolic link has anything to escape to. File
//!    data stays in the layers, and the tree has offsets. Layers that are EROFS files already, as
//!    containerd keeps them, are read where they are (`root::erofs`), and never mounted.
//! 4. The tree is laid out and written as an EROFS file system by this crate itself
//!    (`root::layout`), and the file is renamed into the cache and listed (`cache`).
//!
//! [`pull_lazy`](Cache::pull_lazy) does without layers if they are eStargz: their indexes make the
//! tree, and the image is there with holes in the place of file data (`lazy`).
//!
//! Registries, and other users' archives and folders, are treated as hostile: every document is
//! read up to its limit and within its time, and messages show foreign text without its control
//! characters (`error`). Only the owner has access to the cache (`cache`).
//!
//! Everything in a layer is treated as hostile: names, links, sizes, sparse maps, compression
//! ratios. [`Limits`] bounds whatever can grow. A crash leaves nothing that the next
//! [`Cache::open`] does not remove.
//!
//! # What is not implemented
//!
//! Pushing; platforms other than linux/amd64; SHA-512 digests; docker's schema 1 manifests;
//! encrypted layers; layers for lazy pulls in other forms than eStargz (zstd:chunked, SOCI, indexes
//! in images of their own); signatures; mirrors; docker's credential helpers; resuming an
//! interrupted download; files that are sparse in PAX format (old GNU format works; a hole takes
//! space in the image). Layers are not shared between images: an image is one file. Extended
//! attributes that EROFS cannot hold are left out, and so are overlayfs's own. Times before 1970
//! become 1970, and fractions of seconds are dropped.
//!
//! # Third-party crates
//!
//! `reqwest` speaks HTTP (TLS by `rustls`) and `http-auth` parses challenges, `oci-spec` has the
//! documents' types, `tar` the header layout, `flate2` and `zstd` decompress, `sha2` and `hex` make
//! digests, `base64` decodes docker's stored logins, `tempfile` makes unnamed files, `rustix` has
//! openat2 and extended attributes, `tracing` logs what cannot be fetched, `tokio` and
//! `futures-util` fetch several layers at once, `serde`/`serde_json` store the index, `thiserror`
//! writes the errors.

mod cache;
mod config;
mod digest;
mod error;
mod lazy;
mod limits;
mod manifest;
mod progress;
mod reference;
mod resolve;
mod root;
mod source;
mod spool;
#[cfg(test)]
mod tests;

#[cfg(feature = "fuzz")]
use root::Form;

pub use cache::{Cache, Image, NameConflict, Prune, PullPolicy, Removed, Selection};
pub use config::ImageConfig;
pub use digest::{BadDigest, Digest};
pub use error::{Error, Result};
pub use lazy::serve;
pub use limits::Limits;
pub use progress::{Event, Progress, Silent};
pub use reference::Reference;
pub use source::Source;
pub use source::registry::{Access, Credentials};

/// Merges `data` as uncompressed layers over each other, which must neither panic nor run away,
/// whatever `data` is. Then repeats this with the checksum of every header corrected, since a
/// fuzzer that must guess checksums never gets past the first header.
#[cfg(feature = "fuzz")]
pub fn fuzz_layer(data: &[u8]) {
    let forms = [Form::Changes, Form::Changes, Form::Files];
    fuzz_merge(data, forms);
    let mut repaired = data.to_vec();
    for block in repaired.as_chunks_mut::<512>().0 {
        if block[257..262] == *b"ustar" {
            let mut header = tar::Header::new_old();
            header.as_mut_bytes().copy_from_slice(block);
            header.set_cksum();
            block.copy_from_slice(header.as_bytes());
        }
    }
    fuzz_merge(&repaired, forms);
}

/// Merges `data` as EROFS layers over each other, which must neither panic nor run away, whatever
/// `data` is.
#[cfg(feature = "fuzz")]
pub fn fuzz_erofs(data: &[u8]) {
    fuzz_merge(data, [Form::Erofs; 2]);
}

/// Reads `data` as the index of an eStargz layer, which must neither panic nor run away, whatever
/// `data` is.
#[cfg(feature = "fuzz")]
pub fn fuzz_index(data: &[u8]) {
    lazy::fuzz::index(data);
}

/// Reads `data` as the map of a lazily pulled image, which must neither panic nor run away,
/// whatever `data` is.
#[cfg(feature = "fuzz")]
pub fn fuzz_map(data: &[u8]) {
    lazy::fuzz::map(data);
}

#[cfg(feature = "fuzz")]
fn fuzz_merge<const N: usize>(data: &[u8], forms: [Form; N]) {
    use std::io::Write;
    let Ok(mut file) = tempfile::tempfile() else { return };
    if file.write_all(data).is_err() {
        return;
    }
    let limits = Limits {
        entries: 10_000,
        metadata_bytes: 16 << 20,
        image_uncompressed: 16 << 20,
        ..Limits::default()
    };
    let mut merger = root::merge::Merger::new(&limits);
    for form in forms {
        if merger.apply(&file, form).is_err() {
            return;
        }
    }
    let layers: Vec<_> = forms.iter().filter_map(|_| file.try_clone().ok()).collect();
    let tree = merger.finish();
    let Ok(layout) = root::layout::Layout::of(&tree, [0; 16]) else { return };
    let Ok(image) = tempfile::tempfile() else { return };
    // Data that was read by the merger must be there to be written.
    assert!(layout.write_image(&tree, &layers, &image, &mut |_| {}).is_ok());
    let limits = Limits::default();
    let mut again = root::merge::Merger::new(&limits);
    assert!(again.apply(&image, Form::Erofs).is_ok());
}
