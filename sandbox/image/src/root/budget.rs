//! The memory that the merged root and its readers take, counted before it is taken.
//!
//! The costs are those of the collections that hold a tree, with an allocator that has a head of
//! eight bytes for each allocation and rounds to sixteen. They are upper bounds: an image takes
//! less, down to half of what is counted.

use std::collections::BTreeMap;

use super::layout::Layout;
use super::read::{ArchiveEntry, EntryContent};
use super::tree::{Child, Inode, MAX_NAME, NodeKind};
use crate::Limits;

/// The most bytes that an allocation takes beside its content.
const ALLOCATION: usize = 32;
/// The fewest entries of a node of a B-tree that has several nodes. Nodes above it included, an
/// entry takes a fifth of a node at most.
const NODE_ENTRIES: usize = 5;
/// A table is up to half empty, and its predecessor is there while it grows.
const TABLE: usize = 3;

/// An inode, and its place in the image.
const INODE: usize = size_of::<Inode>() + Layout::BYTES_PER_INODE;
/// A folder, beside its inode and its names: the first node of them.
const FOLDER: usize = node::<Vec<u8>, Child>();
/// A name in a folder, beside its bytes.
const NAME: usize = node::<Vec<u8>, Child>() / NODE_ENTRIES + ALLOCATION;
/// The first node of a file's extended attributes.
const ATTRIBUTES: usize = node::<Vec<u8>, Vec<u8>>();
/// An attribute, beside its bytes.
const ATTRIBUTE: usize = node::<Vec<u8>, Vec<u8>>() / NODE_ENTRIES;

/// An entry that waits to be merged, beside its content. The list of them is twice as long as it
/// must be at most.
pub(crate) const WAITING: usize = 2 * size_of::<ArchiveEntry>();

/// A folder that no layer describes, with the longest name.
pub(crate) const MISSING_FOLDER: usize = INODE + FOLDER + NAME + MAX_NAME;

/// Returns the bytes of a B-tree's lowest node, which has room for eleven entries.
const fn node<K, V>() -> usize {
    11 * (size_of::<K>() + size_of::<V>()) + 16 + ALLOCATION
}

/// Memory that is held, and its limit ([`Limits::metadata_bytes`]).
#[derive(Debug)]
pub(crate) struct Budget {
    held: u64,
    most: u64,
}

impl Budget {
    pub(crate) fn new(limits: &Limits) -> Self {
        Self { held: 0, most: limits.metadata_bytes }
    }

    /// Counts `bytes` as held.
    ///
    /// # Errors
    /// Text: more than the limit is held.
    pub(crate) fn take(&mut self, bytes: usize) -> Result<(), String> {
        self.held = self.held.saturating_add(bytes as u64);
        match self.held > self.most {
            true => Err(format!(
                "names and attributes that take more than {} bytes of memory",
                self.most
            )),
            false => Ok(()),
        }
    }

    /// Counts `bytes` as free again.
    pub(crate) fn give_back(&mut self, bytes: u64) {
        self.held = self.held.saturating_sub(bytes);
    }
}

/// Returns the bytes that an entry takes in the tree: its name, and an inode if it has one of its
/// own. Its path is counted as the name, which includes the names of folders that it makes.
pub(crate) fn entry(entry: &ArchiveEntry) -> usize {
    let inode = match &entry.what {
        EntryContent::Node(kind) => INODE + content(kind) + attributes(&entry.meta.xattrs),
        EntryContent::HardLink(_) | EntryContent::Whiteout | EntryContent::Opaque => 0,
    };
    name(entry.path.len()) + inode
}

/// Returns the bytes that the content of an entry takes which waits to be merged.
pub(crate) fn waiting(entry: &ArchiveEntry) -> usize {
    let what = match &entry.what {
        // It has no names yet.
        EntryContent::Node(NodeKind::Directory(_))
        | EntryContent::Whiteout
        | EntryContent::Opaque => 0,
        EntryContent::Node(kind) => content(kind),
        EntryContent::HardLink(target) => heap(target),
    };
    heap(&entry.path) + attributes(&entry.meta.xattrs) + what
}

/// Returns the bytes of a name of `len` bytes in a folder.
pub(crate) const fn name(len: usize) -> usize {
    NAME + len
}

/// Returns the bytes of a name of `len` bytes in a list of a folder's names.
pub(crate) const fn listed(len: usize) -> usize {
    size_of::<(Vec<u8>, u64)>() + ALLOCATION + len
}

/// Returns the bytes of an entry in a hash table, with `len` bytes in an allocation of its own.
pub(crate) const fn in_table<K, V>(len: usize) -> usize {
    TABLE * size_of::<(K, V)>() + ALLOCATION + len
}

/// Returns the bytes of `len` bytes in an allocation of their own.
pub(crate) const fn allocated(len: usize) -> usize {
    ALLOCATION + len
}

/// Returns the bytes of a file's extended attributes.
pub(crate) fn attributes(attributes: &BTreeMap<Vec<u8>, Vec<u8>>) -> usize {
    if attributes.is_empty() {
        return 0;
    }
    let each = attributes.iter().map(|(name, value)| ATTRIBUTE + heap(name) + heap(value));
    ATTRIBUTES + each.sum::<usize>()
}

fn content(kind: &NodeKind) -> usize {
    match kind {
        NodeKind::Directory(_) => FOLDER,
        NodeKind::File(data) => heap(&data.pieces),
        NodeKind::Symlink(target) => heap(target),
        NodeKind::Char(_) | NodeKind::Block(_) | NodeKind::Fifo => 0,
    }
}

/// Returns the bytes that a vector has allocated.
fn heap<T>(vector: &Vec<T>) -> usize {
    match vector.capacity() {
        0 => 0,
        capacity => allocated(capacity * size_of::<T>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::tree::{Data, FileRun, Meta};

    /// As many files as there may be, with paths of 70 bytes, of which one in ten is a folder, are
    /// within the limit, also as an EROFS layer, whose names are listed.
    #[test]
    fn the_largest_ordinary_image_is_within_the_limit() {
        let limits = Limits::default();
        let pieces = vec![FileRun { at: 0, from: 0, len: 1 }];
        let file = |kind| {
            let entry = ArchiveEntry {
                path: vec![b'n'; 70],
                meta: Meta::default(),
                what: EntryContent::Node(kind),
            };
            super::entry(&entry)
        };
        let data = Data { layer: 0, len: 1, pieces };
        let folders = limits.entries / 10 * file(NodeKind::new_directory());
        let files = limits.entries * 9 / 10 * file(NodeKind::File(data));
        let (all, listed) = (folders + files, limits.entries * listed(20));
        assert!((all + listed) as u64 <= limits.metadata_bytes, "{all} and {listed}");
    }

    #[test]
    fn what_is_given_back_may_be_taken_again() {
        let mut budget = Budget::new(&Limits { metadata_bytes: 10, ..Limits::default() });
        budget.take(10).unwrap();
        budget.give_back(4);
        budget.take(4).unwrap();
        assert!(budget.take(1).is_err());
        assert!(budget.take(usize::MAX).is_err());
    }

    /// A single attribute takes a whole node, and further ones a part of it.
    #[test]
    fn an_attribute_costs_more_than_its_bytes() {
        let of = |count: u8| {
            let one = |at| (vec![b'u', at], vec![b'v']);
            attributes(&(0..count).map(one).collect())
        };
        assert_eq!(of(0), 0);
        assert!(of(1) > 11 * 2 * size_of::<Vec<u8>>());
        assert!((150..250).contains(&(of(64) / 64)), "{}", of(64));
    }
}
