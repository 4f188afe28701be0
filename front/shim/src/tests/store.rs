//! Tests of records, also where there is no room for them, and of several stores at once.

use std::io::Write;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use tonic::Code;

use super::*;
use crate::ttrpc::Failure;

/// Makes a store in a directory of the test's own.
fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::make(&dir.path().join("state")).unwrap();
    (dir, store)
}

/// Returns the store as the next serving process opens it.
fn next(store: &Store) -> Store {
    Store::open(store.share().unwrap())
}

fn path(store: &Store, name: &str) -> PathBuf {
    store.directory().unwrap().path(name)
}

/// Has the next record by this name find a file system without room.
fn fill(store: &Store, name: &str) {
    symlink("/dev/full", path(store, &format!(".{name}"))).unwrap();
}

#[test]
fn a_file_that_was_not_written_to_its_end_is_not_there() {
    let (_dir, store) = store();
    store.put("task-1", b"old");
    // A process that is killed before the rename leaves this.
    fs::write(path(&store, ".task-1"), b"ne").unwrap();
    fs::write(path(&store, ".task-2"), b"").unwrap();
    let next = next(&store);
    assert_eq!(next.names(""), ["task-1"]);
    assert_eq!(next.get("task-1").unwrap(), b"old");
    next.put("task-1", b"new");
    assert_eq!(next.get("task-1").unwrap(), b"new");
    next.remove("task-1");
    assert!(next.get("task-1").is_none());
}

#[test]
fn a_record_without_room_is_refused_and_the_old_one_stays() {
    let (_dir, store) = store();
    store.try_put("task-1", b"old").unwrap();
    fill(&store, "task-1");
    let error = store.try_put("task-1", b"new").unwrap_err();
    assert_eq!(store.get("task-1").unwrap(), b"old");
    let Failure { code, message } = Failure::unrecorded("the container one", &error);
    assert_eq!(code, Code::ResourceExhausted);
    let expected = "slipway: cannot keep a record of the container one: No space left on device";
    assert!(message.starts_with(expected), "{message}");
    assert!(message.ends_with("; free space in /run/containerd/s"), "{message}");
    symlink("/dev/full", path(&store, "part-1")).unwrap();
    assert!(is_full(&store.append("part-1", b"piece", 0).unwrap_err()));
    symlink("/dev/full", path(&store, "cursor-1")).unwrap();
    assert!(is_full(&store.fixed("cursor-1", 8).unwrap_err()));
}

#[tokio::test]
async fn a_record_that_cannot_be_refused_is_written_once_it_can_be() {
    let (_dir, store) = store();
    // No file can take its place.
    fs::create_dir(path(&store, "task-1")).unwrap();
    store.put("task-1", b"first");
    store.put("task-1", b"last");
    store.put("task-2", b"other");
    assert!(!store.directory().unwrap().has_caught_up());
    fs::remove_dir(path(&store, "task-1")).unwrap();
    let catches_up = store.clone();
    let caught_up = tokio::spawn(async move { catches_up.catch_up().await });
    while store.get("task-1").is_none() {
        tokio::time::sleep(AGAIN).await;
    }
    caught_up.abort();
    assert_eq!(store.get("task-1").unwrap(), b"last");
    assert!(store.directory().unwrap().late().is_empty());
    // One that was removed meanwhile is not written.
    fs::create_dir(path(&store, "task-3")).unwrap();
    store.put("task-3", b"");
    store.remove("task-3");
    assert!(store.directory().unwrap().has_caught_up());
}

#[test]
fn a_file_of_a_fixed_size_keeps_its_content() {
    let (_dir, store) = store();
    let file = store.fixed("cursor-1", 8).unwrap().unwrap();
    assert_eq!(store.get("cursor-1").unwrap(), [0; 8]);
    file.write_all_at(b"position", 0).unwrap();
    next(&store).fixed("cursor-1", 8).unwrap().unwrap();
    assert_eq!(store.get("cursor-1").unwrap(), b"position");
    assert!(Store::default().fixed("cursor-1", 8).unwrap().is_none());
}

#[test]
fn a_piece_takes_the_place_of_a_part_of_it() {
    let (_dir, store) = store();
    store.append("part-1", b"one", 0).unwrap();
    store.append("part-1", b"tw", 3).unwrap();
    store.append("part-1", b"two", 3).unwrap();
    assert_eq!(store.get("part-1").unwrap(), b"onetwo");
    store.append("part-1", b"3", 0).unwrap();
    store.rename("part-1", "call-1").unwrap();
    assert_eq!((store.get("part-1"), store.get("call-1")), (None, Some(b"3".to_vec())));
    assert!(store.rename("part-1", "call-1").is_err());
}

