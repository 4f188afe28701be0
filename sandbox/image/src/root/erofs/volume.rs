//! EROFS's structures on disk (Linux, `fs/erofs/erofs_fs.h`), as far as layers have them. Numbers
//! are little-endian, and each of them is the file's: positions are checked before they are read.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::root::tree::FileRun;

/// The position and value of the superblock's magic number.
const SUPERBLOCK: u64 = 1024;
const MAGIC: u32 = 0xe0f5_e1e2;
/// The incompatible features up to prefixes of attributes' names. Files that need one of them which
/// is not supported are refused when they are met.
const FEATURES: u32 = 0x7f;
/// Sizes of structures, bytes.
const INODE: u64 = 32;
const LONG_INODE: u64 = 64;
const SLOT: u64 = 128;
const DIRENT: usize = 12;
/// The head of an inode's attributes, bytes.
pub(super) const ATTRIBUTES_HEAD: u64 = 12;
/// An address that stands for zeros.
const HOLE: u32 = u32::MAX;
/// The most chunks of one file.
const MAX_CHUNKS: u64 = 1 << 20;

/// A file system in a file.
pub(super) struct Volume<'a> {
    file: &'a File,
    len: u64,
    /// The binary logarithm of the block size.
    block_bits: u32,
    /// The position of inode 0.
    inodes: u64,
    /// The position of shared attributes.
    pub(super) shared: u64,
    /// The number of the root's inode.
    pub(super) root: u64,
    /// The time from which those of short inodes count, seconds.
    epoch: u64,
    /// The position of the data that follows in the file, as of a device of its own.
    device: Option<u64>,
}

/// The type of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileKind {
    Directory,
    File,
    Symlink,
    Char,
    Block,
    Fifo,
    Socket,
}

/// The position of a file's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    Plain,
    /// The last block is beside the inode.
    Inline,
    Chunks,
}

/// An inode.
pub(super) struct Inode {
    pub(super) kind: FileKind,
    /// Permission bits with set-id and sticky bits.
    pub(super) mode: u16,
    pub(super) size: u64,
    /// The number of its names.
    pub(super) names: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Seconds since 1970.
    pub(super) mtime: u64,
    /// The position and length of its attributes.
    pub(super) attributes: (u64, u64),
    layout: Result<Layout, &'static str>,
    /// The first block, the device's numbers, or the form of the chunks.
    word: u32,
    /// The bits of the first block above those.
    high: u16,
}

impl Inode {
    /// Returns a device's major and minor number, from the kernel's 32 bits.
    pub(super) fn device(&self) -> (u32, u32) {
        let word = self.word;
        ((word & 0xf_ff00) >> 8, (word & 0xff) | ((word >> 12) & 0xf_ff00))
    }

    fn end(&self) -> u64 {
        self.attributes.0 + self.attributes.1
    }
}

impl<'a> Volume<'a> {
    /// Reads the superblock.
    ///
    /// # Errors
    /// Text: the file has no EROFS, or one that is not supported.
    pub(super) fn open(file: &'a File) -> Result<Self, String> {
        let len = file.metadata().map_err(|e| e.to_string())?.len();
        let mut volume = Self {
            file,
            len,
            block_bits: 0,
            inodes: 0,
            shared: 0,
            root: 0,
            epoch: 0,
            device: None,
        };
        let block: [u8; 128] = volume.read(SUPERBLOCK).map_err(|_| "it is no EROFS file system")?;
        if u32_at(&block, 0) != MAGIC {
            return Err("it is no EROFS file system".into());
        }
        let features = u32_at(&block, 80);
        if features & !FEATURES != 0 {
            return Err(format!("an EROFS with features that are not supported ({features:#x})"));
        }
        volume.block_bits = u32::from(block[12]);
        if !(9..=16).contains(&volume.block_bits) || block[90] != 0 {
            return Err("an EROFS with blocks of an odd size".into());
        }
        volume.root = u64::from(u16_at(&block, 14));
        volume.epoch = u64_at(&block, 24);
        volume.inodes = volume.position(u32_at(&block, 40));
        volume.shared = volume.position(u32_at(&block, 44));
        volume.device = match u16_at(&block, 86) {
            0 => None,
            1 => {
                let slot: [u8; 128] = volume.read(u64::from(u16_at(&block, 88)) * SLOT)?;
                Some(volume.position(u32_at(&slot, 68))).filter(|position| *position > 0)
            }
            more => return Err(format!("an EROFS on {more} further devices")),
        };
        Ok(volume)
    }

    /// Returns the block size, bytes.
    pub(super) fn block(&self) -> u64 {
        1 << self.block_bits
    }

