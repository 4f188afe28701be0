//! Layers that try to escape from the root, or to exhaust resources.

use tar::{EntryType, Header};

use super::support::{Tar, merge, merge_with};
use crate::Limits;
use crate::root::layout::Layout;
use crate::root::merge::MergeError;

#[track_caller]
fn bad(layer: Vec<u8>, reason: &str) {
    match merge(&[layer]) {
        Err(MergeError::Bad(found)) => assert!(found.contains(reason), "{found}"),
        other => panic!("{other:?} instead of '{reason}'"),
    }
}

#[track_caller]
fn too_large(limits: &Limits, layer: Vec<u8>, reason: &str) {
    match merge_with(limits, &[layer]) {
        Err(MergeError::TooLarge(found)) => assert!(found.contains(reason), "{found}"),
        Err(other) => panic!("{other:?} instead of '{reason}'"),
        Ok(_) => panic!("merged instead of '{reason}'"),
    }
}

#[test]
fn names_that_climb() {
    for name in ["../x", "a/../../x", "/../x", "..", "a/..", "a/../b"] {
        bad(Tar::new().file(name, "").end(), "climbs out");
        bad(Tar::new().file("x", "").hard_link("y", name).end(), "climbs out");
    }
    bad(Tar::new().file("../.wh.x", "").end(), "climbs out");
    bad(Tar::new().pax(&[("path", b"../../etc/passwd")]).file("x", "").end(), "climbs out");
    bad(Tar::new().pax(&[("path", b"a\0b")]).file("x", "").end(), "NUL");
    bad(Tar::new().file(".wh.", "").end(), "whiteout");
    bad(Tar::new().file(".wh..", "").end(), "whiteout");
    bad(Tar::new().file("a/.wh...", "").end(), "whiteout");
}

#[test]
fn links_that_climb() {
    for target in ["..", "../x", "a/../../x", "/..", "/a/../../etc"] {
        let layer = Tar::new().dir("a/").symlink("s", target);
        bad(layer.file("s/x", "").end(), "climbs out of the root");
        let layer = Tar::new().dir("a/").symlink("s", target);
        bad(layer.file("s/.wh.x", "").end(), "climbs out of the root");
        let layer = Tar::new().dir("a/").symlink("s", target);
        bad(layer.hard_link("y", "s/x").end(), "climbs out of the root");
    }
    // A link may have any target as long as no path goes through it.
    assert_eq!(merge(&[Tar::new().symlink("s", "../../x").end()]).unwrap().len(), 1);
}

#[test]
fn links_in_circles() {
    bad(Tar::new().symlink("a", "b").symlink("b", "a").file("a/x", "").end(), "too many symbolic");
    bad(Tar::new().symlink("a", "a/a").file("a/x", "").end(), "too many symbolic");
}

#[test]
fn links_without_sense() {
    bad(Tar::new().symlink("s", "").end(), "usable target");
    bad(Tar::new().pax(&[("linkpath", b"a\0b")]).symlink("s", "x").end(), "usable target");
    bad(Tar::new().hard_link("x", "missing").end(), "missing");
    bad(Tar::new().dir("d/").hard_link("x", "d").end(), "folder");
    bad(Tar::new().hard_link("x", "/").end(), "missing");
    bad(Tar::new().file("f", "").file("f/x", "").end(), "is none");
    bad(Tar::new().dir("./").file("x", "").symlink(".", "x").end(), "root is not a folder");
}

#[test]
fn names_that_are_too_long() {
    let name = "n".repeat(256);
    bad(Tar::new().pax(&[("path", name.as_bytes())]).file("x", "").end(), "255");
    let path = "abc/".repeat(1200);
    bad(Tar::new().pax(&[("path", path.as_bytes())]).dir("x/").end(), "4095");
    let gnu = |size| Tar::new().raw(EntryType::GNULongName, b"L", b"", &vec![b'n'; size]);
    bad(gnu(1 << 20).file("x", "").end(), "a name of 1048576 bytes");
    bad(Tar::new().raw(EntryType::XHeader, b"x", b"", &vec![b'n'; 2 << 20]).end(), "PAX header");
    // Links can make a path longer than any name in the archive.
    let deep = "d/".repeat(1500);
    let layer = Tar::new().pax(&[("path", deep.as_bytes())]).dir("x/");
    let layer = layer.pax(&[("linkpath", deep.as_bytes())]).symlink("s", "x");
    let under = format!("s/{deep}");
    bad(layer.pax(&[("path", under.as_bytes())]).dir("x/").end(), "longer than 4095");
}

