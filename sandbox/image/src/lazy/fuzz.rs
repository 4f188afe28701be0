//! Entry points for fuzz targets.

use super::index::Index;
use super::map::{Map, MapLayer, spans};
use crate::root::layout::Layout;
use crate::root::merge::Merger;
use crate::{Digest, Limits};

/// The bytes of a layer with the fuzzed index at its end.
const LAYER: u64 = 1 << 30;

/// Merges `data` as the documents of two layers' indexes, and makes the image's map, which must
/// neither panic nor run away, whatever `data` is.
pub(crate) fn index(data: &[u8]) {
    let limits = Limits {
        entries: 10_000,
        metadata_bytes: 16 << 20,
        image_uncompressed: 16 << 20,
        ..Limits::default()
    };
    let mut merger = Merger::new(&limits);
    let mut indexes = Vec::new();
    for _ in 0..2 {
        let index = Index::parse(data, LAYER, &limits, merger.budget());
        let Ok(Some(mut index)) = index else { return };
        let mut end = 0;
        for chunk in &index.chunks {
            assert!(chunk.at == end && chunk.bytes > 0, "{chunk:?} follows {end}");
            end += chunk.bytes;
        }
        if merger.apply_index(&mut index, LAYER).is_err() {
            return;
        }
        indexes.push(index);
    }
    let tree = merger.finish();
    let Ok(layout) = Layout::of(&tree, [0; 16]) else { return };
    let layer = MapLayer { digest: Digest::of(data), bytes: LAYER, prefetch: indexes[0].prefetch };
    // An index that was accepted makes a map that is accepted.
    encoded(&Map {
        reference: "localhost/app:1".parse().expect("a reference"),
        plain_http: true,
        bytes: layout.bytes(),
        layers: vec![layer; 2],
        spans: spans(&tree, layout.data(), &indexes),
    });
}

/// Reads `data` as a map without the digest at its end, which must not panic, whatever `data` is.
pub(crate) fn map(data: &[u8]) {
    let limits = Limits { document_bytes: 1 << 20, ..Limits::default() };
    if let Ok((map, _)) = Map::parse(data, data.len() as u64, &limits) {
        encoded(&map);
    }
}

/// Asserts that a map is read as it is written.
fn encoded(map: &Map) {
    let mut bytes = Vec::new();
    assert!(map.encode(&mut bytes).is_ok());
    let read = Map::parse(&bytes[..], bytes.len() as u64, &Limits::default());
    assert_eq!(read.map(|(map, _)| map).as_ref(), Ok(map));
}
