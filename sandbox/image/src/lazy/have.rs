//! The presence bitmap of a lazily pulled image: one bit for each span that its file has, in a file
//! of the run directory.
//!
//! A bit is written after the data of its span, so a fetcher that is killed loses nothing but what
//! it was about to write. The head of the file names the map and the boot that the bits belong to,
//! so no bit outlives data that the kernel had not written to the disk. For another map there is a
//! new file, and a process that still fetches for the old map writes to the old one.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use crate::Digest;

const MAGIC: [u8; 8] = *b"sliphave";
const VERSION: u64 = 1;
/// The bytes of the head: magic, version, number of spans, and the map's identity.
const HEAD: usize = 56;

/// One bit for each span of an image.
#[derive(Debug)]
pub(crate) struct SpanBitmap {
    file: Option<File>,
    bits: Vec<u8>,
    count: usize,
    missing: usize,
}

impl SpanBitmap {
    /// Opens the bitmap at `path`, of the map with this identity and `count` spans. Begins with
    /// zeros if the file is missing, of another map or damaged.
    ///
    /// # Errors
    /// The file cannot be opened, read or written.
    pub(crate) fn open(path: &Path, map: &Digest, count: usize) -> io::Result<Self> {
        let (file, bits) = match open_or_begin(path, map, count) {
            // Another process has removed or made the file meanwhile.
            Err(e)
                if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::AlreadyExists) =>
            {
                open_or_begin(path, map, count)?
            }
            opened => opened?,
        };
        Ok(Self::of(Some(file), bits, count))
    }

    /// Reads the bitmap at `path` as [`open`](Self::open) does, and changes nothing.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read(path: &Path, map: &Digest, count: usize) -> io::Result<Self> {
        let bits = match File::open(path) {
            Ok(file) => read_bits(&file, map, count)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        Ok(Self::of(None, bits.unwrap_or_else(|| zeros(count)), count))
    }

    /// Makes a bitmap in memory alone, all zero.
    pub(crate) fn in_memory(count: usize) -> Self {
        Self::of(None, zeros(count), count)
    }

    /// Makes a bitmap of these bits. `file` gets the bits that are set later.
    fn of(file: Option<File>, mut bits: Vec<u8>, count: usize) -> Self {
        // Bits beyond the last span stand for none.
        if let Some(last) = bits.last_mut()
            && !count.is_multiple_of(8)
        {
            *last &= (1 << (count % 8)) - 1;
        }
        let set: usize = bits.iter().map(|byte| byte.count_ones() as usize).sum();
        Self { file, bits, count, missing: count - set }
    }

    /// Returns whether the file has the span.
    pub(crate) fn has(&self, span: usize) -> bool {
        self.bits.get(span / 8).is_some_and(|byte| byte & (1 << (span % 8)) != 0)
    }

    /// Returns the number of spans that are missing.
    pub(crate) fn missing(&self) -> usize {
        self.missing
    }

    /// Marks a span as written.
    pub(crate) fn set(&mut self, span: usize) {
        if span >= self.count || self.has(span) {
            return;
        }
        self.missing -= 1;
        let at = span / 8;
        self.bits[at] |= 1 << (span % 8);
        if let Some(file) = &self.file {
            // A bit that is lost costs a request of the next fetcher, no more.
            let _ = file.write_all_at(&self.bits[at..=at], (HEAD + at) as u64);
        }
    }

    /// Returns the first missing span from `from` on. Returns `None` if there is none.
    pub(crate) fn missing_from(&self, from: usize) -> Option<usize> {
        let mut at = from;
        while at < self.count {
            match at.is_multiple_of(8) && self.bits[at / 8] == u8::MAX {
                true => at += 8,
                false if self.has(at) => at += 1,
                false => return Some(at),
            }
        }
        None
    }

    /// Returns the last missing span before `before`. Returns `None` if there is none.
    pub(crate) fn missing_before(&self, before: usize) -> Option<usize> {
        let mut end = before.min(self.count);
        while end > 0 {
            match end.is_multiple_of(8) && self.bits[end / 8 - 1] == u8::MAX {
                true => end -= 8,
                false if self.has(end - 1) => end -= 1,
                false => return Some(end - 1),
            }
        }
        None
    }
}

fn zeros(count: usize) -> Vec<u8> {
    vec![0; count.div_ceil(8)]
}

fn head(map: &Digest, count: usize) -> Vec<u8> {
    let numbers = [VERSION, count as u64].map(u64::to_le_bytes);
    [&MAGIC[..], &numbers[0], &numbers[1], &map.bytes()].concat()
}

