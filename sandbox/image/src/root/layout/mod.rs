//! A writer of the merged root as an EROFS file system (Linux, `fs/erofs/erofs_fs.h`).
//!
//! [`Layout::of`] finds a place for everything before a byte is written, so the positions of files'
//! data are known even if the data comes later. The file has blocks of 4 KiB:
//!
//! 1. the superblock and the inodes, the root's first and those of a folder's content side by side.
//!    Behind an inode are its extended attributes, and then the target of a symbolic link or the
//!    last block of a folder's names, if all of it fits into one block;
//! 2. the other blocks of folders' names, and longer targets;
//! 3. the data of files, each from a block of its own on and never beside its inode: a guest reads
//!    each page in place (DAX).
//!
//! Inodes have the long form (64 bytes), so each has its own time, and owners of 32 bits. The image
//! has no optional feature of the format, so Linux 5.15 and later mount it. The same tree with the
//! same UUID makes the same bytes.
//!
//! A tree may be hostile: it is walked without recursion, and what the format has no room for is an
//! error. Not implemented: compression, attributes that files share, the superblock's checksum,
//! more than 16 TiB.

mod attributes;
mod format;
mod names;
mod output;

use std::fs::File;
use std::io;

use super::tree::{Data, Id, NodeKind, ROOT, Tree, show};
use format::{BLOCK, INODE, SLOT, SUPERBLOCK, SUPERBLOCK_BYTES, Superblock};
use names::Names;
use output::Output;

/// The longest name, bytes (`EROFS_NAME_LEN`).
const MAX_NAME: usize = 255;

/// The places of a tree's metadata and data in an image.
pub(crate) struct Layout {
    uuid: [u8; 16],
    /// The places of inodes, by their index. Inodes without a name have no place.
    places: Vec<InodePlacement>,
    /// The inodes that have a name, in the order of their places.
    order: Vec<Id>,
    /// The files with data, and the position of it, ascending.
    data: Vec<(Id, u64)>,
    /// The length of all files together, bytes.
    file_bytes: u64,
    /// The end of the inodes, which is a block's, bytes.
    inodes_end: u64,
    /// The end of all metadata, which is a block's, bytes.
    metadata_end: u64,
    /// The length of the image, bytes.
    bytes: u64,
}

/// The place of an inode and of its content.
#[derive(Clone, Copy)]
struct InodePlacement {
    /// The inode's number: its position in units of [`SLOT`]. It is 0 as long as there is none.
    number: u32,
    /// The number of names; for a folder two and the number of folders in it.
    links: u32,
    /// The folder in which a folder is.
    parent: Id,
    /// The first block of the content.
    first_block: u32,
    /// The number of blocks of a folder's names or of a link's target.
    blocks: u32,
    /// Set if the last part of the content is beside the inode.
    is_inline: bool,
}

impl InodePlacement {
    const NONE: Self =
        Self { number: 0, links: 0, parent: ROOT, first_block: 0, blocks: 0, is_inline: false };
}

impl Layout {
    /// The memory of a layout for each inode, bytes.
    pub(crate) const BYTES_PER_INODE: usize =
        size_of::<InodePlacement>() + size_of::<Id>() + size_of::<(Id, u64)>();

    /// Places metadata and data of every inode of `tree` that has a name. The data of each file
    /// begins at a block.
    ///
    /// # Errors
    /// Text: a file has what EROFS has no room for.
    pub(crate) fn of(tree: &Tree, uuid: [u8; 16]) -> Result<Self, String> {
        let mut placer = Placer::new(tree);
        placer.place(ROOT, ROOT).map_err(|reason| format!("'/': {reason}"))?;
        let mut next = 0;
        while let Some(&folder) = placer.order.get(next) {
            for (name, child) in tree.children(folder) {
                let named = placer.name(folder, name, child.id);
                named.map_err(|reason| format!("'{}': {reason}", show(name)))?;
            }
            next += 1;
        }
        placer.finish(uuid)
    }

    /// Returns the length of the image, a multiple of 4096 bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the length of all files together, bytes, with each inode counted once.
    pub(crate) fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Returns the files that are not empty, and the offset of their data in the image, ascending.
    pub(crate) fn data(&self) -> &[(Id, u64)] {
        &self.data
    }

