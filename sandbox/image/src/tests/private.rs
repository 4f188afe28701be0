//! Protection of the cache from other users of the machine, and of names from archives that bring
//! their own.

use std::io::BufRead;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use super::support::*;
use crate::{Cache, Error, Image, Limits, NameConflict, Reference, Silent, Source};

/// The attacker: a user that owns nothing.
const NOBODY: u32 = 65534;

fn open(dir: &Path) -> Cache {
    Cache::open(dir, Limits::default()).unwrap()
}

async fn import(
    cache: &Cache,
    content: &str,
    name: Option<&str>,
    taken: NameConflict,
) -> crate::Result<Image> {
    let layout = Layout::of(&[gzip(&Tar::new().file("x", content).end())]);
    let source = Source::OciLayout(layout.path().to_owned(), None);
    let name = name.map(|name| name.parse::<Reference>().unwrap());
    cache.import(&source, name, taken, Arc::new(Silent)).await
}

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
}

fn everything(dir: &Path) -> Vec<PathBuf> {
    let names = tree_of(dir).into_keys().map(|name| dir.join(name));
    names.chain([dir.to_owned()]).collect()
}

/// Returns the permission bits of other users.
fn rights_of_others(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o077
}

#[tokio::test]
async fn the_cache_is_its_owners_alone() {
    let place = tempfile::tempdir().unwrap();
    let dir = place.path().join("images");
    let image = import(&open(&dir), "x", Some("app"), NameConflict::Refuse).await.unwrap();
    assert!(everything(&dir).contains(&image.erofs_path));
    for path in everything(&dir) {
        assert_eq!(rights_of_others(&path), 0, "{}", path.display());
    }
    // The files have the modes that earlier versions left.
    for path in everything(&dir) {
        chmod(&path, if path.is_dir() { 0o755 } else { 0o644 });
    }
    let cache = open(&dir);
    cache.touch(&image.digest).unwrap();
    for path in everything(&dir) {
        assert_eq!(rights_of_others(&path), 0, "{}", path.display());
    }
    assert_eq!(cache.get("app").unwrap().unwrap().digest, image.digest);
}

/// Lookups do not wait, even while another process holds the lock.
#[tokio::test]
async fn looking_something_up_waits_for_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let image = import(&cache, "x", Some("app"), NameConflict::Refuse).await.unwrap();
    let held = slipway_lock::Lock::try_take(&dir.path().join("index.lock")).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    let looking = std::thread::spawn(move || {
        let _ = sender.send((cache.get("app").unwrap().unwrap(), cache.list().unwrap()));
    });
    let (found, listed) = receiver.recv_timeout(std::time::Duration::from_secs(100)).unwrap();
    assert_eq!((&found, listed.as_slice()), (&image, std::slice::from_ref(&image)));
    drop(held);
    looking.join().unwrap();
}

/// A shell command that runs as the attacker. Dropping this ends it.
struct Attacker(Child);

impl Attacker {
    /// Starts the command and returns once it has printed a line, together with that line.
    fn run(script: &str, path: &Path) -> (Self, String) {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).arg(path).uid(NOBODY).gid(NOBODY).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (Self(child), line)
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        // The group has the shell and its children.
        let group = rustix::process::Pid::from_child(&self.0);
        let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        let _ = self.0.wait();
    }
}

/// The attack that used to block listing and starting: a lock on any file that can be opened for
/// reading.
const LOCK: &str = "flock -s -n \"$1\" sh -c 'echo held; exec sleep 600' || echo refused";
const READ: &str = "cat \"$1\" >/dev/null && echo read || echo refused";

