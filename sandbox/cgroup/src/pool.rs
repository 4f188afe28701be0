//! A pool of control groups that are made before sandboxes need them, and the thread that makes and
//! resets them.
//!
//! A request of a start of a sandbox takes a group from the list, within a *turn*
//! ([`turns`](crate::turns)): a bounded number of requests runs at a time. The pool's thread fills
//! the list. It makes no group while a request runs or may follow soon, unless the list is empty:
//! the kernel makes groups and moves processes under one lock, on which the request would wait.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::parents::Parents;
use crate::reset::{Reset, reset};
use crate::turns::SlotQueue;
use crate::{Counters, Group, Hierarchies, Limits, Result, Slot};

/// The time between two attempts to reset a group in which a process still is, and between two
/// looks whether a request runs.
const AGAIN: Duration = Duration::from_millis(10);
/// The number of attempts to reset a group after which the log has a line about it. Further
/// attempts follow every [`LATER`], without an end: the kernel may not be able to end the process
/// yet.
const TRIES: u32 = 200;
/// The time between two attempts to reset a group after [`TRIES`] attempts, and between two
/// attempts to make a group.
const LATER: Duration = Duration::from_secs(5);
/// The time after a group was taken in which none is made while others are ready: a sandbox that
/// starts alone takes the group first, and has its turn and enters the group later.
const QUIET: Duration = Duration::from_millis(100);

/// The settings of a pool.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The beginning of the names of the pool's groups. No other pool of the host may have it.
    pub tag: String,
    /// The number of groups that the pool keeps ready. 0: none, and every group is made on demand.
    pub size: usize,
    /// The limits that groups are made with, until a sandbox has other limits.
    pub limits: Limits,
}

/// The numbers of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolCounts {
    /// Groups that are ready.
    pub ready: u64,
    /// Groups that are being reset.
    pub returning: u64,
    /// Groups that were taken from the list.
    pub taken: u64,
    /// Groups that were asked for while the list was empty.
    pub missed: u64,
    /// Groups that were made.
    pub made: u64,
    /// Groups that were reset and listed again.
    pub reused: u64,
    /// Groups that were removed: they could not be reset, or the pool had its number of groups.
    pub removed: u64,
}

/// A pool of groups. [Closing](Self::close) or dropping it removes the groups that are ready.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    hierarchies: Hierarchies,
    settings: Settings,
    state: Mutex<PoolState>,
    work: Condvar,
    turns: SlotQueue,
    parents: Parents,
}

#[derive(Debug)]
struct PoolState {
    ready: Vec<Group>,
    returning: VecDeque<Returning>,
    /// `true` while the thread resets a group, which is in neither list at that time.
    resetting: bool,
    /// The names of the groups in `ready` and `returning`: no group may be in the pool twice.
    listed: BTreeSet<String>,
    /// The limits of the last sandbox. The next one will likely have the same.
    usual: Limits,
    counts: PoolCounts,
    /// The number of the next group's name.
    next: u64,
    /// `true` once the pool knows which groups sandboxes of an earlier daemon have.
    open: bool,
    closed: bool,
    /// The earliest time of the next attempt to make a group.
    make_at: Instant,
    /// The end of the last quiet time ([`QUIET`]). `None` if no group was taken yet.
    quiet_until: Option<Instant>,
}

#[derive(Debug)]
struct Returning {
    group: Group,
    tries: u32,
    at: Instant,
}

type Guard<'a> = MutexGuard<'a, PoolState>;

enum PoolWork {
    Make(String),
    Reset(Returning),
}

