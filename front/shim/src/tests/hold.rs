//! Tests of the two ends of a holder without its processes: that of the serving process
//! ([`Holder`]), and its own ([`keep_for`]).

use std::io::{Read, Write};

use super::*;

/// Makes a serving process's end, and the holder's.
pub(crate) fn ends() -> (Arc<Holder>, OwnedFd) {
    let (socket, theirs) = pair().unwrap();
    (Arc::new(Holder(Mutex::new(HolderState { socket, held: BTreeMap::new() }))), theirs)
}

fn end_of_pipe() -> OwnedFd {
    std::io::pipe().unwrap().0.into()
}

#[test]
fn files_that_a_killed_process_had_kept_reach_the_next_one() {
    let (killed, theirs) = ends();
    let (mut reader, writer) = std::io::pipe().unwrap();
    // The handles of a process that is killed are not dropped, so the holder keeps their files.
    std::mem::forget(killed.put("kept".to_owned(), writer.into()));
    drop(killed.put("dropped".to_owned(), end_of_pipe()));
    let replaced = killed.put("replaced".to_owned(), end_of_pipe());
    std::mem::forget(killed.put("replaced".to_owned(), end_of_pipe()));
    drop(replaced);
    // The kernel closes the socket of a process that has ended.
    drop(std::mem::replace(&mut killed.state().socket, pair().unwrap().0));
    let (mut held, (socket, next)) = (BTreeMap::new(), pair().unwrap());
    assert!(!keep_for(&theirs, &mut held));
    assert_eq!(held.keys().collect::<Vec<_>>(), ["kept", "replaced"]);
    hand_over(&socket, &held).unwrap();
    let next = Holder::join(next).unwrap();
    assert_eq!(next.names("ke"), ["kept"]);
    assert!(next.take("dropped").is_none());
    next.take("kept").unwrap().copy().unwrap().write_all(b"once").unwrap();
    let mut four = [0; 4];
    reader.read_exact(&mut four).unwrap();
    assert_eq!(&four, b"once");
}

#[test]
fn files_that_nobody_has_taken_are_closed() {
    let (next, theirs) = ends();
    next.state().held.insert("left".to_owned(), Arc::new(end_of_pipe()));
    let _taken = next.put("taken".to_owned(), end_of_pipe());
    next.close_rest();
    assert_eq!(next.names(""), ["taken"]);
    drop(std::mem::replace(&mut next.state().socket, pair().unwrap().0));
    let mut held = BTreeMap::from([("left".to_owned(), end_of_pipe())]);
    assert!(!keep_for(&theirs, &mut held));
    assert_eq!(held.keys().collect::<Vec<_>>(), ["taken"]);
}

#[test]
fn a_process_whose_work_is_done_ends_its_holder() {
    let (holder, theirs) = ends();
    holder.end();
    assert!(keep_for(&theirs, &mut BTreeMap::new()));
}

#[test]
fn a_process_that_dies_again_and_again_is_not_started_any_more() {
    let (mut starts, begun) = (Vec::new(), Instant::now());
    for second in 0..MOST_STARTS as u64 {
        assert!(may_start(&mut starts, begun + Duration::from_secs(second)));
    }
    assert!(!may_start(&mut starts, begun + WITHIN - Duration::from_secs(1)));
    assert!(may_start(&mut starts, begun + 3 * WITHIN));
}

#[tokio::test]
async fn the_end_of_a_holder_is_seen() {
    let (ours, theirs) = pair().unwrap();
    let watched = tokio::spawn(gone(ours));
    tokio::task::yield_now().await;
    assert!(!watched.is_finished());
    drop(theirs);
    watched.await.unwrap().unwrap();
}

#[test]
fn the_next_holder_gets_the_listening_socket_last() {
    let (holder, _theirs) = ends();
    let _kept = ["a", LISTENER, "z"].map(|name| holder.put(name.to_owned(), end_of_pipe()));
    let (socket, next) = pair().unwrap();
    holder.state().move_to(socket).unwrap();
    let names = [(); 3].map(|()| receive(&next).unwrap().unwrap().name);
    // A holder without the listening socket starts no serving process: it would lack descriptors
    // if its sender was killed before the others were sent.
    assert_eq!(names, ["a", "z", LISTENER]);
}

#[test]
fn a_holder_that_lacks_a_descriptor_ends() {
    let (holder, theirs) = ends();
    // The name is a byte too long for a message.
    let _kept = holder.put("x".repeat(LONGEST), end_of_pipe());
    let mut held = BTreeMap::new();
    assert!(keep_for(&theirs, &mut held) && held.is_empty());
}

#[test]
fn a_holder_that_has_no_room_for_a_descriptor_ends() {
    let (holder, theirs) = ends();
    let _kept = holder.put("y".repeat(LONGEST - 1), end_of_pipe());
    // The kernel delivers the message without its file to a process that has no descriptor left.
    send(&holder.state().socket, PUT, "lost", None).unwrap();
    let _after = holder.put("after".to_owned(), end_of_pipe());
    let mut held = BTreeMap::new();
    assert!(keep_for(&theirs, &mut held));
    assert_eq!(held.into_keys().collect::<Vec<_>>(), ["y".repeat(LONGEST - 1)]);
}
