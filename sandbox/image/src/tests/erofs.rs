//! Layers that are EROFS files: as `mkfs.erofs` makes them of archives, and as it never would.

use std::ffi::OsString;
use std::io::{Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use tar::EntryType;

use super::support::*;
use crate::root::Form;
use crate::root::merge::{MergeError, Merger};
use crate::source::{folder, layers};
use crate::{Cache, Limits, NameConflict, Reference, Silent, Source};

/// Makes a layer of an archive, as containerd's EROFS differ does.
fn make(mkfs: &[OsString], arguments: &[&str], tar: &[u8]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("layer.erofs");
    let mut command = Command::new(&mkfs[0]);
    command.args(&mkfs[1..]).args(arguments).args(["--aufs", "--quiet"]).arg(&out);
    command.env("TMPDIR", dir.path()).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(tar).unwrap();
    assert!(child.wait().unwrap().success(), "{arguments:?}");
    let mut layer = std::fs::read(&out).unwrap();
    if arguments.contains(&"--tar=i") {
        layer.extend_from_slice(tar);
    }
    layer
}

fn merged(limits: &Limits, layers: &[Vec<u8>]) -> Result<Vec<String>, MergeError> {
    let files: Vec<_> = layers.iter().map(|bytes| in_file(bytes)).collect();
    let mut merger = Merger::new(limits);
    files.iter().try_for_each(|file| merger.apply(file, Form::Erofs))?;
    Ok(show(&merger.finish(), &files))
}

fn archives() -> [Vec<u8>; 2] {
    let long = "0123456789".repeat(1000);
    let lower = Tar::new()
        .dir("a/")
        .file("a/x", "1")
        .file("a/y", &long)
        .dir("d/")
        .file("d/gone", "2")
        .hard_link("linked", "a/y")
        .symlink("s", "a/x")
        .raw(EntryType::Fifo, b"pipe", b"", b"")
        .file("empty", "");
    let upper = Tar::new()
        .dir("a/")
        .file("a/.wh.x", "")
        .dir("d/")
        .file("d/.wh..wh..opq", "")
        .pax(&[("SCHILY.xattr.user.k", b"v"), ("SCHILY.xattr.security.selinux", b"label")])
        .file("d/new", &long)
        .file("linked", "3");
    [lower.end(), upper.end()]
}

#[test]
fn layers_are_those_of_their_archives() {
    let Some(mkfs) = mkfs("layers_are_those_of_their_archives") else { return };
    let archives = archives();
    let expected = merge(&archives).unwrap();
    for arguments in [&["--tar=f", "-Enoinline_data"][..], &["--tar=f"], &["--tar=i"]] {
        let layers = archives.each_ref().map(|archive| make(&mkfs, arguments, archive));
        assert_eq!(merged(&Limits::default(), &layers).unwrap(), expected, "{arguments:?}");
        let limits = Limits { entries: 2, ..Limits::default() };
        let refused = merged(&limits, &layers).unwrap_err();
        assert!(format!("{refused:?}").contains("more than 2 files"), "{refused:?}");
        let limits = Limits { metadata_bytes: 100, ..Limits::default() };
        assert!(merged(&limits, &layers).is_err());
    }
    let compressed = make(&mkfs, &["--tar=f", "-zlz4"], &archives[0]);
    let refused = merged(&Limits::default(), &[compressed]).unwrap_err();
    assert!(format!("{refused:?}").contains("compressed"), "{refused:?}");
}

#[tokio::test]
async fn an_image_of_layers() {
    let Some(mkfs) = mkfs("an_image_of_layers").filter(|_| readers("an_image_of_layers")) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (name, archive) in ["1", "2"].into_iter().zip(archives()) {
        std::fs::write(at(name), make(&mkfs, &["--tar=f"], &archive)).unwrap();
    }
    std::fs::create_dir(at("upper")).unwrap();
    std::fs::write(at("upper").join("own"), "changed").unwrap();
    let cache = Cache::open(at("c"), Limits::default()).unwrap();
    let name: Option<Reference> = Some("chain:1".parse().unwrap());
    let import = |paths: &[&str]| {
        let source = Source::Layers(paths.iter().map(|name| at(name)).collect());
        let (cache, name) = (cache.clone(), name.clone());
        async move { cache.import(&source, name, NameConflict::Replace, Arc::new(Silent)).await }
    };
    let image = import(&["2", "1"]).await.unwrap();
    assert_eq!(import(&["2", "1"]).await.unwrap().digest, image.digest);
    assert_ne!(import(&["1", "2"]).await.unwrap().digest, image.digest);
    let with_own = import(&["upper", "2", "1"]).await.unwrap();
    let out = extract(&with_own.erofs_path);
    let files = tree_of(&out.path().join("root"));
    let has = |name: &str| files.get(name).map(String::as_str);
    assert_eq!((has("linked"), has("own"), has("a/x")), (Some("3"), Some("changed"), None));
    let missing = import(&["3", "1"]).await.unwrap_err().to_string();
    assert!(missing.contains("/3"), "{missing}");
    std::fs::set_permissions(at("1"), PermissionsExt::from_mode(0o666)).unwrap();
    let changeable = import(&["2", "1"]).await.unwrap_err().to_string();
    assert!(changeable.contains("another user may change it"), "{changeable}");
}

/// Returns the entries of the archive that an upper directory becomes.
fn of_upper(dir: &Path) -> crate::Result<Vec<String>> {
    let (_, files) = layers::open(&[dir.to_owned()], &std::env::temp_dir(), &Limits::default())?;
    let mut file = files.into_iter().next().unwrap().1;
    file.rewind().unwrap();
    let mut archive = tar::Archive::new(file);
    let entries = archive.entries().unwrap();
    Ok(entries.map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect())
}

#[test]
fn deletions_of_an_upper_directory_are_those_of_an_archive() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("d")).unwrap();
    let (mode, kind) = (rustix::fs::Mode::empty(), rustix::fs::FileType::CharacterDevice);
    let gone = dir.path().join("d/gone");
    // A device with the numbers 0 and 0 is the one that a user may make.
    rustix::fs::mknodat(rustix::fs::CWD, &gone, kind, mode, 0).unwrap();
    assert_eq!(of_upper(dir.path()).unwrap(), ["./", "d/", "d/.wh.gone"]);
    let opaque = c"trusted.overlay.opaque";
    let flags = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(dir.path().join("d"), opaque, b"y", flags).is_ok() {
        assert_eq!(of_upper(dir.path()).unwrap()[2], "d/.wh..wh..opq");
    }
    std::fs::write(dir.path().join(".wh.name"), "").unwrap();
    let refused = of_upper(dir.path()).unwrap_err().to_string();
    assert!(refused.contains("stands for a deletion"), "{refused}");
}

