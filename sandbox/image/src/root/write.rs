//! A writer of a tree as one tar stream: ustar headers, and PAX headers for values that do not fit.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use tar::{EntryType, Header};

use super::tree::{Data, Id, Meta, NodeKind, ROOT, Tree};

const BLOCK: u64 = 512;
/// Bytes that are read and written at once.
const CHUNK: usize = 256 << 10;
/// The largest number in the seven octal digits of a ustar id.
const MAX_OCTAL_ID: u32 = 0o7_777_777;
/// The largest size in the eleven octal digits of a ustar size.
const MAX_OCTAL_SIZE: u64 = 0o77_777_777_777;
static ZEROS: [u8; CHUNK] = [0; CHUNK];

/// Writes `tree` to `out`: a folder before its content, names in byte order, so that the same tree
/// makes the same bytes. `layers` are the files to which [`Data::layer`] is an index. `progress` is
/// called with the bytes of file data written so far.
pub(crate) fn write_tree(
    tree: &Tree,
    layers: &[File],
    out: impl Write,
    progress: &mut dyn FnMut(u64),
) -> io::Result<()> {
    let mut tar = TarWriter::new(out);
    tar.entry(b"./", &tree.inode(ROOT).meta, EntryType::Directory, b"", 0)?;
    let mut writer = Writer { tar, tree, layers, names: HashMap::new() };
    tree.walk(|path, folder, name, id| writer.node(path, folder, name, id, progress))?;
    writer.tar.finish()
}

/// Returns the bytes of file data in `tree`, with each inode counted once.
pub(crate) fn data_bytes(tree: &Tree) -> u64 {
    let mut seen = HashSet::new();
    let mut total = 0;
    let counted = tree.walk(|_, _, _, id| {
        if let NodeKind::File(data) = &tree.inode(id).kind
            && seen.insert(id)
        {
            total += data.len;
        }
        Ok::<(), Infallible>(())
    });
    match counted {
        Ok(()) => total,
    }
}

struct Writer<'a, W: Write> {
    tar: TarWriter<W>,
    tree: &'a Tree,
    layers: &'a [File],
    /// The first name of every inode and its folder, for hard links. The path is not stored: a few
    /// links make the paths of a million files much longer than their layer.
    names: HashMap<Id, (Id, &'a [u8])>,
}

impl<'a, W: Write> Writer<'a, W> {
    fn node(
        &mut self,
        path: &[u8],
        folder: Id,
        name: &'a [u8],
        id: Id,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<()> {
        let inode = self.tree.inode(id);
        if self.names.contains_key(&id) {
            // A link has no attributes of its own; the inode's were written with its first name.
            let first = self.first_path(id);
            return self.tar.entry(path, &Meta::default(), EntryType::Link, &first, 0);
        }
        self.names.insert(id, (folder, name));
        let meta = &inode.meta;
        match &inode.kind {
            NodeKind::File(data) => {
                self.tar.entry(path, meta, EntryType::Regular, b"", data.len)?;
                self.data(data, progress)
            }
            NodeKind::Symlink(target) => self.tar.entry(path, meta, EntryType::Symlink, target, 0),
            NodeKind::Char(numbers) => self.tar.device(path, meta, EntryType::Char, *numbers),
            NodeKind::Block(numbers) => self.tar.device(path, meta, EntryType::Block, *numbers),
            NodeKind::Fifo => self.tar.entry(path, meta, EntryType::Fifo, b"", 0),
            NodeKind::Directory(_) => self.tar.entry(path, meta, EntryType::Directory, b"", 0),
        }
    }

    /// Returns the path under which `id` was written first.
    fn first_path(&self, mut id: Id) -> Vec<u8> {
        let mut parts = Vec::new();
        while let Some((folder, name)) = self.names.get(&id) {
            parts.push(*name);
            id = *folder;
        }
        parts.reverse();
        parts.join(&b'/')
    }

    fn data(&mut self, data: &Data, progress: &mut dyn FnMut(u64)) -> io::Result<()> {
        let layer = self.layers.get(data.layer as usize);
        let layer = layer.ok_or_else(|| io::Error::other("a file of a layer that is not there"))?;
        let mut at = 0;
        for piece in &data.pieces {
            self.tar.zeros(piece.at - at, progress)?;
            self.tar.copy(layer, piece.from, piece.len, progress)?;
            at = piece.at + piece.len;
        }
        self.tar.zeros(data.len - at, progress)?;
        self.tar.pad(data.len)
    }
}

/// A writer of single tar entries.
pub(crate) struct TarWriter<W> {
    out: W,
    buffer: Vec<u8>,
    /// Bytes of file data so far.
    written: u64,
}

impl<W: Write> TarWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, buffer: vec![0; CHUNK], written: 0 }
    }

    /// Writes the two zero blocks at an archive's end.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.out.write_all(&ZEROS[..2 * BLOCK as usize])?;
        self.out.flush()
    }

    /// Writes the header of an entry. The caller must write `size` bytes of data and call
    /// [`pad`](Self::pad).
    pub(crate) fn entry(
        &mut self,
        path: &[u8],
        meta: &Meta,
        kind: EntryType,
        link: &[u8],
        size: u64,
    ) -> io::Result<()> {
        let header = header(path, meta, kind, link, size);
        self.put(path, meta, link, size, header)
    }

    /// Writes a device with its major and minor number.
    pub(crate) fn device(
        &mut self,
        path: &[u8],
        meta: &Meta,
        kind: EntryType,
        (major, minor): (u32, u32),
    ) -> io::Result<()> {
        let mut header = header(path, meta, kind, b"", 0);
        header.set_device_major(major)?;
        header.set_device_minor(minor)?;
        self.put(path, meta, b"", 0, header)
    }

    fn put(
        &mut self,
        path: &[u8],
        meta: &Meta,
        link: &[u8],
        size: u64,
        mut header: Header,
    ) -> io::Result<()> {
        let pax = pax_records(path, meta, link, size);
        if !pax.is_empty() {
            let plain = Meta { mode: 0o644, ..Meta::default() };
            let len = pax.len() as u64;
            let mut pax_header =
                self::header(b"PaxHeaders/entry", &plain, EntryType::XHeader, b"", len);
            pax_header.set_cksum();
            self.out.write_all(pax_header.as_bytes())?;
            self.out.write_all(&pax)?;
            self.pad(len)?;
        }
        header.set_cksum();
        self.out.write_all(header.as_bytes())
    }

    /// Copies `len` bytes of `file`, beginning at `from`.
    pub(crate) fn copy(
        &mut self,
        file: &File,
        mut from: u64,
        len: u64,
        progress: &mut dyn FnMut(u64),
    ) -> io::Result<()> {
        let end = from + len;
        while from < end {
            let n = CHUNK.min(usize::try_from(end - from).unwrap_or(CHUNK));
            file.read_exact_at(&mut self.buffer[..n], from)?;
            self.out.write_all(&self.buffer[..n])?;
            from += n as u64;
            self.written += n as u64;
            progress(self.written);
        }
        Ok(())
    }

    fn zeros(&mut self, mut len: u64, progress: &mut dyn FnMut(u64)) -> io::Result<()> {
        while len > 0 {
            let n = CHUNK.min(usize::try_from(len).unwrap_or(CHUNK));
            self.out.write_all(&ZEROS[..n])?;
            len -= n as u64;
            self.written += n as u64;
            progress(self.written);
        }
        Ok(())
    }

    /// Pads `size` bytes of data to a whole block.
    pub(crate) fn pad(&mut self, size: u64) -> io::Result<()> {
        let rest = (BLOCK - size % BLOCK) % BLOCK;
        self.out.write_all(&ZEROS[..rest as usize])
    }
}

