//! The merging rules, one by one.

use tar::{EntryType, Header};

use super::support::{Tar, in_file, merge, merge_with, show, skip};
use crate::Limits;
use crate::root::Form;
use crate::root::merge::Merger;
use crate::root::read::TarReader;
use crate::root::tree::{Meta, NodeKind, ROOT};
use crate::root::write::TarWriter;

fn base() -> Vec<u8> {
    Tar::new().dir("a/").file("a/x", "1").file("a/y", "2").dir("a/d/").file("a/d/z", "3").end()
}

#[track_caller]
fn check(layers: &[Vec<u8>], expected: &[&str]) {
    assert_eq!(merge(layers).unwrap(), expected);
}

#[test]
fn one_layer() {
    check(&[base()], &["d a/", "d a/d/", "f a/d/z 3", "f a/x 1", "f a/y 2"]);
}

#[test]
fn empty_archives_are_empty_layers() {
    check(&[vec![], Tar::new().end()], &[]);
}

#[test]
fn upper_file_replaces_lower() {
    let upper = Tar::new().file("a/x", "new").end();
    check(&[base(), upper], &["d a/", "d a/d/", "f a/d/z 3", "f a/x new", "f a/y 2"]);
}

#[test]
fn folder_over_folder_keeps_content_and_takes_attributes() {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Directory);
    header.set_path("a/").unwrap();
    header.set_mode(0o1700);
    header.set_uid(7);
    header.set_gid(8);
    header.set_size(0);
    header.set_mtime(99);
    header.set_cksum();
    let upper = Tar::new().header(&header).end();
    let (tree, files) = merge_with(&Limits::default(), &[base(), upper]).unwrap();
    assert_eq!(show(&tree, &files).len(), 5);
    let meta = &tree.inode(tree.child(ROOT, b"a").unwrap().id).meta;
    assert_eq!((meta.mode, meta.uid, meta.gid, meta.mtime), (0o1700, 7, 8, 99));
}

#[test]
fn file_over_folder_and_folder_over_file() {
    check(&[base(), Tar::new().file("a", "f").end()], &["f a f"]);
    let upper = Tar::new().dir("a/x/").file("a/x/n", "n").end();
    check(&[base(), upper], &["d a/", "d a/d/", "f a/d/z 3", "d a/x/", "f a/x/n n", "f a/y 2"]);
}

#[test]
fn whiteout_of_file_and_of_folder() {
    let upper = Tar::new().file("a/.wh.x", "").file("a/.wh.d", "").end();
    check(&[base(), upper], &["d a/", "f a/y 2"]);
}

#[test]
fn whiteout_of_what_is_not_there() {
    let upper = Tar::new().file("a/.wh.nothing", "").file("no/such/.wh.x", "").end();
    check(&[base(), upper], &["d a/", "d a/d/", "f a/d/z 3", "f a/x 1", "f a/y 2"]);
}

#[test]
fn whiteout_spares_its_own_layer_in_either_order() {
    let expected = ["d a/", "d a/d/", "f a/d/new 4", "f a/x 5", "f a/y 2"];
    let before = Tar::new().file("a/.wh.x", "").file("a/.wh.d", "");
    let before = before.file("a/d/new", "4").file("a/x", "5").end();
    let after = Tar::new().file("a/d/new", "4").file("a/x", "5");
    let after = after.file("a/.wh.x", "").file("a/.wh.d", "").end();
    check(&[base(), before], &expected);
    check(&[base(), after], &expected);
}

#[test]
fn opaque_empties_the_folder_of_lower_layers_in_either_order() {
    let before = Tar::new().file("a/.wh..wh..opq", "").file("a/n", "4").dir("a/d/").end();
    let after = Tar::new().file("a/n", "4").dir("a/d/").file("a/.wh..wh..opq", "").end();
    check(&[base(), before], &["d a/", "d a/d/", "f a/n 4"]);
    check(&[base(), after], &["d a/", "d a/d/", "f a/n 4"]);
}

#[test]
fn opaque_root() {
    check(&[base(), Tar::new().file(".wh..wh..opq", "").file("b", "b").end()], &["f b b"]);
}

#[test]
fn whiteouts_reach_through_two_layers() {
    let middle = Tar::new().file("a/.wh.x", "").end();
    let upper = Tar::new().file("a/x", "again").end();
    check(&[base(), middle, upper], &["d a/", "d a/d/", "f a/d/z 3", "f a/x again", "f a/y 2"]);
}

