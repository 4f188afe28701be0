//! Tests of where the next process goes on, wherever the last one was killed.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::*;

/// A FIFO that is open for reading and writing.
fn fifo(path: &Path) -> File {
    mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    File::options().read(true).write(true).open(path).unwrap()
}

/// Makes a cursor with a record at `path`.
fn cursor(path: &Path) -> Cursor {
    let cursor = Cursor::default();
    cursor.keep(File::create(path).unwrap());
    cursor
}

/// Returns the position at which the next process goes on.
fn next(record: &Path, destination: &File) -> u64 {
    let next = Cursor::default();
    next.resume(&std::fs::read(record).unwrap(), |_| destination.metadata().ok());
    next.carried()
}

#[test]
fn a_piece_for_a_fifo_is_neither_lost_nor_doubled() {
    let dir = tempfile::tempdir().unwrap();
    let (mut fifo, record) = (fifo(&dir.path().join("fifo")), dir.path().join("record"));
    let cursor = cursor(&record);
    assert_eq!(next(&record, &fifo), 0, "before the first piece");
    for (at, piece) in [(0, &b"one"[..]), (3, &b"and two"[..]), (10, &b"!"[..])] {
        cursor.begin_fifo(fifo.as_fd(), Stream::Out, piece.len()).unwrap();
        assert_eq!(next(&record, &fifo), at, "killed before the write");
        fifo.write_all(piece).unwrap();
        let end = at + piece.len() as u64;
        assert_eq!(next(&record, &fifo), end, "killed after the write");
        let mut read = vec![0; piece.len()];
        fifo.read_exact(&mut read).unwrap();
        assert_eq!(next(&record, &fifo), end, "its reader has it");
        cursor.reach(end);
        // Killed between the mark of the next piece and its record.
        let time = Timespec { tv_sec: mark(end), tv_nsec: 0 };
        let times = Timestamps { last_access: time, last_modification: time };
        rustix::fs::futimens(&fifo, &times).unwrap();
        assert_eq!(next(&record, &fifo), end, "killed before the record");
    }
}

#[test]
fn a_part_of_a_piece_in_a_file_is_continued() {
    let dir = tempfile::tempdir().unwrap();
    let (path, record) = (dir.path().join("log"), dir.path().join("record"));
    std::fs::write(&path, "of others\n").unwrap();
    let mut file = File::options().append(true).open(&path).unwrap();
    let cursor = cursor(&record);
    cursor.reach(100);
    cursor.begin_file(Stream::Err, 8, 10).unwrap();
    assert_eq!(next(&record, &file), 100);
    file.write_all(b"half").unwrap();
    assert_eq!(next(&record, &file), 104);
    file.write_all(b"half and more").unwrap();
    assert_eq!(next(&record, &file), 108);
}

#[test]
fn without_a_record_a_piece_must_not_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let (fifo, cursor) = (fifo(&dir.path().join("fifo")), Cursor::default());
    cursor.begin_fifo(fifo.as_fd(), Stream::Out, 1).unwrap();
    cursor.keep(File::options().write(true).open("/dev/full").unwrap());
    assert!(cursor.begin_fifo(fifo.as_fd(), Stream::Out, 1).is_err());
    assert!(cursor.begin_file(Stream::Out, 1, 0).is_err());
}

#[test]
fn output_that_went_nowhere_is_not_asked_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let (mut fifo, record) = (fifo(&dir.path().join("fifo")), dir.path().join("record"));
    let cursor = cursor(&record);
    cursor.begin_fifo(fifo.as_fd(), Stream::Out, 3).unwrap();
    fifo.write_all(b"one").unwrap();
    cursor.reach(1000);
    cursor.pass(Stream::Err);
    assert_eq!(next(&record, &fifo), 1000);
    // A record that was made and not written yet is one of nothing.
    std::fs::write(&record, [0; RECORD]).unwrap();
    assert_eq!(next(&record, &fifo), 0);
}

#[test]
fn a_record_that_is_cut_is_none() {
    let next = Cursor::default();
    next.resume(&[1; RECORD - 1], |_| None);
    assert_eq!(next.carried(), 0);
    // Of an output that goes nowhere by now.
    let mut record = [0; RECORD];
    (record[0], record[8]) = (7, 2);
    next.resume(&record, |_| None);
    assert_eq!(next.carried(), 9);
}
