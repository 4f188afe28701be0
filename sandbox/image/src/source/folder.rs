//! A plain folder as an image of one layer: it is packed into a tar archive once, and from there
//! on treated like any other layer.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, OsString};
use std::fs::{File, Metadata};
use std::io::{self, BufWriter};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use tar::EntryType;

use crate::digest::DigestWriter;
use crate::manifest::{self, Layer, Plan};
use crate::root::read::is_kept;
use crate::root::tree::Meta;
use crate::root::write::TarWriter;
use crate::{Error, Limits, Result};

/// Packs the folder `root` into a nameless file in `dir`, and plans an image with that one layer
/// and an empty config.
pub(crate) fn pack(root: &Path, dir: &Path, limits: &Limits) -> Result<(Plan, File)> {
    let meta = std::fs::metadata(root).map_err(|e| bad(root, e))?;
    if !meta.is_dir() {
        return Err(bad(root, "is no folder"));
    }
    let file = tempfile::tempfile_in(dir).map_err(|e| Error::io("write to", dir, e))?;
    let mut sink = DigestWriter::new(BufWriter::with_capacity(1 << 20, file));
    let mut packer = Packer {
        out: TarWriter::new(&mut sink),
        device: meta.dev(),
        links: HashMap::new(),
        spool: dir,
        limits,
        bytes: 0,
        entries: 0,
    };
    packer.pack(root, &meta)?;
    packer.out.finish().map_err(|e| Error::io("write to", dir, e))?;
    let (out, digest, size) = sink.finish();
    let file = out.into_inner().map_err(|e| Error::io("write to", dir, e.into_error()))?;
    let config = format!(
        r#"{{"architecture":"amd64","os":"linux","config":{{}},"rootfs":{{"type":"layers","diff_ids":["{digest}"]}}}}"#
    );
    let layers = vec![Layer { digest, size, diff_id: digest }];
    let name = root.display().to_string();
    let plan = manifest::synthesise(config.as_bytes(), layers, &name)?;
    Ok((Plan { whiteouts: false, ..plan }, file))
}

/// What is left of a folder's names.
type Names = std::vec::IntoIter<OsString>;

struct Packer<'a, W: io::Write> {
    out: TarWriter<W>,
    /// The root's device: what is mounted below is not read.
    device: u64,
    /// First path of files with several names, by device and inode.
    links: HashMap<(u64, u64), Vec<u8>>,
    spool: &'a Path,
    limits: &'a Limits,
    bytes: u64,
    entries: usize,
}

