//! A reader of tar archives in files: POSIX ustar and PAX, GNU long names, old GNU sparse files.
//!
//! The `tar` crate's own reader is not used, since it buffers long names and PAX headers without a
//! bound and hides the position of data; its header parser is used. Not supported: PAX sparse files
//! (refused; no tool writes layers with them), multi-volume archives (refused), global PAX headers
//! (skipped, as container runtimes do).

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use tar::{EntryType, GnuExtSparseHeader, GnuSparseHeader, Header};

use super::tree::{Data, FileRun, Meta, NodeKind, check_attributes, show};

const BLOCK: u64 = 512;
/// The most bytes of a PAX header, which has paths and extended attributes of one file. The kernel
/// allows 64 KiB of attribute names and 64 KiB for each value.
const MAX_PAX: u64 = 1 << 20;
/// `XATTR_SIZE_MAX` of Linux.
const MAX_XATTR: usize = 64 << 10;
/// `XATTR_NAME_MAX` of Linux.
const MAX_XATTR_NAME: usize = 255;
/// The most zero bytes after a GNU long name, which are no part of it. GNU tar writes one, others
/// pad with more.
const MAX_ZEROS: u64 = 64;
/// The most extents of one sparse file: 16 MiB of map.
const MAX_PIECES: usize = 1 << 20;

/// One file of an archive.
#[derive(Debug)]
pub(crate) struct ArchiveEntry {
    /// The path as stored, not checked yet.
    pub path: Vec<u8>,
    pub meta: Meta,
    pub what: EntryContent,
}

/// The type and content of an [`ArchiveEntry`].
#[derive(Debug)]
pub(crate) enum EntryContent {
    Node(NodeKind),
    /// Another name for the file at this path, which is not checked yet.
    HardLink(Vec<u8>),
    /// The removal of what lower layers have at the path.
    Whiteout,
    /// The removal of what lower layers have in the folder.
    Opaque,
}

/// A reader of the entries of a tar archive.
pub(crate) struct TarReader<'a> {
    file: &'a File,
    len: u64,
    at: u64,
    /// The most bytes of a GNU long name, zero bytes after it included. The caller checks names
    /// again.
    max_long_name: u64,
}

/// The values from PAX and GNU headers for the entry that follows them.
#[derive(Default)]
struct Extras {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<u64>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl<'a> TarReader<'a> {
    /// Makes a reader at the beginning of `file`. Names may have up to `max_name` bytes.
    pub(crate) fn new(file: &'a File, max_name: usize) -> io::Result<Self> {
        let max_long_name = max_name as u64 + MAX_ZEROS;
        Ok(Self { file, len: file.metadata()?.len(), at: 0, max_long_name })
    }

    /// Returns the next entry. Returns `None` at the archive's end, or an error that says what is
    /// wrong with the archive.
    pub(crate) fn next(&mut self) -> Result<Option<ArchiveEntry>, String> {
        let mut extras = Extras::default();
        loop {
            let Some(header) = self.header()? else { return Ok(None) };
            let kind = header.entry_type();
            match kind {
                EntryType::GNULongName => extras.path = Some(self.long_name(&header)?),
                EntryType::GNULongLink => extras.link = Some(self.long_name(&header)?),
                EntryType::XHeader => {
                    let size = stored_size(&header)?;
                    if size > MAX_PAX {
                        return Err(format!("a PAX header of {size} bytes"));
                    }
                    let bytes = self.take(size)?;
                    extras.read_pax(&bytes)?;
                }
                EntryType::XGlobalHeader => self.skip(stored_size(&header)?)?,
                _ => return self.entry(&header, extras).map(Some),
            }
        }
    }

