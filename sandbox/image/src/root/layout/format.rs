//! EROFS's structures on disk (Linux, `fs/erofs/erofs_fs.h`), as the writer makes them. Numbers are
//! little-endian.

use super::InodePlacement;
use crate::root::tree::{Inode, NodeKind};

/// The block size, bytes.
pub(super) const BLOCK: u64 = 1 << BLOCK_BITS;
const BLOCK_BITS: u8 = 12;
/// The position, size and magic number of the superblock.
pub(super) const SUPERBLOCK: u64 = 1024;
pub(super) const SUPERBLOCK_BYTES: u64 = 128;
const MAGIC: u32 = 0xe0f5_e1e2;
/// The compatible feature `MTIME`: an inode's time is that of its modification. Linux ignores it.
const MTIME: u32 = 2;
/// The size of an inode in the long form, bytes.
pub(super) const INODE: u64 = 64;
/// The unit of an inode's position, bytes.
pub(super) const SLOT: u64 = 32;
/// The size of a name's head in a folder, bytes.
pub(super) const DIRENT: usize = 12;
/// The form of an inode: long, and its data in blocks, or with the last block beside the inode.
const PLAIN: u16 = 1;
const INLINE: u16 = 1 | (2 << 1);
/// The most bits of a device's numbers in Linux.
const MAJOR_BITS: u32 = 12;
const MINOR_BITS: u32 = 20;

/// The file system's own values in its superblock.
pub(super) struct Superblock {
    /// The number of the root's inode, which has 16 bits here.
    pub(super) root: u16,
    /// The number of inodes.
    pub(super) inodes: u64,
    /// The number of blocks.
    pub(super) blocks: u32,
    pub(super) uuid: [u8; 16],
}

impl Superblock {
    /// Returns the bytes of the superblock. Inodes count from the beginning of the file
    /// (`meta_blkaddr` 0), and the build time is 0, so that the same tree makes the same bytes.
    pub(super) fn bytes(&self) -> [u8; SUPERBLOCK_BYTES as usize] {
        let mut bytes = [0; SUPERBLOCK_BYTES as usize];
        put(&mut bytes, 0, &MAGIC.to_le_bytes());
        put(&mut bytes, 8, &MTIME.to_le_bytes());
        put(&mut bytes, 12, &[BLOCK_BITS]);
        put(&mut bytes, 14, &self.root.to_le_bytes());
        put(&mut bytes, 16, &self.inodes.to_le_bytes());
        put(&mut bytes, 36, &self.blocks.to_le_bytes());
        put(&mut bytes, 48, &self.uuid);
        bytes
    }
}

/// Returns the bytes of an inode. `size` is the length of its content, `attributes` that of its
/// extended attributes in the units of their head, and `serial` a number for 32-bit programs.
pub(super) fn inode(
    inode: &Inode,
    place: &InodePlacement,
    size: u64,
    attributes: u16,
    serial: u32,
) -> [u8; INODE as usize] {
    let meta = &inode.meta;
    let form = if place.is_inline { INLINE } else { PLAIN };
    let mode = (mode_of(&inode.kind) << 12) | (meta.mode & 0o7777);
    let word = match inode.kind {
        NodeKind::Char(numbers) | NodeKind::Block(numbers) => device(numbers).unwrap_or(0),
        _ => place.first_block,
    };
    // Linux counts seconds with a sign.
    let mtime = meta.mtime.min(i64::MAX as u64);
    let mut bytes = [0; INODE as usize];
    put(&mut bytes, 0, &form.to_le_bytes());
    put(&mut bytes, 2, &attributes.to_le_bytes());
    put(&mut bytes, 4, &mode.to_le_bytes());
    put(&mut bytes, 8, &size.to_le_bytes());
    put(&mut bytes, 16, &word.to_le_bytes());
    put(&mut bytes, 20, &serial.to_le_bytes());
    put(&mut bytes, 24, &meta.uid.to_le_bytes());
    put(&mut bytes, 28, &meta.gid.to_le_bytes());
    put(&mut bytes, 32, &mtime.to_le_bytes());
    put(&mut bytes, 44, &place.links.to_le_bytes());
    bytes
}

/// Returns a device's numbers as Linux's 32 bits (`new_encode_dev`). Returns `None` for numbers
/// that Linux does not have.
pub(super) fn device((major, minor): (u32, u32)) -> Option<u32> {
    let fits = major >> MAJOR_BITS == 0 && minor >> MINOR_BITS == 0;
    fits.then_some((minor & 0xff) | (major << 8) | ((minor & !0xff) << 12))
}

/// Returns the type of a file in its mode, `S_IFMT` without the twelve zero bits.
fn mode_of(kind: &NodeKind) -> u16 {
    match kind {
        NodeKind::Fifo => 0o01,
        NodeKind::Char(_) => 0o02,
        NodeKind::Directory(_) => 0o04,
        NodeKind::Block(_) => 0o06,
        NodeKind::File(_) => 0o10,
        NodeKind::Symlink(_) => 0o12,
    }
}

/// Returns the type of a file beside its name, one of Linux's `FT_*`.
pub(super) fn type_of(kind: &NodeKind) -> u8 {
    match kind {
        NodeKind::File(_) => 1,
        NodeKind::Directory(_) => 2,
        NodeKind::Char(_) => 3,
        NodeKind::Block(_) => 4,
        NodeKind::Fifo => 5,
        NodeKind::Symlink(_) => 7,
    }
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}