/// Makes a ustar header without its checksum. Values that do not fit are cut here and complete in
/// the PAX header.
fn header(path: &[u8], meta: &Meta, kind: EntryType, link: &[u8], size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(u32::from(meta.mode));
    header.set_uid(u64::from(if meta.uid > MAX_OCTAL_ID { 0 } else { meta.uid }));
    header.set_gid(u64::from(if meta.gid > MAX_OCTAL_ID { 0 } else { meta.gid }));
    header.set_size(if size > MAX_OCTAL_SIZE { 0 } else { size });
    header.set_mtime(if meta.mtime > MAX_OCTAL_SIZE { 0 } else { meta.mtime });
    let old = header.as_old_mut();
    copy_cut(&mut old.name, path);
    copy_cut(&mut old.linkname, link);
    header
}

fn copy_cut(to: &mut [u8], from: &[u8]) {
    let n = to.len().min(from.len());
    to[..n].copy_from_slice(&from[..n]);
}

fn pax_records(path: &[u8], meta: &Meta, link: &[u8], size: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let mut records: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
    // Some readers fail on a field without a terminating NUL, so 100 bytes go to PAX, too.
    if path.len() > 99 {
        records.insert("path", path.to_vec());
    }
    if link.len() > 99 {
        records.insert("linkpath", link.to_vec());
    }
    let numbers = [
        ("uid", u64::from(meta.uid), u64::from(MAX_OCTAL_ID)),
        ("gid", u64::from(meta.gid), u64::from(MAX_OCTAL_ID)),
        ("size", size, MAX_OCTAL_SIZE),
        ("mtime", meta.mtime, MAX_OCTAL_SIZE),
    ];
    for (key, value, max) in numbers {
        if value > max {
            records.insert(key, value.to_string().into_bytes());
        }
    }
    for (key, value) in &records {
        pax_record(&mut out, key.as_bytes(), value);
    }
    for (name, value) in &meta.xattrs {
        pax_record(&mut out, &[b"SCHILY.xattr.", name.as_slice()].concat(), value);
    }
    out
}

/// Appends `LENGTH KEY=VALUE\n`, where the length counts its own digits.
fn pax_record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + 1;
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    out.extend_from_slice(format!("{len} ").as_bytes());
    out.extend_from_slice(key);
    out.push(b'=');
    out.extend_from_slice(value);
    out.push(b'\n');
}