#[test]
fn an_upper_directory_is_not_the_folder_that_it_could_be() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), "").unwrap();
    let (spool, limits) = (std::env::temp_dir(), Limits::default());
    let (upper, _) = layers::open(&[dir.path().to_owned()], &spool, &limits).unwrap();
    let (folder, _) = folder::pack(dir.path(), &spool, &limits).unwrap();
    assert_eq!(upper.layers[0].digest, folder.layers[0].digest);
    assert_ne!(upper.digest, folder.digest);
}

#[test]
fn a_layer_where_another_user_may_put_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("place");
    let (layer, link) = (place.join("layer"), place.join("link"));
    std::fs::create_dir(&place).unwrap();
    std::fs::write(&layer, "layer").unwrap();
    std::os::unix::fs::symlink(&layer, &link).unwrap();
    let set = |path: &Path, mode| {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    };
    set(&layer, 0o644);
    let open = |path: &Path| {
        let opened = layers::open(&[path.to_owned()], &std::env::temp_dir(), &Limits::default());
        opened.map(drop).map_err(|error| error.to_string())
    };
    for (mode, is_refused) in [(0o755, false), (0o1777, false), (0o775, true), (0o777, true)] {
        set(&place, mode);
        for path in [&layer, &link] {
            let opened = open(path);
            assert_eq!(opened.is_err(), is_refused, "{mode:o}: {opened:?}");
            let why = opened.err().unwrap_or_default();
            assert!(!is_refused || why.contains("/place' on the way to it has owner"), "{why}");
        }
    }
    set(&place, 0o755);
    assert!(open(&place.join("missing")).unwrap_err().contains("/missing"));
    if !rustix::process::geteuid().is_root() {
        return skip("a_layer_where_another_user_may_put_one", "root to act as another user");
    }
    std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
    assert!(open(&link).unwrap_err().contains("a link of user 65534"));
    // Upper directories are reached as folders are.
    let (upper, to_upper) = (dir.path().join("upper"), dir.path().join("to_upper"));
    std::fs::create_dir_all(upper.join("in")).unwrap();
    std::os::unix::fs::symlink(&upper, &to_upper).unwrap();
    open(&to_upper.join("in")).unwrap();
    std::os::unix::fs::lchown(&to_upper, Some(65534), None).unwrap();
    for path in [to_upper.clone(), to_upper.join("in")] {
        assert!(open(&path).unwrap_err().contains("a link of user 65534"), "{path:?}");
    }
    std::os::unix::fs::chown(&place, Some(65534), None).unwrap();
    assert!(open(&layer).unwrap_err().contains("has owner 65534"));
}

