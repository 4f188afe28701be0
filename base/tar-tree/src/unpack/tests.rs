//! Tests of archives, honest and hostile.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};

use tar::Builder;

use super::*;
use crate::place::{Source, find, is_contents, place};
use crate::{PIECE, PieceReader, PieceWriter, pack};

/// A directory with the directory `place`, in which archives are unpacked, and one beside it.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        for name in ["place", "beside"] {
            std::fs::create_dir(folder.at(name)).unwrap();
        }
        folder
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn root(&self) -> OwnedFd {
        rustix::fs::open(self.0.path(), OFlags::PATH, Mode::empty()).unwrap()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.at(name)).unwrap()
    }

    /// Unpacks the archive of a directory as `/place/in`.
    fn unpack(&self, archive: &[u8]) -> Result<LeftOut, Error> {
        let source = Source { is_directory: true, is_contents: false, name: OsStr::new("in") };
        let place = place(self.root().as_fd(), Path::new("/place"), Some(source)).unwrap();
        unpack(archive, &place, Rules::of_guest(false))
    }

    /// Unpacks the archive of a file as `in` in the directory `place`, which is found before.
    fn unpack_file(&self, archive: &[u8], owners: bool) -> Result<LeftOut, Error> {
        let source = Source { is_directory: false, is_contents: false, name: OsStr::new("in") };
        let place = place(self.root().as_fd(), Path::new("/place"), Some(source)).unwrap();
        unpack(archive, &place, Rules::of_guest(owners))
    }

    /// Unpacks an archive of the host's user in `/place`, as it is.
    fn unpack_entries(&self, archive: &[u8]) -> Result<LeftOut, Error> {
        let place = place(self.root().as_fd(), Path::new("/place"), None).unwrap();
        unpack(archive, &place, Rules::of_host(false))
    }

    /// Copies what is at one path to the other.
    fn copy(&self, from: &str, to: &str) -> Result<LeftOut, Error> {
        let (root, from) = (self.root(), Path::new(from));
        let found = find(root.as_fd(), from, false)?;
        let source = Source {
            is_directory: found.is_directory(),
            is_contents: is_contents(from),
            name: from.file_name().unwrap_or_default(),
        };
        let place = place(root.as_fd(), Path::new(to), Some(source))?;
        let mut pieces = Vec::new();
        let left_out = pack(
            &found,
            Path::new(TOP),
            PieceWriter::new(|piece| {
                pieces.push(piece);
                Ok(())
            }),
        )?;
        let mut pieces = pieces.into_iter();
        let mut reader = PieceReader::new(|| Ok(pieces.next()));
        unpack(&mut reader, &place, Rules::of_guest(false))?;
        read_end(reader)?;
        Ok(left_out)
    }

    fn nothing_is_beside(&self) {
        assert_eq!(std::fs::read_dir(self.0.path()).unwrap().count(), 2);
        assert_eq!(std::fs::read_dir(self.at("beside")).unwrap().count(), 0);
    }
}

/// Returns a header with exactly this path, which the library would not write.
fn header(kind: EntryType, path: &str) -> Header {
    let mut header = Header::new_gnu();
    header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(0o6755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1_000_000_000);
    header.set_size(0);
    header.set_cksum();
    header
}

fn link(kind: EntryType, path: &str, target: &str) -> (Header, &'static [u8]) {
    let mut header = header(kind, path);
    header.set_link_name_literal(target).unwrap();
    header.set_cksum();
    (header, b"")
}

fn file(path: &str, content: &'static [u8]) -> (Header, &'static [u8]) {
    let mut header = header(EntryType::Regular, path);
    header.set_size(content.len() as u64);
    header.set_cksum();
    (header, content)
}

fn directory(path: &str) -> (Header, &'static [u8]) {
    (header(EntryType::Directory, path), b"")
}

fn archive<'a>(entries: impl IntoIterator<Item = (Header, &'a [u8])>) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (header, content) in entries {
        builder.append(&header, content).unwrap();
    }
    builder.into_inner().unwrap()
}

