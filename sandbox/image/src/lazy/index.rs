//! The index of an eStargz layer: where it is in the layer, and what it says.
//!
//! A [`Footer`] at the end of the layer says where the index is ([`footer`]). [`Index::read`]
//! checks and parses the index, entry by entry ([`Maker`]): files for the merged tree
//! ([`Merger::apply_index`]), and a [`Chunk`] for each piece of data that can be fetched alone.

use std::io::{self, Read};

use base64::Engine;
use flate2::bufread::GzDecoder;
use tar::Header;

use super::MOST_MEMBER;
use super::toc::{self, TocEntry};
use crate::digest::DigestReader;
use crate::manifest::Layer;
use crate::root::budget::{self, Budget};
use crate::root::merge::{MergeError, Merger};
use crate::root::read::{ArchiveEntry, EntryContent, add_xattr};
use crate::root::tree::{Data, FileRun, Meta, NodeKind, show};
use crate::{Digest, Error, Limits, Result};

/// The most bytes of a footer, which is at the end of a layer.
pub(crate) const MOST_FOOTER: u64 = 51;
/// The beginning of a gzip member with an extra field (RFC 1952), as a footer begins.
const GZIP: [u8; 4] = [0x1f, 0x8b, 8, 4];
/// The name of the index in the layer as a tar archive.
const TOC_NAME: &[u8] = b"stargz.index.json";
/// The fewest bytes of a chunk that is not its file's last one: a block of an image. So the chunks
/// that a read concerns are not much more than its blocks.
const LEAST_CHUNK: u64 = 4 << 10;
/// The memory of a chunk. The list of chunks is twice as long as it must be at most.
const CHUNK: usize = 2 * size_of::<Chunk>();
/// The empty file behind the data that a container soon needs, in the root of a layer.
const PREFETCH_LANDMARK: &str = ".prefetch.landmark";
/// The empty file of a layer without such data.
const NO_PREFETCH_LANDMARK: &str = ".no.prefetch.landmark";

/// The place of an index in its layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Footer {
    /// The offset of the index's gzip member, which ends where the footer begins.
    pub toc: u64,
    /// The bytes of the footer itself.
    pub bytes: u64,
}

/// Returns the footer at the end of `layer`, of which the last [`MOST_FOOTER`] bytes suffice.
/// Returns `None` if there is none: the layer is no eStargz layer.
pub(crate) fn footer(layer: &[u8]) -> Option<Footer> {
    let parse = |bytes: usize, extra: &[u8]| {
        let footer = layer.get(layer.len().checked_sub(bytes)?..)?;
        let field = footer.strip_prefix(&GZIP)?.get(6..)?.strip_prefix(extra)?;
        let (digits, rest) = field.split_at_checked(16)?;
        if !rest.starts_with(b"STARGZ") || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let toc = u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()?;
        Some(Footer { toc, bytes: bytes as u64 })
    };
    // The length of the extra field, and of eStargz the header of its only subfield. The other form
    // is stargz's, from which eStargz was made.
    parse(51, &[26, 0, b'S', b'G', 22, 0]).or_else(|| parse(47, &[22, 0]))
}

/// A layer's index as the registry has it.
pub(crate) struct Toc {
    /// Its offset in the layer, where the data of files ends.
    pub offset: u64,
    /// Its digest, by the manifest.
    pub digest: Digest,
    /// The gzip member with the tar entry that has it.
    pub member: Vec<u8>,
}

/// The index of one layer.
#[derive(Debug, Default)]
pub(crate) struct Index {
    /// The chunks of all files, in the order of [`Chunk::at`].
    pub chunks: Vec<Chunk>,
    /// The bytes of the layer that a container soon needs, from the layer's beginning on.
    pub prefetch: u64,
    /// The files. Their data is in the virtual layer of the chunks.
    entries: Vec<ArchiveEntry>,
}

/// A chunk of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The offset in a virtual layer in which all chunks follow each other, as
    /// [`FileRun::from`](crate::root::tree::FileRun::from).
    pub at: u64,
    /// The bytes of the chunk, uncompressed; at least 1.
    pub bytes: u64,
    /// The offset of the chunk's gzip member in the layer.
    pub stream: u64,
    /// The bytes of the layer from there on that have the chunk: up to the next member, or fewer if
    /// the chunk needs fewer however badly it is compressed.
    pub stream_bytes: u64,
    /// The offset of the chunk in the uncompressed bytes from `stream` on. With `bytes` it is at
    /// most [`MOST_MEMBER`].
    pub inner: u64,
    /// The digest of the chunk.
    pub digest: Digest,
}

