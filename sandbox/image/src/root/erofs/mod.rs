//! A reader of EROFS files as layers: what `mkfs.erofs --aufs` makes of a layer's archive, or
//! `mkfs.erofs` of overlayfs's upper directory, for instance as containerd's EROFS snapshotter has
//! them.
//!
//! The kernel of the host never sees such a file system, which may be hostile. The reader walks it
//! and returns the entries that an archive would have; file data stays where it is, and entries
//! have offsets. Deletions are in overlayfs's form (Linux, *Overlay Filesystem*): a character
//! device with the numbers 0 and 0, or an empty file with the attribute `trusted.overlay.whiteout`,
//! removes its name, and `trusted.overlay.opaque` empties a folder. With the mount option
//! `userxattr` these attributes begin with `user.` instead.
//!
//! Read are plain files, files with their end beside the inode, chunks, and archives that follow
//! their index in the same file (`mkfs.erofs --tar=i`). Not supported, and refused: compression,
//! addresses of 48 bits, metadata in a box of its own, data on further devices, prefixes of
//! attributes, files that overlayfs has moved (`redirect`) or without their data (`metacopy`).
//! Checksums are not looked at: nothing here trusts the file.

mod attributes;
pub(crate) mod pick;
mod volume;

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;

use super::budget::{self, Budget};
use super::read::{ArchiveEntry, EntryContent};
use super::tree::{Data, Meta, NodeKind, show};
use crate::Limits;
use attributes::Attributes;
use volume::{FileKind, Inode, Volume};

/// The longest target of a symbolic link, bytes.
const MAX_LINK: u64 = 4095;
/// Names that are read at most, as a multiple of the limit on files: `.` and `..` count.
const NAMES_PER_FILE: usize = 4;

/// A reader of the entries of a layer, a folder before its content.
pub(crate) struct ErofsReader<'a> {
    volume: Volume<'a>,
    limits: &'a Limits,
    /// The folders from the root to the one that is being read.
    open: Vec<Folder>,
    /// The path of the file that was read last.
    path: Vec<u8>,
    /// Entries to return before more is read.
    ready: VecDeque<ArchiveEntry>,
    /// The first path of each file with several names.
    links: HashMap<u64, Vec<u8>>,
    /// The folders so far. A file system in which one has two names has no end.
    folders: HashSet<u64>,
    /// The names read so far.
    names: usize,
    /// The bytes that were taken from the budget. Attributes that are in entries, and names of
    /// folders that are done, are among them: they bound the work of reading.
    held: u64,
}

/// The remaining names of a folder.
struct Folder {
    names: std::vec::IntoIter<(Vec<u8>, u64)>,
    /// The length of the path to it, with a slash.
    len: usize,
}

impl<'a> ErofsReader<'a> {
    /// Makes a reader of the file system in `file`.
    ///
    /// # Errors
    /// Text that says what is wrong with the file.
    pub(crate) fn new(
        file: &'a File,
        limits: &'a Limits,
        budget: &mut Budget,
    ) -> Result<Self, String> {
        let volume = Volume::open(file)?;
        let root = volume.root;
        let mut reader = Self {
            volume,
            limits,
            open: Vec::new(),
            path: Vec::new(),
            ready: VecDeque::new(),
            links: HashMap::new(),
            folders: HashSet::new(),
            names: 0,
            held: 0,
        };
        let inode = reader.volume.inode(root)?;
        if inode.kind != FileKind::Directory {
            return Err("its root is no folder".into());
        }
        reader.folder(root, &inode, budget)?;
        Ok(reader)
    }

    /// Returns the bytes that this reader has taken from the budget.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    /// Returns the next entry. Returns `None` at the end, or an error that says what is wrong.
    pub(crate) fn next(&mut self, budget: &mut Budget) -> Result<Option<ArchiveEntry>, String> {
        loop {
            if let Some(entry) = self.ready.pop_front() {
                return Ok(Some(entry));
            }
            let Some(folder) = self.open.last_mut() else { return Ok(None) };
            self.path.truncate(folder.len);
            let Some((name, inode)) = folder.names.next() else {
                self.open.pop();
                continue;
            };
            self.path.extend_from_slice(&name);
            let read = self.file(inode, budget);
            read.map_err(|reason| format!("'{}': {reason}", show(&self.path)))?;
        }
    }