impl Pool {
    /// Makes a pool, which makes no group before [`open`](Self::open) is called.
    ///
    /// # Errors
    /// The error of creating a thread.
    pub fn new(hierarchies: Hierarchies, settings: Settings) -> std::io::Result<Self> {
        let state = PoolState {
            ready: Vec::new(),
            returning: VecDeque::new(),
            resetting: false,
            listed: BTreeSet::new(),
            usual: settings.limits,
            counts: PoolCounts::default(),
            next: 0,
            open: false,
            closed: false,
            make_at: Instant::now(),
            quiet_until: None,
        };
        let state = Mutex::new(state);
        let (work, turns) = (Condvar::new(), SlotQueue::of_host());
        let parents = Parents::default();
        let shared = Shared { hierarchies, settings, state, work, turns, parents };
        let shared = Arc::new(shared);
        let works = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("cgroups".into()).spawn(move || {
            lower_priority();
            works.run();
        })?;
        Ok(Self { shared, thread: Mutex::new(Some(thread)) })
    }

    /// Starts to make groups. Groups of an earlier daemon with this pool's tag that are not in
    /// `owned` are reset and used; with `None`, nobody knows which are owned, and none is touched.
    /// Waits for a reading of the groups' directories.
    pub fn open(&self, owned: Option<&BTreeSet<String>>) {
        let (tag, names) = (self.prefix(), self.shared.hierarchies.names());
        if let Some(owned) = owned {
            for name in names.iter().filter(|name| name.starts_with(&tag) && !owned.contains(*name))
            {
                self.give_back(self.group(name));
            }
        }
        self.shared.lock().open = true;
        self.shared.work.notify_one();
    }

    /// Returns the hierarchies of the pool's groups.
    pub fn hierarchies(&self) -> &Hierarchies {
        &self.shared.hierarchies
    }

    /// Returns the group `name`, for a sandbox that has it already.
    pub fn group(&self, name: &str) -> Group {
        self.shared.hierarchies.group(name)
    }