#[test]
fn a_tree_arrives_as_it_was() {
    let folder = Folder::new();
    let from = folder.at("place/from");
    let deep = "n".repeat(200);
    std::fs::create_dir_all(from.join(&deep).join("empty")).unwrap();
    let content: Vec<u8> = (0..5 * PIECE + 11).map(|at| (at * 7) as u8).collect();
    std::fs::write(from.join(&deep).join("file"), &content).unwrap();
    std::fs::write(from.join("script"), "#!").unwrap();
    std::fs::set_permissions(from.join("script"), PermissionsExt::from_mode(0o4751)).unwrap();
    symlink(format!("../{deep}//{deep}"), from.join("long")).unwrap();
    symlink("a//b/./c", from.join("short")).unwrap();
    std::fs::set_permissions(from.join(&deep), PermissionsExt::from_mode(0o555)).unwrap();

    assert_eq!(folder.copy("/place/from", "/place/to").unwrap(), LeftOut::default());
    let to = folder.at("place/to");
    assert_eq!(std::fs::read(to.join(&deep).join("file")).unwrap(), content);
    assert!(to.join(&deep).join("empty").is_dir());
    let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
    // Of a guest no set-user-ID bit is taken.
    assert_eq!((mode(&to.join("script")), mode(&to.join(&deep))), (0o751, 0o555));
    for name in ["long", "short"] {
        let target = |folder: &Path| std::fs::read_link(folder.join(name)).unwrap();
        assert_eq!(target(&to).as_os_str().len(), target(&from).as_os_str().len());
        assert_eq!(target(&to), target(&from));
    }
    let time = |folder: &Path| std::fs::metadata(folder.join(&deep).join("file")).unwrap().mtime();
    assert_eq!(time(&to), time(&from));
    // Directories that are there are merged, and files replaced.
    std::fs::write(to.join("more"), "stays").unwrap();
    std::fs::write(from.join("script"), "new").unwrap();
    std::fs::set_permissions(to.join(&deep), PermissionsExt::from_mode(0o755)).unwrap();
    folder.copy("/place/from/.", "/place/to").unwrap();
    assert_eq!(
        (folder.read("place/to/script"), folder.read("place/to/more")),
        pair("new", "stays")
    );
    folder.copy("/place/from/script", "/place/to/script").unwrap();
    folder.copy("/place/from/script", "/beside").unwrap();
    assert_eq!(folder.read("beside/script"), "new");
    assert!(folder.copy("/place/from", "/place/to/script").is_err());
    // So that the temporary directory can be removed.
    for path in [from.join(&deep), to.join(&deep)] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).unwrap();
    }
}

fn pair(one: &str, other: &str) -> (String, String) {
    (one.to_owned(), other.to_owned())
}

