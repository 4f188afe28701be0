//! Streams of a VMM, good and bad.

use std::fs::File;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use super::*;

const LIMIT: Duration = Duration::from_secs(60);
/// Pages of the memory.
const PAGES: u64 = 1000;

/// The pages that were given, each by its offset and its first byte.
type Given = Arc<Mutex<Vec<(u64, u8)>>>;

fn record(offset: u64, byte: u8) -> Vec<u8> {
    [&offset.to_le_bytes()[..], &[byte; PAGE]].concat()
}

/// Waits until nobody can read from the pipe. The child of another test may have a copy of the
/// descriptor until it executes its program.
fn wait_until_broken(pipe: &File) {
    poll(&mut [PollFd::new(pipe, PollFlags::empty())], None).unwrap();
}

fn sink(given: &Given) -> PageSink {
    let given = Arc::clone(given);
    Box::new(move |offset: u64, page: &[u8]| {
        assert_eq!(page, vec![page[0]; PAGE]);
        given.lock().unwrap().push((offset, page[0]));
        Ok(())
    })
}

/// Returns what a reader makes of bytes, which come in parts of `part` bytes.
fn read(sent: Vec<u8>, part: usize) -> (Result<bool>, Vec<(u64, u8)>) {
    read_with(PageStream::new, sent, part)
}

/// Returns what a reader that `make` makes does.
fn read_with(
    make: fn(u64) -> Result<(PageStream, OwnedFd)>,
    sent: Vec<u8>,
    part: usize,
) -> (Result<bool>, Vec<(u64, u8)>) {
    let (reader, pipe) = make(PAGES * PAGE as u64).unwrap();
    let writer = std::thread::spawn(move || {
        let mut pipe = File::from(pipe);
        // The reader may have gone.
        sent.chunks(part).all(|bytes| pipe.write_all(bytes).is_ok())
    });
    let given = Given::default();
    let outcome = reader.read(sink(&given), LIMIT);
    writer.join().unwrap();
    let given = given.lock().unwrap().clone();
    (outcome, given)
}

#[test]
fn pages_come_in_order_however_the_stream_is_cut() {
    let pages: Vec<(u64, u8)> = (0..PAGES).step_by(3).map(|n| (n * 4096, n as u8 | 1)).collect();
    let records = pages.iter().map(|(offset, byte)| record(*offset, *byte));
    let stream: Vec<u8> = records.chain([END.to_vec()]).flatten().collect();
    for part in [1021, RECORD, 65_537, stream.len()] {
        let (outcome, given) = read(stream.clone(), part);
        assert!(outcome.unwrap(), "in parts of {part}");
        assert_eq!(given, pages, "in parts of {part}");
    }
    let (outcome, given) = read(END.to_vec(), 1);
    assert!(outcome.unwrap() && given.is_empty());
}

#[test]
fn memory_of_a_guest_that_runs_comes_in_few_rounds() {
    let last = (PAGES - 1) * 4096;
    let rounds = [record(0, 1), record(last, 2), ROUND.to_vec(), record(4096, 3), ROUND.to_vec()];
    let stream = [rounds.concat(), END.to_vec()].concat();
    for part in [1021, RECORD + 1, stream.len()] {
        let (outcome, given) = read_with(PageStream::ahead, stream.clone(), part);
        assert!(outcome.unwrap(), "in parts of {part}");
        assert_eq!(given, [(0, 1), (last, 2), (4096, 3)]);
    }
    let most = [[ROUND; ROUNDS].concat(), END.to_vec()].concat();
    assert!(read_with(PageStream::ahead, most, 4096).0.unwrap());
    for bad in [
        // One round more.
        [ROUND; ROUNDS + 1].concat(),
        [record(4096, 1), record(0, 1)].concat(),
    ] {
        let (outcome, _) = read_with(PageStream::ahead, bad, 16384);
        assert!(matches!(outcome, Err(Error::Control(_))), "{outcome:?}");
    }
}

#[test]
fn a_stream_without_its_end_is_told_apart() {
    for sent in [vec![], END[..7].to_vec(), record(0, 1), record(0, 1)[..4096].to_vec()] {
        let whole = sent.len() / RECORD;
        let (outcome, given) = read(sent, 4096);
        assert!(!outcome.unwrap());
        assert_eq!(given.len(), whole);
    }
}

#[test]
fn a_stream_that_no_such_memory_has_is_an_error() {
    let two = |first, second| [record(first, 1), record(second, 2)].concat();
    let last = (PAGES - 1) * 4096;
    let bad = [
        (two(4096, 4096), 1),
        (two(8192, 4096), 1),
        (two(last, last + 4096), 1),
        (two(0, 1), 1),
        (record(2048, 1), 0),
        (record(u64::MAX - 4095, 1), 0),
        (record(u64::MAX - 1, 1), 0),
        // No page is waited for.
        ((last + 4096).to_le_bytes().to_vec(), 0),
        ([&END[..], &[0]].concat(), 0),
        ([&END[..], &END[..]].concat(), 0),
    ];
    for (number, (sent, count)) in bad.into_iter().enumerate() {
        let len = sent.len();
        let (outcome, given) = read(sent, len);
        assert!(matches!(outcome, Err(Error::Control(_))), "{number}: {outcome:?}");
        assert_eq!(given.len(), count, "{number}");
    }
}

#[test]
fn an_error_of_the_sink_ends_the_reader_and_breaks_the_pipe() {
    let (reader, pipe) = PageStream::new(PAGES * PAGE as u64).unwrap();
    let mut pipe = File::from(pipe);
    pipe.write_all(&record(0, 1)).unwrap();
    let full: PageSink = Box::new(|_: u64, _: &[u8]| Err(io::ErrorKind::StorageFull.into()));
    let error = reader.read(full, LIMIT).unwrap_err();
    let is_full = |source: &io::Error| source.kind() == io::ErrorKind::StorageFull;
    assert!(matches!(&error, Error::System { source, .. } if is_full(source)), "{error}");
    wait_until_broken(&pipe);
    assert_eq!(pipe.write_all(&END).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
}

#[test]
fn a_vmm_that_says_too_little_is_given_up() {
    for sent in [vec![], record(0, 1), vec![0; 100]] {
        let (reader, pipe) = PageStream::new(PAGES * PAGE as u64).unwrap();
        let mut pipe = File::from(pipe);
        pipe.write_all(&sent).unwrap();
        let outcome = reader.read(sink(&Given::default()), Duration::from_millis(20));
        assert!(matches!(outcome, Err(Error::Timeout { .. })), "{outcome:?}");
        wait_until_broken(&pipe);
        assert_eq!(pipe.write_all(&END).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
