//! The map of a lazily pulled image: for each hole of the image's file, the bytes of the layer that
//! fill it.
//!
//! It is written once and read by the process that fetches, which trusts it no more than a layer.
//! Numbers are little-endian:
//!
//! | bytes | content |
//! |---|---|
//! | 8 | `slip-map` |
//! | 4 | the version, 1 |
//! | 4 | the bytes of the header |
//! | … | the header, in JSON: registry, image and layers |
//! | 76 for each span | image, bytes, stream, stream_bytes, inner (8 each), layer (4), digest (32) |
//! | 32 | the SHA-256 digest of everything before it |

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::MOST_MEMBER;
use super::index::Index;
use crate::digest::{DigestReader, DigestWriter};
use crate::root::tree::{Id, NodeKind, Tree};
use crate::{Digest, Error, Limits, Reference, Result};

const MAGIC: [u8; 8] = *b"slip-map";
const VERSION: u32 = 1;
/// The bytes before the header.
const START: u64 = 16;
/// The bytes of a span.
const RECORD: usize = 76;
/// The bytes of the digest at the end.
const DIGEST: u64 = 32;

/// The map of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Map {
    /// The name with which the image was pulled: its registry and repository have the layers.
    pub reference: Reference,
    /// Set if the registry is used without TLS.
    pub plain_http: bool,
    /// The bytes of the image's file.
    pub bytes: u64,
    /// The layers, lowest first.
    pub layers: Vec<MapLayer>,
    /// The holes of the image's file, in ascending order; none overlaps another.
    pub spans: Vec<Span>,
}

/// A layer of the image in its registry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct MapLayer {
    pub digest: Digest,
    /// The bytes of the layer.
    pub bytes: u64,
    /// The bytes from the layer's beginning on that a container soon needs.
    pub prefetch: u64,
}

/// A hole of the image's file, and the chunk that fills it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// The offset in the image's file.
    pub image: u64,
    /// The bytes of the hole and of the chunk; at least 1.
    pub bytes: u64,
    /// The layer, as an index into [`Map::layers`].
    pub layer: u32,
    /// The offset of a gzip member in the layer.
    pub stream: u64,
    /// The bytes of the layer from there on that have the chunk; at least 1. More members may
    /// follow in them.
    pub stream_bytes: u64,
    /// The offset of the chunk in the uncompressed bytes from `stream` on. With `bytes` it is at
    /// most [`MOST_MEMBER`].
    pub inner: u64,
    /// The digest of the chunk.
    pub digest: Digest,
}

/// The part of a map that is written as JSON.
#[derive(Serialize, Deserialize)]
struct Header {
    reference: Reference,
    plain_http: bool,
    bytes: u64,
    layers: Vec<MapLayer>,
}

/// Returns the spans of an image: `data` are the places of the files' data in the image's file, in
/// ascending order, and `indexes` the indexes of the layers.
pub(crate) fn spans(tree: &Tree, data: &[(Id, u64)], indexes: &[Index]) -> Vec<Span> {
    let chunks = indexes.iter().map(|index| index.chunks.len());
    let mut spans = Vec::with_capacity(chunks.sum());
    for &(id, place) in data {
        let NodeKind::File(file) = &tree.inode(id).kind else { continue };
        let Some(index) = indexes.get(file.layer as usize) else { continue };
        for piece in &file.pieces {
            let chunks = &index.chunks;
            let first = chunks.partition_point(|chunk| chunk.at < piece.from);
            let end = piece.from + piece.len;
            // A piece is a whole number of chunks.
            let chunks = chunks[first..].iter().take_while(|chunk| chunk.at < end);
            spans.extend(chunks.map(|chunk| Span {
                image: place + piece.at + (chunk.at - piece.from),
                bytes: chunk.bytes,
                layer: file.layer,
                stream: chunk.stream,
                stream_bytes: chunk.stream_bytes,
                inner: chunk.inner,
                digest: chunk.digest,
            }));
        }
    }
    spans
}

