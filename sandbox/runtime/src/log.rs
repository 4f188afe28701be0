//! A container's kept output: records of (stream, time, bytes) in two files that take turns, so
//! that it never takes more than its limit.
//!
//! Record: stream (1 byte), time (8 bytes, little-endian, ns since the epoch), length (4 bytes,
//! little-endian), data.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

use crate::time::realtime_ns;

/// Most bytes of data in a record that a reader accepts.
const MOST_DATA: u32 = 1 << 20;
const HEADER: usize = 13;

/// Which standard stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stream {
    /// Standard output, or the terminal.
    Out = 1,
    /// Standard error.
    Err = 2,
}

/// One piece of output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Which stream.
    pub stream: Stream,
    /// CLOCK_REALTIME, ns since the epoch.
    pub time_ns: u64,
    /// What was written.
    pub data: Vec<u8>,
}

/// Appends records.
pub struct Writer {
    path: PathBuf,
    file: File,
    written: u64,
    half: u64,
}

fn older(path: &Path) -> PathBuf {
    path.with_extension("old")
}

impl Writer {
    /// Begins a log at `path` that takes at most `limit` bytes in all.
    ///
    /// # Errors
    /// What creating a file says.
    pub fn create(path: &Path, limit: u64) -> std::io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let written = file.metadata()?.len();
        Ok(Self { path: path.to_path_buf(), file, written, half: limit / 2 })
    }

    /// Appends `data`. When the file is half the limit, it becomes the older one, and what was
    /// older goes.
    ///
    /// # Errors
    /// What writing says, a full disk above all; the record may then be cut.
    pub fn append(&mut self, stream: Stream, data: &[u8]) -> std::io::Result<()> {
        // A guest says how long a piece is; a reader accepts no longer ones.
        data.chunks(MOST_DATA as usize).try_for_each(|piece| self.append_one(stream, piece))
    }

    fn append_one(&mut self, stream: Stream, data: &[u8]) -> std::io::Result<()> {
        if self.written > 0 && self.written + (HEADER + data.len()) as u64 > self.half {
            std::fs::rename(&self.path, older(&self.path))?;
            self.file = OpenOptions::new().create(true).append(true).open(&self.path)?;
            self.written = 0;
        }
        let mut record = Vec::with_capacity(HEADER + data.len());
        record.push(stream as u8);
        record.extend(realtime_ns().to_le_bytes());
        record.extend((data.len() as u32).to_le_bytes());
        record.extend(data);
        self.written += record.len() as u64;
        self.file.write_all(&record)
    }
}

/// Reads records in order; at the end of what is there it returns None and can be asked again.
pub struct Reader {
    path: PathBuf,
    file: Option<BufReader<File>>,
    pending: Vec<u8>,
    /// How much of `pending` was given out.
    taken: usize,
}

impl Reader {
    /// Begins with the oldest record that is kept.
    pub fn open(path: &Path) -> Self {
        let file = File::open(older(path)).or_else(|_| File::open(path)).ok().map(BufReader::new);
        Self { path: path.to_path_buf(), file, pending: Vec::new(), taken: 0 }
    }

    /// The next record that is whole.
    ///
    /// # Errors
    /// What reading says; `InvalidData` for a file that is no log.
    pub fn read(&mut self) -> std::io::Result<Option<Record>> {
        loop {
            if let Some(record) = self.take()? {
                return Ok(Some(record));
            }
            if !self.fill()? && !self.follow()? {
                return Ok(None);
            }
        }
    }

    /// Moves on to the file that came after the one at whose end we are.
    fn follow(&mut self) -> std::io::Result<bool> {
        let current = match &self.file {
            None => {
                self.file = File::open(&self.path).ok().map(BufReader::new);
                return Ok(self.file.is_some());
            }
            Some(file) => file.get_ref().metadata()?,
        };
        let Ok(newest) = File::open(&self.path) else { return Ok(false) };
        if same(&newest.metadata()?, &current) {
            return Ok(false);
        }
        // Ours is no longer written: what came since its end was last seen comes first.
        if self.fill()? {
            return Ok(true);
        }
        // Files that took turns twice meanwhile left one between ours and the newest.
        let between = File::open(older(&self.path)).ok();
        let between = between.filter(|file| file.metadata().is_ok_and(|it| !same(&it, &current)));
        // What is cut at the end of a file stays cut.
        self.pending.clear();
        self.taken = 0;
        self.file = Some(BufReader::new(between.unwrap_or(newest)));
        Ok(true)
    }

