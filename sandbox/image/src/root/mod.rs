//! The root file system of an image: layers are read ([`read`]), merged in memory into a tree
//! ([`tree`], [`merge`]) and written as one tar stream ([`write`]). No file of a layer is ever
//! created on the host's own file system, so there is no path on the host to escape to.

pub(crate) mod merge;
pub(crate) mod read;
pub(crate) mod tree;
pub(crate) mod write;
