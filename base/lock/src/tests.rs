//! Locks against other processes of this user and, as root, against another user's.

use std::io::BufRead;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::*;

/// The attacker's user id: a user that owns nothing.
const NOBODY: u32 = 65534;

/// Returns a directory, and a guard that lets one test run at a time: a process that another test
/// starts holds copies of this one's locks between its fork and its exec.
fn dir() -> (MutexGuard<'static, ()>, tempfile::TempDir) {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let dir = tempfile::tempdir().unwrap();
    // Others may enter the directory, so only the file's own mode keeps them out.
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    (alone, dir)
}

fn mode_of(path: &Path) -> u32 {
    std::fs::metadata(path).unwrap().mode() & 0o7777
}

/// An attacker that has a file open for reading and locks it until this value is dropped.
struct Attacker(Child);

impl Attacker {
    /// Starts an attacker. Returns `None` if it could not lock the file.
    fn lock(path: &Path) -> Option<Self> {
        let mut command = Command::new("flock");
        command.args(["--shared", "--nonblock", "--no-fork"]).arg(path);
        command.args(["sh", "-c", "echo held; exec sleep 600"]).uid(NOBODY).gid(NOBODY);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let attacker = Self(child);
        (line == "held\n").then_some(attacker)
    }
}

impl Drop for Attacker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: {test}: needs root to act as another user");
    }
    root
}

#[test]
fn one_holder_at_a_time_who_is_named() {
    let (_alone, dir) = dir();
    let path = dir.path().join("lock");
    let lock = Lock::try_take(&path).unwrap();
    assert_eq!(mode_of(&path), 0o600);
    let me = Holder { pid: std::process::id(), uid: Some(rustix::process::getuid().as_raw()) };
    for error in [Lock::try_take(&path), Lock::try_existing(&path)].map(Result::unwrap_err) {
        let Error::Held { holders, .. } = &error else { panic!("{error}") };
        // A file system with device numbers of its own, such as btrfs, shows no holder.
        assert!(holders.0.is_empty() || holders.0 == [me], "{error}");
        assert!(error.to_string().contains("lock is locked by "), "{error}");
        assert!(!holders.are_strangers());
    }
    drop(lock);
    Lock::try_existing(&path).unwrap();
    assert!(matches!(Lock::try_existing(&dir.path().join("none")), Err(Error::Io { .. })));
}

#[test]
fn waits_until_it_is_free() {
    let (_alone, dir) = dir();
    let path = dir.path().join("lock");
    let lock = Lock::try_take(&path).unwrap();
    let waiter = {
        let path = path.clone();
        std::thread::spawn(move || Lock::within(&path, Duration::from_secs(600)).map(drop))
    };
    std::thread::sleep(LOOK * 4);
    assert!(!waiter.is_finished());
    drop(lock);
    waiter.join().unwrap().unwrap();
}

#[test]
fn a_file_that_was_removed_is_not_at_its_path_and_other_errors_are_reported() {
    let (_alone, dir) = dir();
    let path = dir.path().join("lock");
    let lock = Lock::try_take(&path).unwrap();
    assert!(is_at(lock.file(), &path).unwrap());
    // `lock` is no directory.
    let error = is_at(lock.file(), &path.join("below")).unwrap_err();
    assert!(matches!(&error, Error::Io { action: "find", .. }), "{error}");
    std::fs::remove_file(&path).unwrap();
    assert!(!is_at(lock.file(), &path).unwrap());
}

#[test]
fn a_holder_that_has_ended_is_named_with_its_heir() {
    let holders = Holders(vec![Holder { pid: 7, uid: Some(3) }, Holder { pid: 8, uid: None }]);
    let text = "process 7 of user 3, a process that inherited it from process 8, which has ended";
    assert_eq!(holders.to_string(), text);
}

#[test]
fn what_cannot_be_a_lock_is_refused_without_waiting() {
    let (_alone, dir) = dir();
    let path = dir.path().join("lock");
    let status = Command::new("mkfifo").arg(&path).status().unwrap();
    assert!(status.success());
    assert!(matches!(Lock::try_take(&path), Err(Error::Unfit { .. })));
    std::fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink(dir.path().join("elsewhere"), &path).unwrap();
    assert!(matches!(Lock::try_take(&path), Err(Error::Io { .. })));
}

#[test]
#[allow(clippy::disallowed_methods)] // the attacker's own calls
fn an_inode_that_others_could_open_is_replaced_and_their_descriptors_lock_nothing() {
    let (_alone, dir) = dir();
    let path = dir.path().join("lock");
    for mode in [0o644, 0o660, MARKED] {
        std::fs::write(&path, "").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let before = File::open(&path).unwrap();
        let lock = Lock::try_take(&path).unwrap();
        assert_eq!(mode_of(&path), OURS);
        assert!(!is_at(&before, &path).unwrap(), "{mode:o}");
        assert!(is_at(lock.file(), &path).unwrap(), "{mode:o}");
        // The lock also excludes other processes of this user.
        assert!(matches!(Lock::try_take(&path), Err(Error::Held { .. })));
        drop(lock);
        #[allow(clippy::disallowed_methods, reason = "an attacker's own call")]
        rustix::fs::flock(&before, FlockOperation::NonBlockingLockShared).unwrap();
        Lock::try_take(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn waiting_for_an_inode_that_is_replaced_ends_at_the_new_one() {
    let (_alone, dir) = dir();
    let path = dir.path().join("lock");
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    let count = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                let _lock = Lock::within(&path, Duration::from_secs(600)).unwrap();
                use std::sync::atomic::Ordering::SeqCst;
                assert_eq!(count.fetch_add(1, SeqCst), 0, "two holders");
                std::thread::sleep(Duration::from_millis(2));
                count.fetch_sub(1, SeqCst);
            });
        }
    });
    assert_eq!(mode_of(&path), OURS);
}

#[test]
fn another_user_cannot_lock_as_root() {
    if !is_root("another_user_cannot_lock_as_root") {
        return;
    }
    let (_alone, dir) = dir();
    let path = dir.path().join("lock");
    drop(Lock::try_take(&path).unwrap());
    assert!(Attacker::lock(&path).is_none(), "the attacker has the lock");
    Lock::try_take(&path).unwrap();
}

#[test]
fn a_stranger_that_was_there_before_is_named_and_then_out_as_root() {
    if !is_root("a_stranger_that_was_there_before_is_named_and_then_out_as_root") {
        return;
    }
    let (_alone, dir) = dir();
    let path = dir.path().join("lock");
    // Earlier versions created the file like this.
    std::fs::write(&path, "").unwrap();
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o644)).unwrap();
    let attacker = Attacker::lock(&path).expect("the attacker can lock what it can read");
    let error = Lock::within(&path, LOOK).unwrap_err();
    let Error::Held { holders, .. } = &error else { panic!("{error}") };
    let holder = Holder { pid: attacker.0.id(), uid: Some(NOBODY) };
    assert!(holders.0.is_empty() || holders.0 == [holder], "{error}");
    assert_eq!(holders.are_strangers(), !holders.0.is_empty());
    // No other stranger can take the lock any more, and once this one is gone the next lock is out
    // of its reach.
    assert!(Attacker::lock(&path).is_none());
    drop(attacker);
    drop(Lock::try_take(&path).unwrap());
    assert_eq!(mode_of(&path), OURS);
}
