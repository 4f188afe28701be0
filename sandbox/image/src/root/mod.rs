//! The root file system of an image: layers are read (tar archives by [`read`], EROFS files by
//! [`erofs`]), merged in memory into a tree ([`tree`], [`merge`]) and written as one EROFS file
//! ([`layout`]). [`budget`] counts the memory. No file of a layer is ever created on the host's own
//! file system, so there is no path on the host to escape to, and no layer is mounted. [`write`]
//! makes the archive that a plain folder becomes.

pub(crate) mod budget;
pub(crate) mod erofs;
pub(crate) mod layout;
pub(crate) mod merge;
pub(crate) mod read;
pub(crate) mod tree;
pub(crate) mod write;

/// The format of a layer's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// A tar archive of changes: names that begin with `.wh.` are whiteouts.
    Changes,
    /// A tar archive of files alone.
    Files,
    /// An EROFS file system of changes, in overlayfs's form.
    Erofs,
}
