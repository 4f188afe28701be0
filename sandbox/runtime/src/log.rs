//! A container's kept output: records of (stream, time, bytes) in two files that are used in turn,
//! so that the log never takes more than its limit.
//!
//! Record: stream (1 byte), time (8 bytes, little-endian, ns since the epoch), length (4 bytes,
//! little-endian), data. A file begins with a record of stream 0 whose data is a position (8 bytes,
//! little-endian): the number of bytes of output before the file. So the log itself tells the
//! position of its end, and a new daemon knows from where to ask the agent for more. A daemon that
//! was killed while it wrote leaves an incomplete record, which the next writer cuts off.

use std::fs::{File, OpenOptions};
use std::io::{BufReader, Read, Write};
use std::path::{Path, PathBuf};

use slipway_telemetry::realtime_ns;

/// The most bytes of data in a record; a reader refuses longer ones.
const MOST_DATA: u32 = 1 << 20;
const HEADER: usize = 13;
/// The stream number of a record whose data is a position.
const POSITION: u8 = 0;
const POSITION_LEN: usize = HEADER + 8;

/// A standard stream.
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
    /// The number of bytes of output before this piece, of both streams together.
    pub position: u64,
    /// The stream that the piece was written to.
    pub stream: Stream,
    /// The time of writing: CLOCK_REALTIME, ns since the epoch.
    pub time_ns: u64,
    /// The bytes that were written.
    pub data: Vec<u8>,
}

impl Record {
    /// Returns the position after the last byte of the record.
    pub fn end(&self) -> u64 {
        self.position + self.data.len() as u64
    }

    /// Returns the record without the bytes before `position`. Returns `None` if no bytes are left.
    pub fn from(mut self, position: u64) -> Option<Self> {
        let skipped = position.saturating_sub(self.position);
        if skipped >= self.data.len() as u64 {
            return None;
        }
        self.data.drain(..skipped as usize);
        self.position += skipped;
        Some(self)
    }
}

/// The writer of a log.
pub struct Writer {
    path: PathBuf,
    file: File,
    written: u64,
    half: u64,
    position: u64,
}

fn older(path: &Path) -> PathBuf {
    path.with_extension("old")
}

