//! Tests of connections whose serving process is killed, wherever that is.

use std::io::Write;
use std::os::unix::net::UnixStream as Socket;

use super::super::frame::{self, REQUEST, RESPONSE};
use super::*;

/// A connection with its record; the socket outlives each process.
struct Connection {
    theirs: Socket,
    ours: Socket,
    record: Record,
    dir: tempfile::TempDir,
}

impl Connection {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::make(&dir.path().join("state")).unwrap();
        let (theirs, ours) = Socket::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        Self { theirs, ours, record: Record::new(&store, 7), dir }
    }

    fn path(&self, name: &str) -> std::path::PathBuf {
        self.dir.path().join("state").join(name)
    }

    /// Returns a process's end, which is not shut down when it is dropped.
    fn stream(&self) -> UnixStream {
        UnixStream::from_std(self.ours.try_clone().unwrap()).unwrap()
    }

    fn new_requests(&self) -> Requests {
        let (from, to) = self.stream().into_split();
        to.forget();
        Requests::new(from, self.record.clone())
    }

    fn next_requests(&self) -> Requests {
        let (from, to) = self.stream().into_split();
        to.forget();
        Requests::resume(from, self.record.clone()).unwrap()
    }

    /// Sends a request whose message has so many bytes, and returns the message.
    fn send(&mut self, stream: u32, size: usize) -> Vec<u8> {
        let message: Vec<u8> = (0..size).map(|at| (at / 251 + at) as u8).collect();
        self.theirs.write_all(&frame::bytes(stream, REQUEST, &message).unwrap()).unwrap();
        message
    }
}

/// Returns the stream and the message of the next request.
async fn next(requests: &mut Requests) -> (u32, Vec<u8>) {
    match requests.next().await.unwrap().unwrap() {
        Next::Request(header, message) => (header.stream, message),
        refused @ Next::Refused(..) => panic!("{refused:?}"),
    }
}

/// Has the store have no room for what is recorded next of a request.
fn fill(connection: &Connection) {
    let part = connection.record.part();
    std::os::unix::fs::symlink("/dev/full", connection.path(&part)).unwrap();
}

#[tokio::test]
async fn a_request_is_recorded_until_it_is_answered() {
    let mut connection = Connection::new();
    let (one, three) = (connection.send(1, 5), connection.send(3, 0));
    let mut requests = connection.new_requests();
    assert_eq!(next(&mut requests).await, (1, one.clone()));
    assert_eq!(next(&mut requests).await, (3, three.clone()));
    let calls = |record: &Record| -> Vec<_> {
        record.calls().into_iter().map(|(header, message)| (header.stream, message)).collect()
    };
    assert_eq!(calls(&connection.record), [(1, one), (3, three.clone())]);
    connection.record.answered(1);
    assert_eq!(calls(&connection.record), [(3, three)]);
    connection.record.delete();
    assert!(connection.record.store.names("").is_empty());
}

#[tokio::test]
async fn a_request_is_taken_once_wherever_its_process_is_killed() {
    for size in [0, 9, PIECE - HEADER, PIECE, 3 * PIECE + 1] {
        let whole = HEADER + size;
        for recorded in (0..=whole).step_by(PIECE).chain([whole, whole / 2, 3]) {
            for is_consumed in [false, true] {
                taken_once(size, recorded.min(whole), is_consumed).await;
            }
        }
    }
}

/// Has a process killed that has recorded so many bytes of a request with a message of so many
/// bytes, and has consumed the last piece or not.
async fn taken_once(size: usize, recorded: usize, is_consumed: bool) {
    let mut connection = Connection::new();
    let one = connection.send(1, size);
    let bytes = frame::bytes(1, REQUEST, &one).unwrap();
    let (name, part) = (connection.record.part(), &bytes[..recorded]);
    connection.record.store.append(&name, part, 0).unwrap();
    // A piece that was not recorded to its end was not consumed.
    let is_whole = recorded == bytes.len() || recorded.is_multiple_of(PIECE);
    let before = match (is_whole, is_consumed) {
        (true, true) => recorded,
        (true, false) => recorded.saturating_sub(1) / PIECE * PIECE,
        (false, _) => recorded / PIECE * PIECE,
    };
    let stream = connection.stream();
    stream.readable().await.unwrap();
    for piece in bytes[..before].chunks(PIECE) {
        consume(&stream, piece.len()).unwrap();
    }
    let three = connection.send(3, 4);
    let mut requests = connection.next_requests();
    let what = (size, recorded, is_consumed);
    assert_eq!(next(&mut requests).await, (1, one), "{what:?}");
    assert_eq!(next(&mut requests).await, (3, three), "{what:?}");
}

