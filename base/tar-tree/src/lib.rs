//! Files and directories as tar archives, for `slipway cp`: packed at one end, and unpacked at the
//! other, below a directory out of which nothing in the archive leads.
//!
//! # How the pieces meet
//!
//! The end that packs looks its source up ([`find()`]) and writes an archive of it ([`pack()`]).
//! The other end decides by docker's rules where the source is to be ([`place()`]), and makes the
//! files of the archive there ([`unpack()`]). A tree has the name [`TOP`] in an archive between the
//! two, in place of which the end that unpacks puts the name of the place. [`PieceWriter`] and
//! [`PieceReader`] make messages of an archive, and an archive of messages.
//!
//! # What keeps an archive in
//!
//! Each end may distrust the other: the host unpacks what a guest sends. An entry with an absolute
//! path or `..` is refused. The directory of each entry is opened beneath the place, by a call that
//! follows no symbolic link (openat2(2), `RESOLVE_BENEATH`, `RESOLVE_NO_SYMLINKS`), so a link that
//! an archive has made leads no later entry elsewhere. A file is made anew, never written through.
//! Devices, pipes and sockets are never made, and never replaced. [`Rules::of_guest`] makes no hard
//! links and no set-user-ID programs either. Headers and depths are bounded, sparse files are
//! refused, and no size is believed: the room that a file takes is what was sent of it.
//!
//! Paths of the end that packs, and of the place, are resolved within a root (`RESOLVE_IN_ROOT`):
//! the root of a container for its agent, and `/` for the host. On the host, a link at the place
//! itself is not followed ([`place_itself()`]).
//!
//! # Not implemented
//!
//! Extended attributes and access control lists; hard links are packed as files of their own, and
//! holes as zeros. Directories that are there already keep their mode, owner and time.
//!
//! Dependencies: `tar` writes and reads headers, long names and PAX records; `rustix` has openat2;
//! `thiserror` writes the errors; `tempfile` is for tests.

mod pack;
mod pieces;
mod place;
mod unpack;

use std::io;
use std::path::Path;

use slipway_printable::line;

pub use pack::pack;
pub use pieces::{PIECE, PieceReader, PieceWriter};
pub use place::{
    Found, Place, Source, ends_as_directory, find, is_contents, open_directory, place, place_itself,
};
#[cfg(feature = "fuzz")]
pub use unpack::fuzz::fuzz_unpack;
pub use unpack::{Rules, read_end, unpack};

/// The name of a tree in an archive between two ends.
pub const TOP: &str = "top";
/// The most characters of a path in a message.
const SHOWN: usize = 200;

/// The reason why files are not copied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or made.
    #[error("{path}: {cause}")]
    File {
        /// The path, fit for a terminal.
        path: String,
        /// The reason.
        cause: io::Error,
    },
    /// A file cannot be copied, or an entry of an archive is not unpacked.
    #[error("{path}: {reason}")]
    Refused {
        /// The path, fit for a terminal.
        path: String,
        /// The reason.
        reason: &'static str,
    },
    /// The archive is malformed, or does not come to its end.
    #[error("the archive of the files cannot be read: {0}")]
    Archive(io::Error),
}

impl Error {
    fn file(path: &Path, cause: impl Into<io::Error>) -> Self {
        Self::File { path: shown(path), cause: cause.into() }
    }

    fn refused(path: &Path, reason: &'static str) -> Self {
        Self::Refused { path: shown(path), reason }
    }
}

fn shown(path: &Path) -> String {
    line(&path.to_string_lossy(), SHOWN)
}

/// The files that were left out: devices, pipes, sockets, and the kernel's own file systems.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// The number of files.
    pub count: u64,
    /// The path of the first one in the archive, fit for a terminal.
    pub first: String,
}

impl LeftOut {
    fn add(&mut self, path: &Path) {
        if self.count == 0 {
            self.first = shown(path);
        }
        self.count += 1;
    }
}
