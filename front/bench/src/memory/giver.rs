//! Sources of a sandbox's memory.

use std::ffi::OsString;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use slipway_pool::{Pool, Settings, TemplateName};

use super::user::{ANSWER, Answer, Origin, TEMPLATE, Used, UserSpec, touched};
use super::{Keeping, MemoryLoad, MemoryMeasured, PageSize, host, template};
use crate::block::native::{Cpus, pinned};
use crate::measurement::Subject;
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
    /// A private mapping of a template: no device can be given it.
    Private,
    /// Memory of the pool that begins as a template.
    Fork,
    /// The same, of which the pages that are touched are copied ahead while the program begins.
    ForkAhead,
}

/// The memory that a program takes, and the pages that it touches.
#[derive(Clone, Copy)]
struct Wanted {
    bytes: u64,
    page: PageSize,
    /// The number of pages of 4 KiB that are touched; `None` for all.
    pages: Option<u64>,
}

/// The most memory that is begun as a template, all of whose pages are touched: each costs a fault.
const MOST_OF_FORK: u64 = 512 << 20;

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
    fn use_once(&self, wanted: Wanted, origin: Origin) -> Result<Used> {
        let Wanted { bytes, page, pages } = wanted;
        let begins = if self.source.has_template() { template::FIRST } else { 0 };
        let cpus = self.cpus.client.clone();
        let spec = UserSpec { origin, bytes, page, cpus, pages, begins };
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
        ensure!(used.stale == 0, "{} pages did not begin as they should", used.stale);
        Ok(used)
    }

    /// Has the program use recycled memory of a pool that is made for this turn.
    fn recycled(&self, load: Wanted) -> Result<Used> {
        let (limit, origin) = (load.bytes, Origin::Pool(self.keeping.socket()));
        let ahead = matches!(self.source, Source::PoolAhead | Source::PoolZeroed);
        // Without a place at a keeper, all is zeroed before it is given.
        let eager = matches!(self.source, Source::Pre(_));
        let shelves = (!eager).then(|| self.keeping.shelves());
        let pool = Pool::new(Settings { limit, ahead, shelves, ..Settings::default() });
        let pool = pool.context("a pool of memory")?;
        let _server = pool.listen(&self.keeping.socket()).context("a pool's socket")?;
        // The first user leaves what the second one recycles.
        self.use_once(load, origin.clone())?;
        let back = || wait_for(&pool, load.bytes, is_back, "the memory does not come back");
        back()?;
        match self.source {
            Source::Pre(percent) => pool.zero_free(percent),
            Source::PoolZeroed => {
                wait_for(&pool, load.bytes, is_zeroed, "nothing zeroes the memory")?
            }
            _ => {}
        }
        let used = self.use_once(load, origin)?;
        back()?;
        Ok(used)
    }

    /// Has the program use memory that begins as a template, of a pool that is made for this turn.
    fn forked(&self, load: Wanted) -> Result<Used> {
        let shelves = Some(self.keeping.shelves());
        let pool = Pool::new(Settings { shelves, ..Settings::default() });
        let pool = pool.context("a pool of memory")?;
        let name = TemplateName::new(TEMPLATE).context("a name")?;
        pool.add_template(name, template::make(load.bytes)?)?;
        if self.source == Source::ForkAhead {
            let pages = load.pages.unwrap_or(load.bytes >> 12);
            let ranges = touched(load.bytes, pages).map(|at| at..at + 4096);
            pool.copy_ahead(name, &ranges.collect::<Vec<_>>());
        }
        let _server = pool.listen(&self.keeping.socket()).context("a pool's socket")?;
        let used = self.use_once(load, Origin::Fork(self.keeping.socket()))?;
        let none = |pool: &Pool| pool.stats().lent == 0;
        wait_for(&pool, load.bytes, none, "the memory does not come back")?;
        Ok(used)
    }

    /// Has the program map a template privately.
    fn private(&self, load: Wanted) -> Result<Used> {
        let template = template::make(load.bytes)?;
        let (process, number) = (std::process::id(), template.file().as_raw_fd());
        let path = format!("/proc/{process}/fd/{number}");
        self.use_once(load, Origin::Private(path.into()))
    }

    fn turn(&self, load: Wanted) -> Result<MemoryMeasured> {
        let Used { ready_ns, touch_ns, fault_ns, own_bytes, .. } = match self.source {
            Source::New => self.use_once(load, Origin::New),
            Source::NewTransparent => self.use_once(load, Origin::Transparent),
            Source::Private => self.private(load),
            Source::Fork | Source::ForkAhead => self.forked(load),
            _ => self.recycled(load),
        }?;
        Ok(match load.pages {
            None => MemoryMeasured::Given { ready_ns, touch_ns },
            Some(_) => MemoryMeasured::Set { ready_ns, touch_ns, fault_ns, own_bytes },
        })
    }
}

