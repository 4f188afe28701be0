//! Folders whose owner swaps their content while they are packed. No tool is needed.

use std::io::{Read, Seek};
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::fs::RenameFlags;

use super::support::*;
use crate::source::folder;
use crate::{Digest, Error, Limits, Result};

const SECRET: &[u8] = b"nobody else may read this";
const ROUNDS: usize = 200;

/// A folder with `d/` and a secret beside it. `stage` has the files that the owner swaps in.
struct StagedFolder {
    dir: tempfile::TempDir,
    root: PathBuf,
    stage: PathBuf,
}

impl StagedFolder {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["root/d/e", "secret/e", "stage", "work"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        for i in 0..20 {
            for (dir, text) in [("root/d", &b"harmless"[..]), ("secret", SECRET)] {
                std::fs::write(at(dir).join(format!("f{i}")), text).unwrap();
                std::fs::write(at(dir).join(format!("e/f{i}")), text).unwrap();
            }
        }
        Self { root: at("root"), stage: at("stage"), dir }
    }

    fn secret(&self) -> PathBuf {
        self.dir.path().join("secret")
    }

    fn pack(&self) -> Result<Vec<u8>> {
        let work = self.dir.path().join("work");
        let (_, mut file) = folder::pack(&self.root, &work, &Limits::default())?;
        file.rewind().unwrap();
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).unwrap();
        Ok(bytes)
    }
}

fn has_secret(bytes: &[u8]) -> bool {
    bytes.windows(SECRET.len()).any(|window| window == SECRET)
}

/// Swaps `one` and `other` again and again while `work` runs. Returns the number of swaps.
fn while_swapping(one: &Path, other: &Path, mut work: impl FnMut()) -> u64 {
    let (end, swaps) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !end.load(Ordering::Relaxed) {
                let (cwd, flags) = (rustix::fs::CWD, RenameFlags::EXCHANGE);
                rustix::fs::renameat_with(cwd, one, cwd, other, flags).unwrap();
                swaps.fetch_add(1, Ordering::Relaxed);
                // On one processor, the other thread must get a turn in either state.
                std::thread::yield_now();
            }
        });
        // The other thread ends even if `work` fails.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut work));
        end.store(true, Ordering::Relaxed);
        if let Err(panic) = outcome {
            std::panic::resume_unwind(panic);
        }
    });
    swaps.into_inner()
}

#[test]
fn a_folder_swapped_for_a_link_brings_nothing_from_outside() {
    for (inside, leads_to) in [("d", ""), ("d/e", "e"), ("d/f7", "f7")] {
        let place = StagedFolder::new();
        let link = place.stage.join("link");
        symlink(place.secret().join(leads_to), &link).unwrap();
        let swaps = while_swapping(&place.root.join(inside), &link, || {
            for round in 0..ROUNDS {
                // The result is either of the two states, or an error that says that the folder
                // changed.
                match place.pack() {
                    Ok(bytes) => assert!(!has_secret(&bytes), "{inside}: round {round}"),
                    Err(error) => assert!(error.to_string().contains("changed"), "{error}"),
                }
            }
        });
        assert!(swaps > 0);
    }
}

/// Links that do not change become links in the image.
#[test]
fn links_are_packed_and_not_followed() {
    let place = StagedFolder::new();
    symlink(place.secret(), place.root.join("link")).unwrap();
    symlink("/proc/self/root", place.root.join("magic")).unwrap();
    let bytes = place.pack().unwrap();
    assert!(!has_secret(&bytes));
    let path = place.secret().display().to_string();
    assert!(bytes.windows(path.len()).any(|window| window == path.as_bytes()));
}

#[test]
fn what_would_block_never_does() {
    let place = StagedFolder::new();
    let fifo = place.stage.join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    // Packing must end, although nobody ever opens the FIFO's other end.
    let swaps = while_swapping(&place.root.join("d/f7"), &fifo, || {
        for _ in 0..ROUNDS {
            match place.pack() {
                Ok(_) => {}
                Err(error) => assert!(error.to_string().contains("changed"), "{error}"),
            }
        }
    });
    assert!(swaps > 0);
}