#[test]
fn garbage_and_truncation() {
    bad(vec![7; 4096], "garbage");
    bad(vec![0; 100], "truncated");
    bad(b"not a tar archive".to_vec(), "truncated");
    let mut flipped = Tar::new().file("x", "1").end();
    flipped[3] ^= 1;
    bad(flipped, "garbage");
    let whole = Tar::new().file("x", &"1".repeat(2000)).end();
    for len in [1, 511, 513, 1024, 2000] {
        bad(whole[..len].to_vec(), "truncated");
    }
    bad(Tar::new().raw(EntryType::XHeader, b"x", b"", b"999 path=x\n").file("x", "").end(), "PAX");
    bad(Tar::new().raw(EntryType::XHeader, b"x", b"", b"6 path").file("x", "").end(), "PAX");
    bad(Tar::new().pax(&[("size", b"-1")]).file("x", "").end(), "bad number");
    bad(Tar::new().pax(&[("size", b"99999999999")]).file("x", "").end(), "truncated");
    bad(Tar::new().pax(&[("size", b"18446744073709551615")]).file("x", "").end(), "truncated");
    bad(Tar::new().pax(&[("uid", b"4294967296")]).file("x", "").end(), "bad number");
    bad(Tar::new().pax(&[("GNU.sparse.major", b"1")]).file("x", "").end(), "not supported");
    bad(Tar::new().raw(EntryType::new(b'V'), b"volume", b"", b"").end(), "unknown type");
}

#[test]
fn an_entry_is_named_and_its_size_matters_only_if_it_has_data() {
    let with_size = |kind| {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_path("etc/odd").unwrap();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.as_old_mut().size = *b"not a number";
        header.set_cksum();
        Tar::new().header(&header).end()
    };
    bad(with_size(EntryType::Regular), "'etc/odd': a size that is no number");
    assert_eq!(merge(&[with_size(EntryType::Directory)]).unwrap(), ["d etc/", "d etc/odd/"]);
}

fn sparse(extents: &[(u64, u64)], real: u64, stored: usize) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::GNUSparse);
    header.set_path("s").unwrap();
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(stored as u64);
    let gnu = header.as_gnu_mut().unwrap();
    gnu.set_real_size(real);
    for (slot, (at, len)) in gnu.sparse.iter_mut().zip(extents) {
        slot.set_offset(*at);
        slot.set_length(*len);
    }
    header.set_cksum();
    Tar::new().header(&header).data(&vec![b'x'; stored]).end()
}

#[test]
fn sparse_maps() {
    assert_eq!(merge(&[sparse(&[(2, 1), (4, 2)], 8, 3)]).unwrap(), ["f s ..x.xx.."]);
    bad(sparse(&[(4, 2), (2, 1)], 8, 3), "overlap");
    bad(sparse(&[(0, 9)], 8, 9), "pass its end");
    bad(sparse(&[(u64::MAX, 2)], u64::MAX, 2), "overlap or pass");
    bad(sparse(&[(0, 2)], 8, 3), "add up");
    too_large(&Limits::default(), sparse(&[(0, 1)], 1 << 50, 1), "more than 137438953472 bytes");
    too_large(&Limits::default(), sparse(&[(0, 1)], 1 << 30, 1), "mostly empty");
}

