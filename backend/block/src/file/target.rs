//! Copies of data to a new file, by system calls and in pieces of bounded size.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use slipway_ram::next_data;
use slipway_space::Allowance;

use super::open::failed;
use crate::OpenError;

/// Bytes that are read and written at a time.
const PIECE: usize = 256 << 10;
/// The bytes that are a hole of the copy if all of them are zeros.
const GRANULE: usize = 4096;
static ZEROS: [u8; GRANULE] = [0; GRANULE];

/// The file that gets a copy.
pub(crate) struct CopyTarget<'a> {
    file: &'a File,
    /// Its path, for errors.
    path: &'a Path,
    buffer: Vec<u8>,
    /// Set if the file had a name at first. A copy to a file that loses its name ends.
    named: bool,
    space: Allowance,
    /// The number of bytes that were written.
    pub written: u64,
}

impl<'a> CopyTarget<'a> {
    /// Gives `file`, which is empty and has this path, its size.
    ///
    /// # Errors
    /// [`OpenError::File`].
    pub fn new(file: &'a File, path: &'a Path, bytes: u64) -> Result<Self, OpenError> {
        file.set_len(bytes).map_err(failed(path, "set the size of"))?;
        let named = has_name(file).map_err(failed(path, "look at"))?;
        let space = Allowance::of(file).map_err(failed(path, "look at"))?;
        Ok(Self { file, path, buffer: vec![0; PIECE], named, space, written: 0 })
    }

    /// Copies the data in `bytes` of the file `from` to the same place. Its holes and
    /// zeros are holes of the copy. `path` is the path of `from`, for errors.
    ///
    /// # Errors
    /// [`OpenError::File`].
    pub fn copy_data(
        &mut self,
        (from, path): (&File, &Path),
        bytes: Range<u64>,
    ) -> Result<(), OpenError> {
        let unread = |error: io::Error| failed(path, "read")(error);
        let (mut at, end) = (bytes.start as usize, bytes.end as usize);
        while let Some(data) = next_data(from.as_fd(), at, end).map_err(unread)? {
            at = data.end;
            let data = data.start as u64..data.end as u64;
            self.copy((from, data.start), data, unread)?;
        }
        Ok(())
    }

    /// Writes `bytes` of the target, which `from` has from its offset `start` on, apart from zeros.
    /// `unread` makes an error of a failed read.
    ///
    /// # Errors
    /// The error that `unread` makes; [`OpenError::File`] if the target cannot be written, was
    /// removed, or would leave less of its file system free than it has to.
    pub fn copy(
        &mut self,
        (from, start): (&File, u64),
        bytes: Range<u64>,
        unread: impl Fn(io::Error) -> OpenError,
    ) -> Result<(), OpenError> {
        let mut at = bytes.start;
        while at < bytes.end {
            self.check_wanted()?;
            let len = (bytes.end - at).min(PIECE as u64);
            self.space.take(self.file, len).map_err(failed(self.path, "write"))?;
            let piece = &mut self.buffer[..len as usize];
            from.read_exact_at(piece, start + (at - bytes.start)).map_err(&unread)?;
            let written = write_data(self.file, piece, at);
            self.written += written.map_err(failed(self.path, "write"))?;
            at += len;
        }
        Ok(())
    }

    /// Checks that the file was not removed: a caller that gives up removes it, and a copy that
    /// went on would fill the file system with what nobody can see.
    fn check_wanted(&self) -> Result<(), OpenError> {
        match has_name(self.file) {
            Ok(false) if self.named => {
                let removed = io::Error::new(io::ErrorKind::NotFound, "it was removed meanwhile");
                Err(failed(self.path, "write")(removed))
            }
            _ => Ok(()),
        }
    }
}

/// Writes a piece to its place in a file that has a hole there. What is zeros stays a hole. Returns
/// the number of bytes that were written.
fn write_data(file: &File, piece: &[u8], at: u64) -> io::Result<u64> {
    let is_zeros = |granule: &[u8]| *granule == ZEROS[..granule.len()];
    let (mut start, mut written) = (0, 0);
    while start < piece.len() {
        let rest = &piece[start..];
        let zeros = is_zeros(&rest[..rest.len().min(GRANULE)]);
        let alike = rest.chunks(GRANULE).take_while(|granule| is_zeros(granule) == zeros);
        let len = alike.map(<[u8]>::len).sum::<usize>();
        if !zeros {
            file.write_all_at(&rest[..len], at + start as u64)?;
            written += len as u64;
        }
        start += len;
    }
    Ok(written)
}

fn has_name(file: &File) -> io::Result<bool> {
    Ok(file.metadata()?.nlink() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_to_a_file_that_was_removed_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("copy");
        let (from, to) = (tempfile::tempfile().unwrap(), File::create(&path).unwrap());
        from.write_all_at(&[7; 4096], 0).unwrap();
        let mut target = CopyTarget::new(&to, &path, 4096).unwrap();
        target.copy_data((&from, Path::new("from")), 0..2048).unwrap();
        std::fs::remove_file(&path).unwrap();
        let ended = target.copy_data((&from, Path::new("from")), 2048..4096).unwrap_err();
        assert!(ended.to_string().contains("was removed"), "{ended}");
        assert_eq!(target.written, 2048);
        // A file that never had a name is written.
        let unnamed = tempfile::tempfile().unwrap();
        let mut target = CopyTarget::new(&unnamed, &path, 4096).unwrap();
        target.copy_data((&from, Path::new("from")), 0..4096).unwrap();
        assert_eq!(target.written, 4096);
    }

    #[test]
    fn a_copy_leaves_a_part_of_its_disk_free() {
        let [from, to] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        from.write_all_at(&[7; 4096], 0).unwrap();
        let mut target = CopyTarget::new(&to, Path::new("to"), 4096).unwrap();
        target.space = Allowance::keeping(u64::MAX);
        let full = target.copy_data((&from, Path::new("from")), 0..4096).unwrap_err();
        assert!(full.to_string().contains("stay free"), "{full}");
        assert_eq!(target.written, 0);
    }

    #[test]
    fn zeros_are_holes_of_the_copy() {
        let [from, to] = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
        let mut content = vec![0; 2 * PIECE];
        // A granule by itself, two that lie in two pieces, and the last, which is short.
        content[GRANULE..2 * GRANULE].fill(1);
        content[PIECE - GRANULE..PIECE + GRANULE].fill(2);
        content.extend([0; 99]);
        content.push(3);
        from.write_all_at(&content, 0).unwrap();
        let bytes = content.len() as u64;
        let mut target = CopyTarget::new(&to, Path::new("to"), bytes).unwrap();
        target.copy_data((&from, Path::new("from")), 0..bytes).unwrap();
        assert_eq!(target.written, 3 * GRANULE as u64 + 100);
        let mut copied = vec![9; content.len()];
        to.read_exact_at(&mut copied, 0).unwrap();
        assert!(copied == content);
    }
}