#[test]
fn pipes_and_devices_are_left_out() {
    let folder = Folder::new();
    std::fs::create_dir(folder.at("place/from")).unwrap();
    let pipe = folder.at("place/from/pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    assert!(made.unwrap().success() && pipe.metadata().unwrap().file_type().is_fifo());
    let left_out = folder.copy("/place/from", "/place/to").unwrap();
    assert_eq!(left_out, LeftOut { count: 1, first: "top/pipe".to_owned() });
    assert!(matches!(folder.copy("/place/from/pipe", "/place/to"), Err(Error::Refused { .. })));

    let mut device = header(EntryType::Char, "top/device");
    device.set_device_major(1).unwrap();
    device.set_device_minor(3).unwrap();
    device.set_cksum();
    let pipe = header(EntryType::Fifo, "top/pipe");
    let unknown = header(EntryType::new(b'Z'), "top/unknown");
    let others = [device, pipe, unknown].map(|header| (header, b"".as_slice()));
    let hostile = [directory("top/")].into_iter().chain(others);
    let left_out = folder.unpack(&archive(hostile)).unwrap();
    assert_eq!(left_out, LeftOut { count: 3, first: "top/device".to_owned() });
    assert_eq!(std::fs::read_dir(folder.at("place/in")).unwrap().count(), 0);
}

#[test]
fn no_entry_leads_out_of_the_place() {
    let symlinked = |target| link(EntryType::Symlink, "top/link", target);
    let hard = |path, target| link(EntryType::Link, path, target);
    for (at, hostile) in [
        vec![file("../beside/x", b"x")],
        vec![file("top/../../beside/x", b"x")],
        vec![file("top/..", b"x")],
        vec![file("/top/x", b"x")],
        vec![file("other", b"x")],
        vec![file("top", b"x")],
        vec![directory("top/"), symlinked("../../beside"), file("top/link/x", b"x")],
        vec![directory("top/"), symlinked("../../beside"), directory("top/link/")],
        vec![directory("top/"), symlinked("/"), directory("top/link/new/")],
        vec![directory("top/"), hard("top/hard", "top/../../beside")],
        vec![directory("top/"), file("top/x", b"x"), hard("top/hard", "top/x")],
        vec![link(EntryType::Symlink, "top", "../beside"), file("top/x", b"x")],
    ]
    .into_iter()
    .enumerate()
    {
        let folder = Folder::new();
        let error = folder.unpack(&archive(hostile)).unwrap_err();
        assert!(matches!(error, Error::Refused { .. }), "{at}: {error}");
        folder.nothing_is_beside();
    }
}

#[test]
fn a_file_that_was_announced_is_all_that_comes() {
    let hostile = [
        vec![file("top/x", b"x")],
        vec![directory("top/in/")],
        vec![file("top", b"fine"), link(EntryType::Symlink, "top/x", "/")],
    ];
    for (at, hostile) in hostile.into_iter().enumerate() {
        let folder = Folder::new();
        if at < 2 {
            // A directory is there already, which has the name of the file.
            std::fs::create_dir(folder.at("place/in")).unwrap();
        }
        let error = folder.unpack_file(&archive(hostile), false).unwrap_err();
        assert!(error.to_string().contains("nobody asked for it"), "{at}: {error}");
        let in_it = std::fs::read_dir(folder.at("place/in"));
        assert_eq!(in_it.map(Iterator::count).unwrap_or_default(), 0);
    }
    let folder = Folder::new();
    folder.unpack_file(&archive([file("top", b"x")]), false).unwrap();
    assert_eq!(folder.read("place/in"), "x");
}

#[test]
fn only_files_and_links_are_replaced() {
    let folder = Folder::new();
    let made = std::process::Command::new("mkfifo").arg(folder.at("place/in")).status();
    assert!(made.unwrap().success());
    let sent = archive([file("top", b"x")]);
    let error = folder.unpack_file(&sent, false).unwrap_err();
    assert!(error.to_string().contains("a pipe or a socket is there"), "{error}");
    let is_pipe = folder.at("place/in").symlink_metadata().unwrap().file_type().is_fifo();
    assert!(is_pipe, "it is there still");
    std::fs::remove_file(folder.at("place/in")).unwrap();
    std::fs::create_dir(folder.at("place/in")).unwrap();
    let error = folder.unpack_file(&sent, false).unwrap_err();
    assert!(error.to_string().contains("a directory is there"), "{error}");
    std::fs::remove_dir(folder.at("place/in")).unwrap();
    symlink("../beside/new", folder.at("place/in")).unwrap();
    folder.unpack_file(&sent, false).unwrap();
    assert_eq!(folder.read("place/in"), "x");
    folder.nothing_is_beside();
}

#[test]
fn the_owner_of_a_link_is_given_to_the_link() {
    let folder = Folder::new();
    std::fs::write(folder.at("beside/file"), "x").unwrap();
    let own = folder.at("beside/file").metadata().unwrap();
    let mut linked = header(EntryType::Symlink, "top");
    linked.set_link_name_literal("../beside/file").unwrap();
    linked.set_uid(own.uid().into());
    linked.set_gid(own.gid().into());
    linked.set_cksum();
    folder.unpack_file(&archive([(linked, b"".as_slice())]), true).unwrap();
    let link = folder.at("place/in").symlink_metadata().unwrap();
    assert_eq!((link.is_symlink(), link.uid(), link.gid()), (true, own.uid(), own.gid()));
    // Another file in the place of the link keeps its owner.
    let owner = (Uid::from_raw(own.uid()), Gid::from_raw(own.gid()));
    let directory = rustix::fs::open(folder.at("beside"), OFlags::PATH, Mode::empty()).unwrap();
    let error = give_link(directory.as_fd(), &["file".into()], owner).unwrap_err();
    assert!(error.to_string().contains("another file"), "{error}");
}

#[test]
fn a_link_is_replaced_and_not_written_through() {
    let folder = Folder::new();
    std::fs::write(folder.at("place/kept"), "kept").unwrap();
    let entries =
        [directory("top/"), link(EntryType::Symlink, "top/x", "../kept"), file("top/x", b"new")];
    folder.unpack(&archive(entries)).unwrap();
    assert_eq!((folder.read("place/kept"), folder.read("place/in/x")), pair("kept", "new"));
    assert!(folder.at("place/in/x").symlink_metadata().unwrap().is_file());
}

#[test]
fn what_is_announced_is_not_believed() {
    let folder = Folder::new();
    // A file of 2^60 bytes of which there are 512.
    let mut huge = header(EntryType::Regular, "top/huge");
    huge.set_size(1 << 60);
    huge.set_cksum();
    let mut sent = archive([directory("top/")]);
    sent.truncate(512);
    sent.extend(huge.as_bytes());
    sent.extend([7; 512]);
    assert!(matches!(folder.unpack(&sent), Err(Error::Archive(_))));
    assert!(!folder.at("place/in/huge").exists(), "a part of a file is not left");
    // A header of 1 GiB: it is given up long before its end.
    for kind in [EntryType::XHeader, EntryType::GNULongName, EntryType::GNULongLink] {
        let mut long = header(kind, "long");
        long.set_size(1 << 30);
        long.set_cksum();
        let head: &[u8] = long.as_bytes();
        let sent = head.chain(io::repeat(b'x').take(1 << 30));
        let source = Source { is_directory: true, is_contents: false, name: OsStr::new("in") };
        let place = place(folder.root().as_fd(), Path::new("/place"), Some(source)).unwrap();
        let mut sent = Counted { inner: sent, count: 0 };
        let error = unpack(&mut sent, &place, Rules::of_guest(false)).unwrap_err();
        assert!(error.to_string().contains("too long"), "{error}");
        assert!(sent.count <= HEADERS + 512);
    }
    let mut sparse = header(EntryType::GNUSparse, "top/sparse");
    sparse.as_gnu_mut().unwrap().set_real_size(1 << 32);
    sparse.as_gnu_mut().unwrap().sparse[0].set_offset(1 << 32);
    sparse.as_gnu_mut().unwrap().sparse[0].set_length(0);
    sparse.set_cksum();
    let error = folder.unpack(&archive([directory("top/"), (sparse, b"".as_slice())]));
    assert!(matches!(error, Err(Error::Refused { .. })), "{error:?}");
    assert!(!folder.at("place/in/sparse").exists());
    assert!(read_end(io::repeat(0)).is_err() && read_end(io::repeat(0).take(9216)).is_ok());
}

struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.count += read as u64;
        Ok(read)
    }
}