#[test]
fn aufs_metadata_is_skipped() {
    let upper =
        Tar::new().file(".wh..wh.aufs", "").dir(".wh..wh.plnk/").file(".wh..wh.plnk/1.2", "");
    check(&[Tar::new().file("k", "").end(), upper.end()], &["f k "]);
}

#[test]
fn whiteouts_in_a_plain_folder_are_files() {
    let limits = Limits::default();
    let mut merger = Merger::new(&limits);
    let file = in_file(&Tar::new().file(".wh.x", "1").file(".wh..wh..opq", "2").end());
    merger.apply(&file, Form::Files).unwrap();
    assert_eq!(show(&merger.finish(), &[file]), ["f .wh..wh..opq 2", "f .wh.x 1"]);
}

#[test]
fn hard_links_share_an_inode() {
    let layer = Tar::new().file("x", "1").hard_link("y", "x").hard_link("d/z", "./x").end();
    check(&[layer], &["d d/", "f d/z 1 (3 names)", "f x 1 (3 names)", "f y 1 (3 names)"]);
}

#[test]
fn hard_link_survives_the_overwrite_and_the_whiteout_of_its_first_name() {
    let lower = Tar::new().file("x", "1").hard_link("y", "x").end();
    check(&[lower.clone(), Tar::new().file("x", "2").end()], &["f x 2", "f y 1"]);
    check(&[lower.clone(), Tar::new().file(".wh.x", "").end()], &["f y 1"]);
    let same_layer = Tar::new().file("x", "1").hard_link("y", "x").file("x", "2").end();
    check(&[same_layer], &["f x 2", "f y 1"]);
}

#[test]
fn hard_link_to_a_lower_layer_and_to_itself() {
    let lower = Tar::new().file("x", "1").end();
    check(
        &[lower.clone(), Tar::new().hard_link("y", "/x").end()],
        &["f x 1 (2 names)", "f y 1 (2 names)"],
    );
    check(&[lower, Tar::new().hard_link("x", "x").end()], &["f x 1"]);
}

#[test]
fn hard_link_to_a_symbolic_link_is_to_the_link() {
    let layer = Tar::new().symlink("s", "nowhere").hard_link("t", "s").end();
    check(&[layer], &["l s -> nowhere (2 names)", "l t -> nowhere (2 names)"]);
}

#[test]
fn parents_that_are_symbolic_links_are_followed() {
    for target in ["usr/lib", "/usr/lib", "./usr/../usr//lib/", "via"] {
        let lower = Tar::new().dir("usr/lib/").symlink("via", "/usr/lib").symlink("lib", target);
        let upper = Tar::new().file("lib/x", "1").hard_link("lib/y", "lib/x").end();
        check(
            &[lower.end(), upper],
            &[
                &format!("l lib -> {target}"),
                "d usr/",
                "d usr/lib/",
                "f usr/lib/x 1 (2 names)",
                "f usr/lib/y 1 (2 names)",
                "l via -> /usr/lib",
            ],
        );
    }
}

#[test]
fn a_dangling_parent_link_makes_its_folder_within_the_root() {
    let layer = Tar::new().symlink("s", "/deep/down").file("s/x", "1").end();
    check(&[layer], &["d deep/", "d deep/down/", "f deep/down/x 1", "l s -> /deep/down"]);
}

#[test]
fn the_last_name_is_never_followed() {
    let lower = Tar::new().file("t", "old").dir("d/").symlink("s", "t").symlink("e", "d").end();
    let upper = Tar::new().file("s", "new").dir("e/").file("e/n", "1").end();
    check(&[lower, upper], &["d d/", "d e/", "f e/n 1", "f s new", "f t old"]);
}

#[test]
fn whiteout_of_a_symbolic_link_removes_the_link() {
    let lower = Tar::new().dir("d/").file("d/x", "1").symlink("s", "d").end();
    check(&[lower, Tar::new().file(".wh.s", "").end()], &["d d/", "f d/x 1"]);
}

#[test]
fn whiteout_below_a_folder_that_replaced_a_link_spares_the_links_target() {
    let lower = Tar::new().dir("d/").file("d/x", "1").symlink("s", "d").end();
    let upper = Tar::new().dir("s/").file("s/.wh..wh..opq", "").end();
    check(&[lower, upper], &["d d/", "f d/x 1", "d s/"]);
}

