//! eStargz layers: a maker of them, their indexes, and indexes that lie.

use std::fs::File;
use std::io::{Read, Write};

use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use tar::EntryType;

use super::support::*;
use crate::lazy::index::{Footer, Index, MOST_FOOTER, Toc, footer};
use crate::manifest::Layer;
use crate::root::Form;
use crate::root::budget::Budget;
use crate::root::merge::Merger;
use crate::{Digest, Error, Limits};

/// An eStargz layer under construction.
#[derive(Default)]
pub struct Stargz {
    /// The gzip members so far.
    blob: Vec<u8>,
    /// The uncompressed bytes of the member that is not closed yet.
    member: Vec<u8>,
    /// The uncompressed bytes of all members so far.
    tar: Vec<u8>,
    /// The entries of the index so far.
    entries: Vec<Value>,
}

fn member(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

/// Returns a tar entry: its header and its padded data.
fn tar_entry(kind: EntryType, name: &str, link: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = Tar::new().raw(kind, name.as_bytes(), link.as_bytes(), data).end();
    bytes.truncate(bytes.len() - 1024);
    bytes
}

fn footer_of(toc: u64) -> Vec<u8> {
    let mut footer = vec![0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 255, 26, 0, b'S', b'G', 22, 0];
    footer.extend_from_slice(format!("{toc:016x}STARGZ").as_bytes());
    footer.extend_from_slice(&[1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    footer
}

impl Stargz {
    pub fn new() -> Self {
        Self::default()
    }

    fn close(&mut self) {
        if !self.member.is_empty() {
            self.blob.extend(member(&self.member));
            self.tar.append(&mut self.member);
        }
    }

    /// Adds a file without data.
    pub fn entry(mut self, kind: EntryType, name: &str, link: &str) -> Self {
        self.member.extend(tar_entry(kind, name, link, b""));
        let (word, mode) = match kind {
            EntryType::Directory => ("dir", 0o40755),
            EntryType::Symlink => ("symlink", 0o120_644),
            EntryType::Link => ("hardlink", 0o644),
            EntryType::Fifo => ("fifo", 0o10644),
            _ => ("reg", 0o100_644),
        };
        self.entries.push(json!({ "name": name, "type": word, "linkName": link, "mode": mode,
            "modtime": "1970-01-01T00:00:01Z", "NumLink": 0 }));
        self
    }

    pub fn dir(self, name: &str) -> Self {
        self.entry(EntryType::Directory, name, "")
    }

    /// Adds a file in chunks of at most `size` bytes, each with a gzip member of its own.
    pub fn file(mut self, name: &str, data: &str, size: usize) -> Self {
        if data.is_empty() {
            return self.entry(EntryType::Regular, name, "");
        }
        let bytes = tar_entry(EntryType::Regular, name, "", data.as_bytes());
        let (header, padded) = bytes.split_at(512);
        self.member.extend_from_slice(header);
        for (i, chunk) in data.as_bytes().chunks(size).enumerate() {
            self.close();
            let is_last = (i + 1) * size >= data.len();
            let chunk_size = if is_last { 0 } else { size };
            let mut entry = json!({ "name": name, "type": "chunk", "offset": self.blob.len(),
                "chunkOffset": i * size, "chunkSize": chunk_size,
                "chunkDigest": Digest::of(chunk).to_string() });
            if i == 0 {
                entry["type"] = "reg".into();
                entry["size"] = data.len().into();
                entry["mode"] = 0o100_644.into();
                entry["modtime"] = "1970-01-01T00:00:01Z".into();
            }
            self.entries.push(entry);
            let end = if is_last { padded.len() } else { i * size + chunk.len() };
            self.member.extend_from_slice(&padded[i * size..end]);
        }
        self
    }

    /// Adds files whose headers and data share one gzip member, as makers with a minimum size of a
    /// member write them.
    pub fn packed(mut self, files: &[(&str, &str)]) -> Self {
        self.close();
        let offset = self.blob.len();
        for (name, data) in files {
            let inner = self.member.len() + 512;
            self.member.extend(tar_entry(EntryType::Regular, name, "", data.as_bytes()));
            self.entries.push(json!({ "name": name, "type": "reg", "size": data.len(),
                "mode": 0o100_644, "modtime": "1970-01-01T00:00:01Z", "offset": offset,
                "innerOffset": inner, "chunkDigest": Digest::of(data.as_bytes()).to_string() }));
        }
        self
    }

    /// Returns the layer and the digest of its index.
    pub fn end(mut self) -> (Blob, Digest) {
        let entries = std::mem::take(&mut self.entries);
        self.end_with(&json!({ "version": 1, "entries": entries }).to_string())
    }

    fn end_with(mut self, toc: &str) -> (Blob, Digest) {
        self.close();
        let offset = self.blob.len() as u64;
        self.member = Tar::new().file("stargz.index.json", toc).end();
        self.close();
        self.blob.extend(footer_of(offset));
        let kind = "application/vnd.oci.image.layer.v1.tar+gzip";
        let blob = Blob { bytes: self.blob, diff_id: Digest::of(&self.tar), kind };
        (blob, Digest::of(toc.as_bytes()))
    }
}

/// Reads the index of a layer as a lazy pull does.
fn read(blob: &Blob, digest: Digest, limits: &Limits) -> crate::Result<Option<Index>> {
    read_in(blob, digest, limits, &mut Budget::new(limits))
}

/// Reads the index of a layer beside what other layers take.
fn read_in(
    blob: &Blob,
    digest: Digest,
    limits: &Limits,
    budget: &mut Budget,
) -> crate::Result<Option<Index>> {
    let bytes = &blob.bytes;
    let footer = footer(&bytes[bytes.len() - MOST_FOOTER as usize..]).unwrap();
    let end = bytes.len() - footer.bytes as usize;
    let member = bytes[footer.toc as usize..end].to_vec();
    let toc = Toc { offset: footer.toc, digest, member };
    Index::read(&layer(blob), &toc, limits, budget)
}

fn layer(blob: &Blob) -> Layer {
    let (digest, size) = (Digest::of(&blob.bytes), blob.bytes.len() as u64);
    Layer { digest, size, diff_id: blob.diff_id, form: Form::Changes, toc: None }
}

/// Returns a file with the data of all chunks of `index`, each checked: the virtual layer.
fn virtual_layer(blob: &Blob, index: &Index) -> File {
    let mut data = Vec::new();
    for chunk in &index.chunks {
        assert_eq!(chunk.at, data.len() as u64);
        let stream = chunk.stream as usize..(chunk.stream + chunk.stream_bytes) as usize;
        let mut bytes = vec![0; (chunk.inner + chunk.bytes) as usize];
        MultiGzDecoder::new(&blob.bytes[stream]).read_exact(&mut bytes).unwrap();
        let bytes = &bytes[chunk.inner as usize..];
        assert_eq!(Digest::of(bytes), chunk.digest);
        data.extend_from_slice(bytes);
    }
    in_file(&data)
}

#[test]
fn footers() {
    let of = |toc| Some(Footer { toc, bytes: 51 });
    assert_eq!(footer(&footer_of(0x1234_5678)), of(0x1234_5678));
    assert_eq!(footer(&footer_of(u64::MAX)), of(u64::MAX));
    let mut layer = b"something before it".to_vec();
    layer.extend(footer_of(19));
    assert_eq!(footer(&layer), of(19));
    // The form of stargz: no header of a subfield.
    let mut legacy = vec![0x1f, 0x8b, 8, 4, 0, 0, 0, 0, 0, 255, 22, 0];
    legacy.extend_from_slice(b"00000000000000ffSTARGZ");
    legacy.extend_from_slice(&[1, 0, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(footer(&[&b"xxxx"[..], &legacy[..]].concat()), Some(Footer { toc: 255, bytes: 47 }));
    for at in (0..4).chain(10..38) {
        let mut bad = footer_of(0x1234);
        bad[at] = b'+';
        assert_eq!(footer(&bad), None, "{at}");
    }
    for short in [&b""[..], &footer_of(1)[1..], &legacy[1..], &member(b"x")[..]] {
        assert_eq!(footer(short), None);
    }
}

/// Two layers by their indexes make the same tree as by their tar archives.
#[test]
fn an_index_merges_as_its_layer_does() {
    let big = "0123456789abcdef".repeat(1000);
    let lower = Stargz::new()
        .dir("./etc/")
        .file("./etc/gone", "1", 100)
        .packed(&[("small-1", "one"), ("small-2", "two"), ("etc/three", "three")])
        .file("keep", "kept", 4)
        .entry(EntryType::Link, "kept-too", "keep")
        .dir("opq/")
        .file("opq/below", "below", 5)
        .file("opq/empty", "", 2)
        .entry(EntryType::Symlink, "lib", "usr/lib")
        .end();
    let upper = Stargz::new()
        .entry(EntryType::Regular, "etc/.wh.gone", "")
        .file("keep", "changed", 100)
        .entry(EntryType::Regular, "opq/.wh..wh..opq", "")
        .file("opq/above", "2", 100)
        .file("lib/libx", &big, 4096)
        .entry(EntryType::Fifo, "pipe", "")
        .entry(EntryType::Link, "lib-too", "lib")
        .end();
    let limits = Limits::default();
    let mut merger = Merger::new(&limits);
    let (mut layers, mut tars) = (Vec::new(), Vec::new());
    for (blob, digest) in [&lower, &upper] {
        let index = read_in(blob, *digest, &limits, merger.budget());
        let mut index = index.unwrap().unwrap();
        merger.apply_index(&mut index, blob.bytes.len() as u64).unwrap();
        layers.push(virtual_layer(blob, &index));
        let mut tar = Vec::new();
        MultiGzDecoder::new(&blob.bytes[..]).read_to_end(&mut tar).unwrap();
        assert_eq!(Digest::of(&tar), blob.diff_id);
        tars.push(tar);
    }
    let found = show(&merger.finish(), &layers);
    let mut expected = merge(&tars).unwrap();
    // Only the archive has the index itself.
    expected.retain(|line| !line.starts_with("f stargz.index.json"));
    assert_eq!(found, expected);
    assert!(found.contains(&format!("f usr/lib/libx {big}")));
}

#[test]
fn chunks_and_their_members() {
    let (blob, digest) = Stargz::new()
        .packed(&[("first", "1")])
        .file("big", &"x".repeat(10_000), 4096)
        .file(".prefetch.landmark", "\u{f}", 1)
        .file("later", "later", 100)
        .file("d/.prefetch.landmark", "a file as any other", 100)
        .end();
    let index = read(&blob, digest, &Limits::default()).unwrap().unwrap();
    let sizes: Vec<_> = index.chunks.iter().map(|chunk| (chunk.at, chunk.bytes)).collect();
    let expected = [(0, 1), (1, 4096), (4097, 4096), (8193, 1808), (10_001, 5), (10_006, 19)];
    assert_eq!(sizes, expected);
    assert_eq!((index.chunks[0].stream, index.chunks[0].inner), (0, 512));
    for pair in index.chunks.windows(2) {
        assert!(pair[0].stream + pair[0].stream_bytes <= pair[1].stream, "{pair:?}");
    }
    // The landmark is no file, but its member is the end of what is needed soon.
    let (last, next) = (&index.chunks[3], &index.chunks[4]);
    assert_eq!(index.prefetch, last.stream + last.stream_bytes);
    assert!(index.prefetch < next.stream);
    virtual_layer(&blob, &index);
    let none = Stargz::new().file(".no.prefetch.landmark", "\u{f}", 1).file("x", "x", 1).end();
    let index = read(&none.0, none.1, &Limits::default()).unwrap().unwrap();
    assert_eq!((index.prefetch, index.chunks.len()), (0, 1));
}

/// A fetcher must not get more for a chunk than the chunk can need.
#[test]
fn a_gap_behind_a_member_is_not_fetched() {
    let digest = Digest::of(b"x");
    let toc = format!(
        r#"{{"version":1,"entries":[{{"name":"x","type":"reg","size":1,"offset":512,
        "chunkDigest":"{digest}"}}]}}"#
    );
    let limits = Limits::default();
    let index = Index::parse(toc.as_bytes(), 1 << 40, &limits, &mut Budget::new(&limits));
    let index = index.unwrap().unwrap();
    assert!(index.chunks[0].stream_bytes < 128 << 10, "{index:?}");
}

