//! What can go wrong with an image, one clear line each.

use std::io;
use std::path::{Path, PathBuf};

use crate::Digest;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why an image could not be had. Every message is one line that says what was wrong and, where
/// the user can do something about it, what.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is no image reference.
    #[error("'{text}' is no image reference: {reason} (expected [REGISTRY/]NAME[:TAG][@DIGEST])")]
    BadReference {
        /// What was given.
        text: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// The text is no `oci:`, `oci-archive:`, `docker-archive:` or `dir:` source.
    #[error(
        "'{0}' is no image source: use oci:DIR[:TAG], oci-archive:FILE[:TAG], \
         docker-archive:FILE[:NAME] or dir:PATH"
    )]
    BadSource(String),
    /// The text is no SHA-256 digest.
    #[error("'{0}' is no digest: expected sha256: and 64 hexadecimal digits")]
    BadDigest(String),
    /// The registry has no such image.
    #[error("image {0} is not in the registry: check its name and tag")]
    NotFound(String),
    /// The registry refused the credentials, or their absence.
    #[error(
        "registry {registry} refuses access to {reference}: the image does not exist or needs a \
         login (docker login {registry})"
    )]
    Unauthorized {
        /// Host and port.
        registry: String,
        /// The image asked for.
        reference: String,
    },
    /// The registry did not answer, or not in a way that makes sense.
    #[error("registry {registry}: {reason}")]
    Registry {
        /// Host and port.
        registry: String,
        /// What happened.
        reason: String,
    },
    /// A source folder or archive lacks the image, or several are in it and none was chosen.
    #[error("{place}: {reason}")]
    Source {
        /// The folder or archive.
        place: String,
        /// What is missing.
        reason: String,
    },
    /// Bytes do not have the digest under which they were announced.
    #[error(
        "{what} is corrupt: its digest is {actual}, not {expected}; pull it again or repair the \
         source"
    )]
    DigestMismatch {
        /// Manifest, config, layer or uncompressed layer, and which.
        what: String,
        /// Announced.
        expected: Digest,
        /// Computed.
        actual: Digest,
    },
    /// A blob is longer or shorter than its descriptor says.
    #[error("{what} is corrupt: {actual} bytes where its descriptor says {expected}")]
    SizeMismatch {
        /// Which blob.
        what: String,
        /// Bytes announced.
        expected: u64,
        /// Bytes seen; a lower bound when the blob is too long.
        actual: u64,
    },
    /// The image exists for other machines only.
    #[error("{image} is not for {wanted}; it offers {offers}")]
    WrongPlatform {
        /// The image.
        image: String,
        /// `linux/amd64`.
        wanted: &'static str,
        /// Comma-separated platforms.
        offers: String,
    },
    /// A manifest, index or config makes no sense or is of a kind that is not supported.
    #[error("{what} cannot be used: {reason}")]
    BadDocument {
        /// Which document.
        what: String,
        /// Why.
        reason: String,
    },
    /// A layer is truncated, garbage, or names something that must not be followed.
    #[error("layer {layer} cannot be unpacked: {reason}")]
    BadLayer {
        /// Digest or position of the layer.
        layer: String,
        /// Why.
        reason: String,
    },
    /// A limit of [`Limits`](crate::Limits) was exceeded: too large, or a decompression bomb.
    #[error("{what} is refused: {reason}")]
    TooLarge {
        /// Which layer or document.
        what: String,
        /// Which limit, with its value.
        reason: String,
    },
    /// A plain root folder cannot be read.
    #[error("root folder {path}: {reason}")]
    BadFolder {
        /// The folder or a file in it.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// `mkfs.erofs` is missing or too old.
    #[error("{command}: {reason}; erofs-utils 1.7 or newer is needed (slipway doctor tells how)")]
    Tool {
        /// The command as configured.
        command: String,
        /// What it answered.
        reason: String,
    },
    /// `mkfs.erofs` failed.
    #[error("mkfs.erofs failed ({status}): {stderr}")]
    Mkfs {
        /// Its exit status.
        status: String,
        /// Last line of its complaint.
        stderr: String,
    },
    /// The disk with the cache is full. Nothing was left behind.
    #[error(
        "no space left on the disk with {path}: free some, or remove images (slipway image prune)"
    )]
    NoSpace {
        /// The cache's folder.
        path: PathBuf,
    },
    /// The cache has no such image.
    #[error("no image '{0}' here (slipway image ls shows what there is)")]
    Unknown(String),
    /// A short digest fits several images.
    #[error("'{0}' is ambiguous: it fits several images, give more digits")]
    Ambiguous(String),
    /// The image is used by a sandbox.
    #[error("image {0} is in use by a sandbox; remove the sandbox first")]
    InUse(String),
    /// Asked to remove an image by digest that still has several names.
    #[error("image {digest} has several names ({names}): remove them by name, or force")]
    SeveralNames {
        /// The image.
        digest: Digest,
        /// Its names, comma-separated.
        names: String,
    },
    /// The cache's index is unreadable.
    #[error("{path} is damaged ({reason}): remove it to start with an empty cache")]
    BadIndex {
        /// The index file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A system call on a file failed.
    #[error("{action} {path}: {source}")]
    Io {
        /// What was being done: "create", "read", …
        action: &'static str,
        /// To which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A worker thread panicked: a bug, reported instead of spread.
    #[error("internal error in the image worker: {0}")]
    Worker(String),
}

impl Error {
    /// An I/O error on `path`; a full disk becomes [`Error::NoSpace`].
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                Self::NoSpace { path: path.to_owned() }
            }
            _ => Self::Io { action, path: path.to_owned(), source },
        }
    }

    pub(crate) fn bad_layer(layer: impl ToString, reason: impl ToString) -> Self {
        Self::BadLayer { layer: layer.to_string(), reason: reason.to_string() }
    }

    pub(crate) fn bad_document(what: impl ToString, reason: impl ToString) -> Self {
        Self::BadDocument { what: what.to_string(), reason: reason.to_string() }
    }

    pub(crate) fn source(place: impl ToString, reason: impl ToString) -> Self {
        Self::Source { place: place.to_string(), reason: reason.to_string() }
    }

    pub(crate) fn too_large(what: impl ToString, reason: impl ToString) -> Self {
        Self::TooLarge { what: what.to_string(), reason: reason.to_string() }
    }
}
