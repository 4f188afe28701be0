//! Images of the crate's own writer: as its reader, fsck.erofs and Linux see them.

use std::collections::HashMap;
use std::convert::Infallible;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use tar::{EntryType, Header};

use super::support::{Tar, in_file, merge_with, skip, tool};
use crate::root::Form;
use crate::root::layout::Layout;
use crate::root::merge::Merger;
use crate::root::tree::{Child, Data, Id, Inode, Meta, NodeKind, ROOT, Tree};
use crate::{Digest, Limits};

const UUID: [u8; 16] = [7; 16];
const BLOCK: u64 = 4096;

fn tree_of(layers: &[Vec<u8>]) -> (Tree, Vec<File>) {
    merge_with(&Limits::default(), layers).unwrap()
}

fn layout_of(tree: &Tree) -> Layout {
    Layout::of(tree, UUID).unwrap()
}

fn write_to(out: &File, tree: &Tree, layers: &[File]) {
    let layout = layout_of(tree);
    layout.write_image(tree, layers, out, &mut |_| {}).unwrap();
    assert_eq!(out.metadata().unwrap().len(), layout.bytes());
}

fn written(tree: &Tree, layers: &[File]) -> File {
    let out = tempfile::tempfile().unwrap();
    write_to(&out, tree, layers);
    out
}

/// Reads an image with the crate's own reader.
fn read_back(image: &File) -> Tree {
    let limits = Limits::default();
    let mut merger = Merger::new(&limits);
    merger.apply(image, Form::Erofs).unwrap();
    merger.finish()
}

fn content(tree: &Tree, id: Id, layers: &[File]) -> Vec<u8> {
    let NodeKind::File(data) = &tree.inode(id).kind else { return Vec::new() };
    let mut bytes = vec![0; data.len as usize];
    for piece in &data.pieces {
        let place = &mut bytes[piece.at as usize..(piece.at + piece.len) as usize];
        layers[data.layer as usize].read_exact_at(place, piece.from).unwrap();
    }
    bytes
}

/// Returns a line with all that is known of each name but the root's.
fn lines(tree: &Tree, layers: &[File]) -> Vec<String> {
    let mut firsts: HashMap<Id, String> = HashMap::new();
    let mut lines = Vec::new();
    let walked = tree.walk(|path, _, _, id| {
        let path = path.escape_ascii().to_string();
        let inode = tree.inode(id);
        let kind = match &inode.kind {
            NodeKind::Directory(children) => format!("folder of {}", children.len()),
            NodeKind::File(_) => Digest::of(&content(tree, id, layers)).to_string(),
            NodeKind::Symlink(target) => format!("-> {}", target.escape_ascii()),
            other => format!("{other:?}"),
        };
        let first = firsts.entry(id).or_insert_with(|| path.clone());
        lines.push(format!("{path} {kind} {:?} = {first}", inode.meta));
        Ok::<(), Infallible>(())
    });
    walked.unwrap();
    lines
}

/// Checks that the merged layers, written and read back, are the same files.
#[track_caller]
fn check(layers: &[Vec<u8>]) {
    let (tree, files) = tree_of(layers);
    let image = written(&tree, &files);
    let (expected, found) = (lines(&tree, &files), lines(&read_back(&image), &[image]));
    assert_eq!(expected.len(), found.len());
    for (expected, found) in expected.iter().zip(&found) {
        assert!(expected == found, "{expected:.200}\nbecame\n{found:.200}");
    }
}

fn header(kind: EntryType, name: &str, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_path(name).unwrap();
    header.set_mode(0o4751);
    header.set_uid(7);
    header.set_gid(8);
    header.set_mtime(9);
    header.set_size(size);
    header
}

fn device(tar: Tar, kind: EntryType, name: &str, (major, minor): (u32, u32)) -> Tar {
    let mut header = header(kind, name, 0);
    header.set_device_major(major).unwrap();
    header.set_device_minor(minor).unwrap();
    header.set_cksum();
    tar.header(&header)
}

/// Makes a layer with a sparse file of `real` bytes, of which the ones at `extents` are `x`.
fn sparse(extents: &[(u64, u64)], real: u64) -> Vec<u8> {
    let stored: u64 = extents.iter().map(|(_, len)| len).sum();
    let mut header = header(EntryType::GNUSparse, "sparse", stored);
    let gnu = header.as_gnu_mut().unwrap();
    gnu.set_real_size(real);
    for (slot, (at, len)) in gnu.sparse.iter_mut().zip(extents) {
        slot.set_offset(*at);
        slot.set_length(*len);
    }
    header.set_cksum();
    Tar::new().header(&header).data(&vec![b'x'; stored as usize]).end()
}

