//! A plain folder as an image of one layer. The folder is packed into a tar archive once, which is
//! then treated like any other layer. Its owner may be any user, and may change it meanwhile:
//! nothing from outside the folder gets into the image, see [`beneath`](super::beneath).

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, OsStr, OsString};
use std::fs::File;
use std::io::{self, BufWriter, Seek};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use tar::EntryType;

use super::beneath::{Beneath, OpenedFile, changed};
use crate::digest::DigestWriter;
use crate::manifest::{self, Layer, Plan};
use crate::root::Form;
use crate::root::budget::{self, Budget};
use crate::root::tree::Meta;
use crate::root::write::TarWriter;
use crate::{Error, Limits, Result};

/// The beginning of the name of an archive's deletion, and the name of one that empties its folder
/// (OCI image specification, *Whiteouts*).
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// Attributes of overlayfs, without and with its mount option `userxattr` (Linux, *Overlay
/// Filesystem*): of a folder that may hide what lower layers have in it, of an empty file that
/// removes its name, and of files whose content is elsewhere.
const HIDES: [&CStr; 2] = [c"trusted.overlay.opaque", c"user.overlay.opaque"];
const REMOVES: [&CStr; 2] = [c"trusted.overlay.whiteout", c"user.overlay.whiteout"];
const MOVED: [&CStr; 4] = [
    c"trusted.overlay.redirect",
    c"trusted.overlay.metacopy",
    c"user.overlay.redirect",
    c"user.overlay.metacopy",
];

/// Packs the folder `root` into an unnamed file in `dir`, and plans an image with that one layer
/// and an empty config.
pub(crate) fn pack(root: &Path, dir: &Path, limits: &Limits) -> Result<(Plan, File)> {
    let (layer, file) = pack_layer(root, dir, limits, Form::Files)?;
    let plan = manifest::without_config(vec![layer], &root.display().to_string())?;
    Ok((plan, file))
}

/// Packs the folder `root` into an unnamed file in `dir`. With [`Form::Changes`] it is an upper
/// directory of overlayfs, whose deletions become those of an archive.
pub(super) fn pack_layer(
    root: &Path,
    dir: &Path,
    limits: &Limits,
    form: Form,
) -> Result<(Layer, File)> {
    let folder = Beneath::open(root).map_err(|e| bad(root, e))?;
    let found = folder.look(".".as_ref()).map_err(|e| bad(root, e))?;
    let file = tempfile::tempfile_in(dir).map_err(|e| Error::io("write to", dir, e))?;
    let mut sink = DigestWriter::new(BufWriter::with_capacity(1 << 20, file));
    let mut packer = Packer {
        out: TarWriter::new(&mut sink),
        root,
        folder,
        is_upper: form == Form::Changes,
        device: found.meta.dev(),
        links: HashMap::new(),
        spool: dir,
        limits,
        bytes: 0,
        entries: 0,
        budget: Budget::new(limits),
    };
    packer.pack(&found)?;
    packer.out.finish().map_err(|e| Error::io("write to", dir, e))?;
    let (out, digest, size) = sink.finish();
    let file = out.into_inner().map_err(|e| Error::io("write to", dir, e.into_error()))?;
    Ok((Layer { digest, size, diff_id: digest, form, toc: None }, file))
}

/// The remaining names of a folder.
type Names = std::vec::IntoIter<OsString>;

/// A folder whose content is packed.
struct Folder {
    names: Names,
    /// The length of the path to it, with a slash.
    len: usize,
    /// The path to it, if it has the first name of a file with several.
    path: Option<Rc<[u8]>>,
}

/// The first name of a file with several: the path of its folder, and its name there.
type FirstName = (Rc<[u8]>, Vec<u8>);

struct Packer<'a, W: io::Write> {
    out: TarWriter<&'a mut DigestWriter<W>>,
    /// The folder's path, for messages only.
    root: &'a Path,
    folder: Beneath,
    /// Set if the folder is an upper directory of overlayfs.
    is_upper: bool,
    /// The folder's device. Nothing below a mount point of another device is read.
    device: u64,
    /// The first name of each file with several, by device and inode.
    links: HashMap<(u64, u64), FirstName>,
    spool: &'a Path,
    limits: &'a Limits,
    bytes: u64,
    /// The number of names listed so far, at most the limit.
    entries: usize,
    /// The memory of names and links, and what entries have in the archive beside their content.
    budget: Budget,
}

