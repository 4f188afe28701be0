//! The names of a folder: blocks with the heads of names, then the names. They are in byte order
//! within a block and from block to block, since Linux looks them up by halving.

use super::format::{BLOCK, DIRENT};
use crate::root::tree::{Id, Tree};

/// Returns the names of `folder` with their inodes, in byte order, with `.` and `..`.
pub(super) fn names(tree: &Tree, folder: Id, parent: Id) -> impl Iterator<Item = (&[u8], Id)> {
    let dots: [(&[u8], Id); 2] = [(b".", folder), (b"..", parent)];
    let mut dots = dots.into_iter().peekable();
    let mut children = tree.children(folder).map(|(name, child)| (name, child.id)).peekable();
    std::iter::from_fn(move || {
        let is_dot = match (dots.peek(), children.peek()) {
            (Some((dot, _)), Some((name, _))) => dot < name,
            (dot, _) => dot.is_some(),
        };
        if is_dot { dots.next() } else { children.next() }
    })
}

/// Returns the length of the names of `folder`, bytes: whole blocks, and the used part of the last.
pub(super) fn len(tree: &Tree, folder: Id, parent: Id) -> u64 {
    let (mut full, mut used) = (0, 0);
    for (name, _) in names(tree, folder, parent) {
        let more = (DIRENT + name.len()) as u64;
        if used + more > BLOCK {
            full += BLOCK;
            used = 0;
        }
        used += more;
    }
    full + used
}

/// The names of one block.
#[derive(Default)]
pub(super) struct Names {
    heads: Vec<Head>,
    names: Vec<u8>,
}

struct Head {
    inode: u64,
    /// The offset among the names of the block.
    from: u16,
    kind: u8,
}

impl Names {
    /// Returns whether the block has room for `name`.
    pub(super) fn has_room(&self, name: &[u8]) -> bool {
        let used = (self.heads.len() + 1) * DIRENT + self.names.len() + name.len();
        used as u64 <= BLOCK
    }

    /// Adds a name, for which there must be room.
    pub(super) fn push(&mut self, name: &[u8], inode: u64, kind: u8) {
        self.heads.push(Head { inode, from: self.names.len() as u16, kind });
        self.names.extend_from_slice(name);
    }

    /// Returns the used bytes of the block, which is empty then.
    pub(super) fn take(&mut self) -> Vec<u8> {
        let first = (self.heads.len() * DIRENT) as u16;
        let mut bytes = Vec::with_capacity(BLOCK as usize);
        for head in self.heads.drain(..) {
            bytes.extend_from_slice(&head.inode.to_le_bytes());
            bytes.extend_from_slice(&(first + head.from).to_le_bytes());
            bytes.extend_from_slice(&[head.kind, 0]);
        }
        bytes.append(&mut self.names);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::root::tree::{Child, Inode, Meta, NodeKind, ROOT};

    #[test]
    fn names_are_in_byte_order_with_the_dots_among_them() {
        let mut tree = Tree::new(4095);
        let root = tree.find(&[]).unwrap().unwrap();
        for name in ["z", "-", "...", ".-", "..-", "a", "!", ".a"] {
            let inode = Inode { meta: Meta::default(), kind: NodeKind::Fifo };
            let child = Child { id: tree.add(inode).unwrap(), layer: 0 };
            tree.link(&root, name.as_bytes(), child).unwrap();
        }
        let found: Vec<_> = names(&tree, ROOT, ROOT).map(|(name, _)| name).collect();
        let expected: [&[u8]; 10] =
            [b"!", b"-", b".", b".-", b"..", b"..-", b"...", b".a", b"a", b"z"];
        assert_eq!(found, expected);
        let bytes: usize = expected.iter().map(|name| DIRENT + name.len()).sum();
        assert_eq!(len(&tree, ROOT, ROOT), bytes as u64);
    }

    #[test]
    fn a_block_has_heads_and_then_names() {
        let mut block = Names::default();
        block.push(b"ab", 7, 1);
        block.push(b"c", 8, 2);
        let bytes = block.take();
        assert_eq!(bytes[..12], [7, 0, 0, 0, 0, 0, 0, 0, 24, 0, 1, 0]);
        assert_eq!(bytes[12..24], [8, 0, 0, 0, 0, 0, 0, 0, 26, 0, 2, 0]);
        assert_eq!(bytes[24..], *b"abc");
        for _ in 0..(4096 - 12 - 244) / (12 + 244) {
            block.push(&[b'n'; 244], 9, 1);
        }
        assert!(block.has_room(&[b'n'; 244]) && !block.has_room(&[b'n'; 245]));
        assert!(block.take().len() == 4096 - 256 && block.take().is_empty());
    }
}