    /// Returns the next header block. Returns `None` at a zero block or at the end of the file.
    fn header(&mut self) -> Result<Option<Header>, String> {
        if self.at == self.len {
            return Ok(None);
        }
        let mut header = Header::new_old();
        self.fill(header.as_mut_bytes())?;
        if header.as_bytes().iter().all(|&b| b == 0) {
            return Ok(None);
        }
        let sum = header.cksum().map_err(|_| "garbage where a tar header is expected")?;
        // The checksum counts its own eight bytes as blanks (POSIX pax, ustar interchange format).
        let computed: u32 = header
            .as_bytes()
            .iter()
            .enumerate()
            .map(|(i, &b)| if (148..156).contains(&i) { 32 } else { u32::from(b) })
            .sum();
        if sum != computed {
            return Err("garbage where a tar header is expected (wrong checksum)".into());
        }
        Ok(Some(header))
    }

    /// Reads an entry behind its header, and skips its data. Errors name the entry.
    fn entry(&mut self, header: &Header, mut extras: Extras) -> Result<ArchiveEntry, String> {
        let path = extras.path.take().unwrap_or_else(|| header.path_bytes().into_owned());
        let what = self.what(header, &extras, &path);
        let read = what.and_then(|what| Ok((what, meta(header, extras)?)));
        let (what, meta) = read.map_err(|reason| format!("'{}': {reason}", show(&path)))?;
        Ok(ArchiveEntry { path, meta, what })
    }

    fn what(
        &mut self,
        header: &Header,
        extras: &Extras,
        path: &[u8],
    ) -> Result<EntryContent, String> {
        let link = || {
            let stored = header.link_name_bytes().map(|l| l.into_owned());
            extras.link.clone().or(stored).unwrap_or_default()
        };
        // Links, folders and devices have no data, whatever their size field has in it (as in GNU
        // tar and Go's archive/tar).
        let size = || extras.size.map_or_else(|| stored_size(header), Ok);
        let kind = match header.entry_type() {
            EntryType::Regular if is_old_folder(header, path) => NodeKind::new_directory(),
            EntryType::Regular | EntryType::Continuous => NodeKind::File(self.plain_data(size()?)?),
            EntryType::GNUSparse => NodeKind::File(self.sparse_data(header, size()?)?),
            EntryType::Link => return Ok(EntryContent::HardLink(link())),
            EntryType::Symlink => NodeKind::Symlink(link()),
            EntryType::Directory => NodeKind::new_directory(),
            EntryType::Fifo => NodeKind::Fifo,
            EntryType::Char => NodeKind::Char(device(header)?),
            EntryType::Block => NodeKind::Block(device(header)?),
            other => {
                return Err(format!("an entry of the unknown type {:#04x}", other.as_byte()));
            }
        };
        Ok(EntryContent::Node(kind))
    }

    fn plain_data(&mut self, size: u64) -> Result<Data, String> {
        let pieces = match size {
            0 => Vec::new(),
            _ => vec![FileRun { at: 0, from: self.at, len: size }],
        };
        self.skip(size)?;
        Ok(Data { layer: 0, len: size, pieces })
    }

    /// Reads a file in the old GNU sparse format: four extents in the header, further ones in
    /// blocks after it (GNU tar manual, *Old GNU Format*).
    fn sparse_data(&mut self, header: &Header, stored: u64) -> Result<Data, String> {
        let gnu = header.as_gnu().ok_or("a sparse file without a GNU header")?;
        let len = gnu.real_size().map_err(|_| "a sparse file without a size")?;
        let mut map = Vec::new();
        gnu.sparse.iter().try_for_each(|extent| add_extent(&mut map, extent))?;
        let mut more = gnu.is_extended();
        while more {
            let mut block = GnuExtSparseHeader::new();
            self.fill(block.as_mut_bytes())?;
            block.sparse().iter().try_for_each(|extent| add_extent(&mut map, extent))?;
            more = block.is_extended();
        }
        let mut from = self.at;
        let mut pieces = Vec::with_capacity(map.len());
        let mut end = 0;
        for (at, bytes) in map {
            let next = at.checked_add(bytes).filter(|&next| at >= end && next <= len);
            end = next.ok_or("a sparse file whose extents overlap or pass its end")?;
            if bytes > 0 {
                pieces.push(FileRun { at, from, len: bytes });
            }
            from = from.checked_add(bytes).ok_or("a sparse file that is too long")?;
        }
        if from - self.at != stored {
            return Err("a sparse file whose extents do not add up to its data".into());
        }
        self.skip(stored)?;
        Ok(Data { layer: 0, len, pieces })
    }

