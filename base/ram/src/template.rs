//! The bytes with which memory of forks begins.
//!
//! A [`Template`] is a memfd that nobody can change: it is sealed against writing, shrinking and
//! growing. So a mapping of it loses no page, and its bytes are the same for every fork. It has
//! pages only where the memory that it was made of was not zeros; the other parts are holes.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, SeekFrom};
use rustix::io::Errno;

use crate::{Mapping, Permissions, pages};

/// The bytes that are read at once to make a template.
const CHUNK: usize = 256 << 10;
/// A page of zeros.
static ZEROS: [u8; Template::GRANULE] = [0; Template::GRANULE];
/// The seals of a template.
const SEALS: SealFlags = SealFlags::WRITE.union(SealFlags::SHRINK).union(SealFlags::GROW);

/// Bytes of memory that do not change, and of which many memories begin as copies
/// ([`LateMemory::fork`](crate::LateMemory::fork)). Dropping it gives its pages to the kernel.
pub struct Template {
    file: OwnedFd,
    mapping: Mapping,
    /// The parts that are not holes: whole granules, ascending.
    data: Vec<Range<usize>>,
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Template({} of {} bytes)", self.held(), self.len())
    }
}

impl Template {
    /// The size in bytes of the parts that are copied as a whole: a page.
    pub const GRANULE: usize = 4096;

    /// Takes a memfd that is a template already: one that a predecessor made.
    ///
    /// # Errors
    /// `InvalidData` if the file is not sealed against writing, shrinking and growing;
    /// `InvalidInput` if its size is 0 or no multiple of [`Template::GRANULE`]; errors of lseek(2)
    /// and of [`Mapping::file`].
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let sealed = rustix::fs::fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        if !sealed {
            let text = "a template is a memfd that nobody can change";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        let len = checked(rustix::fs::fstat(&file)?.st_size)?;
        let mapping = Mapping::file(file.as_fd(), 0, len, Permissions::READ_ONLY, pages::own())?;
        let (mut data, mut at) = (Vec::new(), 0);
        while let Some(part) = next_data(file.as_fd(), at, len)? {
            // A page of a file in memory is in it as a whole.
            at = part.end;
            data.push(part.start / Self::GRANULE * Self::GRANULE..part.end);
        }
        Ok(Self { file, mapping, data })
    }

    /// Copies `file`, a regular file or one in memory which nobody changes meanwhile: memory of a
    /// VM that does not run, or what [`Template::write`] wrote. Pages of zeros become holes. The
    /// calling thread waits for the file, and moves its offset.
    ///
    /// A file that may have an earlier user's bytes is memory of a pool, whose template
    /// [`LateFiles::template`](crate::LateFiles::template) makes.
    ///
    /// # Errors
    /// `InvalidInput` if the file's size is 0 or no multiple of [`Template::GRANULE`];
    /// `UnexpectedEof` if it shrinks meanwhile; errors of reading, and of making a memfd.
    pub fn copy_of(file: BorrowedFd<'_>) -> io::Result<Self> {
        let len = checked(rustix::fs::fstat(file)?.st_size)?;
        Self::of_parts(len, [(0..len, Some(file))].into_iter())
    }

    /// Makes a template of `len` bytes from parts of files that are the same bytes there, or of
    /// zeros where there is no file.
    pub(crate) fn of_parts<'a>(
        len: usize,
        parts: impl Iterator<Item = (Range<usize>, Option<BorrowedFd<'a>>)>,
    ) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("slipway-template", flags)?;
        rustix::fs::ftruncate(&file, len as u64)?;
        let mut buffer = vec![0; CHUNK];
        for (part, from) in joined(parts) {
            if let Some(from) = from {
                copy(from, part, file.as_fd(), &mut buffer)?;
            }
        }
        rustix::fs::fcntl_add_seals(&file, SEALS.union(SealFlags::SEAL))?;
        Self::new(file)
    }

    /// Writes the bytes to `file`, a new and empty regular file, with holes where the template has
    /// them. The calling thread waits for the disk; the file is not synchronised.
    ///
    /// # Errors
    /// The errors of ftruncate(2) and pwrite(2).
    pub fn write(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        rustix::fs::ftruncate(file, self.len() as u64)?;
        let mut buffer = vec![0; CHUNK];
        let mut data = self.data.iter();
        data.try_for_each(|part| copy(self.file(), part.clone(), file, &mut buffer))
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Returns whether the size is 0, which it never is.
    pub fn is_empty(&self) -> bool {
        self.mapping.is_empty()
    }

    /// Returns the parts that are not holes: whole granules, ascending.
    pub fn data(&self) -> &[Range<usize>] {
        &self.data
    }

    /// Returns the number of bytes that are not in holes: the memory that the template takes.
    pub fn held(&self) -> usize {
        self.data.iter().map(Range::len).sum()
    }

    /// Returns the file.
    pub fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Copies the bytes from `offset` on into `into`. The kernel makes a page for a hole that is
    /// read. Returns `false` for bytes beyond the end.
    pub(crate) fn read(&self, offset: usize, into: &mut [u8]) -> bool {
        let within = offset.checked_add(into.len()).is_some_and(|end| end <= self.len());
        within && self.mapping.read(offset, into)
    }

    /// Writes a part of the bytes to the same place of `file`, whose pages are made thereby. Each
    /// page is in the file with all of its bytes or not at all. Returns `false` if the host has no
    /// memory left.
    pub(crate) fn write_to(&self, file: BorrowedFd<'_>, part: Range<usize>) -> bool {
        let mut at = part.start;
        while at < part.end {
            let from = self.mapping.address(at, part.end - at);
            let Ok(offset) = libc::off_t::try_from(at) else { return false };
            // The call waits for holes that the file's user makes, as a page fault there does.
            slipway_peer::waits::note();
            // SAFETY: the range is within the mapping, whose file no process can change; the kernel
            // reads it during the call.
            let written =
                unsafe { libc::pwrite(file.as_raw_fd(), from.cast(), part.end - at, offset) };
            match written {
                1.. => at += written.unsigned_abs(),
                0 => return false,
                _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => return false,
            }
        }
        true
    }
}