/// Files of every type, of sizes around a block's, with names around those of `.` and `..`.
fn files(mut tar: Tar) -> Tar {
    tar = tar.dir("./");
    for size in [0, 1, 4095, 4096, 4097, 10_000] {
        let data: Vec<u8> = (0..size).map(|at| (at * 7 % 251) as u8).collect();
        tar = tar.raw(EntryType::Regular, format!("size/{size}").as_bytes(), b"", &data);
    }
    for name in ["!", "+x", "-", ".a", ".-", "..-", "...", "not\u{e9}ascii", "a b\n"] {
        tar = tar.file(name, name);
    }
    tar = tar.symlink("link", "size/1").hard_link("link-too", "link").hard_link("d/one", "size/1");
    tar = tar.raw(EntryType::Fifo, b"pipe", b"", b"").hard_link("pipe-too", "pipe").dir("empty/");
    tar = device(tar, EntryType::Char, "null", (1, 3));
    tar = device(tar, EntryType::Char, "last", (4095, 0xf_ffff));
    tar = device(tar, EntryType::Block, "disk", (259, 300));
    let big: [(&str, &[u8]); 3] =
        [("uid", b"4294967294"), ("gid", b"3000000"), ("mtime", b"99999999999")];
    tar.pax(&big).file("ids", "1")
}

/// Links that just fit beside their inode and links that do not, and attributes of many lengths.
fn attributes_and_links(mut tar: Tar) -> Tar {
    for len in [1, 31, 32, 33, 1000, 2016, 4031, 4032, 4033, 4095] {
        let target = "t".repeat(len);
        tar = tar.pax(&[("linkpath", target.as_bytes())]).symlink(&format!("links/{len}"), "t");
    }
    let value = vec![b'v'; 65_535];
    tar = tar.pax(&[("SCHILY.xattr.user.long", &value)]).file("x/long", "1");
    tar = tar.pax(&[("SCHILY.xattr.user.long", &value)]).dir("x/folder/").file("x/folder/f", "1");
    tar = tar.pax(&[("SCHILY.xattr.trusted.long", &value[..4000])]).symlink("x/link", "target");
    for len in 3990..=4030 {
        let value = &value[..len];
        tar = tar.pax(&[("SCHILY.xattr.trusted.k", value)]).symlink(&format!("x/link{len}"), "to");
    }
    let names: Vec<_> = (0..64).map(|at| format!("SCHILY.xattr.user.{at}")).collect();
    let many: Vec<_> = names.iter().map(|name| (name.as_str(), &value[..100])).collect();
    let own = format!("SCHILY.xattr.user.{}", "n".repeat(250));
    let acl: &[u8] = &[2, 0, 0, 0, 1, 0, 6, 0, 255, 255, 255, 255];
    tar.pax(&many)
        .file("x/many", "1")
        .pax(&[
            ("SCHILY.xattr.trusted.empty", b""),
            ("SCHILY.xattr.security.label", b"l\0"),
            ("SCHILY.xattr.system.posix_acl_access", acl),
            ("SCHILY.xattr.system.posix_acl_default", acl),
            (own.as_str(), b"v"),
        ])
        .dir("x/acl/")
}

/// A folder of 10,000 names, and one of the longest names.
fn large_folders(mut tar: Tar) -> Tar {
    for at in 0..10_000 {
        tar = tar.raw(EntryType::Regular, format!("many/{at}").as_bytes(), b"", b"");
    }
    for at in 0..300 {
        let name = format!("long/{at:03}{}", "n".repeat(252));
        tar = tar.pax(&[("path", name.as_bytes())]).file("x", "");
    }
    // Fifteen names of 242 bytes, one of 247 and the dots leave no byte of a block.
    for folder in ["full", "over"] {
        for at in 0..16 {
            let rest = match (at, folder) {
                (0..15, _) => 240,
                (_, "full") => 245,
                _ => 246,
            };
            let name = format!("{folder}/{at:02}{}", "n".repeat(rest));
            tar = tar.pax(&[("path", name.as_bytes())]).file("x", "");
        }
    }
    tar
}

fn everything() -> Vec<Vec<u8>> {
    let tar = large_folders(attributes_and_links(files(Tar::new())));
    vec![tar.end(), sparse(&[(2 << 20, 3), (5 << 20, 2), ((5 << 20) + 100, 1)], 8 << 20)]
}

