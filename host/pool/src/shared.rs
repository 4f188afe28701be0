//! The state of a pool that its threads share: free memory and that of sandboxes, and the work that
//! is left for the thread in the background.
//!
//! One mutex ([`State`]) is held for moments only: memory is made, counted and given to the kernel
//! without it. Memory goes round by `take` (a launcher asks), `lend` (a sandbox has it), `unlend`
//! (the sandbox is gone) and `put` (it is free). `next_job` has the order in which memory is zeroed
//! ahead.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use slipway_numa::{NumaNode, Topology};
use slipway_pool_spec::Request;
use slipway_ram::{Granules, LateFiles, LateMemory, Template};
use slipway_reactor::Bell;

use crate::choose::{Candidate, Choice, NodeBytes, choose};
use crate::make::{self, fresh, is_huge, is_like};
use crate::shelf::Shelves;
use crate::templates::{TemplateStats, Templates};

/// The configuration of a pool. The default holds nothing and zeroes nothing ahead.
#[derive(Clone, Default)]
pub struct Settings {
    /// The most bytes that the pool holds without a user. What is returned beyond it goes to the
    /// kernel, the oldest first.
    pub limit: u64,
    /// The most bytes of pages of memory that is ready for forks ([`Pool::keep_ready`]), beside
    /// `limit`; 0 has none ready.
    ///
    /// [`Pool::keep_ready`]: crate::Pool::keep_ready
    pub spare_bytes: u64,
    /// Zero memory ahead of its first use, and top the pool up. Without it nothing is done until a
    /// page is needed.
    pub ahead: bool,
    /// The files of all pools of the process.
    pub files: LateFiles,
    /// The places where memory outlives the process; `None` makes the pool zero memory before it
    /// gives it.
    pub shelves: Option<Shelves>,
    /// Zero recycled memory before it is given, as without shelves: the zeroing that FastIOV
    /// (section 4.3.2) decouples from the start is coupled with it again.
    pub zero_first: bool,
}

/// Figures of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes that nobody uses.
    pub free_bytes: u64,
    /// Bytes that sandboxes use.
    pub lent_bytes: u64,
    /// The number of sandboxes that have memory of the pool.
    pub lent: u64,
    /// The number of faults served.
    pub faults: u64,
    /// The number of granules of 64 KiB that were zeroed ahead of their first use.
    pub zeroed_ahead: u64,
    /// Bytes of huge pages, of those that sandboxes use and those that nobody uses.
    pub huge_bytes: u64,
    /// All granules of recycled memory by their states.
    pub granules: Granules,
    /// The number of sandboxes whose memory began as a template.
    pub forks: u64,
    /// Bytes of pages that these sandboxes have of their own.
    pub fork_bytes: u64,
    /// The number of pages of 4 KiB that were copied for them ahead of their first use.
    pub copied_ahead: u64,
    /// The number of memories that are ready for forks, and that no sandbox has.
    pub spare_forks: u64,
    /// Bytes of pages of these memories.
    pub spare_fork_bytes: u64,
    /// The number of forks that were given memory which was ready.
    pub spare_forks_given: u64,
    /// The templates, by name.
    pub templates: Vec<TemplateStats>,
    /// The bytes by NUMA node; empty on a host with one node.
    pub nodes: Vec<NodeBytes>,
}

/// The state that the pool's threads share.
pub(crate) struct Shared {
    pub(crate) settings: Settings,
    /// The NUMA nodes on which memory may have its home.
    pub(crate) topology: Topology,
    /// `/dev/userfaultfd`.
    device: File,
    state: Mutex<State>,
    /// Held while memory is recycled: of all memory beyond the limit, one at a time is complete.
    recycling: Mutex<()>,
    /// Tells the thread in the background that there is work, or that the pool has ended.
    work: Condvar,
    pub(crate) templates: Templates,
    faults: AtomicU64,
    copied_ahead: AtomicU64,
    zeroed_ahead: AtomicU64,
    spare_forks_given: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Memory that nobody has; the oldest first.
    free: VecDeque<PooledMemory>,
    lent: Vec<PooledMemory>,
    ended: bool,
}