    /// Reads the file at the path.
    fn file(&mut self, number: u64, budget: &mut Budget) -> Result<(), String> {
        if self.path.len() > self.limits.path_bytes {
            return Err(format!("a path longer than {} bytes", self.limits.path_bytes));
        }
        let inode = self.volume.inode(number)?;
        match inode.kind {
            FileKind::Directory => return self.folder(number, &inode, budget),
            // Overlayfs links whiteouts to each other, and they are no files.
            FileKind::Char if inode.device() == (0, 0) => {
                self.ready(Meta::default(), EntryContent::Whiteout);
                return Ok(());
            }
            FileKind::File if inode.size == 0 && self.attributes(&inode, budget)?.is_whiteout => {
                self.ready(Meta::default(), EntryContent::Whiteout);
                return Ok(());
            }
            // A socket is left out, since it is useless without its process.
            FileKind::Socket => return Ok(()),
            _ => {}
        }
        if inode.names > 1 {
            if let Some(first) = self.links.get(&number).cloned() {
                self.ready(Meta::default(), EntryContent::HardLink(first));
                return Ok(());
            }
            self.count(budget::in_table::<u64, Vec<u8>>(self.path.len()), budget)?;
            self.links.insert(number, self.path.clone());
        }
        let kind = match inode.kind {
            FileKind::File => NodeKind::File(Data {
                layer: 0,
                len: inode.size,
                pieces: self.volume.pieces(&inode)?,
            }),
            FileKind::Symlink => NodeKind::Symlink(self.volume.content(&inode, MAX_LINK)?),
            FileKind::Char => NodeKind::Char(inode.device()),
            FileKind::Block => NodeKind::Block(inode.device()),
            FileKind::Fifo => NodeKind::Fifo,
            FileKind::Socket | FileKind::Directory => return Ok(()),
        };
        let attributes = self.attributes(&inode, budget)?;
        self.ready(meta(&inode, attributes), EntryContent::Node(kind));
        Ok(())
    }

    /// Reads the folder at the path, and begins with its names.
    fn folder(&mut self, number: u64, inode: &Inode, budget: &mut Budget) -> Result<(), String> {
        self.count(budget::in_table::<u64, ()>(0), budget)?;
        if !self.folders.insert(number) {
            return Err("a folder with two names".into());
        }
        let attributes = self.attributes(inode, budget)?;
        let opaque = attributes.is_opaque;
        // Where such layers are mounted, the root's attributes are those of the writable layer
        // above them. Its own are no archive's: mkfs.erofs sets mode 0777.
        if !self.path.is_empty() {
            self.ready(meta(inode, attributes), EntryContent::Node(NodeKind::new_directory()));
        }
        if opaque {
            self.ready(Meta::default(), EntryContent::Opaque);
        }
        let mut names = Vec::new();
        let most = self.limits.entries.saturating_mul(NAMES_PER_FILE);
        let (pieces, block) = (self.volume.pieces(inode)?, self.volume.block());
        for at in (0..inode.size).step_by(block as usize) {
            let block = self.volume.range(&pieces, at, block.min(inode.size - at))?;
            let mut counted = 0;
            for (name, inode) in volume::names(&block)? {
                self.names += 1;
                if self.names > most {
                    return Err(format!("more than {} files", self.limits.entries));
                }
                if name != b"." && name != b".." {
                    let bytes = budget::listed(name.len());
                    counted += bytes;
                    self.count(bytes, budget)?;
                    names.push((name, inode));
                }
            }
            // Blocks with fewer names than they have room for take as long to read as full ones.
            self.count(block.len().saturating_sub(counted), budget)?;
        }
        if !self.path.is_empty() {
            self.path.push(b'/');
        }
        self.open.push(Folder { names: names.into_iter(), len: self.path.len() });
        Ok(())
    }

    fn ready(&mut self, meta: Meta, what: EntryContent) {
        self.ready.push_back(ArchiveEntry { path: self.path.clone(), meta, what });
    }

    /// Reads the attributes of a file, and counts them.
    fn attributes(&mut self, inode: &Inode, budget: &mut Budget) -> Result<Attributes, String> {
        let found = self.volume.attributes(inode)?;
        self.count(found.bytes, budget)?;
        Ok(found)
    }

    /// Takes `bytes` from the budget.
    fn count(&mut self, bytes: usize, budget: &mut Budget) -> Result<(), String> {
        self.held = self.held.saturating_add(bytes as u64);
        budget.take(bytes)
    }
}

/// Returns the metadata of a file with these attributes.
fn meta(inode: &Inode, attributes: Attributes) -> Meta {
    Meta {
        mode: inode.mode,
        uid: inode.uid,
        gid: inode.gid,
        mtime: inode.mtime,
        xattrs: attributes.kept,
    }
}