    /// Waits for a turn, and begins it. Turns begin in the order of the calls. As many run at once
    /// as the process has CPUs, and two at least.
    ///
    /// During its turn the caller takes or makes a group, sets its limits, and moves a process into
    /// it, if it has one. It must do nothing else, and above all wait for no peer. The turn ends
    /// when the returned value is dropped.
    ///
    /// Blocks the thread for 1 s at most, so asynchronous tasks must not call it. If no turn of
    /// others has ended by then, this one begins beside them. The thread must have no other turn.
    pub fn turn(&self) -> Slot<'_> {
        self.shared.turns.take()
    }

    /// Removes a group from the list, in constant time and without a system call. Returns `None`
    /// if none is ready: the caller then makes one ([`make`](Self::make)). The pool's thread fills
    /// the list again at once if it is empty, and otherwise when no request runs.
    pub fn take(&self) -> Option<Group> {
        let mut state = self.shared.lock();
        let group = state.ready.pop();
        match &group {
            Some(group) => {
                state.listed.remove(group.name());
                state.counts.taken += 1;
                state.quiet_until = Some(quiet_end(state.quiet_until, Instant::now()));
            }
            None => state.counts.missed += u64::from(self.shared.settings.size > 0),
        }
        drop(state);
        self.shared.work.notify_one();
        group
    }

    /// Sets the limits with which groups are put into the list from now on. A sandbox that has
    /// these limits need not write any.
    pub fn expect(&self, limits: Limits) {
        self.shared.lock().usual = limits;
    }

    /// Makes a group outside of the pool, whose name is not one of the pool's. It is no error if
    /// the group exists.
    ///
    /// # Errors
    /// If a directory cannot be made.
    pub fn make(&self, name: &str) -> Result<Group> {
        let group = self.group(name);
        self.shared.parents.make(&self.shared.hierarchies, &group)?;
        Ok(group)
    }

    /// Returns whether `name` is that of a group of the pool.
    pub fn owns(&self, name: &str) -> bool {
        name.starts_with(&self.prefix())
    }

    /// Returns a group to the pool. The pool's thread resets it when its last process has ended.
    /// Does nothing for a group that is in the pool already.
    pub fn give_back(&self, group: Group) {
        let mut state = self.shared.lock();
        if state.listed.insert(group.name().to_owned()) {
            state.returning.push_back(Returning { group, tries: 0, at: Instant::now() });
        }
        drop(state);
        self.shared.work.notify_one();
    }

    /// Returns the numbers of the pool.
    pub fn counts(&self) -> PoolCounts {
        let state = self.shared.lock();
        let returning = state.returning.len() + usize::from(state.resetting);
        let (ready, returning) = (state.ready.len() as u64, returning as u64);
        PoolCounts { ready, returning, ..state.counts }
    }

    /// Ends the pool's thread, waits for its end, and removes the groups in the pool that are
    /// empty. The pool makes no more groups.
    pub fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.work.notify_one();
        let thread = self.thread.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
        let mut state = self.shared.lock();
        let returning: Vec<_> = state.returning.drain(..).map(|one| one.group).collect();
        for group in state.ready.drain(..).chain(returning) {
            let _ = group.remove();
        }
    }

    fn prefix(&self) -> String {
        format!("{}-", self.shared.settings.tag)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> Guard<'_> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn run(&self) {
        while let Some(work) = self.next() {
            match work {
                PoolWork::Make(name) => self.make(&name),
                PoolWork::Reset(returning) => {
                    self.reset(returning);
                    self.lock().resetting = false;
                }
            }
        }
    }

    /// Waits for work. Returns `None` once the pool is closed.
    fn next(&self) -> Option<PoolWork> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let now = Instant::now();
            let due = state.returning.iter().position(|one| one.at <= now);
            if let Some(returning) = due.and_then(|index| state.returning.remove(index)) {
                state.resetting = true;
                return Some(PoolWork::Reset(returning));
            }
            let wants = state.open && state.ready.len() < self.settings.size;
            if wants && state.make_at <= now && !self.hierarchies.is_empty() {
                let just_taken = state.quiet_until.is_some_and(|end| now < end);
                let must_wait = self.turns.is_busy() || just_taken;
                if !state.ready.is_empty() && must_wait {
                    // The kernel makes groups and moves processes under one lock: the requests that
                    // run would wait for the new group, and there are others for the next request.
                    drop(state);
                    std::thread::sleep(AGAIN);
                    state = self.lock();
                    continue;
                }
                return Some(PoolWork::Make(self.next_name(&mut state)));
            }
            let times = state.returning.iter().map(|one| one.at);
            let next = times.chain(wants.then_some(state.make_at)).min();
            state = self.wait(state, next.map(|at| at.saturating_duration_since(now)));
        }
    }

    /// Returns a name that no group in the pool has. A group that is being reset may exist in some
    /// of the hierarchies only.
    fn next_name(&self, state: &mut PoolState) -> String {
        loop {
            state.next += 1;
            let name = format!("{}-{}", self.settings.tag, state.next);
            if !state.listed.contains(&name) {
                return name;
            }
        }
    }

    /// Waits for a change of the state, for `limit` at most.
    fn wait<'a>(&self, state: Guard<'a>, limit: Option<Duration>) -> Guard<'a> {
        match limit {
            None => self.work.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
            Some(limit) => match self.work.wait_timeout(state, limit.max(AGAIN)) {
                Ok((state, _)) => state,
                Err(poisoned) => poisoned.into_inner().0,
            },
        }
    }

    fn make(&self, name: &str) {
        let group = self.hierarchies.group(name);
        match self.parents.make(&self.hierarchies, &group) {
            Ok(true) => {
                self.lock().counts.made += 1;
                self.list(group);
            }
            // The group exists: it belongs to a sandbox of an earlier daemon.
            Ok(false) => {}
            Err(error) => {
                tracing::warn!(%error, "the pool of control groups stays short");
                self.lock().make_at = Instant::now() + LATER;
            }
        }
    }

    fn reset(&self, mut returning: Returning) {
        match reset(&returning.group) {
            Reset::Clean => return self.list(returning.group),
            Reset::Unfit if returning.group.remove().is_ok() => {
                let mut state = self.lock();
                state.listed.remove(returning.group.name());
                state.counts.removed += 1;
                return;
            }
            Reset::Unfit | Reset::Busy => {}
        }
        returning.tries += 1;
        if returning.tries == TRIES {
            let group = returning.group.name();
            tracing::warn!(group, "a process stays in a control group of a sandbox that ended");
        }
        returning.at = Instant::now() + if returning.tries < TRIES { AGAIN } else { LATER };
        self.lock().returning.push_back(returning);
    }

    /// Adds a group that is reset to the list, with the limits of the last sandbox. Removes the
    /// group if the list is full.
    fn list(&self, group: Group) {
        let usual = self.lock().usual;
        let before = Counters::read(group.dirs());
        let mut group = self.hierarchies.group(group.name()).counting_from(before);
        // If a limit cannot be set here, the sandbox that takes the group sets it, or fails.
        let _ = group.limit(usual);
        let mut state = self.lock();
        if state.ready.len() < self.settings.size && !state.closed {
            state.counts.reused += u64::from(!state.listed.insert(group.name().to_owned()));
            state.ready.push(group);
            return;
        }
        state.listed.remove(group.name());
        state.counts.removed += 1;
        drop(state);
        let _ = group.remove();
    }
}