#[test]
fn a_file_that_changes_its_length_is_refused() {
    let place = StagedFolder::new();
    let path = place.root.join("d/grows");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(64 << 20).unwrap();
    for grows in [true, false] {
        let (end, changes) = (AtomicBool::new(false), AtomicU64::new(0));
        let refused = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !end.load(Ordering::Relaxed) {
                    let len = file.metadata().unwrap().len();
                    file.set_len(if grows { len + 1 } else { len.saturating_sub(1) }).unwrap();
                    changes.fetch_add(1, Ordering::Relaxed);
                }
            });
            // Copying takes most of a round, so a round with many changes has some while it copies.
            let (mut busy_rounds, mut refused) = (0, None);
            while busy_rounds < 10 && refused.is_none() {
                let before = changes.load(Ordering::Relaxed);
                refused = place.pack().err();
                busy_rounds += u32::from(changes.load(Ordering::Relaxed) - before > 1000);
            }
            end.store(true, Ordering::Relaxed);
            refused
        });
        let error = refused.expect("a file that never stood still was packed ten times");
        assert!(error.to_string().contains("changed"), "{error}");
    }
}

#[test]
fn the_way_to_the_folder_follows_links_of_root_and_the_caller_only_as_root() {
    const NAME: &str = "the_way_to_the_folder_follows_links_of_root_and_the_caller_only_as_root";
    let mut place = StagedFolder::new();
    let real = place.root.clone();
    for (path, target) in [("alias", "root"), ("stage/up", "../alias"), ("stage/far", "/")] {
        symlink(target, real.with_file_name(path)).unwrap();
    }
    let below = real.strip_prefix("/").unwrap().to_owned();
    let far = real.with_file_name("stage/far").join(below);
    for way in ["alias", "stage/up", "stage/../root/.", "root/"].map(|p| real.with_file_name(p)) {
        place.root = way;
        place.pack().unwrap();
    }
    place.root = far;
    place.pack().unwrap();
    if !rustix::process::geteuid().is_root() {
        return skip(NAME, "root to act as another user");
    }
    let link = real.with_file_name("alias");
    std::os::unix::fs::lchown(&link, Some(65534), None).unwrap();
    for way in ["alias", "stage/up"].map(|p| real.with_file_name(p)) {
        place.root = way;
        let error = place.pack().unwrap_err();
        assert!(matches!(error, Error::BadFolder { .. }), "{error}");
        assert!(error.to_string().contains("a link of user 65534"), "{error}");
    }
}

#[test]
fn too_many_names_are_refused_when_they_are_listed() {
    let place = StagedFolder::new();
    let limits = Limits { entries: 30, ..Limits::default() };
    let error = folder::pack(&place.root, &place.stage, &limits).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
}

/// Returns the path of each entry of an archive, and the path to which it is a link if it is one.
fn links(archive: &[u8]) -> Vec<(String, Option<String>)> {
    let mut archive = tar::Archive::new(archive);
    let entries = archive.entries().unwrap().map(|entry| {
        let entry = entry.unwrap();
        let is_link = entry.header().entry_type() == tar::EntryType::Link;
        let text = |path: &Path| path.display().to_string();
        let target = entry.link_name().unwrap().filter(|_| is_link);
        (text(&entry.path().unwrap()), target.map(|path| text(&path)))
    });
    entries.collect()
}

#[test]
fn further_names_of_a_file_are_links_to_its_first() {
    let place = StagedFolder::new();
    let at = |name: &str| place.root.join(name);
    for (first, other) in [("d/e/f1", "d/e/f1a"), ("d/e/f2", "last"), ("d/f3", "d/f3a")] {
        std::fs::hard_link(at(first), at(other)).unwrap();
    }
    let links: Vec<_> = links(&place.pack().unwrap());
    let target = |name: &str| {
        let found = links.iter().find(|(path, _)| path == name).unwrap();
        found.1.as_deref()
    };
    for first in ["d/e/f1", "d/e/f2", "d/f3"] {
        assert_eq!(target(first), None);
    }
    assert_eq!(target("d/e/f1a"), Some("d/e/f1"));
    assert_eq!(target("last"), Some("d/e/f2"));
    assert_eq!(target("d/f3a"), Some("d/f3"));
}