impl Map {
    /// Writes the map to the file at `path`, which is then on disk.
    ///
    /// # Errors
    /// [`Error::BadMap`] if [`read`](Self::read) would refuse the map; [`Error::Io`].
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        self.check().map_err(|reason| bad(path, reason))?;
        self.write_to(path).map_err(|e| Error::io("write", path, e))
    }

    fn write_to(&self, path: &Path) -> io::Result<()> {
        let mut options = File::options();
        let options = options.write(true).create(true).truncate(true).mode(0o600);
        let mut out = DigestWriter::new(BufWriter::new(options.open(path)?));
        self.encode(&mut out)?;
        let (mut out, digest, _) = out.finish();
        out.write_all(&digest.bytes())?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
    }

    fn header(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Header {
            reference: self.reference.clone(),
            plain_http: self.plain_http,
            bytes: self.bytes,
            layers: self.layers.clone(),
        })
    }

    /// Returns whether [`read`](Self::read) takes a map as long as this one.
    pub(crate) fn fits(&self, limits: &Limits) -> bool {
        let Ok(header) = self.header() else { return false };
        let records = (self.spans.len() as u64).saturating_mul(RECORD as u64);
        let bytes = records.saturating_add(START + header.len() as u64);
        bytes <= most_bytes(limits) && header.len() as u64 <= limits.document_bytes
    }

    /// Writes all but the digest at the end.
    pub(crate) fn encode(&self, mut out: impl Write) -> io::Result<()> {
        let header = self.header()?;
        let len = u32::try_from(header.len()).map_err(io::Error::other)?;
        out.write_all(&MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        out.write_all(&len.to_le_bytes())?;
        out.write_all(&header)?;
        self.spans.iter().try_for_each(|span| out.write_all(&span.encode()))
    }

    /// Returns the most spans of a map whose file has `bytes` bytes.
    pub(crate) fn most_spans(bytes: u64) -> u64 {
        bytes / RECORD as u64
    }

    /// Reads the map at `path`. Reads no more than [`Limits`] allow for the metadata of an image.
    ///
    /// # Errors
    /// [`Error::BadMap`], [`Error::Io`].
    pub(crate) fn read(path: &Path, limits: &Limits) -> Result<Self> {
        let failed = |e| Error::io("read", path, e);
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let body = len.checked_sub(DIGEST).ok_or_else(|| bad(path, "it is cut off".into()))?;
        let mut expected = [0; DIGEST as usize];
        file.read_exact_at(&mut expected, body).map_err(failed)?;
        let (map, actual) =
            Self::parse(BufReader::new(&file), body, limits).map_err(|reason| bad(path, reason))?;
        match actual == Digest::from(expected) {
            true => Ok(map),
            false => Err(bad(path, "its digest is wrong".into())),
        }
    }

    /// Parses the `bytes` bytes of a map before the digest at its end. Returns the digest that
    /// belongs there.
    pub(crate) fn parse(
        input: impl Read,
        bytes: u64,
        limits: &Limits,
    ) -> Result<(Self, Digest), String> {
        if bytes > most_bytes(limits) {
            return Err(format!("it has {bytes} bytes, more than the limits allow"));
        }
        let unreadable = |e: io::Error| e.to_string();
        let mut input = DigestReader::new(input.take(bytes));
        let (mut magic, mut version, mut len) = ([0; 8], [0; 4], [0; 4]);
        for field in [&mut magic[..], &mut version[..], &mut len[..]] {
            input.read_exact(field).map_err(unreadable)?;
        }
        let (version, len) = (u32::from_le_bytes(version), u64::from(u32::from_le_bytes(len)));
        if magic != MAGIC || version != VERSION {
            return Err(format!("it is no map of version {VERSION}"));
        }
        let records =
            bytes.checked_sub(START + len).filter(|left| left.is_multiple_of(RECORD as u64));
        let records = records.ok_or("it is cut off")? / RECORD as u64;
        if len > limits.document_bytes {
            return Err(format!("its header has {len} bytes"));
        }
        let mut header = vec![0; len as usize];
        input.read_exact(&mut header).map_err(unreadable)?;
        let header: Header = serde_json::from_slice(&header).map_err(|e| e.to_string())?;
        // The number is bounded by the file's size.
        let mut spans = Vec::with_capacity(records as usize);
        let mut record = [0; RECORD];
        for _ in 0..records {
            input.read_exact(&mut record).map_err(unreadable)?;
            spans.push(Span::decode(&record));
        }
        let Header { reference, plain_http, bytes, layers } = header;
        let map = Self { reference, plain_http, bytes, layers, spans };
        map.check()?;
        Ok((map, input.digest()))
    }

    /// Checks everything that a fetcher relies on.
    fn check(&self) -> Result<(), String> {
        if self.layers.iter().any(|layer| layer.prefetch > layer.bytes) {
            return Err("more of a layer is needed soon than it has".into());
        }
        let is_within = |from: u64, bytes: u64, len: u64| {
            bytes > 0 && from.checked_add(bytes).is_some_and(|end| end <= len)
        };
        let mut end = 0;
        for span in &self.spans {
            let layer = self.layers.get(span.layer as usize).ok_or("a span of no layer")?;
            if span.image < end || !is_within(span.image, span.bytes, self.bytes) {
                return Err("spans that overlap, or are not in order or not in the image".into());
            }
            if !is_within(span.stream, span.stream_bytes, layer.bytes) {
                return Err("a span whose data is not in its layer".into());
            }
            if !is_within(span.inner, span.bytes, MOST_MEMBER) {
                return Err(format!("a span beyond the first {MOST_MEMBER} bytes of its member"));
            }
            end = span.image + span.bytes;
        }
        Ok(())
    }
}