#[tokio::test]
async fn a_connection_that_ends_within_a_request_is_an_error() {
    let mut connection = Connection::new();
    let bytes = frame::bytes(1, REQUEST, b"four").unwrap();
    connection.theirs.write_all(&bytes[..bytes.len() - 1]).unwrap();
    let ours = connection.stream();
    let Connection { theirs, record, .. } = connection;
    drop(theirs);
    let mut requests = Requests::new(ours.into_split().0, record);
    let failed = requests.next().await.unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::UnexpectedEof);
    let mut connection = Connection::new();
    let header = Header { length: MOST as u32 + 1, stream: 1, kind: REQUEST, flags: 0 };
    connection.theirs.write_all(&header.bytes()).unwrap();
    let failed = connection.new_requests().next().await.unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::InvalidData);
}

#[tokio::test]
async fn a_request_without_room_is_refused_and_passed_over_when_its_caller_was_told() {
    let mut connection = Connection::new();
    let one = connection.send(1, 5);
    connection.send(3, PIECE - HEADER);
    fill(&connection);
    let mut requests = connection.new_requests();
    let refused = requests.next().await.unwrap().unwrap();
    let Next::Refused(1, failure) = refused else { panic!("{refused:?}") };
    assert!(failure.message.contains("cannot keep a record of the call: No space left"));
    // A process that is killed before its caller was told leaves it to the next one.
    std::fs::remove_file(connection.path("part-7")).unwrap();
    assert_eq!(next(&mut connection.next_requests()).await, (1, one));
    fill(&connection);
    let mut requests = connection.new_requests();
    let refused = requests.next().await.unwrap();
    assert!(matches!(refused, Some(Next::Refused(3, _))), "{refused:?}");
    requests.pass_over().unwrap();
    let five = connection.send(5, 1);
    assert_eq!(next(&mut requests).await, (5, five));
}

#[tokio::test]
async fn a_request_that_ends_something_has_the_room_that_is_kept() {
    let mut connection = Connection::new();
    for (stream, method) in [(1, "Kill"), (3, "Start")] {
        fill(&connection);
        let request = v1::Request { method: method.to_owned(), ..Default::default() };
        let frame = frame::bytes(stream, REQUEST, &request.encode_to_vec()).unwrap();
        connection.theirs.write_all(&frame).unwrap();
        let mut requests = connection.new_requests();
        match requests.next().await.unwrap().unwrap() {
            Next::Request(header, _) => assert_eq!((header.stream, method), (1, "Kill")),
            Next::Refused(stream, _) => assert_eq!((stream, method), (3, "Start")),
        }
    }
    assert_eq!(connection.record.store.names("call-"), ["call-7-1"]);
}

#[tokio::test]
async fn a_request_whose_record_finds_no_name_is_refused_and_the_next_one_is_taken() {
    let mut connection = Connection::new();
    connection.send(1, 5);
    let three = connection.send(3, 5);
    // No file can take its place.
    std::fs::create_dir(connection.path("call-7-1")).unwrap();
    let mut requests = connection.new_requests();
    let refused = requests.next().await.unwrap();
    assert!(matches!(refused, Some(Next::Refused(1, _))), "{refused:?}");
    requests.pass_over().unwrap();
    assert_eq!(next(&mut requests).await, (3, three));
}

#[tokio::test]
async fn a_request_of_several_pieces_waits_for_room_in_the_socket() {
    let mut connection = Connection::new();
    let one = connection.send(1, 2 * PIECE);
    fill(&connection);
    let mut requests = connection.new_requests();
    {
        let waits = requests.next();
        tokio::pin!(waits);
        let patience = 5 * AGAIN;
        assert!(tokio::time::timeout(patience, waits.as_mut()).await.is_err());
    }
    // A process that is killed meanwhile has consumed nothing.
    std::fs::remove_file(connection.path("part-7")).unwrap();
    assert_eq!(next(&mut connection.next_requests()).await, (1, one));
}

#[tokio::test]
async fn a_response_of_which_a_part_is_written_is_noted() {
    let connection = Connection::new();
    let (_from, to) = connection.stream().into_split();
    let record = connection.record.clone();
    let frame = frame::bytes(1, RESPONSE, &vec![0; 1 << 20]).unwrap();
    let size = frame.len();
    record.begin(PIECE).unwrap();
    assert!(!connection.record.is_cut());
    record.begin(size).unwrap();
    assert!(connection.record.is_cut(), "before a part of it is written");
    let written = tokio::spawn(async move { record.write(&to, &frame).await });
    let mut theirs = UnixStream::from_std({
        connection.theirs.set_nonblocking(true).unwrap();
        connection.theirs.try_clone().unwrap()
    })
    .unwrap();
    tokio::io::AsyncReadExt::read_u8(&mut theirs).await.unwrap();
    assert!(!written.is_finished() && connection.record.is_cut());
    let mut read = vec![0; size - 1];
    tokio::io::AsyncReadExt::read_exact(&mut theirs, &mut read).await.unwrap();
    written.await.unwrap().unwrap();
    assert!(!connection.record.is_cut());
}