impl Index {
    /// Reads the index of `layer`. Returns `None` if it cannot serve for fetching the layer lazily,
    /// although the layer may be a good one: chunks without SHA-256 digests, beyond [`MOST_MEMBER`]
    /// or shorter than [`LEAST_CHUNK`], members that would have to be uncompressed to more bytes
    /// than the layer may have, and names that were no UTF-8 and lost bytes in JSON. What the index
    /// takes is counted in `budget` as it grows.
    ///
    /// # Errors
    /// [`Error::DigestMismatch`], [`Error::BadLayer`], [`Error::TooLarge`].
    pub(crate) fn read(
        layer: &Layer,
        toc: &Toc,
        limits: &Limits,
        budget: &mut Budget,
    ) -> Result<Option<Self>> {
        let bad = |reason: String| Error::bad_layer(layer.digest, format!("its index {reason}"));
        let mut member = GzDecoder::new(toc.member.as_slice());
        let mut header = Header::new_old();
        member.read_exact(header.as_mut_bytes()).map_err(|e| bad(format!("is unreadable: {e}")))?;
        if header.path_bytes() != TOC_NAME {
            return Err(bad(format!("is called '{}'", show(&header.path_bytes()))));
        }
        let size = header.entry_size().map_err(|_| bad("has a size that is no number".into()))?;
        if size > limits.index_bytes() {
            let reason = format!("its index has more than {} bytes", limits.index_bytes());
            return Err(Error::too_large(format!("layer {}", layer.digest), reason));
        }
        let mut json = DigestReader::new(member.take(size));
        let parsed = Self::parse(&mut json, toc.offset, limits, budget);
        // A wrong digest explains a document that cannot be parsed, so it is checked first.
        io::copy(&mut json, &mut io::sink()).map_err(|e| bad(format!("is unreadable: {e}")))?;
        if json.count() != size {
            return Err(bad("is cut off".into()));
        }
        match json.digest() == toc.digest {
            true => parsed.map_err(|e| e.of(&layer.digest)),
            false => Err(Error::DigestMismatch {
                what: format!("the index of layer {}", layer.digest),
                expected: toc.digest,
                actual: json.digest(),
            }),
        }
    }

    /// Parses the JSON document of an index that is at the offset `toc` of its layer. Returns
    /// `None` as [`read`](Self::read).
    pub(crate) fn parse(
        json: impl Read,
        toc: u64,
        limits: &Limits,
        budget: &mut Budget,
    ) -> Result<Option<Self>, MergeError> {
        let mut maker = Maker::new(toc, limits, budget);
        toc::read(json, &mut |entry| maker.take(entry))?;
        maker.finish()
    }
}

impl Merger<'_> {
    /// Merges a layer of `stored` bytes by its index, which was counted in this merger's budget and
    /// has no files afterwards.
    pub(crate) fn apply_index(&mut self, index: &mut Index, stored: u64) -> Result<(), MergeError> {
        let entries = std::mem::take(&mut index.entries);
        // A file counts with its first chunk.
        let files = entries.iter().filter(|entry| has_data(entry)).count();
        let further = index.chunks.len().saturating_sub(files);
        self.apply_entries(entries, stored, further)
    }
}

fn has_data(entry: &ArchiveEntry) -> bool {
    matches!(&entry.what, EntryContent::Node(NodeKind::File(data)) if data.len > 0)
}

/// The maker of an [`Index`] from the entries of a document.
struct Maker<'a> {
    limits: &'a Limits,
    budget: &'a mut Budget,
    /// The offset of the index, at which the data of files ends.
    toc: u64,
    index: Index,
    /// The entries so far.
    count: usize,
    /// The bytes of all chunks so far.
    len: u64,
    /// The last file, as long as it lacks data.
    open: Option<Open>,
    /// Set if the layer cannot be fetched lazily.
    is_unfit: bool,
}

/// A file whose chunks are being read.
struct Open {
    size: u64,
    /// The bytes of its chunks so far.
    done: u64,
}