#[test]
fn limits() {
    let limits = Limits { entries: 3, ..Limits::default() };
    too_large(&limits, Tar::new().file("a/b/c/d", "").end(), "more than 3 files");
    too_large(&limits, (0..4).fold(Tar::new(), |t, _| t.file(".wh.x", "")).end(), "3 files");
    let limits = Limits { metadata_bytes: 5000, ..Limits::default() };
    let value = vec![b'v'; 6000];
    let layer = Tar::new().pax(&[("SCHILY.xattr.user.k", &value)]).file("x", "").end();
    too_large(&limits, layer, "names and attributes");
    let limits = Limits { image_uncompressed: 5, ..Limits::default() };
    too_large(&limits, Tar::new().file("x", "abc").file("y", "abc").end(), "file data");
    let limits = Limits { path_bytes: 9, ..Limits::default() };
    assert!(merge_with(&limits, &[Tar::new().file("a/bcdefg", "").end()]).is_ok());
    assert!(merge_with(&limits, &[Tar::new().file("a/bcdefgh", "").end()]).is_err());
    bad(Tar::new().pax(&[("SCHILY.xattr.user.k", &[0; 65537])]).file("x", "").end(), "attribute");
}

/// Memory counts, which is more than the bytes in a layer.
#[test]
fn inodes_folders_and_attributes_are_counted() {
    let limits = Limits { metadata_bytes: 50_000, ..Limits::default() };
    let hundred = |add: fn(Tar, &str) -> Tar| {
        (0..100).fold(Tar::new(), |tar, i| add(tar, &i.to_string())).end()
    };
    let files = hundred(|tar, name| tar.file(name, ""));
    assert!(merge_with(&limits, &[files]).is_ok());
    let folders = hundred(|tar, name| tar.dir(&format!("{name}/")));
    too_large(&limits, folders, "names and attributes");
    let marked = |tar: Tar, name: &str| tar.pax(&[("SCHILY.xattr.user.k", b"v")]).file(name, "");
    too_large(&limits, hundred(marked), "names and attributes");
    let deep = format!("{}f", "d/".repeat(60));
    let missing = Tar::new().pax(&[("path", deep.as_bytes())]).file("x", "").end();
    too_large(&limits, missing, "names and attributes");
}

#[test]
fn attributes_of_a_file_are_bounded() {
    let keys: Vec<_> = (0..65).map(|i| format!("SCHILY.xattr.user.{i}")).collect();
    let records: Vec<(&str, &[u8])> = keys.iter().map(|key| (key.as_str(), &b"v"[..])).collect();
    assert!(merge(&[Tar::new().pax(&records[..64]).file("x", "").end()]).is_ok());
    let (some, others) = records.split_at(30);
    bad(Tar::new().pax(some).pax(others).file("x", "").end(), "more than 64 extended attributes");
}

/// A tree as deep as paths allow is merged on a small stack: no recursion may be as deep as a layer
/// says.
#[test]
fn deep_trees_need_no_deep_stack() {
    let deep = "d/".repeat(2040);
    let work = move || {
        let lower = Tar::new().pax(&[("path", (deep + "f").as_bytes())]).file("f", "1").end();
        let (tree, _) = merge_with(&Limits::default(), std::slice::from_ref(&lower)).unwrap();
        assert_eq!(Layout::of(&tree, [0; 16]).unwrap().file_bytes(), 1);
        for whiteout in [".wh.d", ".wh..wh..opq", "d/d/.wh..wh..opq"] {
            let upper = Tar::new().file(whiteout, "").end();
            let (tree, _) = merge_with(&Limits::default(), &[lower.clone(), upper]).unwrap();
            assert_eq!(Layout::of(&tree, [0; 16]).unwrap().file_bytes(), 0);
        }
    };
    std::thread::Builder::new().stack_size(128 << 10).spawn(work).unwrap().join().unwrap();
}

/// Layers of few bytes that cause much work for the merger are refused.
#[test]
fn work_is_bounded() {
    let limits = Limits { entries: 100_000, ..Limits::default() };
    let mut layer = Tar::new().dir("d/");
    for i in 0..2000 {
        layer = layer.file(&format!("d/{i}"), "");
    }
    for _ in 0..40_000 {
        layer = layer.raw(EntryType::Regular, b"d/.wh..wh..opq", b"", b"");
    }
    too_large(&limits, layer.end(), "whiteouts to follow");
}