#[test]
fn a_socket_is_left_out_with_all_of_its_names() {
    let place = StagedFolder::new();
    let at = |name: &str| place.root.join(name);
    let _socket = std::os::unix::net::UnixListener::bind(at("d/one")).unwrap();
    std::fs::hard_link(at("d/one"), at("d/two")).unwrap();
    let links = links(&place.pack().unwrap());
    assert!(links.iter().any(|(path, _)| path == "d/f1"));
    assert!(!links.iter().any(|(path, _)| path == "d/one" || path == "d/two"), "{links:?}");
}

#[test]
fn holes_of_a_file_take_no_space_in_the_archive() {
    const LEN: u64 = 8 << 20;
    let place = StagedFolder::new();
    let file = std::fs::File::create(place.root.join("sparse")).unwrap();
    // A hole that is kept, one that is too short for that, and one at the end.
    let parts = [("first", 0), ("near", 8 << 10), ("far", 5 << 20)];
    for (text, at) in parts {
        file.write_all_at(text.as_bytes(), at).unwrap();
    }
    file.set_len(LEN).unwrap();
    if file.metadata().unwrap().blocks() * 512 > LEN / 4 {
        return skip("holes_of_a_file", "a file system with holes");
    }
    let (plan, mut packed) = folder::pack(&place.root, &place.stage, &Limits::default()).unwrap();
    let (layer, meta) = (&plan.layers[0], packed.metadata().unwrap());
    assert_eq!(meta.len(), layer.size);
    assert!(meta.len() > LEN && meta.blocks() * 512 < LEN / 4, "{meta:?}");
    let mut bytes = Vec::new();
    packed.rewind().unwrap();
    packed.read_to_end(&mut bytes).unwrap();
    assert_eq!(Digest::of(&bytes), layer.digest);
    let mut archive = tar::Archive::new(&bytes[..]);
    let mut entries = archive.entries().unwrap().map(|entry| entry.unwrap());
    let mut entry = entries.find(|one| *one.path().unwrap() == *Path::new("sparse")).unwrap();
    let mut content = Vec::new();
    entry.read_to_end(&mut content).unwrap();
    let mut expected = vec![0; LEN as usize];
    for (text, at) in parts {
        expected[at as usize..][..text.len()].copy_from_slice(text.as_bytes());
    }
    assert!(content == expected);
}

#[test]
fn further_names_of_a_file_have_no_attributes() {
    let place = StagedFolder::new();
    let first = place.root.join("d/f0");
    let flags = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(&first, "user.once", b"value", flags).is_err() {
        return skip("further_names_of_a_file", "a file system with users' attributes");
    }
    for index in 0..5 {
        std::fs::hard_link(&first, place.root.join(format!("link{index}"))).unwrap();
    }
    let bytes = place.pack().unwrap();
    let key = b"SCHILY.xattr.user.once";
    assert_eq!(bytes.windows(key.len()).filter(|window| *window == key).count(), 1);
}

/// Few inodes with many long names make a large archive.
#[test]
fn paths_and_links_of_an_archive_are_counted() {
    let place = StagedFolder::new();
    let deep = place.root.join(["n".repeat(250), "m".repeat(250)].join("/"));
    std::fs::create_dir_all(&deep).unwrap();
    let first = deep.join("first");
    std::fs::write(&first, "").unwrap();
    let limits = Limits { metadata_bytes: 60_000, ..Limits::default() };
    let pack = || folder::pack(&place.root, &place.stage, &limits).map(|_| ());
    pack().unwrap();
    for index in 0..60 {
        std::fs::hard_link(&first, deep.join(index.to_string())).unwrap();
    }
    let error = pack().unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert!(error.to_string().contains("names and attributes"), "{error}");
}

/// The names that wait to be packed are in memory.
#[test]
fn names_in_a_folder_are_counted_when_they_are_listed() {
    let place = StagedFolder::new();
    let limits = Limits { metadata_bytes: 1000, ..Limits::default() };
    let error = folder::pack(&place.root.join("d"), &place.stage, &limits).map(|_| ());
    let error = error.unwrap_err();
    assert!(matches!(error, Error::TooLarge { .. }), "{error}");
    assert!(error.to_string().contains("too long names"), "{error}");
}