#[test]
fn devices_fifos_and_names_with_odd_slashes() {
    let mut header = Header::new_gnu();
    header.set_entry_type(EntryType::Char);
    header.set_path("dev/null").unwrap();
    header.set_mode(0o666);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header.set_mtime(0);
    header.set_device_major(1).unwrap();
    header.set_device_minor(3).unwrap();
    header.set_cksum();
    let layer = Tar::new().header(&header).raw(EntryType::Fifo, b"//./p", b"", b"");
    let layer = layer.file("/abs/x", "1").old_dir("old/");
    check(&[layer.end()], &["d abs/", "f abs/x 1", "d dev/", "c dev/null 1,3", "d old/", "p p"]);
}

/// The data of such a file is skipped: it is not read as headers.
#[test]
fn a_file_whose_name_ends_with_a_slash_is_a_file() {
    let hidden = Tar::new().file("hidden", "1").end();
    let layer = Tar::new().raw(EntryType::Regular, b"archive/", b"", &hidden);
    let (tree, _) = merge_with(&Limits::default(), &[layer.file("next", "1").end()]).unwrap();
    let kind = |name: &[u8]| &tree.inode(tree.child(ROOT, name).unwrap().id).kind;
    let length = hidden.len() as u64;
    assert!(matches!(kind(b"archive"), NodeKind::File(data) if data.len == length));
    assert!(matches!(kind(b"next"), NodeKind::File(_)));
    assert!(tree.child(ROOT, b"hidden").is_none());
}

#[test]
fn pax_says_more_than_the_header() {
    let long = "n".repeat(200);
    let layer = Tar::new()
        .pax(&[
            ("path", format!("d/{long}").as_bytes()),
            ("uid", b"3000000"),
            ("gid", b"4000000000"),
            ("mtime", b"1700000000.75"),
            ("SCHILY.xattr.user.k", b"a=b\nc\0"),
            ("SCHILY.xattr.com.apple.x", b"dropped"),
            ("SCHILY.xattr.trusted.overlay.redirect", b"dropped"),
        ])
        .file("short", "1")
        .file("next", "2")
        .end();
    let (tree, files) = merge_with(&Limits::default(), &[layer]).unwrap();
    assert_eq!(show(&tree, &files), ["d d/", &format!("f d/{long} 1"), "f next 2"]);
    let d = tree.child(ROOT, b"d").unwrap().id;
    let meta = &tree.inode(tree.child(d, long.as_bytes()).unwrap().id).meta;
    assert_eq!((meta.uid, meta.gid, meta.mtime), (3_000_000, 4_000_000_000, 1_700_000_000));
    assert_eq!(meta.xattrs.len(), 1);
    assert_eq!(meta.xattrs[b"user.k".as_slice()], b"a=b\nc\0");
}

#[test]
fn gnu_long_names_and_links() {
    let (name, target) = ("n".repeat(150), "t".repeat(150));
    let layer = Tar::new()
        .raw(EntryType::GNULongName, b"././@LongLink", b"", format!("{name}\0").as_bytes())
        .raw(EntryType::GNULongLink, b"././@LongLink", b"", format!("{target}\0").as_bytes())
        .symlink("short", "cut");
    check(&[layer.end()], &[&format!("l {name} -> {target}")]);
}

#[test]
fn root_entry_sets_the_roots_attributes() {
    let (tree, _) = merge_with(&Limits::default(), &[Tar::new().dir("./").end()]).unwrap();
    assert_eq!((tree.inode(ROOT).meta.mode, tree.inode(ROOT).meta.mtime), (0o755, 1));
}