impl<W: io::Write + Seek> Packer<'_, W> {
    /// Packs the folder itself and everything below it, a folder before its content. For the
    /// folders on the way, it keeps names and no descriptors, since there may be thousands.
    fn pack(&mut self, root: &OpenedFile) -> Result<()> {
        self.put(b"./", root, EntryType::Directory, b"", 0)?;
        self.opaque(b"", root)?;
        let mut path = Vec::new();
        let mut open = vec![Folder { names: self.names(root, b"")?, len: 0, path: None }];
        while let Some(folder) = open.last_mut() {
            path.truncate(folder.len);
            let Some(name) = folder.names.next() else {
                open.pop();
                continue;
            };
            path.extend_from_slice(name.as_bytes());
            if let Some(names) = self.file(&mut path, folder)? {
                open.push(Folder { names, len: path.len(), path: None });
            }
        }
        Ok(())
    }

    /// Packs one file of `folder`. If it is a folder, returns the names in it and appends a slash
    /// to `path`; otherwise returns `None`. Also returns `None` for a mount point.
    fn file(&mut self, path: &mut Vec<u8>, folder: &mut Folder) -> Result<Option<Names>> {
        if path.len() > self.limits.path_bytes {
            return Err(self.too_many(path));
        }
        let found = self.folder.look(OsStr::from_bytes(path).as_ref());
        let found = found.map_err(|e| self.bad(path, e))?;
        if self.is_upper && self.deletion(path, &found)? {
            return Ok(None);
        }
        if !found.meta.is_dir() {
            return self.node(path, &found, folder).map(|()| None);
        }
        path.push(b'/');
        self.put(path, &found, EntryType::Directory, b"", 0)?;
        self.opaque(path, &found)?;
        // A file system that is mounted there is not part of the folder.
        if found.meta.dev() != self.device {
            return Ok(None);
        }
        self.names(&found, path).map(Some)
    }

    /// Returns the names in a folder. Every name is counted when it is listed, before memory is
    /// taken for it.
    fn names(&mut self, folder: &OpenedFile, path: &[u8]) -> Result<Names> {
        let (most, entries, held) = (self.limits.entries, &mut self.entries, &mut self.budget);
        let names = folder.names(|len| {
            *entries += 1;
            *entries <= most && held.take(budget::listed(len)).is_ok()
        });
        let names = names.map_err(|e| self.bad(path, e))?;
        let names = names.ok_or_else(|| self.too_many(path))?;
        Ok(names.into_iter())
    }

    /// Packs overlayfs's deletion of a name as that of an archive. Returns `false` for a file; one
    /// that an archive of changes cannot have is an error.
    fn deletion(&mut self, path: &[u8], found: &OpenedFile) -> Result<bool> {
        let name = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        if name.starts_with(WHITEOUT) {
            return Err(self.bad(path, "its name stands for a deletion"));
        }
        if self.has(path, found, &MOVED, |_| true)? {
            return Err(self.bad(path, "overlayfs has moved it, which is not supported"));
        }
        let (meta, kind) = (&found.meta, found.meta.file_type());
        let is_device = kind.is_char_device() && meta.rdev() == 0;
        let is_empty = kind.is_file() && meta.len() == 0;
        let removes = is_device || (is_empty && self.has(path, found, &REMOVES, |_| true)?);
        if !removes {
            return Ok(false);
        }
        let folder = &path[..path.len() - name.len()];
        self.mark(&[folder, WHITEOUT, name].concat())?;
        Ok(true)
    }

    /// Packs a mark of a folder that hides what lower layers have in it, if it is one.
    fn opaque(&mut self, path: &[u8], found: &OpenedFile) -> Result<()> {
        if !self.is_upper {
            return Ok(());
        }
        // The value `x` announces deletions that are attributes.
        match self.has(path, found, &HIDES, |value| value == b"y")? {
            true => self.mark(&[path, OPAQUE].concat()),
            false => Ok(()),
        }
    }

    /// Returns whether a file has one of these attributes with a value that `counts`.
    fn has(
        &self,
        path: &[u8],
        found: &OpenedFile,
        attributes: &[&CStr],
        counts: impl Fn(&[u8]) -> bool,
    ) -> Result<bool> {
        for attribute in attributes {
            let value = found.xattr(attribute).map_err(|e| self.bad(path, e))?;
            if value.is_some_and(|value| counts(&value)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn mark(&mut self, path: &[u8]) -> Result<()> {
        self.hold(path, budget::name(path.len()))?;
        let result = self.out.entry(path, &Meta::default(), EntryType::Regular, b"", 0);
        result.map_err(|e| Error::io("write to", self.spool, e))
    }

    fn node(&mut self, path: &[u8], found: &OpenedFile, folder: &mut Folder) -> Result<()> {
        let (meta, kind) = (&found.meta, found.meta.file_type());
        // A socket is left out with all of its names, since it is useless without its process.
        if kind.is_socket() {
            return Ok(());
        }
        if meta.nlink() > 1 {
            let inode = (meta.dev(), meta.ino());
            if let Some((folder, name)) = self.links.get(&inode) {
                let first = [&folder[..], &name[..]].concat();
                return self.put(path, found, EntryType::Link, &first, 0);
            }
            self.first_name(path, inode, folder)?;
        }
        match kind {
            _ if kind.is_file() => self.content(path, found),
            _ if kind.is_symlink() => {
                let target = found.target().map_err(|e| self.bad(path, e))?;
                self.put(path, found, EntryType::Symlink, &target, 0)
            }
            _ if kind.is_fifo() => self.put(path, found, EntryType::Fifo, b"", 0),
            _ if kind.is_char_device() => self.device(path, found, EntryType::Char),
            _ => self.device(path, found, EntryType::Block),
        }
    }

    /// Remembers `path` in `folder` as the first name of a file with several.
    fn first_name(&mut self, path: &[u8], inode: (u64, u64), folder: &mut Folder) -> Result<()> {
        let (before, name) = path.split_at(folder.len);
        if folder.path.is_none() {
            self.hold(path, budget::allocated(before.len()))?;
        }
        let before = folder.path.get_or_insert_with(|| before.into()).clone();
        self.hold(path, budget::in_table::<(u64, u64), FirstName>(name.len()))?;
        self.links.insert(inode, (before, name.to_vec()));
        Ok(())
    }

    /// Packs as many bytes as the file had when it was looked up, its holes as zeros that take no
    /// space. A file that then has another length is refused.
    fn content(&mut self, path: &[u8], found: &OpenedFile) -> Result<()> {
        let len = found.meta.len();
        self.bytes = self.bytes.saturating_add(len);
        let max = self.limits.layer_uncompressed.min(self.limits.image_uncompressed);
        if self.bytes > max {
            let reason = format!("the folder holds more than {max} bytes");
            return Err(Error::too_large(self.shown(path).display(), reason));
        }
        let open = found.read().map_err(|e| self.bad(path, e))?;
        self.put(path, found, EntryType::Regular, b"", len)?;
        let copied = self.out.copy_sparse(&open, len);
        copied.map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => self.bad(path, changed()),
            io::ErrorKind::StorageFull => Error::io("write to", self.spool, e),
            _ => Error::io("copy", &self.shown(path), e),
        })?;
        if open.metadata().map_err(|e| self.bad(path, e))?.len() != len {
            return Err(self.bad(path, changed()));
        }
        self.out.pad(len).map_err(|e| Error::io("write to", self.spool, e))
    }

    fn device(&mut self, path: &[u8], found: &OpenedFile, kind: EntryType) -> Result<()> {
        let number = found.meta.rdev();
        let numbers = (rustix::fs::major(number), rustix::fs::minor(number));
        let meta = self.meta(path, found, b"", kind)?;
        let result = self.out.device(path, &meta, kind, numbers);
        result.map_err(|e| Error::io("write to", self.spool, e))
    }

    fn put(
        &mut self,
        path: &[u8],
        found: &OpenedFile,
        kind: EntryType,
        link: &[u8],
        size: u64,
    ) -> Result<()> {
        let meta = self.meta(path, found, link, kind)?;
        let result = self.out.entry(path, &meta, kind, link, size);
        result.map_err(|e| Error::io("write to", self.spool, e))
    }

    /// Returns the metadata of an entry, and counts what the entry has in the archive beside its
    /// content. A link has no extended attributes: the file's first name has them.
    fn meta(
        &mut self,
        path: &[u8],
        found: &OpenedFile,
        link: &[u8],
        kind: EntryType,
    ) -> Result<Meta> {
        let xattrs = match kind {
            EntryType::Link => BTreeMap::new(),
            _ => found.xattrs().map_err(|e| self.bad(path, e))?,
        };
        let bytes = budget::name(path.len()) + link.len() + budget::attributes(&xattrs);
        self.hold(path, bytes)?;
        let meta = &found.meta;
        Ok(Meta {
            mode: (meta.mode() & 0o7777) as u16,
            uid: meta.uid(),
            gid: meta.gid(),
            mtime: u64::try_from(meta.mtime()).unwrap_or(0),
            xattrs,
        })
    }

    /// Takes `bytes` from the budget.
    fn hold(&mut self, path: &[u8], bytes: usize) -> Result<()> {
        let held = self.budget.take(bytes);
        held.map_err(|reason| Error::too_large(self.shown(path).display(), reason))
    }

    /// Returns the host's path of `path`, for a message.
    fn shown(&self, path: &[u8]) -> PathBuf {
        self.root.join(OsStr::from_bytes(path))
    }

    fn bad(&self, path: &[u8], reason: impl ToString) -> Error {
        bad(&self.shown(path), reason)
    }

    fn too_many(&self, path: &[u8]) -> Error {
        Error::too_large(self.shown(path).display(), "too many files, or too long names")
    }
}

fn bad(path: &Path, reason: impl ToString) -> Error {
    Error::BadFolder { path: path.to_owned(), reason: reason.to_string() }
}