/// Returns the size of a template, which must be positive and whole granules.
fn checked(size: i64) -> io::Result<usize> {
    match usize::try_from(size) {
        Ok(size) if size > 0 && size.is_multiple_of(Template::GRANULE) => Ok(size),
        _ => {
            let text = format!("{size} bytes: a template has whole pages of 4 KiB");
            Err(io::Error::new(io::ErrorKind::InvalidInput, text))
        }
    }
}

/// Joins parts that follow each other in the same file.
fn joined<'a>(
    parts: impl Iterator<Item = (Range<usize>, Option<BorrowedFd<'a>>)>,
) -> impl Iterator<Item = (Range<usize>, Option<BorrowedFd<'a>>)> {
    let mut parts = parts.peekable();
    let number = |file: &Option<BorrowedFd<'_>>| file.map(|file| file.as_raw_fd());
    std::iter::from_fn(move || {
        let (mut part, file) = parts.next()?;
        let follows =
            |next: &(Range<usize>, Option<BorrowedFd<'_>>)| number(&next.1) == number(&file);
        while let Some((next, _)) = parts.next_if(follows) {
            part.end = next.end;
        }
        Some((part, file))
    })
}

/// Returns the next part of `at..end` that is no hole of the file, or `None` if there is none.
///
/// # Errors
/// The errors of lseek(2). The call moves the file's offset.
pub fn next_data(file: BorrowedFd<'_>, at: usize, end: usize) -> io::Result<Option<Range<usize>>> {
    if at >= end {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(at as u64)) {
        Err(Errno::NXIO) => return Ok(None),
        other => other? as usize,
    };
    let stop = match rustix::fs::seek(file, SeekFrom::Hole(start as u64)) {
        // The file has shrunk since, or the part ends with it.
        Err(Errno::NXIO) => end,
        other => other? as usize,
    };
    Ok((start < end).then(|| start..stop.min(end)))
}

/// Copies a part of a file to the same place of another, without holes and pages of zeros.
fn copy(
    from: BorrowedFd<'_>,
    part: Range<usize>,
    to: BorrowedFd<'_>,
    buffer: &mut [u8],
) -> io::Result<()> {
    let mut at = part.start;
    while let Some(data) = next_data(from, at, part.end)? {
        // Whole pages, of which the rest is a hole.
        at = data.start / Template::GRANULE * Template::GRANULE;
        let end = data.end.next_multiple_of(Template::GRANULE).min(part.end);
        while at < end {
            let count = buffer.len().min(end - at);
            let chunk = buffer.get_mut(..count).unwrap_or_default();
            read_whole(from, at, chunk)?;
            for run in data_runs(chunk) {
                let start = at + run.start;
                write_whole(to, start, chunk.get(run).unwrap_or_default())?;
            }
            at += count;
        }
    }
    Ok(())
}

/// Returns the runs of pages in `chunk` that have bytes other than zeros, each to be written by one
/// call.
fn data_runs(chunk: &[u8]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (number, page) in chunk.chunks(Template::GRANULE).enumerate() {
        if page == ZEROS.get(..page.len()).unwrap_or_default() {
            continue;
        }
        let start = number * Template::GRANULE;
        match runs.last_mut() {
            Some(last) if last.end == start => last.end += page.len(),
            _ => runs.push(start..start + page.len()),
        }
    }
    runs
}

fn read_whole(file: BorrowedFd<'_>, at: usize, into: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match rustix::io::pread(file, rest, (at + done) as u64) {
            Err(Errno::INTR) => {}
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            other => done += other?,
        }
    }
    Ok(())
}

fn write_whole(file: BorrowedFd<'_>, at: usize, from: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while let Some(rest) = from.get(done..).filter(|rest| !rest.is_empty()) {
        match rustix::io::pwrite(file, rest, (at + done) as u64) {
            Err(Errno::INTR) => {}
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            other => done += other?,
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "template_tests.rs"]
mod tests;