/// Removes the log at `path`, all parts of it. A log that is not there is no error.
///
/// # Errors
/// A part cannot be removed.
pub fn remove(path: &Path) -> std::io::Result<()> {
    for part in [path.to_path_buf(), older(path)] {
        match std::fs::remove_file(part) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

impl Writer {
    /// Opens the log at `path` to append to it, or creates it. The log takes at most `limit` bytes
    /// in all.
    ///
    /// # Errors
    /// The errors of opening and reading files; `InvalidData` if the file is not a log.
    pub fn open(path: &Path, limit: u64) -> std::io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let (written, position) = end_of(path)?;
        // Cuts off an incomplete record, left by a writer that was killed.
        file.set_len(written)?;
        let mut writer =
            Self { path: path.to_path_buf(), file, written, half: limit / 2, position };
        if written == 0 {
            writer.seek(position)?;
        }
        Ok(writer)
    }

    /// Returns the position of the next byte.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Continues at another position. The output between the two positions is lost.
    ///
    /// # Errors
    /// The errors of writing.
    pub fn seek(&mut self, position: u64) -> std::io::Result<()> {
        self.position = position;
        let record = encode(POSITION, &position.to_le_bytes());
        self.written += record.len() as u64;
        self.file.write_all(&record)
    }

    /// Appends `data`. Before the file exceeds half the limit, it becomes the older file, and the
    /// previous older file is removed.
    ///
    /// # Errors
    /// The errors of writing, a full disk above all. The last record may then be incomplete.
    pub fn append(&mut self, stream: Stream, data: &[u8]) -> std::io::Result<()> {
        // The guest chooses the length of a piece, and a reader refuses more than [`MOST_DATA`].
        data.chunks(MOST_DATA as usize).try_for_each(|piece| self.append_one(stream, piece))
    }

    fn append_one(&mut self, stream: Stream, data: &[u8]) -> std::io::Result<()> {
        let full = self.written + (HEADER + data.len()) as u64 > self.half;
        if full && self.written > POSITION_LEN as u64 {
            std::fs::rename(&self.path, older(&self.path))?;
            self.file = OpenOptions::new().create(true).append(true).open(&self.path)?;
            self.written = 0;
            self.seek(self.position)?;
        }
        let record = encode(stream as u8, data);
        self.written += record.len() as u64;
        self.position += data.len() as u64;
        self.file.write_all(&record)
    }
}

fn encode(stream: u8, data: &[u8]) -> Vec<u8> {
    let mut record = Vec::with_capacity(HEADER + data.len());
    record.push(stream);
    record.extend(realtime_ns().to_le_bytes());
    record.extend((data.len() as u32).to_le_bytes());
    record.extend(data);
    record
}

/// Returns the length of the complete records in the newest file of a log, and the position after
/// them.
fn end_of(path: &Path) -> std::io::Result<(u64, u64)> {
    let mut reader = Reader::of(File::open(path).ok(), path);
    reader.skim()?;
    if reader.places > 0 {
        return Ok((reader.read, reader.position));
    }
    // The newest file has no complete record: its writer was killed right after it created the
    // file.
    let mut reader = Reader::of(File::open(older(path)).ok(), path);
    reader.skim()?;
    Ok((0, reader.position))
}

/// A reader of records in order. At the end of the log it returns `None`, and can be asked again.
pub struct Reader {
    path: PathBuf,
    file: Option<BufReader<File>>,
    pending: Vec<u8>,
    /// The number of bytes of `pending` that were parsed.
    taken: usize,
    /// The position of the next record.
    position: u64,
    /// The bytes of complete records so far, and the number of these records that were positions.
    read: u64,
    places: u64,
}

impl Reader {
    /// Opens the log at the oldest record that is kept.
    pub fn open(path: &Path) -> Self {
        Self::of(File::open(older(path)).or_else(|_| File::open(path)).ok(), path)
    }

    fn of(file: Option<File>, path: &Path) -> Self {
        let (file, path) = (file.map(BufReader::new), path.to_path_buf());
        Self { path, file, pending: Vec::new(), taken: 0, position: 0, read: 0, places: 0 }
    }

    /// Reads to the end of the current file.
    fn skim(&mut self) -> std::io::Result<()> {
        loop {
            while self.take()?.is_some() {}
            if !self.fill()? {
                return Ok(());
            }
        }
    }

    /// Returns the next complete record. Returns `None` at the end of the log.
    ///
    /// # Errors
    /// The errors of reading; `InvalidData` if the file is not a log.
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

    /// Returns the next records, of at least `bytes` bytes together if there are that many. Returns
    /// no records at the end of the log.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read), once the records before the failure were returned.
    pub fn read_some(&mut self, bytes: usize) -> std::io::Result<Vec<Record>> {
        let (mut records, mut held) = (Vec::new(), 0);
        while held < bytes {
            match self.read() {
                Ok(Some(record)) => {
                    held += HEADER + record.data.len();
                    records.push(record);
                }
                Err(error) if records.is_empty() => return Err(error),
                // An error here recurs at the next call, which returns it.
                Ok(None) | Err(_) => break,
            }
        }
        Ok(records)
    }

    /// Moves on to the file after the current one, whose end was reached. Returns whether there may
    /// be more to read.
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
        // The current file is no longer written: bytes that were added since its end was last seen
        // come first.
        if self.fill()? {
            return Ok(true);
        }
        // If the files were swapped twice meanwhile, there is one between the current and the
        // newest.
        let between = File::open(older(&self.path)).ok();
        let between = between.filter(|file| file.metadata().is_ok_and(|it| !same(&it, &current)));
        // An incomplete record at the end of a file stays incomplete.
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
        loop {
            let unread = &self.pending[self.taken..];
            let Some((header, rest)) = unread.split_at_checked(HEADER) else { return Ok(None) };
            let bad =
                || std::io::Error::new(std::io::ErrorKind::InvalidData, "not a log of output");
            let time_ns = u64::from_le_bytes(header[1..9].try_into().map_err(|_| bad())?);
            let len = u32::from_le_bytes(header[9..13].try_into().map_err(|_| bad())?);
            if header[0] > Stream::Err as u8 || len > MOST_DATA {
                return Err(bad());
            }
            let Some(data) = rest.get(..len as usize) else { return Ok(None) };
            self.taken += HEADER + data.len();
            self.read += (HEADER + data.len()) as u64;
            let stream = match header[0] {
                1 => Stream::Out,
                2 => Stream::Err,
                _ => {
                    self.position = u64::from_le_bytes(data.try_into().map_err(|_| bad())?);
                    self.places += 1;
                    continue;
                }
            };
            let record = Record { position: self.position, stream, time_ns, data: data.to_vec() };
            self.position = record.end();
            return Ok(Some(record));
        }
    }
}

