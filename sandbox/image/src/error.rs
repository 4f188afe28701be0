//! Errors of images, one clear line each.
//!
//! Registries, archives and file names put foreign text into messages. Such text must do nothing
//! but show: it passes [`shown`] on its way into any message, whichever way the error was made.

use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};

use crate::{BadDigest, Digest};

/// Result with this crate's [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The most characters of a piece of foreign text in a message.
const MOST: usize = 1000;

/// Makes foreign text safe for a message: one line, of bounded length, without control characters.
fn shown(text: impl Display) -> String {
    slipway_printable::line(&text.to_string(), MOST)
}

/// Makes a path safe for a message, since the owner of a file chooses its name.
fn path_shown(path: &Path) -> String {
    shown(path.display())
}

/// The reason why an operation on an image failed. Every message is one line that says what was
/// wrong and, if the user can do something about it, the next step.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The text is not an image reference.
    #[error(
        "'{}' is no image reference: {reason} (expected [REGISTRY/]NAME[:TAG][@DIGEST])",
        shown(.text)
    )]
    BadReference {
        /// The text that was given.
        text: String,
        /// The rule that the text breaks.
        reason: &'static str,
    },
    /// The text is not an `oci:`, `oci-archive:`, `docker-archive:`, `dir:` or `layers:` source.
    #[error(
        "'{}' is no image source: use oci:DIR[:TAG], oci-archive:FILE[:TAG], \
         docker-archive:FILE[:NAME], dir:PATH or layers:PATH[:PATH…]",
        shown(.0)
    )]
    BadSource(String),
    /// The text is not a SHA-256 digest.
    #[error(transparent)]
    BadDigest(#[from] BadDigest),
    /// The registry has no such image.
    #[error("image {} is not in the registry: check its name and tag", shown(.0))]
    NotFound(String),
    /// The registry refused the credentials, or requires some.
    #[error(
        "registry {registry} refuses access to {}: the image does not exist or needs a \
         login (docker login {registry})",
        shown(.reference)
    )]
    Unauthorized {
        /// The registry's host and port.
        registry: String,
        /// The requested image.
        reference: String,
    },
    /// The registry did not answer, or its answer is invalid.
    #[error("registry {registry}: {}", shown(.reason))]
    Registry {
        /// The registry's host and port.
        registry: String,
        /// The cause.
        reason: String,
    },
    /// A source folder or archive lacks the image, or has several images and none was chosen.
    #[error("{}: {}", shown(.place), shown(.reason))]
    Source {
        /// The folder's or archive's path.
        place: String,
        /// The cause.
        reason: String,
    },
    /// The digest of the received bytes is not the announced one.
    #[error(
        "{} is corrupt: its digest is {actual}, not {expected}; pull it again or repair the \
         source",
        shown(.what)
    )]
    DigestMismatch {
        /// The blob: manifest, config, layer or uncompressed layer, and which one.
        what: String,
        /// The announced digest.
        expected: Digest,
        /// The computed digest.
        actual: Digest,
    },
    /// A blob is longer or shorter than its descriptor says.
    #[error("{} is corrupt: {actual} bytes where its descriptor says {expected}", shown(.what))]
    SizeMismatch {
        /// The blob's name.
        what: String,
        /// The announced number of bytes.
        expected: u64,
        /// The received number of bytes; a lower bound if the blob is too long.
        actual: u64,
    },
    /// The image exists only for other platforms.
    #[error("{} is not for {wanted}; it offers {}", shown(.image), shown(.offers))]
    WrongPlatform {
        /// The image's name.
        image: String,
        /// The supported platform, `linux/amd64`.
        wanted: &'static str,
        /// The platforms that the image offers, comma-separated.
        offers: String,
    },
    /// A manifest, index or config is invalid or of an unsupported kind.
    #[error("{} cannot be used: {}", shown(.what), shown(.reason))]
    BadDocument {
        /// The document's name.
        what: String,
        /// The cause.
        reason: String,
    },
    /// A layer is truncated, garbage, or has a name or link that must not be followed.
    #[error("layer {} cannot be unpacked: {}", shown(.layer), shown(.reason))]
    BadLayer {
        /// The digest or the position of the layer.
        layer: String,
        /// The cause.
        reason: String,
    },
    /// A limit of [`Limits`](crate::Limits) was exceeded: the image is too large, or a
    /// decompression bomb.
    #[error("{} is refused: {}", shown(.what), shown(.reason))]
    TooLarge {
        /// The layer or document that exceeds the limit.
        what: String,
        /// The limit and its value.
        reason: String,
    },
    /// A plain root folder cannot be read.
    #[error("root folder {}: {}", path_shown(.path), shown(.reason))]
    BadFolder {
        /// The folder, or a file in it.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The disk with the cache is full but for the part that stays free for others. Nothing of the
    /// image was left behind.
    #[error(
        "no space left on the disk with {} beside the part that stays free (1 GiB, or a twentieth \
         of a small disk): free some, or remove images (slipway image prune)",
        path_shown(.path)
    )]
    NoSpace {
        /// The folder on the full disk, or the file that could not be written.
        path: PathBuf,
    },
    /// The cache has no such image.
    #[error("no image '{}' here (slipway image ls shows what there is)", shown(.0))]
    Unknown(String),
    /// A short digest matches several images.
    #[error("'{}' is ambiguous: it fits several images, give more digits", shown(.0))]
    Ambiguous(String),
    /// Names of an import belong to other images in the cache.
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
    /// An image to be removed by digest has several names.
    #[error("image {digest} has several names ({names}): remove them by name, or force")]
    SeveralNames {
        /// The image's digest.
        digest: Digest,
        /// The image's names, comma-separated.
        names: String,
    },
    /// The cache's index is unreadable.
    #[error("{path} is damaged ({}): remove it to start with an empty cache", shown(.reason))]
    BadIndex {
        /// The path of the index file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The map of a lazily pulled image is unreadable.
    #[error("{}: {}: remove the image and pull it again", path_shown(.path), shown(.reason))]
    BadMap {
        /// The path of the map file.
        path: PathBuf,
        /// The cause.
        reason: String,
    },
    /// The cache's folder, or a file in it, belongs to another user, who could change every image.
    #[error(
        "{path} belongs to user {owner}, not to user {me}: give it back with chown, or use another \
         folder"
    )]
    ForeignCache {
        /// The folder's or file's path.
        path: PathBuf,
        /// The user id of its owner.
        owner: u32,
        /// The user id of the process that opens the cache.
        me: u32,
    },
    /// Another process holds a lock of the cache for too long, or a file that is not a lock is in a
    /// lock's place.
    #[error("the image cache is locked: {0}; end the holder if it hangs")]
    Locked(slipway_lock::Error),
    /// A system call on a file failed.
    #[error("{action} {}: {source}", path_shown(.path))]
    Io {
        /// The operation: "create", "read", …
        action: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// A worker thread panicked. That is a bug, reported as an error so that the process goes on.
    #[error("internal error in the image worker: {}", shown(.0))]
    Worker(String),
}

impl Error {
    /// Makes an error of an I/O error on `path`. A full disk becomes [`Error::NoSpace`].
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

impl From<slipway_private::Error> for Error {
    fn from(error: slipway_private::Error) -> Self {
        match error {
            slipway_private::Error::Foreign { path, owner, me } => {
                Self::ForeignCache { path, owner, me }
            }
            slipway_private::Error::Io { action, path, source } => Self::io(action, &path, source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text that clears the screen, sets the title, reverses the reading direction, and begins a
    /// new line.
    const HOSTILE: &str = "a\x1b[2J\x1b]0;owned\x07\u{202e}\u{9b}31m\r\nslipway: all is well";

    #[test]
    fn foreign_text_shows_and_does_nothing() {
        let text = || HOSTILE.to_owned();
        let digest = Digest::of(b"");
        let errors = [
            Error::BadReference { text: text(), reason: "x" },
            Error::BadSource(text()),
            BadDigest(text()).into(),
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
            Error::Unknown(text()),
            Error::BadIndex { path: "p".into(), reason: text() },
            Error::BadMap { path: text().into(), reason: text() },
            Error::Io { action: "read", path: text().into(), source: io::ErrorKind::Other.into() },
            Error::NoSpace { path: text().into() },
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