    fn long_name(&mut self, header: &Header) -> Result<Vec<u8>, String> {
        let size = stored_size(header)?;
        if size > self.max_long_name {
            return Err(format!("a name of {size} bytes"));
        }
        let mut name = self.take(size)?;
        while name.last() == Some(&0) {
            name.pop();
        }
        Ok(name)
    }

    /// Reads `size` bytes, which the caller has bounded, and skips their padding to a block.
    fn take(&mut self, size: u64) -> Result<Vec<u8>, String> {
        if size > self.len - self.at {
            return Err("the archive is truncated".into());
        }
        let mut bytes = vec![0; size as usize];
        self.file.read_exact_at(&mut bytes, self.at).map_err(|e| e.to_string())?;
        self.skip(size)?;
        Ok(bytes)
    }

    fn fill(&mut self, block: &mut [u8]) -> Result<(), String> {
        self.file.read_exact_at(block, self.at).map_err(|e| match e.kind() {
            io::ErrorKind::UnexpectedEof => "the archive is truncated".to_owned(),
            _ => e.to_string(),
        })?;
        self.at += block.len() as u64;
        Ok(())
    }

    /// Skips `size` bytes and their padding. The last padding may be missing.
    fn skip(&mut self, size: u64) -> Result<(), String> {
        if size > self.len - self.at {
            return Err("the archive is truncated".into());
        }
        self.at = (self.at + size).next_multiple_of(BLOCK).min(self.len);
        Ok(())
    }
}

/// Returns whether an entry is a folder as archives have it from before POSIX: a file of type 0
/// whose name ends with a slash, without data. An entry of type `'0'` is a file whatever its name,
/// and its data follows (as in Go's archive/tar, by which container runtimes read layers).
fn is_old_folder(header: &Header, path: &[u8]) -> bool {
    header.as_old().linkflag == [0] && path.ends_with(b"/")
}

/// Returns the attributes of an entry.
fn meta(header: &Header, extras: Extras) -> Result<Meta, String> {
    let id = |pax: Option<u32>, stored: io::Result<u64>, what| match pax {
        Some(id) => Ok(id),
        None => stored
            .ok()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| format!("a {what} that is no number of 32 bits")),
    };
    Ok(Meta {
        mode: (header.mode().map_err(|_| "a mode that is no number")? & 0o7777) as u16,
        uid: id(extras.uid, header.uid(), "user")?,
        gid: id(extras.gid, header.gid(), "group")?,
        mtime: extras.mtime.unwrap_or_else(|| mtime(header)),
        xattrs: extras.xattrs,
    })
}

fn stored_size(header: &Header) -> Result<u64, String> {
    header.entry_size().map_err(|_| "a size that is no number".to_owned())
}

/// Returns the modification time. Negative times (base-256 with the sign bit) become the epoch,
/// since EROFS counts seconds from there.
fn mtime(header: &Header) -> u64 {
    let negative = header.as_old().mtime[0] == 0xff;
    header.mtime().ok().filter(|_| !negative).unwrap_or(0)
}

fn device(header: &Header) -> Result<(u32, u32), String> {
    let major = header.device_major().ok().flatten();
    let minor = header.device_minor().ok().flatten();
    major.zip(minor).ok_or_else(|| "a device without numbers".to_owned())
}

fn add_extent(map: &mut Vec<(u64, u64)>, extent: &GnuSparseHeader) -> Result<(), String> {
    if extent.is_empty() {
        return Ok(());
    }
    if map.len() == MAX_PIECES {
        return Err("a sparse file of too many extents".into());
    }
    let at = extent.offset().map_err(|_| "a sparse extent that is no number")?;
    let len = extent.length().map_err(|_| "a sparse extent that is no number")?;
    map.push((at, len));
    Ok(())
}