#[test]
fn files_of_every_type_come_back() {
    check(&[files(Tar::new()).end()]);
    check(&[Tar::new().end()]);
}

#[test]
fn long_links_and_attributes_come_back() {
    check(&[attributes_and_links(Tar::new()).end()]);
}

#[test]
fn large_folders_come_back() {
    check(&[large_folders(Tar::new()).end()]);
}

#[test]
fn the_root_comes_first_with_its_own_attributes() {
    let value = vec![b'v'; 4000];
    // With the second attribute all of the root needs a block of its own. With the third one its
    // names are not beside it.
    for (len, number) in [(1, 36_u16), (3000, 128), (4000, 36)] {
        let pax: [(&str, &[u8]); 2] = [("SCHILY.xattr.user.k", &value[..len]), ("uid", b"70000")];
        let (tree, files) = tree_of(&[Tar::new().pax(&pax).dir("./").file("f", "1").end()]);
        let image = written(&tree, &files);
        let mut head = [0; 128];
        image.read_exact_at(&mut head, 1024).unwrap();
        assert_eq!(head[14..16], number.to_le_bytes());
        assert_eq!(head[48..64], UUID);
        let mut root = [0; 64];
        image.read_exact_at(&mut root, 32 * u64::from(number)).unwrap();
        assert_eq!(root[4..6], 0o040_755_u16.to_le_bytes());
        assert_eq!(root[24..28], 70_000_u32.to_le_bytes());
        assert_eq!(root[44..48], 2_u32.to_le_bytes());
        let bytes = (image.metadata().unwrap().len() / BLOCK) as u32;
        assert_eq!(head[36..40], bytes.to_le_bytes());
    }
}

#[test]
fn holes_stay_holes() {
    let layers = [Tar::new().file("x", "1").end(), sparse(&[(2 << 20, 3), (5 << 20, 2)], 8 << 20)];
    check(&layers);
    check(&[sparse(&[], 1 << 20)]);
    let (tree, files) = tree_of(&layers);
    let image = written(&tree, &files).metadata().unwrap();
    assert!(image.len() > 8 << 20 && image.blocks() * 512 < 4 << 20, "{}", image.blocks());
}