#[test]
fn attributes() {
    let toc = json!({ "version": 1, "entries": [
        { "name": "f", "type": "reg", "mode": 0o104_751, "uid": 7, "gid": 8, "userName": "u",
          "modtime": "2019-08-20T10:30:43Z", "digest": "sha256:x",
          "xattrs": { "user.k": "dgoA", "user.overlay.opaque": "eQ==" } },
        { "name": "c", "type": "char", "devMajor": 1, "devMinor": 3 },
        { "name": "b", "type": "block", "devMajor": 8, "devMinor": 1 },
    ] });
    let limits = Limits::default();
    let mut merger = Merger::new(&limits);
    let index = Index::parse(toc.to_string().as_bytes(), 100, &limits, merger.budget());
    let mut index = index.unwrap().unwrap();
    merger.apply_index(&mut index, 100).unwrap();
    let tree = merger.finish();
    assert_eq!(show(&tree, &[in_file(b"")]), ["b b 8,1", "c c 1,3", "f f "]);
    let file = tree.child(crate::root::tree::ROOT, b"f").unwrap();
    let meta = &tree.inode(file.id).meta;
    assert_eq!((meta.mode, meta.uid, meta.gid, meta.mtime), (0o4751, 7, 8, 1_566_297_043));
    let xattrs: Vec<_> = meta.xattrs.iter().collect();
    assert_eq!(xattrs, [(&b"user.k".to_vec(), &b"v\n\0".to_vec())]);
}