impl Extras {
    /// Applies the records `LENGTH KEY=VALUE\n` of a PAX header (POSIX pax, *Extended Header*). An
    /// empty value revokes an earlier one, except for an extended attribute, whose value may be
    /// empty.
    fn read_pax(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while !bytes.is_empty() {
            let (key, value, rest) = pax_record(bytes).ok_or("a malformed PAX header")?;
            self.set(key, value)?;
            bytes = rest;
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), String> {
        match key {
            b"path" => self.path = non_empty(value),
            b"linkpath" => self.link = non_empty(value),
            b"size" => self.size = pax_number(value)?,
            b"uid" => self.uid = pax_number(value)?,
            b"gid" => self.gid = pax_number(value)?,
            b"mtime" => self.mtime = pax_time(value)?,
            _ if key.starts_with(b"GNU.sparse.") => {
                return Err("a sparse file in PAX format, which is not supported".into());
            }
            _ => {
                if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
                    add_xattr(&mut self.xattrs, name, value)?;
                }
            }
        }
        Ok(())
    }
}

/// Adds an extended attribute to those of a file, if it gets into the image (see [`is_kept`]).
pub(crate) fn add_xattr(
    xattrs: &mut BTreeMap<Vec<u8>, Vec<u8>>,
    name: &[u8],
    value: &[u8],
) -> Result<(), String> {
    if name.len() > MAX_XATTR_NAME || value.len() > MAX_XATTR || name.contains(&0) {
        return Err("an extended attribute that Linux would not take".into());
    }
    if is_kept(name) {
        xattrs.insert(name.to_vec(), value.to_vec());
    }
    check_attributes(xattrs.len())
}

/// Returns whether an attribute gets into the image. EROFS must be able to store it, which excludes
/// `com.apple.…` of images made on a Mac. Overlayfs's own attributes are excluded, since with them
/// a layer could redirect the guest's overlay.
pub(crate) fn is_kept(name: &[u8]) -> bool {
    let prefixes: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    let acl = name == b"system.posix_acl_access" || name == b"system.posix_acl_default";
    overlay_name(name).is_none()
        && (acl || prefixes.iter().any(|p| name.starts_with(p) && name.len() > p.len()))
}

/// Returns the name of one of overlayfs's attributes without its beginning, which the mount option
/// `userxattr` changes. Returns `None` for other attributes.
pub(crate) fn overlay_name(name: &[u8]) -> Option<&[u8]> {
    name.strip_prefix(b"trusted.overlay.").or_else(|| name.strip_prefix(b"user.overlay."))
}

fn pax_record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let blank = bytes.iter().take(20).position(|&b| b == b' ')?;
    let len: usize = std::str::from_utf8(&bytes[..blank]).ok()?.parse().ok()?;
    let record = bytes.get(blank + 1..len)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|&b| b == b'=')?;
    Some((&record[..equals], &record[equals + 1..], &bytes[len..]))
}

fn non_empty(value: &[u8]) -> Option<Vec<u8>> {
    (!value.is_empty()).then(|| value.to_vec())
}

fn pax_number<T: std::str::FromStr>(value: &[u8]) -> Result<Option<T>, String> {
    if value.is_empty() {
        return Ok(None);
    }
    let number = std::str::from_utf8(value).ok().and_then(|v| v.parse().ok());
    number.map(Some).ok_or_else(|| "a PAX header with a bad number".to_owned())
}

/// Parses the whole seconds of a PAX time such as `1700000000.25`. Times before the epoch become
/// the epoch.
fn pax_time(value: &[u8]) -> Result<Option<u64>, String> {
    match value.split(|&b| b == b'.').next() {
        Some(seconds) if seconds.starts_with(b"-") => Ok(Some(0)),
        seconds => pax_number(seconds.unwrap_or_default()),
    }
}