#[test]
fn depth_is_bounded() {
    let folder = Folder::new();
    let deep = |count: usize| {
        let mut sent = Builder::new(Vec::new());
        let mut header = header(EntryType::Regular, "x");
        // The library writes a header for the long name.
        sent.append_data(&mut header, "a/".repeat(count), io::empty()).unwrap();
        sent.into_inner().unwrap()
    };
    let error = folder.unpack_entries(&deep(DEEPEST + 1)).unwrap_err();
    assert!(error.to_string().contains("more than 512 directories"), "{error}");
    assert!(!folder.at("place/a").exists());
    folder.unpack_entries(&deep(20)).unwrap();
    assert!(folder.at("place/a/a/a").exists());
}

#[test]
fn an_archive_of_the_user_keeps_its_paths_and_hard_links() {
    let folder = Folder::new();
    let entries = [
        file("./a/b/file", b"x"),
        link(EntryType::Link, "hard", "a/b/file"),
        (header(EntryType::XGlobalHeader, "global"), b"".as_slice()),
        directory("./"),
    ];
    folder.unpack_entries(&archive(entries)).unwrap();
    let inode = |name| folder.at(name).metadata().unwrap().ino();
    assert_eq!(inode("place/a/b/file"), inode("place/hard"));
    assert_eq!(folder.at("place/hard").metadata().unwrap().permissions().mode() & 0o7777, 0o6755);
    for path in ["/x", "../x", "a/../../x"] {
        assert!(folder.unpack_entries(&archive([file(path, b"x")])).is_err(), "{path}");
    }
    folder.nothing_is_beside();
    assert!(folder.unpack_entries(b"no archive at all, which is shorter than a block").is_err());
}
