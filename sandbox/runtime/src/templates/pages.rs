//! Pages of memory in sparse files: holes and pages of zeros are passed over.
//!
//! A file's digest is made of the digests of its chunks, so that several threads can read and hash
//! one file. The digest of a chunk is SHA-256 of its pages that have bytes other than zeros, each
//! with its place before it. The digest of the file is SHA-256 of its length and of the chunks that
//! have such pages in their order, each with its place before its digest. Lengths and places are in
//! bytes, as 64 bits in little-endian order. So digests do not depend on what a file system makes
//! of zeros.

use std::fs::File;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::panic::resume_unwind;
use std::sync::Mutex;
use std::thread;

use rustix::fs::Advice;
use sha2::{Digest, Sha256};
use slipway_ram::next_data;

use crate::lock::lock;

/// The bytes that are read at once.
const PIECE: usize = 1 << 20;
/// A page, the unit in which memory is kept or left out.
const PAGE: usize = 4096;
/// The bytes of a chunk: whole pages. Digests depend on it.
const CHUNK: usize = 2 << 20;
/// The most threads that read and hash one file.
const MOST_THREADS: usize = 4;

/// A check, by each thread before each chunk, that the work is to go on. An error ends it.
type GoOn<'a> = &'a (dyn Fn() -> io::Result<()> + Sync);

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
    let (mut chunks, mut piece, mut all) = (Chunks::new(from, len)?, vec![0; PIECE], Vec::new());
    while let Some(chunk) = chunks.take_next()? {
        let copied = visit_chunk(from, &chunk, &mut piece, |at, page| {
            allow(page.len() as u64)?;
            to.write_all_at(page, at)
        });
        all.extend(copied?);
    }
    Ok(sum_up(len, &all))
}

/// Returns SHA-256 of `bytes`, in hexadecimal digits.
pub(crate) fn digest(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))
}

/// Returns the digest of the pages among the first `len` bytes of `file` that have bytes other than
/// zeros, in hexadecimal digits. The head of this module defines it. May take a while. Calls
/// `go_on` before each chunk; an error of it ends the work.
///
/// # Errors
/// The errors of reading, and of `go_on`.
pub(crate) fn digest_pages(file: &File, len: u64, go_on: GoOn<'_>) -> io::Result<String> {
    measure_by(file, len, threads(), go_on).map(|(_, digest)| digest)
}

/// Returns the number of bytes in the pages among the first `len` bytes of `file` that have bytes
/// other than zeros, and their [digest](digest_pages).
///
/// # Errors
/// The errors of reading.
pub(crate) fn measure_pages(file: &File, len: u64) -> io::Result<(u64, String)> {
    measure_by(file, len, threads(), &|| Ok(()))
}

/// Returns the number of threads that read and hash a file: half of the processors, at most
/// [`MOST_THREADS`]. Guests need the others.
fn threads() -> usize {
    let processors = thread::available_parallelism().map_or(1, NonZero::get);
    (processors / 2).clamp(1, MOST_THREADS)
}

/// Does what [`measure_pages`] does, with `threads` threads, of which the caller is one. `go_on` is
/// as for [`digest_pages`].
fn measure_by(file: &File, len: u64, threads: usize, go_on: GoOn<'_>) -> io::Result<(u64, String)> {
    let chunks = Mutex::new(Chunks::new(file, len)?);
    let measure = &|| measure_some(file, &chunks, go_on);
    let measured = thread::scope(|scope| {
        // Where no thread is left, those that there are measure all.
        let begin = |_: usize| {
            thread::Builder::new().name("pages".into()).spawn_scoped(scope, measure).ok()
        };
        let others: Vec<_> = (1..threads).filter_map(begin).collect();
        let mut all = measure()?;
        for other in others {
            all.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic))?);
        }
        Ok::<_, io::Error>(all)
    });
    let mut all = measured?;
    all.sort_unstable_by_key(|chunk| chunk.start);
    Ok(sum_up(len, &all))
}