#[test]
fn deletions_of_an_upper_directory_may_be_attributes_of_users() {
    let dir = tempfile::tempdir().unwrap();
    let d = dir.path().join("d");
    std::fs::create_dir(&d).unwrap();
    std::fs::write(d.join("gone"), "").unwrap();
    std::fs::write(d.join("kept"), "bytes").unwrap();
    let set = |path: &Path, name: &str, value: &[u8]| {
        rustix::fs::setxattr(path, name, value, rustix::fs::XattrFlags::empty())
    };
    if set(&d, "user.overlay.opaque", b"x").is_err() {
        return skip("deletions_of_an_upper_directory", "a file system with users' attributes");
    }
    set(&d.join("gone"), "user.overlay.whiteout", b"").unwrap();
    // A file with bytes is none, whatever its attributes are.
    set(&d.join("kept"), "user.overlay.whiteout", b"y").unwrap();
    assert_eq!(of_upper(dir.path()).unwrap(), ["./", "d/", "d/.wh.gone", "d/kept"]);
    set(&d, "user.overlay.opaque", b"y").unwrap();
    assert_eq!(of_upper(dir.path()).unwrap()[2..4], ["d/.wh..wh..opq", "d/.wh.gone"]);
    set(&d.join("kept"), "user.overlay.metacopy", b"").unwrap();
    let refused = of_upper(dir.path()).unwrap_err().to_string();
    assert!(refused.contains("overlayfs has moved it"), "{refused}");
}

const ROOT_NUMBER: u64 = 36;
const FILE_NUMBER: u64 = 40;
const FILE: usize = 1280;

/// Makes the smallest file system: a folder with `names`, and a file of five bytes.
fn small(names: &[(&str, u64)]) -> Vec<u8> {
    small_with(names, &[])
}

/// Makes it with attributes of the folder.
fn small_with(names: &[(&str, u64)], attributes: &[u8]) -> Vec<u8> {
    let mut folder = vec![0_u8; 12 * names.len()];
    for (index, (name, number)) in names.iter().enumerate() {
        let from = folder.len() as u16;
        folder[12 * index..][..8].copy_from_slice(&number.to_le_bytes());
        folder[12 * index + 8..][..2].copy_from_slice(&from.to_le_bytes());
        folder.extend_from_slice(name.as_bytes());
    }
    let mut image = vec![0_u8; 2048];
    put(&mut image, 1024, &0xe0f5_e1e2_u32.to_le_bytes());
    put(&mut image, 1036, &[9]);
    put(&mut image, 1038, &(ROOT_NUMBER as u16).to_le_bytes());
    // Two short inodes: a folder whose names are beside it, and a file at block 3.
    for (at, form, mode, size, block) in
        [(1152, 4_u16, 0o040_755_u16, folder.len() as u32, 0_u32), (FILE, 0, 0o100_644, 5, 3)]
    {
        put(&mut image, at, &form.to_le_bytes());
        put(&mut image, at + 4, &mode.to_le_bytes());
        put(&mut image, at + 6, &1_u16.to_le_bytes());
        put(&mut image, at + 8, &size.to_le_bytes());
        put(&mut image, at + 16, &block.to_le_bytes());
    }
    if !attributes.is_empty() {
        put(&mut image, 1152 + 2, &words(attributes));
    }
    put(&mut image, 1184, &[attributes, &folder].concat());
    put(&mut image, 3 * 512, b"hello");
    image
}

fn put(image: &mut [u8], at: usize, bytes: &[u8]) {
    image[at..at + bytes.len()].copy_from_slice(bytes);
}