#[test]
fn a_store_that_was_removed_keeps_nothing_and_says_so() {
    let (dir, store) = store();
    assert!(!store.is_gone() && !Store::default().is_gone());
    fs::remove_dir_all(dir.path().join("state")).unwrap();
    assert!(store.is_gone() && next(&store).is_gone());
    assert!(store.try_put("task-1", b"").is_err() && store.append("part-1", b"", 0).is_err());
    // That of the next shim stays.
    let other = Store::make(&dir.path().join("state")).unwrap();
    store.put("over", b"");
    store.delete();
    assert!(!other.is_gone() && other.names("").is_empty());
}

#[test]
fn a_shim_that_ends_and_the_next_one_by_its_name_have_stores_of_their_own() {
    let (dir, ends) = store();
    let state = dir.path().join("state");
    // Its holder has the descriptor still.
    let held = ends.share().unwrap();
    ends.put("over", b"");
    drop(ends);
    let begins = Store::make(&state).unwrap();
    assert!(begins.names("").is_empty());
    assert_eq!(Store::open(held).names(""), ["over"]);
    // Nobody has the first one any more.
    let last = Store::make(&state).unwrap();
    assert!(last.names("").is_empty() && !begins.is_gone());
    for store in [begins, last] {
        store.delete();
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn the_stores_of_dead_shims_are_removed_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str| dir.path().join(name);
    for name in ["0a.state", "0b.1.state", "other"] {
        fs::create_dir(of(name)).unwrap();
        fs::write(of(name).join("task-1"), "").unwrap();
    }
    let _serves = UnixListener::bind(of("0c")).unwrap();
    fs::create_dir(of("0c.state")).unwrap();
    let _lives = Store::make(&of("0d.state")).unwrap();
    sweep(dir.path());
    let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|it| it.unwrap()).collect();
    left.sort_by_key(fs::DirEntry::file_name);
    let left: Vec<_> = left.iter().map(fs::DirEntry::file_name).collect();
    assert_eq!(left, ["0c", "0c.state", "0d.state", "other"]);
}

/// A small tmpfs that root mounts, unmounted on drop.
struct Small(tempfile::TempDir);

impl Small {
    /// Returns `None` after saying that `test` is skipped.
    fn mount(test: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let flags = rustix::mount::MountFlags::empty();
        let mounted =
            rustix::mount::mount("slipway-test", dir.path(), "tmpfs", flags, c"size=256k");
        if mounted.is_err() {
            let line = format!("SKIPPED: {test}: needs root to mount a tmpfs\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            return None;
        }
        Some(Self(dir))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let flags = rustix::mount::UnmountFlags::DETACH;
        // It is mounted, and nothing else unmounts it.
        let _ = rustix::mount::unmount(self.0.path(), flags);
    }
}

#[test]
fn root_the_end_of_a_process_has_room_on_a_full_file_system() {
    let small = Small::mount("root_the_end_of_a_process_has_room_on_a_full_file_system");
    let Some(small) = small else { return };
    let store = Store::make(&small.0.path().join("state")).unwrap();
    store.try_put("process-1", &[1; 100]).unwrap();
    let filler = small.0.path().join("filler");
    let mut file = File::create(&filler).unwrap();
    while file.write_all(&[0; 4096]).is_ok() {}
    assert!(is_full(&store.try_put("process-1", &[2; 100]).unwrap_err()));
    assert_eq!(store.get("process-1").unwrap(), [1; 100]);
    for end in 3..9 {
        store.put("process-1", &[end; 100]);
        assert_eq!(store.get("process-1").unwrap(), [end; 100]);
    }
    let directory = store.directory().unwrap();
    drop(file);
    fs::remove_file(filler).unwrap();
    assert!(directory.has_caught_up() && !directory.lacks_room.load(Ordering::Relaxed));
    assert!(ROOMS.iter().all(|room| directory.path(room).exists()));
}

#[test]
fn names_of_files_follow_from_any_names() {
    let long = "x".repeat(300);
    let of = |parts: &[&str]| name("process", parts);
    let names = [of(&["a", "b"]), of(&["a", "../b"]), of(&[&long])];
    assert!(names.iter().all(|name| name.len() < 64 && !name.contains('/')), "{names:?}");
    assert_ne!(names[0], names[1]);
}

#[test]
fn a_value_of_another_version_is_none() {
    let (_dir, store) = store();
    store.put_json("one", &[1, 2]);
    assert_eq!(store.get_json::<Vec<u32>>("one"), Some(vec![1, 2]));
    assert_eq!(store.get_json::<String>("one"), None);
    let nowhere = Store::default();
    nowhere.put("one", b"");
    nowhere.try_put("one", b"").unwrap();
    assert!(nowhere.get("one").is_none() && nowhere.names("").is_empty());
}
