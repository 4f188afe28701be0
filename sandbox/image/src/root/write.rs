//! A writer of tar archives: ustar headers, and PAX headers for values that do not fit.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Seek, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use tar::{EntryType, Header};

use super::tree::Meta;
use crate::digest::DigestWriter;

const BLOCK: u64 = 512;
/// Bytes that are read and written at once.
const CHUNK: usize = 256 << 10;
/// The least bytes of a hole that is kept: each costs a write of what is before it.
const LEAST_HOLE: u64 = 64 << 10;
/// The largest number in the seven octal digits of a ustar id.
const MAX_OCTAL_ID: u32 = 0o7_777_777;
/// The largest size in the eleven octal digits of a ustar size.
const MAX_OCTAL_SIZE: u64 = 0o77_777_777_777;
static ZEROS: [u8; 2 * BLOCK as usize] = [0; 2 * BLOCK as usize];

/// A writer of single tar entries.
pub(crate) struct TarWriter<W> {
    out: W,
    buffer: Vec<u8>,
}

impl<W: Write> TarWriter<W> {
    pub(crate) fn new(out: W) -> Self {
        Self { out, buffer: vec![0; CHUNK] }
    }

    /// Writes the two zero blocks at an archive's end.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        self.out.write_all(&ZEROS)?;
        self.out.flush()
    }

    /// Writes the header of an entry. The caller must write `size` bytes of data and call
    /// [`pad`](Self::pad).
    pub(crate) fn entry(
        &mut self,
        path: &[u8],
        meta: &Meta,
        kind: EntryType,
        link: &[u8],
        size: u64,
    ) -> io::Result<()> {
        let header = header(path, meta, kind, link, size);
        self.put(path, meta, link, size, header)
    }

    /// Writes a device with its major and minor number.
    pub(crate) fn device(
        &mut self,
        path: &[u8],
        meta: &Meta,
        kind: EntryType,
        (major, minor): (u32, u32),
    ) -> io::Result<()> {
        let mut header = header(path, meta, kind, b"", 0);
        header.set_device_major(major)?;
        header.set_device_minor(minor)?;
        self.put(path, meta, b"", 0, header)
    }

    fn put(
        &mut self,
        path: &[u8],
        meta: &Meta,
        link: &[u8],
        size: u64,
        mut header: Header,
    ) -> io::Result<()> {
        let pax = pax_records(path, meta, link, size);
        if !pax.is_empty() {
            let plain = Meta { mode: 0o644, ..Meta::default() };
            let len = pax.len() as u64;
            let mut pax_header =
                self::header(b"PaxHeaders/entry", &plain, EntryType::XHeader, b"", len);
            pax_header.set_cksum();
            self.out.write_all(pax_header.as_bytes())?;
            self.out.write_all(&pax)?;
            self.pad(len)?;
        }
        header.set_cksum();
        self.out.write_all(header.as_bytes())
    }

    /// Copies `len` bytes of `file`, beginning at `from`.
    pub(crate) fn copy(&mut self, file: &File, mut from: u64, len: u64) -> io::Result<()> {
        let end = from + len;
        while from < end {
            let n = CHUNK.min(usize::try_from(end - from).unwrap_or(CHUNK));
            file.read_exact_at(&mut self.buffer[..n], from)?;
            self.out.write_all(&self.buffer[..n])?;
            from += n as u64;
        }
        Ok(())
    }

    /// Pads `size` bytes of data to a whole block.
    pub(crate) fn pad(&mut self, size: u64) -> io::Result<()> {
        let rest = (BLOCK - size % BLOCK) % BLOCK;
        self.out.write_all(&ZEROS[..rest as usize])
    }
}

impl<W: Write + Seek> TarWriter<&mut DigestWriter<W>> {
    /// Copies the first `len` bytes of `file`. Holes of `file` become holes of the archive.
    pub(crate) fn copy_sparse(&mut self, file: &File, len: u64) -> io::Result<()> {
        let mut at = 0;
        while at < len {
            let data = data_after(file, at, len);
            self.out.zeros(data.start - at)?;
            self.copy(file, data.start, data.end - data.start)?;
            at = data.end;
        }
        Ok(())
    }
}

/// Returns the next part of a file with data between `at` and `end`, or an empty one at `end` if
/// there is none. It ends after `at`. A hole of less than [`LEAST_HOLE`] before it is a part of it.
fn data_after(file: &File, at: u64, end: u64) -> Range<u64> {
    let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) => data.clamp(at, end),
        Err(Errno::NXIO) => end,
        // The file system does not know its files' holes.
        Err(_) => return at..end,
    };
    let start = if data - at < LEAST_HOLE { at } else { data };
    if data == end {
        return start..end;
    }
    match rustix::fs::seek(file, SeekFrom::Hole(data)) {
        Ok(hole) if hole > data => start..hole.min(end),
        _ => at..end,
    }
}

/// Makes a ustar header without its checksum. Values that do not fit are cut here and complete in
/// the PAX header.
fn header(path: &[u8], meta: &Meta, kind: EntryType, link: &[u8], size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(u32::from(meta.mode));
    header.set_uid(u64::from(if meta.uid > MAX_OCTAL_ID { 0 } else { meta.uid }));
    header.set_gid(u64::from(if meta.gid > MAX_OCTAL_ID { 0 } else { meta.gid }));
    header.set_size(if size > MAX_OCTAL_SIZE { 0 } else { size });
    header.set_mtime(if meta.mtime > MAX_OCTAL_SIZE { 0 } else { meta.mtime });
    let old = header.as_old_mut();
    copy_cut(&mut old.name, path);
    copy_cut(&mut old.linkname, link);
    header
}

fn copy_cut(to: &mut [u8], from: &[u8]) {
    let n = to.len().min(from.len());
    to[..n].copy_from_slice(&from[..n]);
}

fn pax_records(path: &[u8], meta: &Meta, link: &[u8], size: u64) -> Vec<u8> {
    let mut out = Vec::new();
    let mut records: BTreeMap<&str, Vec<u8>> = BTreeMap::new();
    // Some readers fail on a field without a terminating NUL, so 100 bytes go to PAX, too.
    if path.len() > 99 {
        records.insert("path", path.to_vec());
    }
    if link.len() > 99 {
        records.insert("linkpath", link.to_vec());
    }
    let numbers = [
        ("uid", u64::from(meta.uid), u64::from(MAX_OCTAL_ID)),
        ("gid", u64::from(meta.gid), u64::from(MAX_OCTAL_ID)),
        ("size", size, MAX_OCTAL_SIZE),
        ("mtime", meta.mtime, MAX_OCTAL_SIZE),
    ];
    for (key, value, max) in numbers {
        if value > max {
            records.insert(key, value.to_string().into_bytes());
        }
    }
    for (key, value) in &records {
        pax_record(&mut out, key.as_bytes(), value);
    }
    for (name, value) in &meta.xattrs {
        pax_record(&mut out, &[b"SCHILY.xattr.", name.as_slice()].concat(), value);
    }
    out
}

/// Appends `LENGTH KEY=VALUE\n`, where the length counts its own digits.
fn pax_record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + 1;
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    out.extend_from_slice(format!("{len} ").as_bytes());
    out.extend_from_slice(key);
    out.push(b'=');
    out.extend_from_slice(value);
    out.push(b'\n');
}
