//! Pages of memory in sparse files: holes and pages of zeros are passed over.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use sha2::{Digest, Sha256};
use slipway_ram::next_data;

/// The bytes that are read at once.
const PIECE: usize = 1 << 20;
/// A page, the unit in which memory is kept or left out.
const PAGE: usize = 4096;

/// Copies the pages among the first `len` bytes of `from` that have bytes other than zeros to the
/// same places of `to`. Returns the number of bytes that were copied, and their
/// [digest](digest_pages).
///
/// # Errors
/// The errors of reading and writing.
pub(crate) fn copy_pages(from: &File, len: u64, to: &File) -> io::Result<(u64, String)> {
    copy_pages_if(from, len, to, |_| Ok(()))
}

/// Copies pages as [`copy_pages`] does. Calls `allow` with the number of a page's bytes before each
/// page is written. An error of `allow` ends the copy.
///
/// # Errors
/// The errors of reading and writing, and of `allow`.
pub(crate) fn copy_pages_if(
    from: &File,
    len: u64,
    to: &File,
    mut allow: impl FnMut(u64) -> io::Result<()>,
) -> io::Result<(u64, String)> {
    let mut copied = 0;
    let digest = visit(from, len, |at, page| {
        allow(page.len() as u64)?;
        copied += page.len() as u64;
        to.write_all_at(page, at)
    })?;
    Ok((copied, digest))
}

/// Calls `each` for every page among the first `len` bytes of `file` that has bytes other than
/// zeros, with its place, in their order. Holes of the file are passed over.
///
/// # Errors
/// The errors of reading, and of `each`.
fn for_each_page(
    file: &File,
    len: u64,
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let end = usize::try_from(len).map_err(io::Error::other)?;
    let (mut at, mut piece) = (0, vec![0; PIECE]);
    while let Some(data) = next_data(file.as_fd(), at, end)? {
        at = data.start / PAGE * PAGE;
        let most = (end - at).min(PIECE);
        let read = file.read_at(&mut piece[..most], at as u64)?;
        if read == 0 {
            break;
        }
        for page in piece[..read].chunks(PAGE) {
            if page.iter().any(|byte| *byte != 0) {
                each(at as u64, page)?;
            }
            at += page.len();
        }
    }
    Ok(())
}

/// Returns SHA-256 of `bytes`, in hexadecimal digits.
pub(crate) fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Returns SHA-256 of the pages of `file` that have bytes other than zeros, each with its place
/// before it, in hexadecimal digits. So the digest does not depend on what a file system makes of
/// zeros.
///
/// # Errors
/// The errors of reading.
pub(crate) fn digest_pages(file: &File, len: u64) -> io::Result<String> {
    visit(file, len, |_, _| Ok(()))
}

/// Returns the number of bytes in the pages among the first `len` bytes of `file` that have bytes
/// other than zeros, and their [digest](digest_pages).
///
/// # Errors
/// The errors of reading.
pub(crate) fn measure_pages(file: &File, len: u64) -> io::Result<(u64, String)> {
    let mut bytes = 0;
    let digest = visit(file, len, |_, page| {
        bytes += page.len() as u64;
        Ok(())
    })?;
    Ok((bytes, digest))
}

/// Calls `each` as [`for_each_page`] does, and returns the digest of the pages.
fn visit(
    file: &File,
    len: u64,
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<String> {
    let mut hash = Sha256::new();
    hash.update(len.to_le_bytes());
    for_each_page(file, len, |at, page| {
        hash.update(at.to_le_bytes());
        hash.update(page);
        each(at, page)
    })?;
    Ok(hex::encode(hash.finalize()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn sparse() -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4 * MIB).unwrap();
        file.write_all_at(b"first", 100).unwrap();
        file.write_all_at(&[7; 3 * PAGE], 2 * MIB - 8).unwrap();
        // Zeros that take memory are as good as a hole.
        file.write_all_at(&[0; PAGE], 3 * MIB).unwrap();
        file
    }

    #[test]
    fn memory_is_copied_with_its_holes() {
        let (from, to) = (sparse(), tempfile::tempfile().unwrap());
        to.set_len(4 * MIB).unwrap();
        let (copied, digest) = copy_pages(&from, 4 * MIB, &to).unwrap();
        assert_eq!(copied, 5 * PAGE as u64);
        let (mut one, mut two) = (vec![0; 4 << 20], vec![0; 4 << 20]);
        from.read_exact_at(&mut one, 0).unwrap();
        to.read_exact_at(&mut two, 0).unwrap();
        assert!(one == two);
        assert!(to.metadata().unwrap().blocks() * 512 < MIB);
        assert_eq!(measure_pages(&from, 4 * MIB).unwrap(), (copied, digest.clone()));
        let digests = [&from, &to].map(|file| digest_pages(file, 4 * MIB).unwrap());
        assert_eq!(digests, [digest.clone(), digest]);
        to.write_all_at(b"x", 3 * MIB).unwrap();
        assert_ne!(digests[0], digest_pages(&to, 4 * MIB).unwrap());
    }

    #[test]
    fn each_page_with_bytes_is_visited_once() {
        let mut places = Vec::new();
        let visited = for_each_page(&sparse(), 4 * MIB, |at, page| {
            assert_eq!(page.len(), PAGE);
            places.push(at / PAGE as u64);
            Ok(())
        });
        visited.unwrap();
        assert_eq!(places, [0, 511, 512, 513, 514]);
    }
}
