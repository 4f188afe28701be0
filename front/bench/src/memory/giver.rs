//! Sources of a sandbox's memory.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use slipway_pool::{Pool, Settings};

use super::user::{ANSWER, Answer, Origin, Used, UserSpec};
use super::{Keeping, MemoryLoad, MemoryMeasured, MemorySubject, PageSize, host};
use crate::block::native::{Cpus, pinned};
use crate::packet::process::Running;

/// The longest time for a program's answer, or for the pool, and again for each GiB.
const PATIENCE: Duration = Duration::from_secs(60);
/// The time between two looks at a pool.
const LOOK: Duration = Duration::from_millis(1);

/// A source of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// New pages of the kernel, in a file in memory; huge ones of hugetlbfs.
    New,
    /// New transparent huge pages, private to the process: no device can be given them.
    NewTransparent,
    /// Recycled memory of the pool, none of it zeroed, and no thread that zeroes ahead.
    Pool,
    /// Recycled memory of the pool, given as soon as its last user is gone, while a thread zeroes
    /// ahead.
    PoolAhead,
    /// Recycled memory of the pool that a thread has zeroed since its last user was gone.
    PoolZeroed,
    /// Recycled memory of which this part, in percent, was zeroed beforehand, and the rest before
    /// the memory is given: FastIOV's Pre10, Pre50 and Pre100.
    Pre(usize),
}

/// A source of memory, and the program that takes it.
pub struct Giver {
    name: &'static str,
    about: String,
    source: Source,
    keeping: Arc<Keeping>,
    program: Vec<OsString>,
    cpus: Cpus,
}

impl Giver {
    /// Makes a subject. `program` is the command line that runs [`super::serve_user`] with one more
    /// argument. Threads of a pool run on the target's processors of `cpus`, the program on the
    /// client's.
    pub fn new(
        (name, about): (&'static str, &str),
        source: Source,
        keeping: &Arc<Keeping>,
        program: &[OsString],
        cpus: &Cpus,
    ) -> Self {
        let (keeping, program, cpus) = (Arc::clone(keeping), program.to_vec(), cpus.clone());
        Self { name, about: about.to_owned(), source, keeping, program, cpus }
    }

    /// Runs the program once. Returns its times.
    fn use_once(&self, (bytes, page): (u64, PageSize), origin: Origin) -> Result<Used> {
        let spec = UserSpec { origin, bytes, page, cpus: self.cpus.client.clone() };
        let (first, rest) = self.program.split_first().context("no program")?;
        let mut command = Command::new(first);
        command.args(rest).arg(serde_json::to_string(&spec)?);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut running = Running::start(&mut command)?;
        let lines = running.lines();
        let deadline = Instant::now() + patience(bytes);
        let answer = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let line = lines.recv_timeout(left).context("the memory's user does not answer")?;
            if let Some(line) = line.strip_prefix(ANSWER) {
                break serde_json::from_str::<Answer>(line)?;
            }
        };
        let used = answer.map_err(Error::msg)?;
        running.finish(deadline)?;
        ensure!(used.stale == 0, "{} pages were not zero", used.stale);
        Ok(used)
    }

    /// Has the program use recycled memory of a pool that is made for this turn.
    fn recycled(&self, load: (u64, PageSize)) -> Result<Used> {
        let (limit, origin) = (load.0, Origin::Pool(self.keeping.socket()));
        let ahead = matches!(self.source, Source::PoolAhead | Source::PoolZeroed);
        // Without a place at a keeper, all is zeroed before it is given.
        let eager = matches!(self.source, Source::Pre(_));
        let shelves = (!eager).then(|| self.keeping.shelves());
        let pool = Pool::new(Settings { limit, ahead, shelves, ..Settings::default() });
        let pool = pool.context("a pool of memory")?;
        let _server = pool.listen(&self.keeping.socket()).context("a pool's socket")?;
        // The first user leaves what the second one recycles.
        self.use_once(load, origin.clone())?;
        let back = || wait_for(&pool, load.0, is_back, "the memory does not come back");
        back()?;
        match self.source {
            Source::Pre(percent) => pool.zero_free(percent),
            Source::PoolZeroed => wait_for(&pool, load.0, is_zeroed, "nothing zeroes the memory")?,
            _ => {}
        }
        let used = self.use_once(load, origin)?;
        back()?;
        Ok(used)
    }

    fn turn(&self, load: (u64, PageSize)) -> Result<MemoryMeasured> {
        let Used { ready_ns, touch_ns, .. } = match self.source {
            Source::New => self.use_once(load, Origin::New),
            Source::NewTransparent => self.use_once(load, Origin::Transparent),
            _ => self.recycled(load),
        }?;
        Ok(MemoryMeasured::Given { ready_ns, touch_ns })
    }
}