impl Span {
    fn encode(&self) -> [u8; RECORD] {
        let mut record = [0; RECORD];
        let (words, rest) = record.split_at_mut(40);
        let fields = [self.image, self.bytes, self.stream, self.stream_bytes, self.inner];
        for (word, field) in words.chunks_exact_mut(8).zip(fields) {
            word.copy_from_slice(&field.to_le_bytes());
        }
        rest[..4].copy_from_slice(&self.layer.to_le_bytes());
        rest[4..].copy_from_slice(&self.digest.bytes());
        record
    }

    fn decode(record: &[u8; RECORD]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&record[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let (mut layer, mut digest) = ([0; 4], [0; 32]);
        layer.copy_from_slice(&record[40..44]);
        digest.copy_from_slice(&record[44..]);
        Self {
            image: word(0),
            bytes: word(8),
            layer: u32::from_le_bytes(layer),
            stream: word(16),
            stream_bytes: word(24),
            inner: word(32),
            digest: digest.into(),
        }
    }
}

/// Returns the most bytes of a map without the digest at its end.
fn most_bytes(limits: &Limits) -> u64 {
    limits.metadata_bytes.saturating_add(limits.document_bytes)
}

fn bad(path: &Path, reason: String) -> Error {
    Error::BadMap { path: path.to_owned(), reason: format!("the map is damaged ({reason})") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map() -> Map {
        let digest = Digest::of(b"x");
        let layer = MapLayer { digest, bytes: 1000, prefetch: 10 };
        let span = |image, bytes, layer| Span {
            image,
            bytes,
            layer,
            stream: 100,
            stream_bytes: 900,
            inner: 512,
            digest: Digest::of(&[layer as u8]),
        };
        Map {
            reference: "localhost:5000/a/b:1".parse().unwrap(),
            plain_http: true,
            bytes: 16384,
            layers: vec![layer, MapLayer { prefetch: 0, ..layer }],
            spans: vec![span(4096, 1, 1), span(4097, 4095, 0), span(12288, 4096, 1)],
        }
    }

    fn parse(map: &Map) -> Result<Map, String> {
        let mut bytes = Vec::new();
        map.encode(&mut bytes).unwrap();
        Map::parse(&bytes[..], bytes.len() as u64, &Limits::default()).map(|(map, _)| map)
    }

    #[test]
    fn a_map_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.map");
        map().write(&path).unwrap();
        assert_eq!(Map::read(&path, &Limits::default()).unwrap(), map());
        let empty = Map { spans: Vec::new(), layers: Vec::new(), ..map() };
        assert_eq!(parse(&empty).unwrap(), empty);
    }

    #[test]
    fn every_changed_or_missing_byte_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.map");
        map().write(&path).unwrap();
        let good = std::fs::read(&path).unwrap();
        let refused = |bytes: &[u8]| {
            std::fs::write(&path, bytes).unwrap();
            let error = Map::read(&path, &Limits::default()).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("x.map") && text.contains("pull it again"), "{text}");
        };
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 0x10;
            refused(&bytes);
        }
        for len in [0, 15, 31, 32, 47, 48, good.len() - 76, good.len() - 1] {
            refused(&good[..len]);
        }
        refused(&[&good[..], &[0; 76]].concat());
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(Map::read(&path, &Limits::default()), Err(Error::Io { .. })));
    }

    #[test]
    fn hostile_maps() {
        let span = map().spans[0];
        let last = |span| Map { spans: vec![map().spans[1], span], ..map() };
        let cases = [
            ("overlap", last(Span { image: 8191, ..span })),
            ("order", last(Span { image: 0, ..span })),
            ("not in the image", last(Span { image: 16384, ..span })),
            ("not in the image", last(Span { image: 12288, bytes: 4097, ..span })),
            ("not in the image", last(Span { image: u64::MAX, bytes: 2, ..span })),
            ("not in the image", last(Span { image: 12288, bytes: 0, ..span })),
            ("no layer", last(Span { image: 12288, layer: 2, ..span })),
            ("not in its layer", last(Span { image: 12288, stream_bytes: 901, ..span })),
            ("not in its layer", last(Span { image: 12288, stream_bytes: 0, ..span })),
            ("not in its layer", last(Span { image: 12288, stream: u64::MAX, ..span })),
            ("of its member", last(Span { image: 12288, inner: MOST_MEMBER, ..span })),
            ("of its member", last(Span { image: 12288, inner: u64::MAX, ..span })),
            (
                "needed soon",
                Map { layers: vec![MapLayer { prefetch: 1001, ..map().layers[0] }; 2], ..map() },
            ),
        ];
        for (reason, map) in cases {
            let found = parse(&map).unwrap_err();
            assert!(found.contains(reason), "{reason}: {found}");
            let dir = tempfile::tempdir().unwrap();
            assert!(matches!(map.write(&dir.path().join("m")), Err(Error::BadMap { .. })));
        }
    }

    #[test]
    fn a_huge_map_is_not_read() {
        let limits = Limits { document_bytes: 10, metadata_bytes: 10, ..Limits::default() };
        assert!(Map::parse(io::empty(), 21, &limits).unwrap_err().contains("limits"));
        let mut bytes = Vec::new();
        map().encode(&mut bytes).unwrap();
        let limits = Limits { document_bytes: 10, ..Limits::default() };
        let found = Map::parse(&bytes[..], bytes.len() as u64, &limits).unwrap_err();
        assert!(found.contains("its header"), "{found}");
    }

    #[test]
    fn a_map_fits_if_it_would_be_read() {
        let mut bytes = Vec::new();
        map().encode(&mut bytes).unwrap();
        let (all, header) = (bytes.len() as u64, map().header().unwrap().len() as u64);
        let cases = [
            (header, all - header, true),
            (header, all - header - 1, false),
            (header - 1, all, false),
            (all, 0, true),
        ];
        for (document_bytes, metadata_bytes, fits) in cases {
            let limits = Limits { document_bytes, metadata_bytes, ..Limits::default() };
            assert_eq!(map().fits(&limits), fits, "{limits:?}");
            assert_eq!(Map::parse(&bytes[..], all, &limits).is_ok(), fits, "{limits:?}");
        }
    }
}
