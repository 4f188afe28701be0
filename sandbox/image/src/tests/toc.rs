//! Indexes of eStargz layers that lie, that are too large, or that only a whole pull can use.

use serde_json::{Value, json};

use crate::lazy::MOST_MEMBER;
use crate::lazy::index::Index;
use crate::root::budget::{self, Budget};
use crate::root::merge::{MergeError, Merger};
use crate::root::read::{ArchiveEntry, EntryContent};
use crate::root::tree::{Meta, NodeKind};
use crate::{Digest, Limits};

/// Parses an index with its data before the offset 1000, without what other layers take.
fn parsed(toc: &[u8], limits: &Limits) -> Result<Option<Index>, MergeError> {
    Index::parse(toc, 1000, limits, &mut Budget::new(limits))
}

/// Parses and merges an index of `entries` with its data before the offset 1000.
fn merged(entries: Value, limits: &Limits) -> Result<Option<Index>, MergeError> {
    let toc = json!({ "version": 1, "entries": entries }).to_string();
    let mut merger = Merger::new(limits);
    let mut index = Index::parse(toc.as_bytes(), 1000, limits, merger.budget())?;
    if let Some(index) = &mut index {
        merger.apply_index(index, 1000)?;
    }
    Ok(index)
}

#[track_caller]
fn bad(entries: Value, reason: &str) {
    match merged(entries, &Limits::default()) {
        Err(MergeError::Bad(found)) => assert!(found.contains(reason), "{found}"),
        other => panic!("{other:?} instead of '{reason}'"),
    }
}

fn reg(more: Value) -> Value {
    let mut entry = json!({ "name": "x", "type": "reg", "size": 10, "offset": 512,
        "chunkDigest": Digest::of(b"x").to_string() });
    for (key, value) in more.as_object().unwrap() {
        entry[key] = value.clone();
    }
    entry
}

fn chunk(more: Value) -> Value {
    let mut entry = reg(json!({ "type": "chunk", "chunkOffset": 4096, "offset": 600 }));
    entry.as_object_mut().unwrap().remove("size");
    for (key, value) in more.as_object().unwrap() {
        entry[key] = value.clone();
    }
    entry
}

/// Returns the entries of a file in so many chunks of 4 KiB.
fn in_chunks(count: u64) -> Value {
    let entries = (0..count).map(|at| match at {
        0 => reg(json!({ "size": count * 4096, "chunkSize": 4096 })),
        at => chunk(json!({ "chunkOffset": at * 4096, "chunkSize": 4096 })),
    });
    Value::from(entries.collect::<Vec<_>>())
}

#[test]
fn names_and_links_that_climb() {
    for name in ["../x", "a/../../x", "..", "a/.."] {
        bad(json!([reg(json!({ "name": name }))]), "climbs out");
        bad(json!([{ "name": "y", "type": "hardlink", "linkName": name }]), "climbs out");
    }
    bad(json!([reg(json!({ "name": "a\0b" }))]), "NUL");
    let up = json!({ "name": "s", "type": "symlink", "linkName": ".." });
    bad(json!([up, reg(json!({ "name": "s/x" }))]), "climbs out");
    bad(json!([{ "name": "s", "type": "symlink" }]), "usable target");
    bad(json!([{ "name": "l", "type": "hardlink", "linkName": "x" }]), "missing");
    bad(json!([reg(json!({ "name": "./" }))]), "root is not a folder");
    bad(json!([{ "name": "x", "type": "socket" }]), "unknown type 'socket'");
    bad(json!([{ "name": "x" }]), "unknown type ''");
    bad(json!([{ "name": "x", "type": "dir", "xattrs": { "user.k": "?" } }]), "base64");
    bad(json!([{ "name": "x", "type": "dir", "xattrs": { "user.\0": "" } }]), "Linux would not");
}