    fn position(&self, block: u32) -> u64 {
        u64::from(block) << self.block_bits
    }

    fn read<const N: usize>(&self, at: u64) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.fill(at, &mut bytes).map(|()| bytes)
    }

    fn fill(&self, at: u64, bytes: &mut [u8]) -> Result<(), String> {
        self.check(at, bytes.len() as u64)?;
        self.file.read_exact_at(bytes, at).map_err(|e| e.to_string())
    }

    /// Reads `len` bytes, for which no memory is taken before they are known to be there.
    pub(super) fn bytes(&self, at: u64, len: u64) -> Result<Vec<u8>, String> {
        self.check(at, len)?;
        let len = usize::try_from(len).map_err(|e| e.to_string())?;
        let mut bytes = vec![0; len];
        self.fill(at, &mut bytes).map(|()| bytes)
    }

    fn check(&self, at: u64, len: u64) -> Result<(), String> {
        match at.checked_add(len).is_some_and(|end| end <= self.len) {
            true => Ok(()),
            false => Err("it leads beyond the end of its layer".into()),
        }
    }

    /// Reads an inode by its number.
    pub(super) fn inode(&self, number: u64) -> Result<Inode, String> {
        let at = number.checked_mul(INODE).and_then(|at| at.checked_add(self.inodes));
        let at = at.ok_or("it leads beyond the end of its layer")?;
        let short: [u8; 32] = self.read(at)?;
        let form = u16_at(&short, 0);
        if form >> 5 != 0 {
            return Err("an inode of an unknown form".into());
        }
        let mode = u16_at(&short, 4);
        let kind = kind(mode)?;
        let head = match u16_at(&short, 2) {
            0 => 0,
            words => ATTRIBUTES_HEAD + 4 * (u64::from(words) - 1),
        };
        let single = form & (1 << 4) != 0 && kind != FileKind::Directory;
        let half = u16_at(&short, 6);
        let mut inode = Inode {
            kind,
            mode: mode & 0o7777,
            size: u64::from(u32_at(&short, 8)),
            names: if single { 1 } else { u32::from(half) },
            uid: u32::from(u16_at(&short, 24)),
            gid: u32::from(u16_at(&short, 26)),
            mtime: self.epoch.saturating_add(u64::from(u32_at(&short, 12))),
            attributes: (at + INODE, head),
            layout: layout(form),
            word: u32_at(&short, 16),
            high: if single { half } else { 0 },
        };
        if form & 1 != 0 {
            let long: [u8; 64] = self.read(at)?;
            inode.size = u64_at(&long, 8);
            inode.names = u32_at(&long, 44);
            inode.uid = u32_at(&long, 24);
            inode.gid = u32_at(&long, 28);
            inode.mtime = u64_at(&long, 32);
            inode.attributes.0 = at + LONG_INODE;
            inode.high = half;
        }
        // Times before 1970 become 1970, as those of archives.
        if i64::try_from(inode.mtime).is_err() {
            inode.mtime = 0;
        }
        Ok(inode)
    }

    /// Returns the runs of a file's bytes, all of which are within the layer.
    pub(super) fn pieces(&self, inode: &Inode) -> Result<Vec<FileRun>, String> {
        if inode.size == 0 {
            return Ok(Vec::new());
        }
        let pieces = match inode.layout? {
            Layout::Chunks => self.chunks(inode)?,
            Layout::Plain if inode.word == HOLE && matches!(inode.high, 0 | u16::MAX) => Vec::new(),
            Layout::Plain => vec![FileRun { at: 0, from: self.first(inode)?, len: inode.size }],
            Layout::Inline => {
                let blocks = (inode.size - 1) & !(self.block() - 1);
                let tail = FileRun { at: blocks, from: inode.end(), len: inode.size - blocks };
                match blocks {
                    0 => vec![tail],
                    _ => vec![FileRun { at: 0, from: self.first(inode)?, len: blocks }, tail],
                }
            }
        };
        pieces.iter().try_for_each(|piece| self.check(piece.from, piece.len))?;
        Ok(pieces)
    }

    fn first(&self, inode: &Inode) -> Result<u64, String> {
        let block = (u64::from(inode.high) << 32) | u64::from(inode.word);
        let position = block.checked_mul(self.block());
        position.ok_or_else(|| "it leads beyond the end of its layer".to_owned())
    }

    fn chunks(&self, inode: &Inode) -> Result<Vec<FileRun>, String> {
        let form = inode.word & 0xffff;
        if form & !0x3f != 0 {
            return Err("chunks of an unknown form".into());
        }
        let bits = self.block_bits + (form & 0x1f);
        let unit: u64 = if form & 0x20 != 0 { 8 } else { 4 };
        let count = inode.size.div_ceil(1 << bits);
        if count > MAX_CHUNKS {
            return Err("a file of too many chunks".into());
        }
        let list = self.bytes(inode.end().next_multiple_of(unit), count * unit)?;
        let mut pieces: Vec<FileRun> = Vec::new();
        for (index, entry) in list.chunks_exact(unit as usize).enumerate() {
            let (device, block) = match unit {
                8 => (u16_at(entry, 2), u32_at(entry, 4)),
                _ => (0, u32_at(entry, 0)),
            };
            if block == HOLE {
                continue;
            }
            let at = (index as u64) << bits;
            let from = self.on_device(device)? + self.position(block);
            let len = (inode.size - at).min(1 << bits);
            match pieces.last_mut() {
                Some(last) if last.at + last.len == at && last.from + last.len == from => {
                    last.len += len;
                }
                _ => pieces.push(FileRun { at, from, len }),
            }
        }
        Ok(pieces)
    }

    /// Returns the position in the file at which a device begins.
    fn on_device(&self, device: u16) -> Result<u64, String> {
        match (device & 1, self.device) {
            (0, _) => Ok(0),
            (_, Some(position)) => Ok(position),
            (_, None) => Err("its data is on another device".into()),
        }
    }

    /// Returns the content of a short file.
    pub(super) fn content(&self, inode: &Inode, most: u64) -> Result<Vec<u8>, String> {
        if inode.size > most {
            return Err(format!("{} bytes where at most {most} are expected", inode.size));
        }
        let pieces = self.pieces(inode)?;
        self.range(&pieces, 0, inode.size)
    }

    /// Reads a short range of a file.
    pub(super) fn range(&self, pieces: &[FileRun], at: u64, len: u64) -> Result<Vec<u8>, String> {
        let mut bytes = vec![0; usize::try_from(len).map_err(|e| e.to_string())?];
        let after = pieces.partition_point(|piece| piece.at + piece.len <= at);
        for piece in pieces[after..].iter().take_while(|piece| piece.at < at + len) {
            let (from, to) = (piece.at.max(at), (piece.at + piece.len).min(at + len));
            let place = &mut bytes[(from - at) as usize..(to - at) as usize];
            self.fill(piece.from + (from - piece.at), place)?;
        }
        Ok(bytes)
    }
}