/// Measures chunks until none is left. After an error no thread takes a further chunk.
fn measure_some(
    file: &File,
    chunks: &Mutex<Chunks<'_>>,
    go_on: GoOn<'_>,
) -> io::Result<Vec<MeasuredChunk>> {
    let take = || -> io::Result<Option<Range<usize>>> {
        go_on()?;
        let taken = lock(chunks).take_next()?;
        if let Some(chunk) = &taken {
            // The disk reads the chunk while this thread hashes the one before. A hint: without it
            // the chunk is read when it is needed.
            let (at, len) = (chunk.start as u64, NonZero::new(chunk.len() as u64));
            let _ = rustix::fs::fadvise(file, at, len, Advice::WillNeed);
        }
        Ok(taken)
    };
    let (mut piece, mut all, mut next) = (vec![0; PIECE], Vec::new(), take()?);
    while let Some(chunk) = next {
        next = take()?;
        let measured = visit_chunk(file, &chunk, &mut piece, |_, _| Ok(()));
        if measured.is_err() {
            lock(chunks).close();
        }
        all.extend(measured?);
    }
    Ok(all)
}

/// The chunks of a file, in their order, without those that are holes.
struct Chunks<'a> {
    file: &'a File,
    /// The place of the next chunk.
    at: usize,
    end: usize,
}

impl<'a> Chunks<'a> {
    /// Returns the chunks of the first `len` bytes of `file`.
    fn new(file: &'a File, len: u64) -> io::Result<Self> {
        Ok(Self { file, at: 0, end: usize::try_from(len).map_err(io::Error::other)? })
    }

    /// Takes the next chunk. Returns `None` if none is left.
    fn take_next(&mut self) -> io::Result<Option<Range<usize>>> {
        let Some(data) = next_data(self.file.as_fd(), self.at, self.end)? else {
            return Ok(None);
        };
        let start = data.start / CHUNK * CHUNK;
        self.at = (start + CHUNK).min(self.end);
        Ok(Some(start..self.at))
    }

    /// Leaves no chunk to be taken.
    fn close(&mut self) {
        self.at = self.end;
    }
}

/// A chunk that has bytes other than zeros.
struct MeasuredChunk {
    /// Its place in the file.
    start: u64,
    /// The bytes of its pages that are not zeros.
    bytes: u64,
    digest: [u8; 32],
}

/// Returns the bytes of these chunks, which are all those of a file of `len` bytes in their order,
/// and the file's digest.
fn sum_up(len: u64, chunks: &[MeasuredChunk]) -> (u64, String) {
    let mut hash = Sha256::new();
    hash.update(len.to_le_bytes());
    for chunk in chunks {
        hash.update(chunk.start.to_le_bytes());
        hash.update(chunk.digest);
    }
    let bytes = chunks.iter().map(|chunk| chunk.bytes).sum();
    (bytes, hex::encode(hash.finalize()))
}

