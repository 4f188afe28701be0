//! What can go wrong with an image, one clear line each.
//!
//! Registries, archives and file names bring text of their own into messages. A message shows it and does
//! nothing else: what is foreign passes [`shown`] on its way into any message, however the error was made.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use crate::Digest;

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Longest piece of foreign text in a message, characters.
const MOST: usize = 1000;

/// Foreign text as a message shows it: one line, of bounded length, without control characters.
fn shown(text: impl Display) -> String {
    slipway_printable::line(&text.to_string(), MOST)
}

/// A path as a message shows it: names of files are their owner's choice.
fn path_shown(path: &Path) -> String {
    shown(path.display())
}

/// Why an image could not be had. Every message is one line that says what was wrong and, where
/// the user can do something about it, what.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is no image reference.
    #[error(
        "'{}' is no image reference: {reason} (expected [REGISTRY/]NAME[:TAG][@DIGEST])",
        shown(.text)
    )]
    BadReference {
        /// What was given.
        text: String,
        /// The rule that it breaks.
        reason: &'static str,
    },
    /// The text is no `oci:`, `oci-archive:`, `docker-archive:` or `dir:` source.
    #[error(
        "'{}' is no image source: use oci:DIR[:TAG], oci-archive:FILE[:TAG], \
         docker-archive:FILE[:NAME] or dir:PATH",
        shown(.0)
    )]
    BadSource(String),
    /// The text is no SHA-256 digest.
    #[error("'{}' is no digest: expected sha256: and 64 hexadecimal digits", shown(.0))]
    BadDigest(String),
    /// The registry has no such image.
    #[error("image {} is not in the registry: check its name and tag", shown(.0))]
    NotFound(String),
    /// The registry refused the credentials, or their absence.
    #[error(
        "registry {registry} refuses access to {}: the image does not exist or needs a \
         login (docker login {registry})",
        shown(.reference)
    )]
    Unauthorized {
        /// Host and port.
        registry: String,
        /// The image asked for.
        reference: String,
    },
    /// The registry did not answer, or not in a way that makes sense.
    #[error("registry {registry}: {}", shown(.reason))]
    Registry {
        /// Host and port.
        registry: String,
        /// What happened.
        reason: String,
    },
    /// A source folder or archive lacks the image, or several are in it and none was chosen.
    #[error("{}: {}", shown(.place), shown(.reason))]
    Source {
        /// The folder or archive.
        place: String,
        /// What is missing.
        reason: String,
    },
    /// Bytes do not have the digest under which they were announced.
    #[error(
        "{} is corrupt: its digest is {actual}, not {expected}; pull it again or repair the \
         source",
        shown(.what)
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
    #[error("{} is corrupt: {actual} bytes where its descriptor says {expected}", shown(.what))]
    SizeMismatch {
        /// Which blob.
        what: String,
        /// Bytes announced.
        expected: u64,
        /// Bytes seen; a lower bound when the blob is too long.
        actual: u64,
    },
    /// The image exists for other machines only.
    #[error("{} is not for {wanted}; it offers {}", shown(.image), shown(.offers))]
    WrongPlatform {
        /// The image.
        image: String,
        /// `linux/amd64`.
        wanted: &'static str,
        /// Comma-separated platforms.
        offers: String,
    },
    /// A manifest, index or config makes no sense or is of a kind that is not supported.
    #[error("{} cannot be used: {}", shown(.what), shown(.reason))]
    BadDocument {
        /// Which document.
        what: String,
        /// Why.
        reason: String,
    },
    /// A layer is truncated, garbage, or names something that must not be followed.
    #[error("layer {} cannot be unpacked: {}", shown(.layer), shown(.reason))]
    BadLayer {
        /// Digest or position of the layer.
        layer: String,
        /// Why.
        reason: String,
    },
    /// A limit of [`Limits`](crate::Limits) was exceeded: too large, or a decompression bomb.
    #[error("{} is refused: {}", shown(.what), shown(.reason))]
    TooLarge {
        /// Which layer or document.
        what: String,
        /// Which limit, with its value.
        reason: String,
    },
    /// A plain root folder cannot be read.
    #[error("root folder {}: {}", path_shown(.path), shown(.reason))]
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
    #[error("mkfs.erofs failed ({status}): {}", shown(.stderr))]
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
    #[error("no image '{}' here (slipway image ls shows what there is)", shown(.0))]
    Unknown(String),
    /// A short digest fits several images.
    #[error("'{}' is ambiguous: it fits several images, give more digits", shown(.0))]
    Ambiguous(String),
    /// Names of an import stand for other images here.
    #[error(
        "there are other images called {} here: --replace takes the names from them, or import it \
         under another name",
        shown(.names)
    )]
    NamesTaken {
        /// The names, comma-separated.
        names: String,
    },
    /// The image is used by a sandbox.
    #[error("image {} is in use by a sandbox; remove the sandbox first", shown(.0))]
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
    #[error("{path} is damaged ({}): remove it to start with an empty cache", shown(.reason))]
    BadIndex {
        /// The index file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The cache's folder, or a file in it, is another user's, who could change every image.
    #[error(
        "{path} belongs to user {owner}, not to user {me}: give it back with chown, or use another folder"
    )]
    ForeignCache {
        /// The folder or file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// Who opens the cache.
        me: u32,
    },
    /// Another process did not give the cache back in time, or something else is where a lock's file
    /// should be.
    #[error("the image cache is locked: {0}; end the holder if it hangs")]
    Locked(slipway_lock::Error),
    /// A system call on a file failed.
    #[error("{action} {}: {source}", path_shown(.path))]
    Io {
        /// What was being done: "create", "read", …
        action: &'static str,
        /// To which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A worker thread panicked: a bug, reported instead of spread.
    #[error("internal error in the image worker: {}", shown(.0))]
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

impl From<slipway_lock::Error> for Error {
    fn from(error: slipway_lock::Error) -> Self {
        match error {
            slipway_lock::Error::Io { action, path, source } => Self::io(action, &path, source),
            other => Self::Locked(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clears the screen, sets the title, turns the reading direction, begins a line of its own.
    const HOSTILE: &str = "a\x1b[2J\x1b]0;owned\x07\u{202e}\u{9b}31m\r\nslipway: all is well";

    #[test]
    fn foreign_text_shows_and_does_nothing() {
        let text = || HOSTILE.to_owned();
        let digest = Digest::of(b"");
        let errors = [
            Error::BadReference { text: text(), reason: "x" },
            Error::BadSource(text()),
            Error::BadDigest(text()),
            Error::NotFound(text()),
            Error::Registry { registry: "r".into(), reason: text() },
            Error::Source { place: text(), reason: text() },
            Error::DigestMismatch { what: text(), expected: digest, actual: digest },
            Error::SizeMismatch { what: text(), expected: 0, actual: 0 },
            Error::WrongPlatform { image: text(), wanted: "x", offers: text() },
            Error::BadDocument { what: text(), reason: text() },
            Error::BadLayer { layer: text(), reason: text() },
            Error::TooLarge { what: text(), reason: text() },
            Error::BadFolder { path: text().into(), reason: text() },
            Error::Mkfs { status: "1".into(), stderr: text() },
            Error::Unknown(text()),
            Error::BadIndex { path: "p".into(), reason: text() },
            Error::Io { action: "read", path: text().into(), source: io::ErrorKind::Other.into() },
            Error::NamesTaken { names: text() },
            Error::Worker(text()),
        ];
        for error in errors {
            let shown = error.to_string();
            assert!(shown.chars().all(slipway_printable::is_printable), "{shown:?}");
            assert!(shown.contains("a\\u001b[2J"), "{shown}");
        }
    }

    #[test]
    fn foreign_text_is_of_bounded_length() {
        let error = Error::Registry { registry: "r".into(), reason: "x".repeat(1 << 20) };
        assert!(error.to_string().len() < 2 * MOST);
    }
}