/// Memory of the pool, free or a sandbox's, and how far it was zeroed ahead.
struct PooledMemory {
    memory: Arc<LateMemory>,
    /// The number of the next granule to look at.
    next: usize,
    /// The next sandbox may need all of it at once: see [`BackgroundWork::is_urgent`].
    is_urgent: bool,
    /// The sandbox that has the memory; `None` for memory that nobody has.
    user: Option<User>,
}

/// The sandbox that has a memory.
struct User {
    /// The device and inode number of the memory's file; `None` if the kernel does not tell them.
    identity: Option<(u64, u64)>,
    /// Rung when all granules were looked at.
    done: Arc<Bell>,
}

/// A part of a memory for the thread in the background.
pub(crate) struct BackgroundWork {
    pub(crate) memory: Arc<LateMemory>,
    pub(crate) granules: std::ops::Range<usize>,
    /// Pages that are not there are to be made.
    pub(crate) populate: bool,
    /// The work does not wait for an idle CPU: the last sandbox had hardware, and so may the next,
    /// whose start waits for all that is not zeroed by then.
    pub(crate) is_urgent: bool,
    /// Rung after the last part of a sandbox's memory.
    pub(crate) done: Option<Arc<Bell>>,
}

impl Shared {
    /// Makes the state of an empty pool.
    ///
    /// # Errors
    /// The kernel has no `/dev/userfaultfd`, or access is denied.
    pub(crate) fn new(settings: Settings) -> std::io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/userfaultfd");
        let device = device.map_err(|error| {
            std::io::Error::new(error.kind(), format!("/dev/userfaultfd (Linux 6.1): {error}"))
        })?;
        Ok(Self {
            settings,
            topology: Topology::of_host(),
            device,
            state: Mutex::default(),
            recycling: Mutex::default(),
            work: Condvar::new(),
            templates: Templates::default(),
            faults: AtomicU64::new(0),
            copied_ahead: AtomicU64::new(0),
            zeroed_ahead: AtomicU64::new(0),
            spare_forks_given: AtomicU64::new(0),
        })
    }

    /// Returns the present figures.
    pub(crate) fn stats(&self) -> Stats {
        let state = self.lock();
        let memory = |one: &PooledMemory| one.memory.clone();
        let free: Vec<_> = state.free.iter().map(memory).collect();
        let lent: Vec<_> = state.lent.iter().map(memory).collect();
        let nodes = state.by_node(&self.topology, &[]);
        // Counting takes a while: without the lock.
        drop(state);
        let bytes = |all: &[Arc<LateMemory>]| all.iter().map(|one| one.len() as u64).sum();
        let huge = |one: &&Arc<LateMemory>| is_huge(one);
        let (forks, recycled): (Vec<_>, Vec<_>) =
            free.iter().chain(&lent).partition(|one| one.template().is_some());
        let templates: Vec<Arc<Template>> =
            forks.iter().filter_map(|one| one.template().cloned()).collect();
        let (spare_forks, spare_fork_bytes) = self.templates.count_spares();
        Stats {
            free_bytes: bytes(&free),
            lent_bytes: bytes(&lent),
            lent: lent.len() as u64,
            faults: self.faults.load(Ordering::Relaxed),
            zeroed_ahead: self.zeroed_ahead.load(Ordering::Relaxed),
            huge_bytes: free.iter().chain(&lent).filter(huge).map(|one| one.len() as u64).sum(),
            granules: recycled.iter().map(|one| one.count()).sum(),
            forks: forks.len() as u64,
            fork_bytes: forks.iter().map(|one| make::held(one)).sum(),
            copied_ahead: self.copied_ahead.load(Ordering::Relaxed),
            spare_forks,
            spare_fork_bytes,
            spare_forks_given: self.spare_forks_given.load(Ordering::Relaxed),
            templates: self.templates.stats(&templates),
            nodes,
        }
    }

    /// Ends the pool: gives its free memory to the kernel, and has its threads end.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        let free = std::mem::take(&mut state.free);
        drop(state);
        self.work.notify_all();
        drop(free);
        self.templates.end();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Changed in single calls: a panic leaves it consistent.
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns whether the pool keeps memory of this size without a user.
    pub(crate) fn keeps(&self, memory: &LateMemory) -> bool {
        memory.len() as u64 <= self.settings.limit
    }

    /// Waits for the turn to recycle memory, and to put it into the pool.
    pub(crate) fn recycling(&self) -> MutexGuard<'_, ()> {
        self.recycling.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the device that makes userfaultfds.
    pub(crate) fn device(&self) -> BorrowedFd<'_> {
        self.device.as_fd()
    }

    /// Takes memory for a sandbox: recycled memory of this size if there is any, else new memory,
    /// on the NUMA node that the request names if there is one (see [`choose`]). Has the pool
    /// topped up with new memory when the last for such a request was taken.
    ///
    /// # Errors
    /// The reason, for the launcher.
    pub(crate) fn take(&self, request: Request) -> Result<Arc<LateMemory>, String> {
        make::check(request)?;
        // The host may have been given a node that the pool does not know.
        let near = request.near.filter(|node| self.topology.cpus(*node).is_some());
        let request = Request { near, ..request };
        if request.template.is_some() {
            return self.fork(request);
        }
        let mut state = self.lock();
        let (home, recycled) = match state.pick(request, None, &self.topology) {
            Choice::Recycled(at) => (None, state.free.remove(at)),
            Choice::New(home) => (home, None),
        };
        drop(state);
        let memory = match recycled {
            Some(one) => one.memory,
            None => self.make_new(request, home)?,
        };
        if self.settings.ahead {
            self.top_up(request, &memory);
        }
        Ok(memory)
    }

    /// Takes memory that begins as the template that the request names: what is ready, else new
    /// memory.
    fn fork(&self, request: Request) -> Result<Arc<LateMemory>, String> {
        let named = request.template.and_then(|name| self.templates.get(&name));
        let Some(named) = named else {
            let name = request.template.map_or(String::new(), |name| name.to_string());
            return Err(format!("the pool has no template {name}; make or load it first"));
        };
        make::check_fork(request, &named.template)?;
        let take = |name| self.templates.take_spare(&name, &named.template, request.near);
        if let Some(spare) = request.template.and_then(take) {
            self.spare_forks_given.fetch_add(1, Ordering::Relaxed);
            return Ok(spare);
        }
        make::fork(request, &named.template, self.home_of_fork(request.near))
    }

    /// Returns the NUMA node for new memory of a fork whose launcher names `near`, or none. What is
    /// ready for forks counts as if they had it.
    pub(crate) fn home_of_fork(&self, near: Option<NumaNode>) -> Option<NumaNode> {
        let spares = self.templates.spares();
        let spares: Vec<&LateMemory> = spares.iter().map(|one| &**one).collect();
        let loads = self.lock().by_node(&self.topology, &spares);
        match choose(std::iter::empty(), near, &loads) {
            Choice::New(home) => home,
            Choice::Recycled(_) => None,
        }
    }

    /// Makes new memory if none is left for another such request, after `taken` was taken for one.
    fn top_up(&self, request: Request, taken: &LateMemory) {
        let next = self.lock().pick(request, Some(taken), &self.topology);
        // The thread in the background makes its pages. Too few huge ones are no error here.
        if let Choice::New(home) = next
            && let Ok(spare) = fresh(request, home, &self.topology)
        {
            self.put(spare, false);
        }
    }

    /// Makes new memory. Where too few huge pages are left for it, takes recycled memory of another
    /// node.
    fn make_new(
        &self,
        request: Request,
        home: Option<NumaNode>,
    ) -> Result<Arc<LateMemory>, String> {
        fresh(request, home, &self.topology).or_else(|reason| {
            let anywhere = Request { near: None, ..request };
            let mut state = self.lock();
            match state.pick(anywhere, None, &self.topology) {
                Choice::Recycled(at) => state.free.remove(at).map(|one| one.memory).ok_or(reason),
                Choice::New(_) => Err(reason),
            }
        })
    }

    /// Notes that a sandbox has `memory`. The bell rings when all of it was zeroed ahead.
    pub(crate) fn lend(&self, memory: &Arc<LateMemory>, bell: &Arc<Bell>) {
        // Nothing of a fork is zeroed ahead.
        let next = memory.template().map_or(0, |_| memory.granules());
        let status = rustix::fs::fstat(memory.file());
        let identity = status.ok().map(|status| (status.st_dev, status.st_ino));
        let user = Some(User { identity, done: bell.clone() });
        let lent = PooledMemory { memory: memory.clone(), next, is_urgent: false, user };
        self.lock().lent.push(lent);
        self.work.notify_all();
    }

    /// Notes that no sandbox has `memory`.
    pub(crate) fn unlend(&self, memory: &Arc<LateMemory>) {
        self.lock().lent.retain(|one| !Arc::ptr_eq(&one.memory, memory));
    }

    /// Returns the memory of a sandbox whose file has this device and inode number.
    pub(crate) fn lent(&self, identity: (u64, u64)) -> Option<Arc<LateMemory>> {
        let has = |one: &&PooledMemory| {
            one.user.as_ref().is_some_and(|user| user.identity == Some(identity))
        };
        self.lock().lent.iter().find(has).map(|one| one.memory.clone())
    }

    /// Puts memory that nobody has into the pool: new memory, or recycled memory whose user is
    /// gone. If it `is_urgent`, the thread in the background zeroes it before all other memory, and
    /// does not wait for an idle CPU. Beyond the pool's limit the oldest memory goes to the kernel.
    pub(crate) fn put(&self, memory: Arc<LateMemory>, is_urgent: bool) {
        let mut state = self.lock();
        if state.ended {
            return;
        }
        state.free.push_back(PooledMemory { memory, next: 0, is_urgent, user: None });
        let mut held: u64 = state.free.iter().map(|one| one.memory.len() as u64).sum();
        let mut surplus = Vec::new();
        while held > self.settings.limit {
            let Some(one) = state.free.pop_front() else { break };
            held -= one.memory.len() as u64;
            surplus.push(one);
        }
        drop(state);
        self.work.notify_all();
        // Giving gigabytes to the kernel takes a while: without the lock.
        drop(surplus);
    }

    /// Waits for the next part, of at most `granules` granules, of any memory that is to be looked
    /// at: first of urgent memory, then of sandboxes' memory, then of other free memory. Returns
    /// `None` when the pool has ended.
    pub(crate) fn next_job(&self, granules: usize) -> Option<BackgroundWork> {
        let mut state = self.lock();
        loop {
            if state.ended {
                return None;
            }
            let State { free, lent, .. } = &mut *state;
            let is_left = |one: &&mut PooledMemory| one.next < one.memory.granules();
            if let Some(one) = free.iter_mut().filter(|one| one.is_urgent).find(is_left) {
                return Some(one.part(granules));
            }
            if let Some(one) = lent.iter_mut().chain(free.iter_mut()).find(is_left) {
                return Some(one.part(granules));
            }
            let waited = self.work.wait(state);
            state = waited.unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// Zeroes the first `percent` % of the granules of each free memory. A thread that
    /// takes the memory meanwhile finds each granule zeroed, or dirty, or waits for it.
    pub(crate) fn zero_free(&self, percent: usize) {
        let free: Vec<_> = self.lock().free.iter().map(|one| one.memory.clone()).collect();
        for memory in free {
            let count = memory.granules() * percent.min(100) / 100;
            let zeroed = (0..count).filter(|one| memory.zero_ahead(*one) == Ok(true)).count();
            self.count_zeroed(zeroed as u64);
        }
    }

    /// Counts a fault that is served.
    pub(crate) fn count_fault(&self) {
        self.faults.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts pages of 4 KiB that were copied ahead.
    pub(crate) fn count_copied(&self, pages: u64) {
        self.copied_ahead.fetch_add(pages, Ordering::Relaxed);
    }

    /// Counts granules that were zeroed ahead.
    pub(crate) fn count_zeroed(&self, granules: u64) {
        self.zeroed_ahead.fetch_add(granules, Ordering::Relaxed);
    }
}

impl State {
    /// Chooses memory for a request. `taken` was taken for a sandbox and is not lent yet.
    fn pick(&self, request: Request, taken: Option<&LateMemory>, topology: &Topology) -> Choice {
        let fits = |(_, one): &(usize, &PooledMemory)| is_like(&one.memory, request);
        let candidates = self.free.iter().enumerate().filter(fits).map(|(at, one)| Candidate {
            at,
            home: one.memory.home(),
            zeroed: one.next,
        });
        choose(candidates, request.near, &self.by_node(topology, taken.as_slice()))
    }

    /// Returns the bytes on each node. Those of `others` count as if sandboxes had them.
    fn by_node(&self, topology: &Topology, others: &[&LateMemory]) -> Vec<NodeBytes> {
        let bytes = |node| {
            let at_home = |one: &&LateMemory| one.home() == Some(node);
            let free = self.free.iter().map(|one| &*one.memory).filter(at_home);
            let lent = self.lent.iter().map(|one| &*one.memory);
            let lent = lent.chain(others.iter().copied()).filter(at_home);
            let bytes = |one: &LateMemory| one.len() as u64;
            NodeBytes { node, free: free.map(bytes).sum(), lent: lent.map(bytes).sum() }
        };
        topology.nodes().map(bytes).collect()
    }
}

impl PooledMemory {
    /// Takes the next part, of at most `granules` granules. Missing pages are made for memory that
    /// nobody has, which a sandbox then finds there; those of a sandbox's memory are made when the
    /// sandbox touches them.
    fn part(&mut self, granules: usize) -> BackgroundWork {
        let all = self.memory.granules();
        let start = self.next;
        self.next = (start + granules).min(all);
        let last = self.next == all;
        BackgroundWork {
            memory: self.memory.clone(),
            granules: start..self.next,
            populate: self.user.is_none(),
            is_urgent: self.is_urgent,
            done: self.user.as_ref().filter(|_| last).map(|user| user.done.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};
    use slipway_ram::GRANULE;

    use super::*;

    fn memory(granules: usize) -> Arc<LateMemory> {
        let file = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, (granules * GRANULE) as u64).unwrap();
        Arc::new(LateMemory::new(file).unwrap())
    }

    #[test]
    fn memory_that_hardware_had_is_zeroed_before_all_other() {
        let settings = Settings { limit: 1 << 20, ..Settings::default() };
        let Ok(shared) = Shared::new(settings) else {
            println!("SKIPPED: memory_that_hardware_had_…: needs /dev/userfaultfd");
            return;
        };
        let (lent, free, urgent) = (memory(1), memory(1), memory(3));
        shared.lend(&lent, &Arc::new(Bell::new().unwrap()));
        shared.put(free.clone(), false);
        shared.put(urgent.clone(), true);
        let next = || {
            let job = shared.next_job(2).unwrap();
            let known =
                [&lent, &free, &urgent].iter().position(|one| Arc::ptr_eq(one, &job.memory));
            (known.unwrap(), job.granules, job.is_urgent)
        };
        assert_eq!([next(), next()], [(2, 0..2, true), (2, 2..3, true)]);
        assert_eq!([next(), next()], [(0, 0..1, false), (1, 0..1, false)]);
    }
}