/// Returns the bits of the bitmap in `file`. Returns `None` if it is of another map, or not whole.
fn read_bits(file: &File, map: &Digest, count: usize) -> io::Result<Option<Vec<u8>>> {
    let mut bits = zeros(count);
    if file.metadata()?.len() != (HEAD + bits.len()) as u64 {
        return Ok(None);
    }
    let mut found = [0; HEAD];
    file.read_exact_at(&mut found, 0)?;
    if found[..] != head(map, count) {
        return Ok(None);
    }
    file.read_exact_at(&mut bits, HEAD as u64)?;
    Ok(Some(bits))
}

/// Opens the file at `path` if it is of this map. Otherwise removes it, and makes a new one.
fn open_or_begin(path: &Path, map: &Digest, count: usize) -> io::Result<(File, Vec<u8>)> {
    match File::options().read(true).write(true).open(path) {
        Ok(file) => match read_bits(&file, map, count)? {
            Some(bits) => return Ok((file, bits)),
            None => std::fs::remove_file(path)?,
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    begin(path, map, count)
}

/// Makes a file of a head and zeros, where none is.
fn begin(path: &Path, map: &Digest, count: usize) -> io::Result<(File, Vec<u8>)> {
    let bits = zeros(count);
    let file = File::options().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all_at(&[head(map, count), bits.clone()].concat(), 0)?;
    Ok((file, bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_outlive_their_process_and_no_map() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.have");
        let (one, other) = (Digest::of(b"1"), Digest::of(b"2"));
        let mut have = SpanBitmap::open(&path, &one, 20).unwrap();
        assert_eq!(have.missing(), 20);
        for span in [0, 7, 8, 19, 19, 20, 1000] {
            have.set(span);
        }
        drop(have);
        let have = SpanBitmap::open(&path, &one, 20).unwrap();
        assert_eq!(have.missing(), 16);
        assert!([0, 7, 8, 19].into_iter().all(|span| have.has(span)));
        assert!(!have.has(1) && !have.has(20) && !have.has(1000));
        assert_eq!(SpanBitmap::read(&path, &one, 20).unwrap().missing(), 16);
        assert_eq!(SpanBitmap::read(&path, &other, 20).unwrap().missing(), 20);
        assert_eq!(SpanBitmap::read(&path, &one, 21).unwrap().missing(), 21);
        assert_eq!(SpanBitmap::read(&dir.path().join("none"), &one, 3).unwrap().missing(), 3);
        let mut stale = have;
        assert_eq!(SpanBitmap::open(&path, &other, 20).unwrap().missing(), 20);
        stale.set(1);
        assert_eq!(SpanBitmap::open(&path, &other, 20).unwrap().missing(), 20, "of the old map");
        assert_eq!(
            SpanBitmap::open(&path, &one, 20).unwrap().missing(),
            20,
            "the other map took it"
        );
    }

    #[test]
    fn a_damaged_file_counts_as_empty() {
        let dir = tempfile::tempdir().unwrap();
        let (path, map) = (dir.path().join("x.have"), Digest::of(b"1"));
        let fill = || (0..20).for_each(|span| SpanBitmap::open(&path, &map, 20).unwrap().set(span));
        fill();
        let whole = std::fs::read(&path).unwrap();
        let cut = whole[..whole.len() - 1].to_vec();
        let long = [&whole[..], &[0]].concat();
        let mut version = whole.clone();
        version[8] = 2;
        for bytes in [cut, long, version, Vec::new()] {
            std::fs::write(&path, bytes).unwrap();
            assert_eq!(SpanBitmap::open(&path, &map, 20).unwrap().missing(), 20);
        }
        // Bits beyond the last span are not counted.
        fill();
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() = 0xff;
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(SpanBitmap::open(&path, &map, 20).unwrap().missing(), 0);
    }

    #[test]
    fn missing_spans_are_found_from_both_sides() {
        let mut have = SpanBitmap::in_memory(40);
        (0..40).filter(|span| ![3, 24].contains(span)).for_each(|span| have.set(span));
        assert_eq!((have.missing_from(0), have.missing_from(4)), (Some(3), Some(24)));
        assert_eq!((have.missing_from(24), have.missing_from(25)), (Some(24), None));
        assert_eq!((have.missing_before(40), have.missing_before(24)), (Some(24), Some(3)));
        assert_eq!((have.missing_before(3), have.missing_before(1000)), (None, Some(24)));
    }
}