#[test]
fn an_index_that_is_not_the_manifests() {
    let limits = Limits::default();
    let layer = || Stargz::new().file("x", "1", 1);
    let (blob, digest) = layer().end();
    let error = read(&blob, Digest::of(b"other"), &limits).unwrap_err();
    assert!(matches!(error, Error::DigestMismatch { .. }), "{error}");
    // The digest is what is wrong with garbage, too.
    let error = read(&layer().end_with("garbage").0, digest, &limits).unwrap_err();
    assert!(matches!(error, Error::DigestMismatch { .. }), "{error}");
    let (garbage, right) = layer().end_with("garbage");
    let error = read(&garbage, right, &limits).unwrap_err();
    assert!(matches!(error, Error::BadLayer { .. }), "{error}");
    // A bomb of blanks, and one in a place where the limit is smaller.
    let bomb = layer().end_with(&" ".repeat(1 << 20));
    let small = Limits { metadata_bytes: 1 << 19, ..Limits::default() };
    let error = read(&bomb.0, bomb.1, &small).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
}

#[test]
fn members_that_are_no_index() {
    let (blob, digest) = Stargz::new().file("x", "1", 1).end();
    let tar = Tar::new().file("stargz.index.json", &"x".repeat(5000)).end();
    let other = Tar::new().file("other.json", "{}").end();
    let whole = member(&tar);
    for (member, reason) in [
        (Vec::new(), "unreadable"),
        (b"garbage".to_vec(), "unreadable"),
        (member(b"short"), "unreadable"),
        (member(&tar[..600]), "cut off"),
        (whole[..whole.len() / 2].to_vec(), "its index"),
        (member(&other), "'other.json'"),
    ] {
        let toc = Toc { offset: 100, digest, member };
        let limits = Limits::default();
        let error = Index::read(&layer(&blob), &toc, &limits, &mut Budget::new(&limits));
        let error = error.unwrap_err();
        assert!(matches!(error, Error::BadLayer { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{reason}: {error}");
    }
}