impl Subject for Giver {
    type Load = MemoryLoad;
    type Measured = MemoryMeasured;

    fn name(&self) -> &str {
        self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn takes(&self, load: &MemoryLoad) -> bool {
        match *load {
            MemoryLoad::Give { bytes, page } if self.source.has_template() => {
                page == PageSize::Base && bytes <= MOST_OF_FORK
            }
            MemoryLoad::Give { page, .. } => {
                self.source != Source::NewTransparent || page == PageSize::Huge
            }
            MemoryLoad::Set { .. } => self.source == Source::New || self.source.has_template(),
            MemoryLoad::Gate(_) => false,
        }
    }

    fn lacks(&self, load: &MemoryLoad) -> Option<String> {
        let Wanted { bytes, page, .. } = Wanted::of(load)?;
        match self.source {
            Source::NewTransparent if !host::has_transparent() => Some(
                "needs transparent huge pages: `madvise` in \
                 /sys/kernel/mm/transparent_hugepage/enabled"
                    .to_owned(),
            ),
            Source::NewTransparent => host::lacks(bytes, PageSize::Base),
            Source::New => host::lacks(bytes, page),
            // The template, what it is made of, and the copy.
            Source::Private => host::lacks(3 * bytes, page),
            Source::Fork | Source::ForkAhead => {
                host::lacks_pool().or_else(|| host::lacks(3 * bytes, page))
            }
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
        let Some(wanted) = Wanted::of(load) else { bail!("{load} is a device's load") };
        // Threads that a pool starts stay on these processors.
        pinned(&self.cpus.target, || self.turn(wanted))
    }
}

impl Source {
    fn has_template(self) -> bool {
        matches!(self, Self::Private | Self::Fork | Self::ForkAhead)
    }
}

impl Wanted {
    /// Returns what a program wants with a load, or `None` if it is a device's.
    fn of(load: &MemoryLoad) -> Option<Self> {
        match *load {
            MemoryLoad::Give { bytes, page } => Some(Self { bytes, page, pages: None }),
            MemoryLoad::Set { bytes, pages } => {
                Some(Self { bytes, page: PageSize::Base, pages: Some(pages) })
            }
            MemoryLoad::Gate(_) => None,
        }
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
    fn some_pages_of_a_template_are_touched_and_no_others_copied() {
        if let Some(reason) = host::lacks_pool() {
            println!(
                "SKIPPED: some_pages_of_a_template_are_touched_and_no_others_copied: {reason}"
            );
            return;
        }
        use Source::{Fork, ForkAhead, New, Private};
        for source in [New, Private, Fork, ForkAhead] {
            let measured = run(source, "16M-64p").unwrap();
            let MemoryMeasured::Set { ready_ns, touch_ns, fault_ns, own_bytes } = measured else {
                panic!("{source:?}: {measured:?}");
            };
            assert!(ready_ns > 0 && fault_ns > 0 && touch_ns >= fault_ns, "{measured:?}");
            // Anonymous pages of the program itself count with a private mapping.
            let most = if source == Private { 4 << 20 } else { 64 << 12 };
            assert!((64 << 12..=most).contains(&own_bytes), "{source:?}: {own_bytes}");
        }
        assert!(matches!(run(Fork, "16M-4k"), Ok(MemoryMeasured::Given { .. })));
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
        assert!(takes(Source::Fork, "16M-4k") && takes(Source::Fork, "16M-9p"));
        assert!(!takes(Source::Fork, "16M-2m") && !takes(Source::Pool, "16M-9p"));
    }
}
