//! The pool on the host's control groups. Needs root and writable control groups.
#![allow(clippy::unwrap_used)] // a failed unwrap is the failure report

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use slipway_cgroup::{Hierarchies, Limits, Pool, PoolCounts, ROOT, Sets, Settings, V1_CONTROLLERS};

const LIMITS: Limits = Limits { memory_bytes: 256 << 20, cpus: 2, threads: 64 };
const PATIENCE: Duration = Duration::from_secs(60);

/// The groups of one test, which are removed at its end.
struct Host {
    all: Hierarchies,
}

impl Host {
    /// Returns `None`, and says so, where control groups cannot be made.
    fn new(test: &str) -> Option<Self> {
        let parent = format!("slipway-test-{}-{test}", std::process::id());
        let all = Hierarchies::of_host(&parent, &V1_CONTROLLERS);
        if all.is_empty() {
            println!("SKIPPED: {test}: needs root and writable control groups");
            return None;
        }
        Some(Self { all })
    }

    fn pool(&self, size: usize) -> Pool {
        let settings = Settings { tag: "pool".into(), size, limits: LIMITS };
        Pool::new(self.all.clone(), settings).unwrap()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for name in self.all.names() {
            let _ = self.all.group(&name).remove();
        }
        // v1 has CPU sets in a hierarchy of their own.
        let cpusets = Path::new(ROOT).join("cpuset");
        for root in self.all.roots().iter().chain([&cpusets]) {
            let parent = self.all.path_of("");
            let _ = fs::remove_dir(root.join(parent.trim_matches('/')));
        }
    }
}