impl<'a> Maker<'a> {
    fn new(toc: u64, limits: &'a Limits, budget: &'a mut Budget) -> Self {
        let index = Index::default();
        Self { limits, budget, toc, index, count: 0, len: 0, open: None, is_unfit: false }
    }

    fn take(&mut self, entry: TocEntry) -> Result<(), MergeError> {
        self.count += 1;
        if self.count > self.limits.entries {
            let limit = self.limits.entries;
            return Err(MergeError::TooLarge(format!("more than {limit} files and chunks")));
        }
        let (files, chunks) = (self.index.entries.len(), self.index.chunks.len());
        self.add(entry)?;
        let files = self.index.entries[files..].iter();
        let files: usize = files.map(|file| budget::WAITING + budget::waiting(file)).sum();
        let chunks = (self.index.chunks.len() - chunks) * CHUNK;
        self.budget.take(files + chunks).map_err(MergeError::TooLarge)
    }

    /// Adds a file, a chunk or both.
    fn add(&mut self, entry: TocEntry) -> Result<(), MergeError> {
        if entry.kind == "chunk" {
            return self.chunk(&entry).map_err(|reason| self.last_is_bad(&reason));
        }
        self.close()?;
        // JSON has no bytes that are no text; its makers write this character instead.
        self.is_unfit |= [&entry.name, &entry.link_name].iter().any(|s| s.contains('\u{fffd}'));
        let name = show(entry.name.as_bytes());
        let taken = match self.landmark(&entry) {
            Ok(false) => self.file(entry),
            other => other.map(|_| ()),
        };
        taken.map_err(|reason| MergeError::Bad(format!("'{name}': {reason}")))
    }

    fn last_is_bad(&self, reason: &str) -> MergeError {
        let last = self.index.entries.last().map(|entry| show(&entry.path)).unwrap_or_default();
        MergeError::Bad(format!("'{last}': {reason}"))
    }

    /// Returns whether `entry` is a landmark, which is no file of the image.
    fn landmark(&mut self, entry: &TocEntry) -> Result<bool, String> {
        let mut parts = entry.name.split('/').filter(|part| !matches!(*part, "" | "."));
        let (name, None) = (parts.next(), parts.next()) else { return Ok(false) };
        match name {
            Some(PREFETCH_LANDMARK) if entry.offset >= self.toc => {
                Err("data that is not before the index".into())
            }
            Some(PREFETCH_LANDMARK) => {
                self.index.prefetch = entry.offset;
                Ok(true)
            }
            name => Ok(name == Some(NO_PREFETCH_LANDMARK)),
        }
    }

    fn file(&mut self, entry: TocEntry) -> Result<(), String> {
        let meta = meta(&entry)?;
        let data = if entry.kind == "reg" { Some(self.data(&entry)?) } else { None };
        let (device, link) = ((entry.dev_major, entry.dev_minor), entry.link_name.into_bytes());
        let what = match (entry.kind.as_str(), data) {
            (_, Some(data)) => EntryContent::Node(NodeKind::File(data)),
            ("dir", _) => EntryContent::Node(NodeKind::new_directory()),
            ("symlink", _) => EntryContent::Node(NodeKind::Symlink(link)),
            ("hardlink", _) => EntryContent::HardLink(link),
            ("char", _) => EntryContent::Node(NodeKind::Char(device)),
            ("block", _) => EntryContent::Node(NodeKind::Block(device)),
            ("fifo", _) => EntryContent::Node(NodeKind::Fifo),
            (other, _) => {
                return Err(format!("an entry of the unknown type '{}'", show(other.as_bytes())));
            }
        };
        self.index.entries.push(ArchiveEntry { path: entry.name.into_bytes(), meta, what });
        Ok(())
    }

    /// Begins with the data of a regular file, whose entry is that of its first chunk, too.
    fn data(&mut self, entry: &TocEntry) -> Result<Data, String> {
        let (from, len) = (self.len, entry.size);
        from.checked_add(len).ok_or("more data than 64 bits can count")?;
        if len == 0 {
            return Ok(Data { layer: 0, len, pieces: Vec::new() });
        }
        self.open = Some(Open { size: len, done: 0 });
        self.chunk(entry)?;
        // The chunks of a file follow each other, so they are one piece of the virtual layer.
        Ok(Data { layer: 0, len, pieces: vec![FileRun { at: 0, from, len }] })
    }