/// Calls `each` as [`for_each_page`] does, and measures the chunk. Returns `None` if it has no page
/// with bytes other than zeros.
fn visit_chunk(
    file: &File,
    chunk: &Range<usize>,
    piece: &mut [u8],
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<Option<MeasuredChunk>> {
    let (mut hash, mut bytes) = (Sha256::new(), 0);
    for_each_page(file, chunk, piece, |at, page| {
        hash.update(at.to_le_bytes());
        hash.update(page);
        bytes += page.len() as u64;
        each(at, page)
    })?;
    let (start, digest) = (chunk.start as u64, hash.finalize().into());
    Ok((bytes > 0).then_some(MeasuredChunk { start, bytes, digest }))
}

/// Calls `each` for every page of a chunk that has bytes other than zeros, with its place, in their
/// order. Holes of the file are passed over. `piece` is room for the bytes that are read at once.
///
/// # Errors
/// The errors of reading, and of `each`.
fn for_each_page(
    file: &File,
    chunk: &Range<usize>,
    piece: &mut [u8],
    mut each: impl FnMut(u64, &[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let mut at = chunk.start;
    while let Some(data) = next_data(file.as_fd(), at, chunk.end)? {
        at = data.start / PAGE * PAGE;
        let most = (chunk.end - at).min(piece.len());
        let read = read_full(|into, at| file.read_at(into, at), &mut piece[..most], at as u64)?;
        for page in piece[..read].chunks(PAGE) {
            if page.iter().any(|byte| *byte != 0) {
                each(at as u64, page)?;
            }
            at += page.len();
        }
        if read < most {
            break;
        }
    }
    Ok(())
}

/// Reads with `read` from the place `at` on until `into` is full or the file has ended. Returns the
/// number of bytes. A network's file system, or one in user space, may answer each call with some
/// bytes alone, which are not to be taken for a page.
///
/// # Errors
/// The errors of `read`, except interruptions.
fn read_full(
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    into: &mut [u8],
    at: u64,
) -> io::Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match read(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::atomic::{AtomicUsize, Ordering};

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
        let digests = [&from, &to].map(|file| digest_pages(file, 4 * MIB, &|| Ok(())).unwrap());
        assert_eq!(digests, [digest.clone(), digest]);
        to.write_all_at(b"x", 3 * MIB).unwrap();
        assert_ne!(digests[0], digest_pages(&to, 4 * MIB, &|| Ok(())).unwrap());
    }

    #[test]
    fn each_page_with_bytes_is_visited_once() {
        let (file, mut places, mut starts) = (sparse(), Vec::new(), Vec::new());
        let mut chunks = Chunks::new(&file, 4 * MIB).unwrap();
        while let Some(chunk) = chunks.take_next().unwrap() {
            let visited = for_each_page(&file, &chunk, &mut [0; 3 * PAGE], |at, page| {
                assert_eq!(page.len(), PAGE);
                places.push(at / PAGE as u64);
                Ok(())
            });
            visited.unwrap();
            starts.push(chunk.start);
        }
        assert_eq!((places, starts), (vec![0, 511, 512, 513, 514], vec![0, CHUNK]));
    }

    #[test]
    fn a_read_of_some_bytes_is_no_page() {
        let mut calls = 0;
        let mut some = |into: &mut [u8], at: u64| -> io::Result<usize> {
            calls += 1;
            match at {
                _ if calls % 3 == 0 => Err(io::ErrorKind::Interrupted.into()),
                ..5000 => {
                    let count = into.len().min(700).min((5000 - at) as usize);
                    into[..count].fill(at.to_le_bytes()[0] | 1);
                    Ok(count)
                }
                _ => Ok(0),
            }
        };
        let mut piece = [0; 2 * PAGE];
        assert_eq!(read_full(&mut some, &mut piece, 0).unwrap(), 5000, "up to the end");
        assert!(piece[..5000].iter().all(|byte| *byte != 0) && piece[5000..] == [0; 3192]);
        assert_eq!(read_full(&mut some, &mut piece[..PAGE], 100).unwrap(), PAGE);
        let failed = read_full(|_, _| Err(io::ErrorKind::Other.into()), &mut piece, 0);
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::Other);
    }

    #[test]
    fn the_number_of_threads_changes_no_digest() {
        let file = sparse();
        let len = 64 * MIB;
        file.set_len(len).unwrap();
        for number in [7u8, 8, 9, 20, 31] {
            file.write_all_at(&[number; PAGE], u64::from(number) * CHUNK as u64).unwrap();
        }
        // Its only chunk between two holes has zeros alone.
        file.write_all_at(&[0; PAGE], 13 * CHUNK as u64).unwrap();
        let one = measure_by(&file, len, 1, &|| Ok(())).unwrap();
        assert_eq!(one.0, 10 * PAGE as u64);
        for threads in [2, 4, 50] {
            assert_eq!(measure_by(&file, len, threads, &|| Ok(())).unwrap(), one);
        }
        let to = tempfile::tempfile().unwrap();
        to.set_len(len).unwrap();
        assert_eq!(copy_pages(&file, len, &to).unwrap(), one);
    }

    #[test]
    fn the_place_of_a_page_and_the_length_are_part_of_the_digest() {
        let digest = |at: usize, len: u64| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(len).unwrap();
            file.write_all_at(b"page", at as u64).unwrap();
            digest_pages(&file, len, &|| Ok(())).unwrap()
        };
        let len = 8 * MIB;
        assert_eq!(digest(PAGE, len), digest(PAGE, len));
        let others = [digest(0, len), digest(CHUNK + PAGE, len), digest(PAGE, 2 * len)];
        assert!(others.iter().all(|other| *other != digest(PAGE, len)));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_an_error_of_all_threads() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        let only_written = File::create(&path).unwrap();
        only_written.write_all_at(&[1; PAGE], 0).unwrap();
        for threads in [1, 3] {
            assert!(measure_by(&only_written, PAGE as u64, threads, &|| Ok(())).is_err());
        }
    }

    #[test]
    fn no_chunk_is_read_once_the_work_is_not_to_go_on() {
        let (file, asked) = (sparse(), AtomicUsize::new(0));
        let stop = || match asked.fetch_add(1, Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(io::Error::other("stopped")),
        };
        let stopped = measure_by(&file, 4 * MIB, 1, &stop).unwrap_err();
        assert_eq!((stopped.to_string().as_str(), asked.into_inner()), ("stopped", 2));
        assert!(digest_pages(&file, 4 * MIB, &|| Err(io::Error::other("stopped"))).is_err());
    }
}