fn settled(pool: &Pool, wanted: impl Fn(&PoolCounts) -> bool) -> PoolCounts {
    let begun = Instant::now();
    loop {
        let counts = pool.counts();
        if wanted(&counts) {
            return counts;
        }
        assert!(begun.elapsed() < PATIENCE, "{counts:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn sleeper() -> Child {
    Command::new("sleep").arg("1000").spawn().unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Returns the value of the first of `files` that a directory of the group has.
fn value(group: &slipway_cgroup::Group, files: &[&str]) -> Option<String> {
    let dirs = group.procs_files();
    let dirs = dirs.iter().filter_map(|file| file.parent());
    let read = |dir: &Path| files.iter().find_map(|file| fs::read_to_string(dir.join(file)).ok());
    dirs.into_iter().find_map(read).map(|text| text.trim().to_owned())
}

#[test]
fn a_group_goes_round() {
    let Some(host) = Host::new("round") else { return };
    let pool = host.pool(2);
    assert!(pool.take().is_none(), "it makes none before it is open");
    pool.open(Some(&BTreeSet::new()));
    settled(&pool, |counts| counts.ready == 2);
    let mut group = pool.take().unwrap();
    assert!(pool.owns(group.name()));
    group.limit(Limits { threads: 9, ..LIMITS }).unwrap();
    if let Some(threads) = value(&group, &["pids.max"]) {
        assert_eq!(threads, "9");
    }
    let child = sleeper();
    group.join(child.id()).unwrap();
    let inside = fs::read_to_string(format!("/proc/{}/cgroup", child.id())).unwrap();
    let path = host.all.path_of(group.name());
    assert!(inside.lines().filter(|line| line.ends_with(&path)).count() >= 1, "{inside}");
    settled(&pool, |counts| counts.ready == 2);

    // It is given back while its process lives: nobody has it before the process is gone.
    let name = group.name().to_owned();
    pool.give_back(group);
    pool.give_back(pool.group(&name));
    settled(&pool, |counts| counts.returning == 1);
    end(child);
    let counts = settled(&pool, |counts| counts.returning == 0);
    assert_eq!((counts.ready, counts.removed), (2, 1), "the pool was full: {counts:?}");
    assert!(!host.all.names().contains(&name));
    drop(pool);
    assert_eq!(host.all.names(), BTreeSet::new());
}

/// Returns a pool that is not open, so that it makes no group, with one group in it.
fn with_one(host: &Host) -> Pool {
    let pool = host.pool(1);
    pool.give_back(pool.make("pool-1").unwrap());
    settled(&pool, |counts| counts.ready == 1);
    pool
}

/// Runs a shell script in the group.
fn run_in(group: &slipway_cgroup::Group, script: &str) {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("for file; do echo $$ >$file; done; {script}")).arg("sh");
    shell.args(group.procs_files()).stderr(Stdio::null());
    shell.status().unwrap();
}

#[test]
fn a_returned_group_has_the_usual_limits_and_new_counts() {
    let Some(host) = Host::new("limits") else { return };
    let pool = with_one(&host);
    let mut group = pool.take().unwrap();
    group.limit(Limits { threads: 1, ..LIMITS }).unwrap();
    // The shell is the one thread that the limit allows, so its child is refused.
    run_in(&group, "(:); true");
    let counted = value(&group, &["pids.events"]).is_some();
    assert_eq!(group.usage().counters.threads_refused > 0, counted);
    pool.give_back(group);
    settled(&pool, |counts| counts.ready == 1);
    let again = pool.take().unwrap();
    assert_eq!((again.name(), again.usage().counters.threads_refused), ("pool-1", 0));
    if let Some(threads) = value(&again, &["pids.max"]) {
        assert_eq!(threads, LIMITS.threads.to_string());
    }
}

/// Returns the list of CPUs on which a process may run.
fn allowed(child: &Child) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let list = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    list.unwrap().trim().to_owned()
}

#[test]
fn a_group_is_confined_until_it_is_given_back() {
    let Some(host) = Host::new("sets") else { return };
    let pool = with_one(&host);
    let group = pool.take().unwrap();
    let (first, second) = (sleeper(), sleeper());
    group.join(first.id()).unwrap();
    let all = allowed(&first);
    let one = all.split(['-', ',']).next().unwrap().to_owned();
    let sets = Sets { cpus: one.clone(), mems: String::new() };
    if all == one || !host.all.confine(&group, &sets).unwrap() {
        for child in [first, second] {
            end(child);
        }
        return println!("SKIPPED: CPU sets of control groups: needs two CPUs and the controller");
    }
    assert_eq!(allowed(&first), one);
    group.join(second.id()).unwrap();
    assert_eq!(allowed(&second), one);
    host.all.confine(&group, &Sets::default()).unwrap();
    assert_ne!(allowed(&first), one);
    assert_ne!(allowed(&second), one);
    let none = Sets { cpus: "no list".to_owned(), ..Sets::default() };
    let refused = host.all.confine(&group, &none).unwrap_err().to_string();
    assert!(refused.starts_with("cannot set ") && refused.contains("cpuset.cpus"), "{refused}");
    host.all.confine(&group, &sets).unwrap();
    for child in [first, second] {
        end(child);
    }
    pool.give_back(group);
    settled(&pool, |counts| counts.ready == 1);
    let (again, child) = (pool.take().unwrap(), sleeper());
    again.join(child.id()).unwrap();
    assert_ne!(allowed(&child), one);
    end(child);
}

/// Page cache that a sandbox's processes made is charged to their group, also when they have ended.
#[test]
fn page_cache_of_the_last_sandbox_is_not_charged_to_the_next() {
    let Some(host) = Host::new("cache") else { return };
    let pool = with_one(&host);
    let group = pool.take().unwrap();
    if value(&group, &["memory.current", "memory.usage_in_bytes"]).is_none() {
        return println!("SKIPPED: page cache of control groups: no memory controller here");
    }
    let file = tempfile::NamedTempFile::new_in("/var/tmp").unwrap();
    let path = file.path().display();
    run_in(&group, &format!("head -c 20000000 /dev/zero >{path}; sync {path}"));
    assert!(group.usage().memory_bytes > 16 << 20, "{:?}", group.usage());
    pool.give_back(group);
    let counts = settled(&pool, |counts| counts.returning == 0);
    assert_eq!((counts.ready, counts.removed), (1, 0), "it came clean");
    let left = pool.take().unwrap().usage().memory_bytes;
    assert!(left <= 512 << 10, "{left} bytes are left");
}

#[test]
fn the_next_daemon_takes_what_the_last_one_left() {
    let Some(host) = Host::new("crash") else { return };
    let first = host.pool(3);
    first.open(Some(&BTreeSet::new()));
    settled(&first, |counts| counts.ready == 3);
    let (used, left) = (first.take().unwrap(), first.take().unwrap());
    settled(&first, |counts| counts.ready == 3);
    // As after kill -9: nothing is removed, and groups of another pool are nobody's business.
    std::mem::forget(first);
    let others = host.all.group("other-1");
    for root in host.all.roots() {
        fs::create_dir(root.join(host.all.path_of("other-1").trim_start_matches('/'))).unwrap();
    }
    let next = host.pool(6);
    next.open(Some(&BTreeSet::from([used.name().to_owned()])));
    settled(&next, |counts| counts.ready == 6 && counts.returning == 0);
    let mut names = BTreeSet::new();
    while names.len() < 4 {
        names.insert(next.take().unwrap().name().to_owned());
    }
    assert!(!names.contains(used.name()));
    assert!(host.all.names().contains(left.name()), "it is ready, or taken again");
    assert!(host.all.names().contains(others.name()));
}

/// The user to whom a test delegates a group: nobody.
const USER: u32 = 65_534;
/// The variable with which this program runs again as that user: the groups' parent, and the mount
/// points of the hierarchies, one a line.
const DELEGATED: &str = "SLIPWAY_TEST_DELEGATED";

/// A user without rights has a group that is delegated to it (systemd's `Delegate=yes`), and is in
/// a group below that. The test runs once as root, and once more within itself as that user.
#[test]
fn a_pool_works_in_a_delegated_group() {
    if let Ok(delegated) = std::env::var(DELEGATED) {
        return in_a_delegated_group(&delegated);
    }
    let Some(host) = Host::new("delegated") else { return };
    let own = host.pool(0).make("daemon").unwrap();
    delegate(&own);
    // A copy, since this program may be in a directory that the user cannot enter. Made by another
    // process: a child of another test would have it open for writing, and it could not be run.
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("test");
    let this = std::env::current_exe().unwrap();
    assert!(Command::new("cp").arg(this).arg(&program).status().unwrap().success());
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let parent = host.all.path_of("");
    let roots = host.all.roots().iter().map(|root| root.display().to_string());
    let lines: Vec<_> = std::iter::once(parent).chain(roots).collect();
    let mut user = Command::new(program);
    user.args(["--exact", "--nocapture", "a_pool_works_in_a_delegated_group"]);
    user.env(DELEGATED, lines.join("\n")).uid(USER).gid(USER).current_dir("/");
    let mut user = user.stdin(Stdio::piped()).spawn().unwrap();
    own.join(user.id()).unwrap();
    // It begins once its input ends.
    drop(user.stdin.take());
    assert!(user.wait().unwrap().success());
    assert_eq!(host.all.names(), BTreeSet::from(["daemon".to_owned()]), "its groups are gone");
}

/// Gives the parent of the groups, and `own` in it, to the user, as systemd delegates a group.
fn delegate(own: &slipway_cgroup::Group) {
    for procs in own.procs_files() {
        let group = procs.parent().unwrap();
        for dir in [group, group.parent().unwrap()] {
            chown(dir, Some(USER), Some(USER)).unwrap();
            for file in ["cgroup.procs", "cgroup.threads", "cgroup.subtree_control"] {
                if dir.join(file).exists() {
                    chown(dir.join(file), Some(USER), Some(USER)).unwrap();
                }
            }
        }
    }
}

/// Takes a group of a pool, with limits and a process in it, and gives it back.
fn in_a_delegated_group(delegated: &str) {
    assert_eq!(std::io::read_to_string(std::io::stdin()).unwrap(), "");
    let mut lines = delegated.lines();
    let parent = lines.next().unwrap();
    let all = Hierarchies::at(lines.map(PathBuf::from).collect(), parent);
    let settings = Settings { tag: "pool".into(), size: 1, limits: LIMITS };
    let pool = Pool::new(all.clone(), settings).unwrap();
    pool.open(Some(&BTreeSet::new()));
    settled(&pool, |counts| counts.ready == 1);
    let child = sleeper();
    let turn = pool.turn();
    let mut group = pool.take().unwrap();
    group.limit(Limits { threads: 9, ..LIMITS }).unwrap();
    group.join(child.id()).unwrap();
    drop(turn);
    if let Some(threads) = value(&group, &["pids.max"]) {
        assert_eq!(threads, "9");
    }
    let inside = fs::read_to_string(format!("/proc/{}/cgroup", child.id())).unwrap();
    let path = all.path_of(group.name());
    assert!(inside.lines().any(|line| line.ends_with(&path)), "{inside}");
    // Outside of what was delegated the user has no rights.
    for root in all.roots() {
        let made = fs::create_dir(root.join("slipway-test-outside"));
        assert_eq!(made.unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
    }
    end(child);
    pool.give_back(group);
    settled(&pool, |counts| counts.ready == 1 && counts.returning == 0);
    drop(pool);
    assert_eq!(all.names(), BTreeSet::from(["daemon".to_owned()]));
}