    fn chunk(&mut self, entry: &TocEntry) -> Result<(), String> {
        let open = self.open.as_mut().ok_or("a chunk where no data is missing")?;
        if entry.chunk_offset != open.done {
            let (at, done) = (entry.chunk_offset, open.done);
            return Err(format!("a chunk at {at} where the data so far ends at {done}"));
        }
        let left = open.size - open.done;
        let bytes = if entry.chunk_size == 0 { left } else { entry.chunk_size };
        if bytes == 0 || bytes > left {
            return Err(format!("a chunk of {bytes} bytes where {left} are missing"));
        }
        self.is_unfit |= bytes < LEAST_CHUNK.min(left);
        open.done += bytes;
        let at = self.len;
        self.len += bytes;
        let (stream, inner) = (entry.offset, entry.inner_offset);
        if stream >= self.toc {
            return Err("data that is not before the index".into());
        }
        // The layer begins with the header of its first file.
        if stream == 0 && inner == 0 {
            return Err("data without an offset in the layer".into());
        }
        let needed = inner.checked_add(bytes).filter(|needed| *needed <= MOST_MEMBER);
        match (entry.chunk_digest.parse::<Digest>(), needed) {
            (Ok(digest), Some(needed)) => {
                let chunk =
                    Chunk { at, bytes, stream, stream_bytes: stored(needed), inner, digest };
                self.index.chunks.push(chunk);
            }
            _ => self.is_unfit = true,
        }
        Ok(())
    }

    /// Checks that the last file has all of its data.
    fn close(&mut self) -> Result<(), MergeError> {
        match self.open.take() {
            Some(open) if open.done < open.size => {
                Err(self.last_is_bad(&format!("no data from {} on", open.done)))
            }
            _ => Ok(()),
        }
    }

    /// Returns the bytes that all members are uncompressed to, each up to the end of its last
    /// chunk. A small layer can claim any number of them: what is before a chunk in its member may
    /// be nothing but bytes to skip.
    fn inflated(&self) -> u64 {
        let chunks = self.index.chunks.iter();
        let mut ends: Vec<_> = chunks.map(|c| (c.stream, c.inner + c.bytes)).collect();
        ends.sort_unstable();
        let members = ends.chunk_by(|one, other| one.0 == other.0);
        members.filter_map(|member| member.last()).map(|(_, end)| end).sum()
    }

    fn finish(mut self) -> Result<Option<Index>, MergeError> {
        self.close()?;
        if self.is_unfit || self.inflated() > self.limits.layer_bytes(self.toc) {
            return Ok(None);
        }
        let Index { chunks, prefetch, .. } = &mut self.index;
        let mut members: Vec<_> = chunks.iter().map(|chunk| chunk.stream).collect();
        members.extend([*prefetch, self.toc]);
        members.sort_unstable();
        members.dedup();
        for chunk in chunks {
            // The index itself is behind every member.
            let next = members.get(members.partition_point(|&member| member <= chunk.stream));
            let most = next.map_or(0, |next| next - chunk.stream);
            chunk.stream_bytes = chunk.stream_bytes.min(most);
        }
        Ok(Some(self.index))
    }
}

/// Returns the most bytes of a gzip member up to the point where `bytes` bytes have come out of it.
/// Incompressible data is stored in blocks of up to 64 KiB, or smaller ones where the maker flushed
/// its compressor between small files.
fn stored(bytes: u64) -> u64 {
    bytes + bytes / 16 + (64 << 10)
}

/// Returns the attributes of a file.
fn meta(entry: &TocEntry) -> Result<Meta, String> {
    let mut meta = Meta {
        mode: (entry.mode & 0o7777) as u16,
        uid: entry.uid,
        gid: entry.gid,
        mtime: entry.mtime(),
        ..Meta::default()
    };
    for (name, value) in &entry.xattrs {
        let value = base64::engine::general_purpose::STANDARD.decode(value);
        let value = value.map_err(|_| "an extended attribute that is no base64")?;
        add_xattr(&mut meta.xattrs, name.as_bytes(), &value)?;
    }
    Ok(meta)
}