impl<W: io::Write> Packer<'_, W> {
    /// Packs the root and everything below it, folders before what is in them.
    fn pack(&mut self, root: &Path, meta: &Metadata) -> Result<()> {
        self.put(root, b"./", meta, EntryType::Directory, b"", 0)?;
        let mut path = Vec::new();
        let mut open = vec![(root.to_owned(), names(root)?, 0)];
        while let Some((dir, names, len)) = open.last_mut() {
            path.truncate(*len);
            let Some(name) = names.next() else {
                open.pop();
                continue;
            };
            path.extend_from_slice(name.as_bytes());
            let file = dir.join(&name);
            if let Some(names) = self.file(&file, &mut path)? {
                open.push((file, names, path.len()));
            }
        }
        Ok(())
    }

    /// Packs one file. If it is a folder, returns what is in it, and `path` ends with a slash.
    fn file(&mut self, file: &Path, path: &mut Vec<u8>) -> Result<Option<Names>> {
        self.entries += 1;
        if path.len() > self.limits.path_bytes || self.entries > self.limits.entries {
            return Err(Error::too_large(file.display(), "too many files or too long a path"));
        }
        let meta = std::fs::symlink_metadata(file).map_err(|e| bad(file, e))?;
        if !meta.is_dir() {
            return self.node(file, path, &meta).map(|()| None);
        }
        path.push(b'/');
        self.put(file, path, &meta, EntryType::Directory, b"", 0)?;
        // What is mounted there is not part of the folder.
        if meta.dev() == self.device { names(file).map(Some) } else { Ok(None) }
    }

    fn node(&mut self, file: &Path, path: &[u8], meta: &Metadata) -> Result<()> {
        let kind = meta.file_type();
        if meta.nlink() > 1 {
            if let Some(first) = self.links.get(&(meta.dev(), meta.ino())).cloned() {
                return self.put(file, path, meta, EntryType::Link, &first, 0);
            }
            self.links.insert((meta.dev(), meta.ino()), path.to_vec());
        }
        match kind {
            _ if kind.is_file() => self.content(file, path),
            _ if kind.is_symlink() => {
                let target = std::fs::read_link(file).map_err(|e| bad(file, e))?;
                self.put(file, path, meta, EntryType::Symlink, target.as_os_str().as_bytes(), 0)
            }
            _ if kind.is_fifo() => self.put(file, path, meta, EntryType::Fifo, b"", 0),
            _ if kind.is_char_device() => self.device(file, path, meta, EntryType::Char),
            _ if kind.is_block_device() => self.device(file, path, meta, EntryType::Block),
            // A socket means nothing without the process behind it.
            _ => Ok(()),
        }
    }

    fn content(&mut self, file: &Path, path: &[u8]) -> Result<()> {
        // A file that was swapped for a link or a fifo since it was looked at is refused, not
        // followed or waited for.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let open = rustix::fs::open(file, flags, Mode::empty()).map_err(|e| bad(file, e))?;
        let open = File::from(open);
        let meta = open.metadata().map_err(|e| bad(file, e))?;
        if !meta.is_file() {
            return Err(bad(file, "changed while it was read"));
        }
        self.bytes = self.bytes.saturating_add(meta.len());
        let max = self.limits.layer_uncompressed.min(self.limits.image_uncompressed);
        if self.bytes > max {
            return Err(Error::too_large(
                file.display(),
                format!("the folder holds more than {max} bytes"),
            ));
        }
        self.put(file, path, &meta, EntryType::Regular, b"", meta.len())?;
        let copied = self.out.copy(&open, 0, meta.len(), &mut |_| {});
        copied.map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => bad(file, "changed while it was read"),
            _ => Error::io("copy", file, e),
        })?;
        self.out.pad(meta.len()).map_err(|e| Error::io("write to", self.spool, e))
    }

    fn device(&mut self, file: &Path, path: &[u8], meta: &Metadata, kind: EntryType) -> Result<()> {
        let numbers = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
        let meta = attributes(file, meta)?;
        let result = self.out.device(path, &meta, kind, numbers);
        result.map_err(|e| Error::io("write to", self.spool, e))
    }

    fn put(
        &mut self,
        file: &Path,
        path: &[u8],
        meta: &Metadata,
        kind: EntryType,
        link: &[u8],
        size: u64,
    ) -> Result<()> {
        let meta = attributes(file, meta)?;
        let result = self.out.entry(path, &meta, kind, link, size);
        result.map_err(|e| Error::io("write to", self.spool, e))
    }
}

/// The names in a folder, sorted: the same folder must give the same digest.
fn names(dir: &Path) -> Result<Names> {
    let listing = std::fs::read_dir(dir).map_err(|e| bad(dir, e))?;
    let names: io::Result<Vec<_>> = listing.map(|entry| Ok(entry?.file_name())).collect();
    let mut names = names.map_err(|e| bad(dir, e))?;
    names.sort();
    Ok(names.into_iter())
}

fn bad(path: &Path, reason: impl ToString) -> Error {
    Error::BadFolder { path: path.to_owned(), reason: reason.to_string() }
}

fn attributes(file: &Path, meta: &Metadata) -> Result<Meta> {
    Ok(Meta {
        mode: (meta.mode() & 0o7777) as u16,
        uid: meta.uid(),
        gid: meta.gid(),
        mtime: u64::try_from(meta.mtime()).unwrap_or(0),
        xattrs: xattrs(file).map_err(|e| bad(file, e))?,
    })
}

fn xattrs(file: &Path) -> rustix::io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut found = BTreeMap::new();
    let mut names = vec![0; 64 << 10];
    let len = match rustix::fs::llistxattr(file, &mut names[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::NOTSUP) => return Ok(found),
        Err(e) => return Err(e),
    };
    for name in names[..len].split(|&b| b == 0).filter(|name| is_kept(name)) {
        // Split at NULs, so there is none inside.
        let Ok(c_name) = CString::new(name) else { continue };
        let mut value = vec![0; 64 << 10];
        match rustix::fs::lgetxattr(file, &c_name, &mut value[..]) {
            Ok(len) => {
                value.truncate(len);
                found.insert(name.to_vec(), value);
            }
            Err(rustix::io::Errno::NODATA) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(found)
}