/// Returns whether both are the same file. A file that is open keeps its inode number.
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
        // A file holds two records of 1 + 13 bytes after its position.
        let mut writer = Writer::open(&path, 98).unwrap();
        writer.append(Stream::Out, b"a").unwrap();
        let mut reader = Reader::open(&path);
        assert_eq!(texts(&mut reader), [b"a"]);
        for text in [b"b", b"c"] {
            writer.append(Stream::Out, text).unwrap();
        }
        assert_eq!(texts(&mut reader), [b"b", b"c"]);
        // Two swaps at once: the reader's file is gone from the disk, but the next one is not.
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
        Writer::open(&path, 8 << 20).unwrap().append(Stream::Out, &long).unwrap();
        assert_eq!(texts(&mut Reader::open(&path)).concat(), long);
    }

    fn texts(reader: &mut Reader) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| reader.read().unwrap()).map(|record| record.data).collect()
    }

    #[test]
    fn records_before_a_failure_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        let mut writer = Writer::open(&path, 4000).unwrap();
        (0..10_u8).for_each(|i| writer.append(Stream::Out, &[i]).unwrap());
        OpenOptions::new().append(true).open(&path).unwrap().write_all(&[9; 64]).unwrap();
        let mut reader = Reader::open(&path);
        assert_eq!(reader.read_some(3 * (HEADER + 1)).unwrap().len(), 3);
        assert_eq!(reader.read_some(1 << 20).unwrap().len(), 7);
        assert!(reader.read_some(1 << 20).is_err());
        assert!(reader.read_some(1 << 20).is_err());
    }

    #[test]
    fn a_reader_follows_the_writer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        let mut reader = Reader::open(&path);
        assert_eq!(reader.read().unwrap(), None);
        let mut writer = Writer::open(&path, 1 << 20).unwrap();
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
        let mut writer = Writer::open(&path, 4000).unwrap();
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
        Writer::open(&path, 4000).unwrap().append(Stream::Out, b"whole").unwrap();
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(&[1, 0, 0]).unwrap();
        assert_eq!(texts(&mut Reader::open(&path)), [b"whole"]);
        std::fs::write(&path, [9; 64]).unwrap();
        assert!(Reader::open(&path).read().is_err());
    }

    /// After a writer was killed at any byte, the next writer continues after the last complete
    /// record, and knows its position.
    #[test]
    fn a_log_says_how_far_it_came() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("output.log");
        let mut writer = Writer::open(&path, 400).unwrap();
        for i in 0..30_u32 {
            writer.append(Stream::Out, format!("{i:04}").as_bytes()).unwrap();
        }
        let (position, whole) = (writer.position(), std::fs::read(&path).unwrap());
        assert_eq!(position, 120);
        drop(writer);
        let records = (whole.len() - POSITION_LEN) / (HEADER + 4);
        assert!(older(&path).exists() && records > 1);
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let lost = records - cut.saturating_sub(POSITION_LEN) / (HEADER + 4);
            let mut writer = Writer::open(&path, 4000).unwrap();
            assert_eq!(writer.position(), position - 4 * lost as u64, "cut at {cut}");
            writer.append(Stream::Err, b"next").unwrap();
            let mut reader = Reader::open(&path);
            let all: Vec<_> = std::iter::from_fn(|| reader.read().unwrap()).collect();
            assert_eq!(all.last().unwrap().data, b"next");
            assert!(all.windows(2).all(|two| two[0].end() == two[1].position), "cut at {cut}");
            assert_eq!(all.last().unwrap().end(), writer.position());
        }
        // Without the newer file, the older one tells the position.
        std::fs::remove_file(&path).unwrap();
        let mut writer = Writer::open(&path, 4000).unwrap();
        assert_eq!(writer.position(), position - 4 * records as u64);
        writer.seek(1000).unwrap();
        drop(writer);
        assert_eq!(Writer::open(&path, 4000).unwrap().position(), 1000);
    }

    #[test]
    fn a_record_from_a_position_on() {
        let record =
            Record { position: 10, stream: Stream::Out, time_ns: 1, data: b"abc".to_vec() };
        assert_eq!(record.clone().from(3), Some(record.clone()));
        let rest = record.clone().from(12).unwrap();
        assert_eq!((rest.position, rest.data.as_slice(), rest.end()), (12, b"c".as_slice(), 13));
        assert_eq!(record.clone().from(13), None);
        assert_eq!(record.from(u64::MAX), None);
    }
}