#[test]
fn chunks_that_lie() {
    let first = || reg(json!({ "size": 4102, "chunkSize": 4096 }));
    assert!(merged(json!([first(), chunk(json!({}))]), &Limits::default()).unwrap().is_some());
    bad(json!([first()]), "no data from 4096 on");
    bad(json!([first(), { "name": "d", "type": "dir" }, chunk(json!({}))]), "no data from 4096 on");
    bad(json!([chunk(json!({}))]), "no data is missing");
    bad(json!([reg(json!({})), chunk(json!({ "chunkOffset": 10 }))]), "where 0 are missing");
    bad(json!([{ "name": "d", "type": "dir" }, chunk(json!({}))]), "no data is missing");
    for at in [0, 4095, 4097, 4102, u64::MAX] {
        bad(
            json!([first(), chunk(json!({ "chunkOffset": at }))]),
            "where the data so far ends at 4096",
        );
    }
    bad(json!([reg(json!({ "chunkOffset": 1 }))]), "where the data so far ends at 0");
    for size in [7, 100, u64::MAX] {
        bad(json!([first(), chunk(json!({ "chunkSize": size }))]), "where 6 are missing");
    }
    bad(json!([reg(json!({ "chunkSize": 11 }))]), "where 10 are missing");
    for offset in [1000, 1001, u64::MAX] {
        bad(json!([reg(json!({ "offset": offset }))]), "not before the index");
        let landmark = json!({ "name": ".prefetch.landmark", "offset": offset });
        bad(json!([reg(landmark)]), "not before the index");
    }
    bad(json!([reg(json!({ "offset": 0 }))]), "without an offset");
    let all = json!({ "size": u64::MAX, "chunkSize": 4096 });
    bad(json!([reg(json!({})), reg(all)]), "64 bits");
}