/// Returns the attributes of an inode that has one of overlayfs's, with the number of its prefix.
fn attributes(prefix: u8, name: &str, value: &[u8]) -> Vec<u8> {
    let name = format!("overlay.{name}");
    let mut bytes = vec![0; 12];
    bytes.extend_from_slice(&[name.len() as u8, prefix, value.len() as u8, 0]);
    bytes.extend_from_slice(name.as_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Returns the length of attributes as an inode has it.
fn words(attributes: &[u8]) -> [u8; 2] {
    ((attributes.len() as u16 - 12) / 4 + 1).to_le_bytes()
}

#[test]
fn overlayfs_deletes_by_attributes_with_and_without_userxattr() {
    let limits = Limits::default();
    let lower = small(&[("f", FILE_NUMBER)]);
    let upon = |upper: Vec<u8>| merged(&limits, &[lower.clone(), upper]).unwrap();
    // The prefixes `user.` and `trusted.`.
    for prefix in [1, 4] {
        let file = |size: u32, attribute: &str, value: &[u8]| {
            let mut image = small(&[("f", FILE_NUMBER)]);
            let attributes = attributes(prefix, attribute, value);
            put(&mut image, FILE + 2, &words(&attributes));
            put(&mut image, FILE + 8, &size.to_le_bytes());
            put(&mut image, FILE + 32, &attributes);
            image
        };
        assert!(upon(file(0, "whiteout", b"")).is_empty());
        assert_eq!(upon(file(5, "whiteout", b"y")), ["f f hello"]);
        refused(file(5, "redirect", b"/g"), "overlayfs has moved it");
        refused(file(5, "metacopy", b""), "overlayfs has moved it");
        let folder =
            |value: &[u8]| small_with(&[("g", FILE_NUMBER)], &attributes(prefix, "opaque", value));
        assert_eq!(upon(folder(b"y")), ["f g hello"]);
        assert_eq!(upon(folder(b"x")), ["f f hello", "f g hello"]);
    }
}

/// Each name of an inode that has one name, as it says, makes a file with all its attributes.
#[test]
fn attributes_are_counted_for_each_name() {
    let names = ["a", "b", "c", "d", "e", "f", "g"].map(|name| (name, FILE_NUMBER));
    let with = |count: u8| {
        let mut image = small(&names);
        let mut attributes = vec![0; 12];
        for index in 0..count {
            // The prefix `user.`, a name of two bytes and a value of one.
            attributes.extend_from_slice(&[2, 1, 1, 0]);
            attributes.extend_from_slice(&[b'a' + index / 16, b'a' + index % 16, b'v', 0]);
        }
        put(&mut image, FILE + 2, &words(&attributes));
        put(&mut image, FILE + 8, &0_u32.to_le_bytes());
        put(&mut image, FILE + 32, &attributes);
        image
    };
    let limits = Limits { metadata_bytes: 5000, ..Limits::default() };
    assert_eq!(merged(&limits, &[small(&names)]).unwrap().len(), 7);
    let many = merged(&limits, &[with(1)]).unwrap_err();
    assert!(format!("{many:?}").contains("names and attributes"), "{many:?}");
    assert!(merged(&Limits::default(), &[with(64)]).is_ok());
    refused(with(65), "more than 64 extended attributes");
}

#[track_caller]
fn refused(image: Vec<u8>, why: &str) {
    let refused = merged(&Limits::default(), &[image]).unwrap_err();
    assert!(format!("{refused:?}").contains(why), "{refused:?}");
}

#[test]
fn a_hostile_file_system_is_refused() {
    let good = || small(&[("f", FILE_NUMBER)]);
    let with = |at: usize, bytes: &[u8]| {
        let mut image = good();
        put(&mut image, at, bytes);
        image
    };
    let limits = Limits::default();
    assert_eq!(merged(&limits, &[good()]).unwrap(), ["f f hello"]);
    let hole = with(FILE + 16, &u32::MAX.to_le_bytes());
    assert_eq!(merged(&limits, &[hole]).unwrap(), ["f f ....."]);
    refused(vec![0; 4096], "no EROFS");
    refused(vec![0; 10], "no EROFS");
    refused(with(1036, &[20]), "odd size");
    refused(with(1024 + 80, &0x80_u32.to_le_bytes()), "not supported");
    refused(with(1024 + 86, &2_u16.to_le_bytes()), "2 further devices");
    refused(with(1038, &(FILE_NUMBER as u16).to_le_bytes()), "root is no folder");
    refused(with(1038, &u16::MAX.to_le_bytes()), "beyond the end");
    refused(small(&[("a", ROOT_NUMBER)]), "two names");
    refused(small(&[("a/b", FILE_NUMBER)]), "garbage");
    refused(small(&[("", FILE_NUMBER)]), "garbage");
    refused(small(&[("f", u64::MAX)]), "beyond the end");
    refused(with(1184 + 8, &13_u16.to_le_bytes()), "garbage");
    refused(with(FILE, &2_u16.to_le_bytes()), "compressed");
    refused(with(FILE, &0x20_u16.to_le_bytes()), "unknown form");
    refused(with(FILE + 4, &0o170_000_u16.to_le_bytes()), "unknown type");
    refused(with(FILE + 16, &0x00ff_ffff_u32.to_le_bytes()), "beyond the end");
    refused(with(FILE + 8, &0x00ff_ffff_u32.to_le_bytes()), "beyond the end");
    let mut chunks = with(FILE, &8_u16.to_le_bytes());
    put(&mut chunks, FILE + 8, &u32::MAX.to_le_bytes());
    put(&mut chunks, FILE + 16, &0_u32.to_le_bytes());
    refused(chunks.clone(), "too many chunks");
    put(&mut chunks, FILE + 8, &1_000_000_u32.to_le_bytes());
    refused(chunks, "beyond the end");
    // The attributes of the file are said to be longer than the layer, or have a wrong head.
    refused(with(FILE + 2, &u16::MAX.to_le_bytes()), "beyond the end");
    let mut attributes = with(FILE + 2, &4_u16.to_le_bytes());
    put(&mut attributes, FILE + 32 + 4, &[9]);
    refused(attributes, "garbage");
}