/// Gives the calling thread the lowest priority: sandboxes that start now come first.
fn lower_priority() {
    const LOWEST: i32 = 19;
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), LOWEST);
}

/// Returns the end of the quiet time ([`QUIET`]) after a group was taken at `now`. `last` is the
/// end of the last quiet time.
///
/// A quiet time is not prolonged by further takes, and the next one begins [`QUIET`] after its end
/// at the earliest. So there is time to fill the list on a node that takes groups all the time.
fn quiet_end(last: Option<Instant>, now: Instant) -> Instant {
    match last {
        Some(end) if now < end + QUIET => end,
        _ => now + QUIET,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { memory_bytes: 1 << 30, cpus: 1, threads: 8 };

    fn wait_for(pool: &Pool, ready: u64) {
        while pool.counts().ready != ready {
            std::thread::yield_now();
        }
    }

    /// Directories of a file system stand for groups.
    #[test]
    fn no_group_is_made_while_a_request_is_served() {
        let root = tempfile::tempdir().unwrap();
        let all = Hierarchies::at(vec![root.path().into()], "p");
        let settings = Settings { tag: "pool".into(), size: 2, limits: LIMITS };
        let pool = Pool::new(all, settings).unwrap();
        pool.open(Some(&BTreeSet::new()));
        wait_for(&pool, 2);
        let turn = pool.turn();
        let first = pool.take().unwrap();
        // Long enough for several looks of the pool's thread.
        std::thread::sleep(AGAIN * 5);
        assert_eq!((pool.counts().ready, pool.counts().made), (1, 2));
        // Without a group that is ready, the next request would have to make one.
        let second = pool.take().unwrap();
        wait_for(&pool, 1);
        drop(turn);
        wait_for(&pool, 2);
        assert_ne!(first.name(), second.name());
    }

    #[test]
    fn a_node_that_takes_groups_all_the_time_has_time_to_make_some() {
        let begun = Instant::now();
        let end = quiet_end(None, begun);
        assert_eq!(end, begun + QUIET);
        for part in [0, 1, 9, 10, 11, 19] {
            assert_eq!(quiet_end(Some(end), begun + QUIET * part / 10), end, "{part} tenths");
        }
        assert_eq!(quiet_end(Some(end), begun + QUIET * 2), begun + QUIET * 3);
    }

    #[test]
    fn no_group_is_made_right_after_one_was_taken() {
        let root = tempfile::tempdir().unwrap();
        let all = Hierarchies::at(vec![root.path().into()], "p");
        let settings = Settings { tag: "pool".into(), size: 2, limits: LIMITS };
        let pool = Pool::new(all, settings).unwrap();
        pool.open(Some(&BTreeSet::new()));
        wait_for(&pool, 2);
        let begun = Instant::now();
        let _first = pool.take().unwrap();
        wait_for(&pool, 2);
        assert!(begun.elapsed() >= QUIET, "a start may still be before its turn");
        let _second = pool.take().unwrap();
        // Without a group that is ready, the next start would have to make one.
        let _third = pool.take().unwrap();
        while pool.counts().ready == 0 {
            std::thread::yield_now();
        }
    }
}
