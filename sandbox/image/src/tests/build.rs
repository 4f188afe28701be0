//! Whole builds, checked with erofs-utils' own fsck.erofs and dump.erofs.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::Arc;

use tar::EntryType;

use super::support::*;
use crate::{Cache, Digest, Image, Limits, NameConflict, Silent, Source};

async fn import(cache: &Cache, source: Source) -> Image {
    cache.import(&source, None, NameConflict::Refuse, Arc::new(Silent)).await.unwrap()
}

#[tokio::test]
async fn merged_layers_as_fsck_erofs_reads_them() {
    if !readers("merged_layers_as_fsck_erofs_reads_them") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("c"), Limits::default()).unwrap();
    let long = "n".repeat(180);
    let big = "0123456789abcdef".repeat(20_000);
    let lower = Tar::new()
        .dir("etc/")
        .file("etc/gone", "1")
        .file("etc/old", "old")
        .file("keep", "kept")
        .hard_link("kept-too", "keep")
        .dir("opq/")
        .file("opq/below", "1")
        .symlink("lib", "usr/lib")
        .end();
    let upper = Tar::new()
        .file("etc/.wh.gone", "")
        .file("etc/old", "new")
        .file("keep", "changed")
        .file("opq/.wh..wh..opq", "")
        .file("opq/above", "2")
        .file("lib/libx", &big)
        .pax(&[
            ("path", format!("{long}/{long}").as_bytes()),
            ("uid", b"3000000"),
            ("gid", b"70000"),
            ("SCHILY.xattr.user.k", b"v\n\0w"),
            ("SCHILY.xattr.security.capability", &CAP_NET_RAW),
        ])
        .file("short", "deep")
        .raw(EntryType::Fifo, b"pipe", b"", b"")
        .hard_link("pipe-too", "pipe")
        .hard_link("lib-too", "lib")
        .end();
    let layout = Layout::of(&[gzip(&lower), zstd(&upper)]);
    let image = import(&cache, Source::OciLayout(layout.path().to_owned(), None)).await;
    let out = extract(&image.erofs_path);
    let tree = tree_of(&out.path().join("root"));
    let names: Vec<_> = tree.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    let deep = format!("{long}/{long}");
    let mut expected = vec![
        ("etc", "dir"),
        ("etc/old", "new"),
        ("keep", "changed"),
        ("kept-too", "kept"),
        ("lib", "-> usr/lib"),
        ("lib-too", "-> usr/lib"),
        (&long, "dir"),
        (&deep, "deep"),
        ("opq", "dir"),
        ("opq/above", "2"),
        ("pipe", "special"),
        ("pipe-too", "special"),
        ("usr", "dir"),
        ("usr/lib", "dir"),
        ("usr/lib/libx", &big),
    ];
    expected.sort_unstable();
    assert_eq!(names, expected);
    let text = dump(&image.erofs_path, &format!("/{deep}"));
    assert!(text.contains("Uid: 3000000") && text.contains("Gid: 70000"), "{text}");
    // Blocks of its own (EROFS_INODE_FLAT_PLAIN), which a guest can read in place.
    assert!(text.contains("Layout: 0"), "{text}");
    // The name and value of the attribute occur in the file, which is enough here.
    let bytes = std::fs::read(&image.erofs_path).unwrap();
    let has = |needle: &[u8]| bytes.windows(needle.len()).any(|window| window == needle);
    assert!(has(b"v\n\0w") && has(&CAP_NET_RAW));
    assert!(!has(b"below"), "what is hidden is not in the image");
}

/// `vfs_cap_data` version 2 with CAP_NET_RAW permitted and effective, as for ping.
const CAP_NET_RAW: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// An image that is just within the limits.
#[tokio::test]
async fn extremes() {
    if !readers("extremes") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("c"), Limits::default()).unwrap();
    let deep = "d/".repeat(2040) + "f";
    let name = "n".repeat(255);
    let target = "t".repeat(4095);
    let value = vec![b'v'; 3000];
    let layer = Tar::new()
        .pax(&[("path", deep.as_bytes())])
        .file("f", "deep down here")
        .file("z1", "linked")
        .pax(&[("path", name.as_bytes()), ("linkpath", target.as_bytes())])
        .symlink("s", "t")
        .pax(&[("linkpath", name.as_bytes())])
        .hard_link("same-link", "x")
        .raw(EntryType::Regular, b"not\xffutf8\n", b"", b"1")
        .pax(&[("SCHILY.xattr.user.a", &value), ("SCHILY.xattr.trusted.b", b"")])
        .file("z0", "with attributes")
        .hard_link("z2", "z0")
        .hard_link("a0", "z0")
        .raw(EntryType::Fifo, b"p", b"", b"")
        .hard_link("p2", "p")
        .pax(&[("uid", b"4294967294"), ("gid", b"4294967294"), ("mtime", b"99999999999")])
        .file("b", "")
        .end();
    let layout = Layout::of(&[gzip(&layer)]);
    let image = import(&cache, Source::OciLayout(layout.path().to_owned(), None)).await;
    for (path, links) in [("/a0", 3), ("/z2", 3)] {
        let text = dump(&image.erofs_path, path);
        assert!(text.contains(&format!("Links: {links}")), "{path}: {text}");
    }
    let text = dump(&image.erofs_path, "/b");
    assert!(text.contains("Uid: 4294967294") && text.contains("Timestamp: 5138-11-16"), "{text}");
    // dump.erofs itself cannot look up a path as deep as this one.
    let bytes = std::fs::read(&image.erofs_path).unwrap();
    for needle in [value.as_slice(), b"deep down here"] {
        assert!(bytes.windows(needle.len()).any(|window| window == needle));
    }
}