#[tokio::test]
async fn another_user_neither_reads_nor_locks_as_root() {
    const NAME: &str = "another_user_neither_reads_nor_locks_as_root";
    if !rustix::process::geteuid().is_root() {
        return skip(NAME, "root to act as another user");
    }
    let place = tempfile::tempdir().unwrap();
    // Other users can pass through the parent, as with the data directory.
    chmod(place.path(), 0o711);
    let dir = place.path().join("images");
    let cache = open(&dir);
    let image = import(&cache, "x", Some("app"), NameConflict::Refuse).await.unwrap();
    // The first round relies on the folder's mode, the second on the modes of its files.
    for mode in [0o700, 0o755] {
        chmod(&dir, mode);
        for path in [dir.join("index.lock"), dir.join("index.json"), image.erofs_path.clone()] {
            let (_attacker, said) = Attacker::run(READ, &path);
            assert_eq!(said, "refused\n", "{}", path.display());
            let (_attacker, said) = Attacker::run(LOCK, &path);
            assert_eq!(said, "refused\n", "{}", path.display());
            cache.touch(&image.digest).unwrap();
        }
    }
}

#[tokio::test]
async fn a_cache_of_another_user_is_refused_as_root() {
    const NAME: &str = "a_cache_of_another_user_is_refused_as_root";
    if !rustix::process::geteuid().is_root() {
        return skip(NAME, "root to act as another user");
    }
    let dir = tempfile::tempdir().unwrap();
    std::os::unix::fs::chown(dir.path(), Some(NOBODY), None).unwrap();
    let error = Cache::open(dir.path(), Limits::default()).unwrap_err();
    assert!(matches!(error, Error::ForeignCache { owner: NOBODY, .. }), "{error}");
}

/// An archive that has the name of another image does not get that name, since its maker has no
/// right to it.
#[tokio::test]
async fn an_import_takes_no_name_from_another_image() {
    let dir = tempfile::tempdir().unwrap();
    let cache = open(dir.path());
    let debian =
        import(&cache, "the real one", Some("debian:12"), NameConflict::Refuse).await.unwrap();
    let layer = plain(&Tar::new().file("x", "another").end());
    let config = config_json("amd64", std::slice::from_ref(&layer));
    let manifest =
        r#"[{"Config":"c.json","RepoTags":["new:1","debian:12"],"Layers":["l/layer.tar"]}]"#;
    let saved = Tar::new()
        .raw(tar::EntryType::Regular, b"l/layer.tar", b"", &layer.bytes)
        .file("c.json", &config)
        .file("manifest.json", manifest)
        .end();
    let path = dir.path().join("saved.tar");
    std::fs::write(&path, saved).unwrap();
    let archive = Source::DockerArchive(path, None);
    let log = Log::new();
    let error = cache.import(&archive, None, NameConflict::Refuse, log.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::NamesTaken { names } if names == "debian:12"), "{error}");
    assert!(error.to_string().contains("--replace"), "{error}");
    assert!(!log.has("Layers"), "refused before anything is unpacked");
    let names = || cache.get("debian:12").unwrap().unwrap().digest;
    assert_eq!((names(), cache.list().unwrap().len()), (debian.digest, 1));
    // The user gives the image a name of its own. The image is in the cache then, but its own names
    // are not.
    let other = Some("mine:1".parse().unwrap());
    let mine = cache.import(&archive, other, NameConflict::Refuse, log.clone()).await.unwrap();
    assert!(cache.import(&archive, None, NameConflict::Refuse, log.clone()).await.is_err());
    assert_eq!((names(), mine.references.len()), (debian.digest, 1));
    // The names are taken if the user asks for that.
    let taken = cache.import(&archive, None, NameConflict::Replace, log.clone()).await.unwrap();
    assert_eq!((taken.digest, names()), (mine.digest, mine.digest));
    // The image's own names are no conflict.
    let again = cache.import(&archive, None, NameConflict::Refuse, log).await.unwrap();
    assert_eq!(again.references, taken.references);
    assert!(cache.get(&debian.digest.to_string()).unwrap().unwrap().references.is_empty());
    // A name from the command line is treated in the same way.
    let error = import(&cache, "third", Some("mine:1"), NameConflict::Refuse).await.unwrap_err();
    assert!(matches!(&error, Error::NamesTaken { names } if names == "mine:1"), "{error}");
}