#[test]
fn documents_that_are_none() {
    let parse = |toc: &str| match parsed(toc.as_bytes(), &Limits::default()) {
        Err(MergeError::Bad(reason)) => reason,
        other => panic!("{toc}: {other:?}"),
    };
    for toc in
        ["", "{", "[]", "null", r#"{"version":1,"entries":{}}"#, r#"{"version":1,"entries":[]}x"#]
    {
        assert!(parse(toc).contains("its index"), "{toc}");
    }
    for (toc, reason) in [
        ("{}", "missing field `version`"),
        (r#"{"version":1}"#, "missing field `entries`"),
        (r#"{"version":2,"entries":[]}"#, "version 2 is not known"),
        (r#"{"version":1,"entries":[],"entries":[]}"#, "duplicate field"),
        (r#"{"version":1,"entries":[{"size":-1}]}"#, "-1"),
        (r#"{"version":1,"entries":[{"uid":4294967296}]}"#, "4294967296"),
        (r#"{"version":1,"entries":[{"offset":1e3}]}"#, "floating point"),
    ] {
        let found = parse(toc);
        assert!(found.contains(reason), "{reason}: {found}");
    }
    let other = br#"{"entries":[],"x":[{}],"version":1}"#;
    assert!(parsed(other, &Limits::default()).is_ok());
}

/// Such a layer may be pulled as a whole.
#[test]
fn layers_that_only_a_whole_pull_gets() {
    let limits = Limits::default();
    for entry in [
        reg(json!({ "chunkDigest": "" })),
        reg(json!({ "chunkDigest": "sha512:00" })),
        reg(json!({ "innerOffset": MOST_MEMBER })),
        reg(json!({ "innerOffset": u64::MAX })),
        reg(json!({ "size": MOST_MEMBER + 1 })),
        reg(json!({ "name": "not \u{fffd} UTF-8" })),
        json!({ "name": "l", "type": "symlink", "linkName": "\u{fffd}" }),
    ] {
        assert!(merged(json!([entry]), &limits).unwrap().is_none(), "{entry}");
    }
}

/// A fetcher would look at millions of chunks for one read.
#[test]
fn chunks_that_are_too_short() {
    let limits = Limits::default();
    let of = |size: u64, chunk_size: u64| {
        let first = reg(json!({ "size": size, "chunkSize": chunk_size }));
        let last = chunk(json!({ "chunkOffset": chunk_size }));
        merged(json!([first, last]), &limits).unwrap()
    };
    assert!(of(8192, 4095).is_none());
    assert!(of(2, 1).is_none());
    // The last chunk of a file may have any length.
    assert!(of(4097, 4096).is_some());
    assert!(merged(json!([reg(json!({ "size": 1 }))]), &limits).unwrap().is_some());
}

#[test]
fn chunks_of_all_layers_count() {
    let limits = Limits { entries: 5, ..Limits::default() };
    let mut merger = Merger::new(&limits);
    let toc = json!({ "version": 1, "entries": in_chunks(4) }).to_string();
    let mut merge = || {
        let index = Index::parse(toc.as_bytes(), 1000, &limits, merger.budget());
        let mut index = index.unwrap().unwrap();
        merger.apply_index(&mut index, 1000)
    };
    merge().unwrap();
    let Err(MergeError::TooLarge(reason)) = merge() else { panic!("8 of 5 entries") };
    assert!(reason.contains("more than 5 files and chunks"), "{reason}");
}

/// A fetcher would uncompress what is before a chunk for each member, however small the layer is.
#[test]
fn members_that_are_uncompressed_to_more_than_the_layer_may_have() {
    let limits = Limits { ratio_floor: 100, ratio: 0, ..Limits::default() };
    let at = |name: &str, offset: u64, inner: u64| {
        reg(json!({ "name": name, "offset": offset, "innerOffset": inner }))
    };
    let is_fit = |entries: Value| merged(entries, &limits).unwrap().is_some();
    assert!(is_fit(json!([at("a", 500, 40), at("b", 600, 40)])));
    assert!(!is_fit(json!([at("a", 500, 40), at("b", 600, 41)])));
    // Chunks of one member are uncompressed together.
    assert!(is_fit(json!([at("a", 500, 90), at("b", 500, 80), at("c", 500, 10)])));
    assert!(!is_fit(json!([at("a", 500, 91), at("b", 500, 80)])));
}

#[test]
fn limits_of_indexes() {
    let too_large = |entries: Value, limits: &Limits, reason: &str| match merged(entries, limits) {
        Err(MergeError::TooLarge(found)) => assert!(found.contains(reason), "{found}"),
        other => panic!("{other:?} instead of '{reason}'"),
    };
    let few = Limits { entries: 2, ..Limits::default() };
    let empty = || json!({ "name": "x", "type": "dir" });
    too_large(json!([empty(), empty(), empty()]), &few, "more than 2 files and chunks");
    let file = Limits { image_uncompressed: 9, ..Limits::default() };
    too_large(json!([reg(json!({}))]), &file, "file data");
    let ratio = Limits { ratio_floor: 19, ratio: 0, ..Limits::default() };
    let same = json!([reg(json!({})), reg(json!({ "name": "y" }))]);
    too_large(same, &ratio, "mostly empty");
    // The memory of chunks counts, too.
    let entries = in_chunks(10);
    let small = Limits { metadata_bytes: 500, ..Limits::default() };
    too_large(entries.clone(), &small, "names and attributes");
    let large = Limits { metadata_bytes: 5000, ..Limits::default() };
    assert!(merged(entries, &large).unwrap().is_some());
}

/// A short document may have very many entries, which are all in memory before they are merged.
#[test]
fn entries_and_chunks_are_counted_while_they_are_read() {
    let toc = |entries: Value| json!({ "version": 1, "entries": entries }).to_string();
    let is_read = |toc: &str, metadata_bytes: u64| {
        let limits = Limits { metadata_bytes, ..Limits::default() };
        match parsed(toc.as_bytes(), &limits) {
            Ok(index) => index.is_some(),
            Err(MergeError::TooLarge(_)) => false,
            Err(error) => panic!("{error:?}"),
        }
    };
    let links = (0..100).map(
        |at| json!({ "name": format!("l{at}"), "type": "hardlink", "linkName": "x".repeat(1000) }),
    );
    let links = toc(Value::from(links.collect::<Vec<_>>()));
    assert!(!is_read(&links, 100_000) && is_read(&links, 200_000));
    let chunks = toc(in_chunks(100));
    assert!(!is_read(&chunks, 100 * 140) && is_read(&chunks, 100 * 200));
}

#[test]
fn memory_of_entries_is_given_back_once_they_are_merged() {
    let names = 100..200_u32;
    let count = names.len();
    let of = |name: u32| json!({ "name": name.to_string(), "type": "dir" });
    let entries = Value::from(names.map(of).collect::<Vec<_>>());
    let toc = json!({ "version": 1, "entries": entries }).to_string();
    let what = EntryContent::Node(NodeKind::new_directory());
    let one = ArchiveEntry { path: b"100".to_vec(), meta: Meta::default(), what };
    let kept = count * budget::entry(&one);
    let twice = |metadata_bytes: usize| {
        let limits = Limits { metadata_bytes: metadata_bytes as u64, ..Limits::default() };
        let mut merger = Merger::new(&limits);
        (0..2).try_for_each(|_| {
            let index = Index::parse(toc.as_bytes(), 1000, &limits, merger.budget())?;
            merger.apply_index(&mut index.unwrap(), 1000)
        })
    };
    let needed = 2 * kept + count * budget::WAITING;
    assert_eq!(twice(needed), Ok(()));
    assert!(matches!(twice(needed - 1), Err(MergeError::TooLarge(_))));
}