/// Returns the names in a block of a folder, with the numbers of their inodes.
pub(super) fn names(block: &[u8]) -> Result<Vec<(Vec<u8>, u64)>, String> {
    let bad = || "a folder whose names are garbage".to_owned();
    let first = block.get(..DIRENT).map(|entry| usize::from(u16_at(entry, 8)));
    let table = first.filter(|&first| first >= DIRENT && first.is_multiple_of(DIRENT));
    let table = table.and_then(|len| block.get(..len)).ok_or_else(bad)?;
    let mut names = Vec::with_capacity(table.len() / DIRENT);
    for at in (0..table.len()).step_by(DIRENT) {
        let from = usize::from(u16_at(table, at + 8));
        let name = match table.get(at + DIRENT..at + 2 * DIRENT) {
            Some(next) => block.get(from..usize::from(u16_at(next, 8))),
            // The last name ends with the block, or before it with a zero byte.
            None => block.get(from..).and_then(|rest| rest.split(|&byte| byte == 0).next()),
        };
        let name = name.filter(|name| !name.is_empty() && !name.contains(&b'/')).ok_or_else(bad)?;
        names.push((name.to_vec(), u64_at(table, at)));
    }
    Ok(names)
}

fn kind(mode: u16) -> Result<FileKind, String> {
    Ok(match mode >> 12 {
        0o01 => FileKind::Fifo,
        0o02 => FileKind::Char,
        0o04 => FileKind::Directory,
        0o06 => FileKind::Block,
        0o10 => FileKind::File,
        0o12 => FileKind::Symlink,
        0o14 => FileKind::Socket,
        _ => return Err("a file of an unknown type".into()),
    })
}

/// Returns the layout of an inode, or why it cannot be read.
fn layout(form: u16) -> Result<Layout, &'static str> {
    match (form >> 1) & 7 {
        0 => Ok(Layout::Plain),
        2 => Ok(Layout::Inline),
        4 => Ok(Layout::Chunks),
        1 | 3 => Err("its data is compressed, which is not supported: make the layer without -z \
             (mkfs_options of containerd's EROFS differ)"),
        _ => Err("its data is in an unknown form"),
    }
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(number(bytes, at))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(number(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(number(bytes, at))
}

/// Returns the bytes of a number. The caller knows that they are there; zeros else.
fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|bytes| bytes.try_into().ok()).unwrap_or([0; N])
}