/// Archives of GNU tar in each of its formats are read correctly.
#[test]
fn archives_of_gnu_tar() {
    let dir = tempfile::tempdir().unwrap();
    let long = "l".repeat(120);
    let root = dir.path().join("r");
    std::fs::create_dir_all(root.join(&long)).unwrap();
    std::fs::write(root.join(&long).join(&long), "deep").unwrap();
    std::fs::hard_link(root.join(&long).join(&long), root.join("hard")).unwrap();
    std::os::unix::fs::symlink(&long, root.join("soft")).unwrap();
    let holes = std::fs::File::create(root.join("holes")).unwrap();
    {
        use std::os::unix::fs::FileExt;
        // Six separate extents do not fit into the header itself.
        for i in 0..6 {
            holes.write_all_at(b"data", i * (1 << 20)).unwrap();
        }
        holes.set_len(7 << 20).unwrap();
    }
    for format in ["gnu", "pax", "ustar", "oldgnu"] {
        let sparse = format.ends_with("gnu");
        let mut command = std::process::Command::new("tar");
        command.arg("-C").arg(&root).args(["-c", "-f", "-", "--sort=name"]);
        command.arg(format!("--format={format}")).args(sparse.then_some("--sparse")).arg(".");
        let Ok(output) = command.output() else {
            skip("archives_of_gnu_tar", "tar");
            return;
        };
        assert!(output.status.success() || format == "ustar");
        if !output.status.success() {
            continue; // ustar has no room for the longest name
        }
        let (tree, files) = merge_with(&Limits::default(), &[output.stdout]).unwrap();
        let lines = show(&tree, &files);
        assert_eq!(lines.len(), 5, "{format}");
        assert_eq!(lines[0], "f hard deep (2 names)");
        let holes = lines[1].strip_prefix("f holes ").unwrap();
        assert_eq!((holes.len(), holes.matches("data").count()), (7 << 20, 6), "{format}");
        assert_eq!(&holes[5 << 20..(5 << 20) + 4], "data");
        assert_eq!(lines[4], format!("l soft -> {long}"));
    }
}

/// An archive that is written is read as it was meant, by this crate and by the `tar` crate.
#[test]
fn written_archive_reads_the_same() {
    let long = ["n".repeat(150), "n".repeat(150)].join("/").into_bytes();
    let xattrs = [(b"user.k".to_vec(), b"v\n".to_vec())].into();
    let plain = Meta { mode: 0o644, ..Meta::default() };
    let marked = Meta { xattrs, ..plain.clone() };
    let large =
        Meta { uid: 4_294_967_294, gid: 2_097_152, mtime: 9_999_999_999_999, ..plain.clone() };
    let mut bytes = Vec::new();
    let mut tar = TarWriter::new(&mut bytes);
    tar.entry(&long, &marked, EntryType::Regular, b"", 4).unwrap();
    tar.copy(&in_file(b"..data.."), 2, 4).unwrap();
    tar.pad(4).unwrap();
    tar.entry(b"h", &Meta::default(), EntryType::Link, &long, 0).unwrap();
    tar.entry(b"ids", &large, EntryType::Regular, b"", 0).unwrap();
    tar.entry(b"s", &plain, EntryType::Symlink, b"t", 0).unwrap();
    tar.device(b"null", &plain, EntryType::Char, (1, 3)).unwrap();
    tar.entry(b"p", &plain, EntryType::Fifo, b"", 0).unwrap();
    tar.finish().unwrap();
    let (tree, files) = merge_with(&Limits::default(), std::slice::from_ref(&bytes)).unwrap();
    let lines = show(&tree, &files);
    assert_eq!(lines[0], "f h data (2 names)");
    assert_eq!(lines.len(), 7);
    assert!(
        ["f ids ", "c null 1,3", "p p", "l s -> t"]
            .iter()
            .all(|line| lines.iter().any(|found| found == line))
    );
    let ids = &tree.inode(tree.child(ROOT, b"ids").unwrap().id).meta;
    assert_eq!((ids.uid, ids.gid, ids.mtime), (4_294_967_294, 2_097_152, 9_999_999_999_999));
    let h = &tree.inode(tree.child(ROOT, b"h").unwrap().id).meta;
    assert_eq!(h.xattrs[b"user.k".as_slice()], b"v\n");
    let mut archive = tar::Archive::new(bytes.as_slice());
    let names: Vec<_> = archive.entries().unwrap().map(|e| e.unwrap().path_bytes().len()).collect();
    assert_eq!(names, [301, 1, 3, 1, 4, 1]);
}

#[test]
fn reader_gives_offsets_of_the_data() {
    let file = in_file(&Tar::new().file("x", "abc").end());
    let entry = TarReader::new(&file, 100).unwrap().next().unwrap().unwrap();
    assert_eq!(entry.path, b"x");
    assert!(format!("{:?}", entry.what).contains("from: 512"));
}