    fn fill(&mut self) -> std::io::Result<bool> {
        let Some(file) = &mut self.file else { return Ok(false) };
        self.pending.drain(..std::mem::take(&mut self.taken));
        let before = self.pending.len();
        file.by_ref().take(256 << 10).read_to_end(&mut self.pending)?;
        Ok(self.pending.len() > before)
    }

    fn take(&mut self) -> std::io::Result<Option<Record>> {
        let unread = &self.pending[self.taken..];
        let Some((header, rest)) = unread.split_at_checked(HEADER) else { return Ok(None) };
        let bad = || std::io::Error::new(std::io::ErrorKind::InvalidData, "not a log of output");
        let stream = match header[0] {
            1 => Stream::Out,
            2 => Stream::Err,
            _ => return Err(bad()),
        };
        let time_ns = u64::from_le_bytes(header[1..9].try_into().map_err(|_| bad())?);
        let len = u32::from_le_bytes(header[9..13].try_into().map_err(|_| bad())?);
        if len > MOST_DATA {
            return Err(bad());
        }
        let Some(data) = rest.get(..len as usize) else { return Ok(None) };
        let record = Record { stream, time_ns, data: data.to_vec() };
        self.taken += HEADER + len as usize;
        Ok(Some(record))
    }
}

/// Whether both are one file; one that is open keeps its number.
fn same(one: &std::fs::Metadata, other: &std::fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_follower_loses_nothing_that_is_kept_when_files_take_turns() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        // Two records of 1 + 13 bytes to a file.
        let mut writer = Writer::create(&path, 56).unwrap();
        writer.append(Stream::Out, b"a").unwrap();
        let mut reader = Reader::open(&path);
        assert_eq!(texts(&mut reader), [b"a"]);
        for text in [b"b", b"c"] {
            writer.append(Stream::Out, text).unwrap();
        }
        assert_eq!(texts(&mut reader), [b"b", b"c"]);
        // Twice at once: the reader's file is gone from the disk, the one after it is not.
        for text in [b"d", b"e", b"f", b"g"] {
            writer.append(Stream::Out, text).unwrap();
        }
        assert_eq!(texts(&mut reader), [b"d", b"e", b"f", b"g"]);
    }

    #[test]
    fn a_piece_longer_than_a_record_can_be_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        let long = vec![b'x'; MOST_DATA as usize + 5];
        Writer::create(&path, 8 << 20).unwrap().append(Stream::Out, &long).unwrap();
        assert_eq!(texts(&mut Reader::open(&path)).concat(), long);
    }

    fn texts(reader: &mut Reader) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| reader.read().unwrap()).map(|record| record.data).collect()
    }

    #[test]
    fn a_reader_follows_the_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        let mut reader = Reader::open(&path);
        assert_eq!(reader.read().unwrap(), None);
        let mut writer = Writer::create(&path, 1 << 20).unwrap();
        writer.append(Stream::Out, b"one").unwrap();
        assert_eq!(texts(&mut reader), [b"one"]);
        writer.append(Stream::Err, b"two").unwrap();
        assert_eq!(reader.read().unwrap().map(|record| record.stream), Some(Stream::Err));
        assert_eq!(reader.read().unwrap(), None);
    }

    #[test]
    fn the_limit_holds_and_the_newest_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        let mut writer = Writer::create(&path, 4000).unwrap();
        for i in 0..1000_u32 {
            writer.append(Stream::Out, format!("{i:04}").as_bytes()).unwrap();
        }
        let size: u64 = std::fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().metadata().unwrap().len())
            .sum();
        assert!(size <= 4000, "{size}");
        let all = texts(&mut Reader::open(&path));
        assert_eq!(all.last().map(Vec::as_slice), Some(b"0999".as_slice()));
        assert!(all.len() > 100);
    }

    #[test]
    fn a_cut_record_is_not_given_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        Writer::create(&path, 4000).unwrap().append(Stream::Out, b"whole").unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&[1, 0, 0]).unwrap();
        assert_eq!(texts(&mut Reader::open(&path)), [b"whole"]);
        std::fs::write(&path, [9; 64]).unwrap();
        assert!(Reader::open(&path).read().is_err());
    }
}