    /// Writes `tree`, of which this is the layout, as an image to `out`, which must be empty. Holes
    /// of files that have a block or more stay holes. `layers` are the files to which
    /// [`Data::layer`] is an index. `progress` is called with the bytes of files written so far.
    ///
    /// # Errors
    /// The error of a system call; a layer is shorter than its files.
    pub(crate) fn write_image(
        &self,
        tree: &Tree,
        layers: &[File],
        out: &File,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<()> {
        self.write_metadata(tree, out)?;
        let mut output = Output::new(out, self.metadata_end);
        let mut done = 0;
        for &(id, at) in self.data() {
            let NodeKind::File(data) = &tree.inode(id).kind else { continue };
            let layer = layers.get(data.layer as usize);
            let layer = layer.ok_or_else(|| io::Error::other("a file of an unknown layer"))?;
            copy(data, layer, at, &mut output, &mut |bytes| progress(done + bytes))?;
            done += data.len;
        }
        output.finish()
    }

    /// Writes everything but the data of files to `out`, which must be empty, and sets its length.
    /// The data are holes.
    pub(crate) fn write_metadata(&self, tree: &Tree, out: &File) -> io::Result<()> {
        out.set_len(self.bytes)?;
        let mut inodes = Output::new(out, 0);
        inodes.skip_to(SUPERBLOCK)?;
        inodes.put(&self.superblock().bytes())?;
        let mut writer =
            Writer { layout: self, tree, inodes, blocks: Output::new(out, self.inodes_end) };
        for (&id, serial) in self.order.iter().zip(1..) {
            writer.inode(id, serial)?;
        }
        writer.inodes.fill_block()?;
        writer.inodes.finish()?;
        writer.blocks.finish()
    }

    fn superblock(&self) -> Superblock {
        Superblock {
            root: self.place(ROOT).number as u16,
            inodes: self.order.len() as u64,
            blocks: (self.bytes / BLOCK) as u32,
            uuid: self.uuid,
        }
    }

    fn place(&self, id: Id) -> &InodePlacement {
        &self.places[id.index()]
    }
}

/// Copies the data of a file to the position `at`. `progress` is called with the bytes so far.
fn copy(
    data: &Data,
    layer: &File,
    at: u64,
    output: &mut Output<'_>,
    progress: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let mut end = 0;
    for piece in &data.pieces {
        let next = piece.at.checked_add(piece.len);
        let next = next.filter(|&next| piece.at >= end && next <= data.len);
        end = next.ok_or_else(|| io::Error::other("a file whose pieces pass its end"))?;
        output.skip_to(at + piece.at)?;
        output.copy(layer, piece.from, piece.len, |bytes| progress(piece.at + bytes))?;
    }
    if end < data.len {
        progress(data.len);
    }
    Ok(())
}

/// The search for places.
struct Placer<'a> {
    tree: &'a Tree,
    places: Vec<InodePlacement>,
    order: Vec<Id>,
    /// The end of the inodes so far, bytes.
    end: u64,
}

impl<'a> Placer<'a> {
    fn new(tree: &'a Tree) -> Self {
        Self {
            tree,
            places: vec![InodePlacement::NONE; tree.inodes()],
            order: Vec::new(),
            end: SUPERBLOCK + SUPERBLOCK_BYTES,
        }
    }

    /// Takes a name of an inode, which gets its place with its first name.
    fn name(&mut self, folder: Id, name: &[u8], id: Id) -> Result<(), String> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(format!("a name of {} bytes", name.len()));
        }
        let is_directory = self.tree.is_directory(id);
        if self.places[id.index()].number == 0 {
            self.place(id, folder)?;
        } else if is_directory {
            return Err("a folder with two names".into());
        }
        let counts = if is_directory { folder } else { id };
        let links = &mut self.places[counts.index()].links;
        *links = links.saturating_add(1);
        Ok(())
    }

    /// Finds the place of an inode, behind those that have one.
    fn place(&mut self, id: Id, parent: Id) -> Result<(), String> {
        let inode = self.tree.inode(id);
        let (content, links) = match &inode.kind {
            NodeKind::Directory(_) => (names::len(self.tree, id, parent), 2),
            NodeKind::Symlink(target) => (target.len() as u64, 0),
            NodeKind::Char(numbers) | NodeKind::Block(numbers) => {
                let (major, minor) = *numbers;
                format::device(*numbers).ok_or_else(|| {
                    format!("a device with the numbers {major} and {minor}, which are too large")
                })?;
                (0, 0)
            }
            NodeKind::File(_) | NodeKind::Fifo => (0, 0),
        };
        let head = INODE + attributes::len(&inode.meta)?;
        let tail = last_block(content);
        // All of it is in one block, since Linux reads a short link with its inode.
        let is_inline = tail > 0 && head + tail <= BLOCK;
        let (whole, len) = if is_inline { (head + tail, head + tail) } else { (INODE, head) };
        if self.end % BLOCK + whole > BLOCK {
            self.end = self.end.next_multiple_of(BLOCK);
        }
        let blocks = if is_inline { (content - tail) / BLOCK } else { content.div_ceil(BLOCK) };
        let full = |_| "more metadata than the image has room for".to_owned();
        self.places[id.index()] = InodePlacement {
            number: u32::try_from(self.end / SLOT).map_err(full)?,
            links,
            parent,
            first_block: 0,
            blocks: u32::try_from(blocks).map_err(full)?,
            is_inline,
        };
        self.order.push(id);
        self.end = (self.end + len).next_multiple_of(SLOT);
        Ok(())
    }

    /// Finds the places of blocks, behind all inodes.
    fn finish(mut self, uuid: [u8; 16]) -> Result<Layout, String> {
        let inodes_end = self.end.next_multiple_of(BLOCK);
        let mut next = inodes_end / BLOCK;
        for id in &self.order {
            let place = &mut self.places[id.index()];
            if place.blocks > 0 {
                place.first_block = take(&mut next, place.blocks.into())?;
            }
        }
        let metadata_end = next * BLOCK;
        let (mut data, mut file_bytes) = (Vec::new(), 0);
        for &id in &self.order {
            let NodeKind::File(file) = &self.tree.inode(id).kind else { continue };
            if file.len > 0 {
                let first = take(&mut next, file.len.div_ceil(BLOCK))?;
                self.places[id.index()].first_block = first;
                data.push((id, u64::from(first) * BLOCK));
                file_bytes += file.len;
            }
        }
        Ok(Layout {
            uuid,
            places: self.places,
            order: self.order,
            data,
            file_bytes,
            inodes_end,
            metadata_end,
            bytes: next * BLOCK,
        })
    }
}