#[tokio::test]
async fn the_same_image_is_the_same_bytes() {
    let layer = Tar::new().dir("b/").file("b/y", "1").file("a", "2").end();
    let mut digests = Vec::new();
    for blob in [gzip(&layer), gzip(&layer)] {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path(), Limits::default()).unwrap();
        let layout = Layout::of(&[blob]);
        let image = import(&cache, Source::OciLayout(layout.path().to_owned(), None)).await;
        digests.push(Digest::of(&std::fs::read(&image.erofs_path).unwrap()));
    }
    assert_eq!(digests[0], digests[1]);
}

#[tokio::test]
async fn every_local_source() {
    if !readers("every_local_source") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("c"), Limits::default()).unwrap();
    let layer = plain(&Tar::new().file("x", "1").end());
    let layout = Layout::of(std::slice::from_ref(&layer));
    let from_layout = import(&cache, Source::OciLayout(layout.path().to_owned(), None)).await;
    // The layout as an archive makes the same image.
    let mut archive = tar::Builder::new(Vec::new());
    archive.append_dir_all(".", layout.path()).unwrap();
    let path = dir.path().join("layout.tar.gz");
    std::fs::write(&path, gzip(&archive.into_inner().unwrap()).bytes).unwrap();
    let from_archive = import(&cache, Source::OciArchive(path, None)).await;
    assert_eq!(from_layout.digest, from_archive.digest);
    assert!(from_archive.references.iter().any(|name| name.familiar() == "layout:latest"));
    // The archive is as `docker save` writes it.
    let config = config_json("amd64", std::slice::from_ref(&layer));
    let manifest = r#"[{"Config":"c.json","RepoTags":["app:7"],"Layers":["l/layer.tar"]}]"#;
    let saved = Tar::new()
        .raw(EntryType::Regular, b"l/layer.tar", b"", &layer.bytes)
        .file("c.json", &config)
        .file("manifest.json", manifest)
        .end();
    let path = dir.path().join("saved.tar");
    std::fs::write(&path, saved).unwrap();
    let saved = import(&cache, Source::DockerArchive(path, None)).await;
    assert_eq!(saved.references[0].familiar(), "app:7");
    assert_eq!(saved.config, from_layout.config);
    assert_eq!(tree_of(&extract(&saved.erofs_path).path().join("root"))["x"], "1");
}

#[tokio::test]
async fn a_plain_folder_comes_out_as_it_went_in() {
    if !readers("a_plain_folder_comes_out_as_it_went_in") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("c"), Limits::default()).unwrap();
    let root = dir.path().join("My-Root");
    std::fs::create_dir_all(root.join("a/b")).unwrap();
    std::fs::write(root.join("a/f"), "data").unwrap();
    std::fs::set_permissions(root.join("a/f"), PermissionsExt::from_mode(0o4751)).unwrap();
    std::fs::hard_link(root.join("a/f"), root.join("a/g")).unwrap();
    std::os::unix::fs::symlink("/nowhere", root.join("a/b/s")).unwrap();
    std::fs::write(root.join(".wh.plain"), "a name like any other").unwrap();
    std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    let xattr = rustix::fs::XattrFlags::empty();
    let has_xattr = rustix::fs::setxattr(root.join("a/f"), "user.k", b"v1", xattr).is_ok();
    let image = import(&cache, Source::Folder(root.clone())).await;
    assert_eq!(image.references[0].familiar(), "my-root:latest");
    let out = extract(&image.erofs_path);
    let out = out.path().join("root");
    let mut expected = tree_of(&root);
    expected.remove("socket");
    assert_eq!(tree_of(&out), expected);
    let (f, g) = (std::fs::metadata(out.join("a/f")).unwrap(), std::fs::metadata(out.join("a/g")));
    assert_eq!((f.ino(), f.mode() & 0o7777), (g.unwrap().ino(), 0o4751));
    assert_eq!(f.mtime(), std::fs::metadata(root.join("a/f")).unwrap().mtime());
    if has_xattr {
        let mut value = [0; 2];
        assert_eq!(rustix::fs::getxattr(out.join("a/f"), "user.k", &mut value[..]), Ok(2));
        assert_eq!(&value, b"v1");
    }
    // The unchanged folder makes the same image, and a changed one another.
    let again = import(&cache, Source::Folder(root.clone())).await;
    assert_eq!(again.digest, image.digest);
    std::fs::write(root.join("a/f"), "DATA").unwrap();
    let source = Source::Folder(root);
    let other = cache.import(&source, None, NameConflict::Replace, Arc::new(Silent)).await.unwrap();
    assert_ne!(other.digest, image.digest);
}

#[tokio::test]
async fn a_deep_folder() {
    if !readers("a_deep_folder") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("c"), Limits::default()).unwrap();
    let root = dir.path().join("r");
    // The folder is as deep as a path from the root of the host may be.
    let depth = (4080 - root.as_os_str().len()) / 2;
    std::fs::create_dir_all(root.join("d/".repeat(depth))).unwrap();
    let image = import(&cache, Source::Folder(root)).await;
    assert!(dump(&image.erofs_path, "/d/d/d").contains("directory"));
}

#[tokio::test]
async fn a_folder_that_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::open(dir.path().join("c"), Limits::default()).unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for path in [file, dir.path().join("missing")] {
        for source in [Source::Folder(path.clone()), Source::OciLayout(path.clone(), None)] {
            let result = cache.import(&source, None, NameConflict::Refuse, Arc::new(Silent)).await;
            let text = result.unwrap_err().to_string();
            assert!(text.contains(path.to_str().unwrap()) && !text.contains('\n'), "{text}");
        }
    }
}