impl MemorySubject for Giver {
    fn name(&self) -> &str {
        self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn takes(&self, load: &MemoryLoad) -> bool {
        match load {
            MemoryLoad::Give { page, .. } => {
                self.source != Source::NewTransparent || *page == PageSize::Huge
            }
            MemoryLoad::Gate(_) => false,
        }
    }

    fn lacks(&self, load: &MemoryLoad) -> Option<String> {
        let MemoryLoad::Give { bytes, page } = *load else { return None };
        match self.source {
            Source::NewTransparent if !host::has_transparent() => Some(
                "needs transparent huge pages: `madvise` in \
                 /sys/kernel/mm/transparent_hugepage/enabled"
                    .to_owned(),
            ),
            Source::NewTransparent => host::lacks(bytes, PageSize::Base),
            Source::New => host::lacks(bytes, page),
            Source::Pool | Source::Pre(_) => {
                host::lacks_pool().or_else(|| host::lacks(bytes, page))
            }
            // The pool is topped up with as much again.
            Source::PoolAhead | Source::PoolZeroed => {
                host::lacks_pool().or_else(|| host::lacks(2 * bytes, page))
            }
        }
    }

    fn run(&mut self, load: &MemoryLoad) -> Result<MemoryMeasured> {
        let MemoryLoad::Give { bytes, page } = *load else { bail!("{load} is a device's load") };
        // Threads that a pool starts stay on these processors.
        pinned(&self.cpus.target, || self.turn((bytes, page)))
    }
}

/// Returns whether the memory of the last user is the pool's again. A pool that zeroes ahead has
/// made memory for topping up, too, none of which was ever dirty.
fn is_back(pool: &Pool) -> bool {
    let stats = pool.stats();
    let recycled = stats.granules.dirty > 0 || stats.zeroed_ahead > 0;
    stats.lent == 0 && stats.free_bytes > 0 && recycled
}

/// Returns whether all memory that nobody has is zeroed.
fn is_zeroed(pool: &Pool) -> bool {
    let granules = pool.stats().granules;
    (granules.absent, granules.dirty, granules.busy) == (0, 0, 0)
}

/// Waits until a pool is in a state.
fn wait_for(pool: &Pool, bytes: u64, state: fn(&Pool) -> bool, otherwise: &str) -> Result<()> {
    let deadline = Instant::now() + patience(bytes);
    while !state(pool) {
        ensure!(Instant::now() < deadline, "{otherwise}: {:?}", pool.stats());
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn patience(bytes: u64) -> Duration {
    PATIENCE * (1 + (bytes >> 30) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The program that memory is given to: this test program again, with a specification as its
    /// last argument.
    #[test]
    fn user() {
        let specification = std::env::args().next_back().unwrap();
        if specification.starts_with('{') {
            crate::memory::serve_user(&specification).unwrap();
        }
    }

    fn run(source: Source, load: &str) -> Result<MemoryMeasured> {
        let this = std::env::current_exe()?.into_os_string();
        let program = [this, "memory::giver::tests::user".into()];
        let program = program.into_iter().chain(["--exact", "--nocapture"].map(OsString::from));
        let (keeping, cpus) = (Arc::new(Keeping::start()?), Cpus::split(1)?);
        let program: Vec<OsString> = program.collect();
        Giver::new(("name", "about"), source, &keeping, &program, &cpus).run(&load.parse().unwrap())
    }

    /// A turn fails if a page shows an earlier user's bytes, so each of these is a test of the
    /// pool, too.
    #[test]
    fn memory_of_each_source_is_zeros_and_is_timed() {
        if let Some(reason) = host::lacks_pool() {
            println!("SKIPPED: memory_of_each_source_is_zeros_and_is_timed: {reason}");
            return;
        }
        use Source::{New, Pool, PoolAhead, Pre};
        for source in [New, Pool, PoolAhead, Pre(0), Pre(50), Pre(100)] {
            match run(source, "16M-4k").unwrap() {
                MemoryMeasured::Given { ready_ns, touch_ns } => assert!(ready_ns.min(touch_ns) > 0),
                other => panic!("{source:?}: {other:?}"),
            }
        }
    }

    #[test]
    fn memory_that_cannot_be_had_is_an_error_with_the_reason() {
        let error = run(Source::New, "1024G-2m").unwrap_err().to_string();
        // A kernel without hugetlbfs makes no such file.
        let reasons = ["cannot map 1099511627776 bytes", "a file in memory"];
        assert!(reasons.iter().any(|reason| error.contains(reason)), "{error}");
    }

    #[test]
    fn a_source_takes_memory_of_pages_that_it_has() {
        let keeping = Arc::new(Keeping::start().unwrap());
        let cpus = Cpus::split(1).unwrap();
        let takes = |source, load: &str| {
            let giver = Giver::new(("name", "about"), source, &keeping, &[], &cpus);
            giver.takes(&load.parse().unwrap())
        };
        assert!(takes(Source::Pool, "16M-4k") && takes(Source::NewTransparent, "16M-2m"));
        assert!(!takes(Source::NewTransparent, "16M-4k") && !takes(Source::New, "gate-pin"));
    }
}