#[test]
fn data_are_where_the_layout_says() {
    let (tree, files) = tree_of(&everything());
    let layout = layout_of(&tree);
    let image = written(&tree, &files);
    let later = tempfile::tempfile().unwrap();
    layout.write_metadata(&tree, &later).unwrap();
    assert_eq!(later.metadata().unwrap().len(), layout.bytes());
    let mut end = 0;
    let mut total = 0;
    for &(id, at) in layout.data() {
        assert!(at.is_multiple_of(BLOCK) && at >= end);
        let data = content(&tree, id, &files);
        assert!(!data.is_empty());
        later.write_all_at(&data, at).unwrap();
        (end, total) = (at + data.len() as u64, total + data.len() as u64);
    }
    assert_eq!(layout.bytes(), end.next_multiple_of(BLOCK));
    assert_eq!(layout.file_bytes(), total);
    let bytes = |file: &File| {
        let mut bytes = vec![0; layout.bytes() as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        Digest::of(&bytes)
    };
    assert_eq!(bytes(&later), bytes(&image));
    // The same tree makes the same bytes.
    assert_eq!(bytes(&written(&tree, &files)), bytes(&image));
}

#[test]
fn progress_ends_at_the_length_of_all_files() {
    let (tree, files) = tree_of(&everything());
    let layout = layout_of(&tree);
    let mut told = vec![0];
    let out = tempfile::tempfile().unwrap();
    layout.write_image(&tree, &files, &out, &mut |done| told.push(done)).unwrap();
    assert!(told.is_sorted() && told.last() == Some(&layout.file_bytes()));
}

/// No recursion may be as deep as a layer says.
#[test]
fn deep_trees_need_no_deep_stack() {
    let work = || {
        let deep = "d/".repeat(2040) + "f";
        check(&[Tar::new().pax(&[("path", deep.as_bytes())]).file("f", "1").end()]);
    };
    std::thread::Builder::new().stack_size(256 << 10).spawn(work).unwrap().join().unwrap();
}

/// An archive has no such names, but an EROFS layer may have them.
#[test]
fn an_attribute_with_an_equals_sign_in_its_name_comes_back() {
    let mut tree = Tree::new(4095);
    let xattrs = [(b"user.a=b".to_vec(), b"c=d".to_vec())].into();
    let inode = Inode { meta: Meta { xattrs, ..Meta::default() }, kind: NodeKind::Fifo };
    let child = Child { id: tree.add(inode).unwrap(), layer: 0 };
    let root = tree.find(&[]).unwrap().unwrap();
    tree.link(&root, b"x", child).unwrap();
    let again = read_back(&written(&tree, &[]));
    assert_eq!(lines(&again, &[]), lines(&tree, &[]));
}

#[track_caller]
fn refused(tree: &Tree, reason: &str) {
    match Layout::of(tree, UUID) {
        Err(found) => assert!(found.contains(reason), "{found}"),
        Ok(_) => panic!("it has a layout instead of '{reason}'"),
    }
}

#[test]
fn what_erofs_has_no_room_for_is_refused() {
    let value = vec![b'v'; 65_536];
    let one = |value: &[u8]| {
        let pax = [("SCHILY.xattr.user.k", value)];
        tree_of(&[Tar::new().pax(&pax).file("named", "").end()]).0
    };
    refused(&one(&value), "'named': the extended attribute user.k of 65536 bytes");
    let names: Vec<_> = (0..5).map(|at| format!("SCHILY.xattr.user.{at}")).collect();
    let pax: Vec<_> = names.iter().map(|name| (name.as_str(), &value[..60_000])).collect();
    let (tree, _) = tree_of(&[Tar::new().pax(&pax).file("named", "").end()]);
    refused(&tree, "bytes of extended attributes");
    let (tree, _) = tree_of(&[device(Tar::new(), EntryType::Char, "c", (4096, 0)).end()]);
    refused(&tree, "'c': a device with the numbers 4096 and 0");
    let (tree, _) = tree_of(&[device(Tar::new(), EntryType::Block, "b", (0, 1 << 20)).end()]);
    refused(&tree, "too large");
    let mut tree = Tree::new(4095);
    let data = Data { layer: 0, len: 1 << 50, pieces: Vec::new() };
    let inode = Inode { meta: Meta::default(), kind: NodeKind::File(data) };
    let child = Child { id: tree.add(inode).unwrap(), layer: 0 };
    let root = tree.find(&[]).unwrap().unwrap();
    tree.link(&root, b"huge", child).unwrap();
    refused(&tree, "16 TiB");
}

#[test]
fn a_layer_that_became_shorter_is_an_error() {
    let (tree, files) = tree_of(&[Tar::new().file("x", &"1".repeat(5000)).end()]);
    files[0].set_len(1000).unwrap();
    let out = tempfile::tempfile().unwrap();
    let error = layout_of(&tree).write_image(&tree, &files, &out, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("a layer cannot be read"), "{error}");
    let error = layout_of(&tree).write_image(&tree, &[], &out, &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("unknown layer"), "{error}");
    let other = in_file(b"");
    assert!(layout_of(&tree).write_image(&tree, &[other], &out, &mut |_| {}).is_err());
}

#[test]
fn fsck_erofs_finds_no_fault() {
    const NAME: &str = "fsck_erofs_finds_no_fault";
    let Some(fsck) = tool("fsck.erofs") else { return skip(NAME, "fsck.erofs") };
    for layers in [everything(), vec![Tar::new().end()]] {
        let (tree, files) = tree_of(&layers);
        let image = tempfile::NamedTempFile::new().unwrap();
        write_to(image.as_file(), &tree, &files);
        let mut command = Command::new(&fsck[0]);
        let output = command.args(&fsck[1..]).arg("--extract").arg(image.path()).output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&said));
    }
}

/// A loop device with a mounted image. Dropping this unmounts and frees it.
struct Mounted {
    device: String,
    place: tempfile::TempDir,
    is_mounted: bool,
}