/// Returns the used bytes in the last block of a content of `len` bytes.
fn last_block(len: u64) -> u64 {
    match len {
        0 => 0,
        _ => (len - 1) % BLOCK + 1,
    }
}

/// Takes `count` blocks from `next` on, and returns the first. A block's address has 32 bits, the
/// largest of which stands for no block.
fn take(next: &mut u64, count: u64) -> Result<u32, String> {
    let end = next.checked_add(count).filter(|&end| end < u64::from(u32::MAX));
    let end = end.ok_or("more than 16 TiB of files, which EROFS has no room for")?;
    let first = std::mem::replace(next, end);
    u32::try_from(first).map_err(|e| e.to_string())
}

/// The writing of metadata: inodes and blocks grow side by side, in the order of the inodes.
struct Writer<'a> {
    layout: &'a Layout,
    tree: &'a Tree,
    inodes: Output<'a>,
    blocks: Output<'a>,
}

impl Writer<'_> {
    /// Writes an inode with all that belongs to it but a file's data.
    fn inode(&mut self, id: Id, serial: u32) -> io::Result<()> {
        let (inode, place) = (self.tree.inode(id), self.layout.place(id));
        let size = match &inode.kind {
            NodeKind::Directory(_) => names::len(self.tree, id, place.parent),
            NodeKind::Symlink(target) => target.len() as u64,
            NodeKind::File(data) => data.len,
            NodeKind::Char(_) | NodeKind::Block(_) | NodeKind::Fifo => 0,
        };
        let attributes = attributes::bytes(&inode.meta);
        let units = attributes::units(attributes.len() as u64);
        self.inodes.skip_to(u64::from(place.number) * SLOT)?;
        self.inodes.put(&format::inode(inode, place, size, units, serial))?;
        self.inodes.put(&attributes)?;
        if place.blocks > 0 {
            self.blocks.skip_to(u64::from(place.first_block) * BLOCK)?;
        }
        match &inode.kind {
            NodeKind::Directory(_) => self.folder(id, place),
            NodeKind::Symlink(target) => self.target(target, place),
            _ => Ok(()),
        }
    }

    fn folder(&mut self, id: Id, place: &InodePlacement) -> io::Result<()> {
        let mut block = Names::default();
        for (name, child) in names::names(self.tree, id, place.parent) {
            if !block.has_room(name) {
                self.blocks.put(&block.take())?;
                self.blocks.fill_block()?;
            }
            let number = self.layout.place(child).number;
            block.push(name, number.into(), format::type_of(&self.tree.inode(child).kind));
        }
        self.last(&block.take(), place)
    }

    fn target(&mut self, target: &[u8], place: &InodePlacement) -> io::Result<()> {
        let last = target.len() - last_block(target.len() as u64) as usize;
        let (full, last) = target.split_at(last);
        self.blocks.put(full)?;
        self.last(last, place)
    }

    /// Writes the last part of a content: beside the inode or into a block.
    fn last(&mut self, bytes: &[u8], place: &InodePlacement) -> io::Result<()> {
        if place.is_inline {
            return self.inodes.put(bytes);
        }
        self.blocks.put(bytes)?;
        self.blocks.fill_block()
    }
}
