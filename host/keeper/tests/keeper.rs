//! A keeper on a thread, with clients that come and go.

#![allow(clippy::unwrap_used)] // a test

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use slipway_keeper::{Keeper, Shelf};

const PATIENCE: Duration = Duration::from_secs(60);

fn connect(path: &Path) -> Keeper {
    for _ in 0..6000 {
        if let Ok(keeper) = Keeper::connect(path) {
            return keeper;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no keeper at {}", path.display());
}

fn file(text: &str) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn text(file: OwnedFd) -> String {
    let (mut file, mut text) = (File::from(file), String::new());
    file.rewind().unwrap();
    file.read_to_string(&mut text).unwrap();
    text
}

fn texts(keeper: &Keeper) -> Vec<(u32, String)> {
    let taken = keeper.take(PATIENCE).unwrap();
    taken.into_iter().map(|(slot, file)| (slot, text(file))).collect()
}

#[test]
fn what_was_put_is_there_for_the_next_one_until_it_is_cleared() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper.sock");
    let serving = {
        let path = path.clone();
        std::thread::spawn(move || slipway_keeper::serve(&path))
    };
    let first = connect(&path);
    assert!(texts(&first).is_empty());
    // More descriptors than fit into one packet.
    for slot in 0..300 {
        first.put(slot * 3, file(&slot.to_string())).unwrap();
    }
    first.put(3, file("replaced")).unwrap();
    first.clear(6).unwrap();
    first.clear(7).unwrap();
    drop(first);
    let second = Arc::new(connect(&path));
    let expected: Vec<_> = (0..300u32)
        .filter(|slot| *slot != 2)
        .map(|slot| (slot * 3, if slot == 1 { "replaced".into() } else { slot.to_string() }))
        .collect();
    assert_eq!(texts(&second), expected);
    assert_eq!(texts(&second), expected);
    assert!(slipway_keeper::serve(&path).is_err(), "somebody listens there");
    let shelf = Shelf::new(second.clone(), 3..10);
    assert!(shelf.put(7, file("beyond")).is_err());
    shelf.put(1, file("four")).unwrap();
    shelf.clear_all().unwrap();
    shelf.put(2, file("five")).unwrap();
    shelf.clear(2).unwrap();
    shelf.put(2, file("five again")).unwrap();
    let expected: Vec<_> = expected
        .into_iter()
        .filter(|(slot, _)| !(3..10).contains(slot))
        .chain([(5, "five again".to_owned())])
        .collect();
    let mut left = texts(&second);
    left.sort_by_key(|(slot, _)| if *slot == 5 { u32::MAX } else { *slot });
    assert_eq!(left, expected);
    drop(shelf);
    drop(second);
    // A client that has not taken anything clears what others put.
    let third = Arc::new(connect(&path));
    let all = Shelf::new(third, 0..1000);
    all.clear_all().unwrap();
    drop(all);
    // Nothing is held and no client is connected: the keeper ends.
    serving.join().unwrap().unwrap();
    assert!(!path.exists());
}

#[test]
fn who_only_looks_ends_no_keeper() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper.sock");
    assert!(!Keeper::is_there(&path));
    let serving = {
        let path = path.clone();
        std::thread::spawn(move || slipway_keeper::serve(&path))
    };
    let client = connect(&path);
    // More connections than the backlog holds, while a client is connected.
    (0..20).for_each(|_| assert!(Keeper::is_there(&path)));
    client.put(1, file("one")).unwrap();
    client.clear(1).unwrap();
    drop(client);
    serving.join().unwrap().unwrap();
    assert!(!Keeper::is_there(&path));
}

#[test]
fn a_client_that_talks_nonsense_is_dropped_and_loses_nothing() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper.sock");
    let serving = {
        let path = path.clone();
        std::thread::spawn(move || slipway_keeper::serve(&path))
    };
    let first = connect(&path);
    first.put(9, file("nine")).unwrap();
    drop(first);
    let address = SocketAddrUnix::new(&path).unwrap();
    for nonsense in [&b"x"[..], &[0xff; 8], &[0; 64]] {
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        rustix::net::send(&socket, nonsense, SendFlags::empty()).unwrap();
    }
    let last = connect(&path);
    assert_eq!(texts(&last), [(9, "nine".to_owned())]);
    last.clear(9).unwrap();
    drop(last);
    serving.join().unwrap().unwrap();
}

#[test]
fn one_of_many_keepers_that_begin_at_once_serves() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keeper.sock");
    // The socket of a keeper that was killed, which each of them would remove.
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let keepers: Vec<_> = (0..8)
        .map(|_| {
            let path = path.clone();
            std::thread::spawn(move || slipway_keeper::serve(&path))
        })
        .collect();
    let client = connect(&path);
    client.put(1, file("one")).unwrap();
    // All but one end while that one holds something.
    let deadline = std::time::Instant::now() + PATIENCE;
    while keepers.iter().filter(|keeper| !keeper.is_finished()).count() > 1 {
        assert!(std::time::Instant::now() < deadline, "several keepers serve");
        std::thread::sleep(Duration::from_millis(1));
    }
    client.clear(1).unwrap();
    drop(client);
    let ended = keepers.into_iter().map(|keeper| keeper.join().unwrap());
    let refused: Vec<_> = ended.filter_map(Result::err).map(|error| error.kind()).collect();
    assert_eq!(refused, [std::io::ErrorKind::AddrInUse; 7]);
    assert!(!path.exists());
}