impl Mounted {
    /// Returns `None` if the machine has no loop device, or its kernel no EROFS.
    fn new(image: &Path) -> Option<Self> {
        let _ = Command::new("modprobe").args(["-q", "erofs"]).output();
        let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
        known.lines().find(|line| line.trim() == "erofs")?;
        let mut losetup = Command::new("losetup");
        let output = losetup.args(["--find", "--show", "--read-only"]).arg(image).output().ok()?;
        let device = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        if !output.status.success() || device.is_empty() {
            return None;
        }
        let place = tempfile::tempdir().unwrap();
        let mut mounted = Self { device, place, is_mounted: false };
        let mut mount = Command::new("mount");
        mount.args(["-t", "erofs", "-o", "ro"]).arg(&mounted.device).arg(mounted.place.path());
        let output = mount.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        mounted.is_mounted = true;
        Some(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.is_mounted {
            let _ = Command::new("umount").arg(self.place.path()).output();
        }
        let _ = Command::new("losetup").args(["--detach", &self.device]).output();
    }
}

/// Checks a file of a mounted image.
fn check_mounted(tree: &Tree, layers: &[File], id: Id, path: &Path) {
    let (inode, shown) = (tree.inode(id), path.display());
    let found = std::fs::symlink_metadata(path).unwrap_or_else(|e| panic!("{shown}: {e}"));
    let meta = &inode.meta;
    let owner = (found.uid(), found.gid(), found.mtime());
    assert_eq!(owner, (meta.uid, meta.gid, meta.mtime as i64), "{shown}");
    assert_eq!(found.mode() & 0o7777, u32::from(meta.mode), "{shown}");
    let kind = found.file_type();
    match &inode.kind {
        NodeKind::Directory(_) => {
            let mut names: Vec<_> =
                std::fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            assert!(names.iter().map(|name| name.as_bytes()).eq(tree.children(id).map(|c| c.0)));
            let folders = tree.children(id).filter(|(_, child)| tree.is_directory(child.id));
            assert_eq!(found.nlink(), 2 + folders.count() as u64, "{shown}");
        }
        NodeKind::File(_) => {
            let same = std::fs::read(path).unwrap() == content(tree, id, layers);
            assert!(kind.is_file() && same, "{shown}");
        }
        NodeKind::Symlink(target) => {
            let link = std::fs::read_link(path).unwrap();
            assert!(link.as_os_str().as_bytes() == target.as_slice(), "{shown}");
        }
        NodeKind::Char((major, minor)) | NodeKind::Block((major, minor)) => {
            assert_eq!(kind.is_char_device(), matches!(inode.kind, NodeKind::Char(_)));
            let numbers = found.rdev();
            let found = (rustix::fs::major(numbers), rustix::fs::minor(numbers));
            assert_eq!(found, (*major, *minor), "{shown}");
        }
        NodeKind::Fifo => assert!(kind.is_fifo(), "{shown}"),
    }
    check_attributes(meta, path);
}

fn check_attributes(meta: &Meta, path: &Path) {
    let mut value = vec![0; 1 << 16];
    for (name, expected) in &meta.xattrs {
        // The kernel checks access lists itself, and may be built without labels.
        if !name.starts_with(b"user.") && !name.starts_with(b"trusted.") {
            continue;
        }
        let found = rustix::fs::lgetxattr(path, name.as_slice(), &mut value[..]);
        if found == Err(rustix::io::Errno::OPNOTSUPP) {
            continue;
        }
        let found = found.map(|len| &value[..len]);
        assert!(found == Ok(expected.as_slice()), "{}: {}", path.display(), name.escape_ascii());
    }
}

#[test]
fn root_linux_mounts_an_image_and_finds_every_file() {
    const NAME: &str = "root_linux_mounts_an_image_and_finds_every_file";
    if !rustix::process::geteuid().is_root() {
        return skip(NAME, "root to mount an image");
    }
    let (tree, layers) = tree_of(&everything());
    let image = tempfile::NamedTempFile::new().unwrap();
    write_to(image.as_file(), &tree, &layers);
    let Some(mounted) = Mounted::new(image.path()) else {
        return skip(NAME, "losetup, loop devices and a kernel with EROFS");
    };
    let place = mounted.place.path();
    check_mounted(&tree, &layers, ROOT, place);
    let mut inodes: HashMap<Id, u64> = HashMap::new();
    let walked = tree.walk(|path, _, _, id| {
        let path: PathBuf = place.join(OsStr::from_bytes(path));
        check_mounted(&tree, &layers, id, &path);
        let number = std::fs::symlink_metadata(&path).unwrap().ino();
        assert_eq!(*inodes.entry(id).or_insert(number), number, "{}", path.display());
        Ok::<(), Infallible>(())
    });
    walked.unwrap();
    assert!(std::fs::symlink_metadata(place.join("many/none")).is_err());
    assert!(std::fs::symlink_metadata(place.join("long/0")).is_err());
    let one = std::fs::symlink_metadata(place.join("size/1")).unwrap();
    assert_eq!(one.nlink(), 2);
}
