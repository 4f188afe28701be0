//! The process that memory is given to: it takes memory as a VMM does, and touches all of it.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use slipway_hypervisor::Topology;
use slipway_pool_wire::{HandOver, Lease, NumaNode, Page, Range, Request, TemplateName};

use super::PageSize;
use crate::block::native::pin;
use crate::statistics::median;

/// The bytes between two touches: each page of the smallest size is touched.
const STEP: usize = 4096;
/// The byte that is written to each page.
const MARK: u8 = 0xaa;

/// The origin of the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Origin {
    /// New pages of the kernel, in a file in memory as a VMM's are: hugetlbfs for huge ones.
    New,
    /// New pages of the kernel, transparent huge ones if it has any free.
    Transparent,
    /// The pool whose socket has this path.
    Pool(PathBuf),
    /// The template of this pool that is named [`TEMPLATE`].
    Fork(PathBuf),
    /// The file with this path, mapped privately: the kernel copies a page that is written to.
    Private(PathBuf),
}

/// The name of the template.
pub(super) const TEMPLATE: &str = "bench";

/// The work of such a process, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UserSpec {
    pub origin: Origin,
    pub bytes: u64,
    pub page: PageSize,
    /// Processors that it may use.
    pub cpus: Vec<usize>,
    /// The number of pages of 4 KiB that it touches, evenly apart; `None` for all.
    pub pages: Option<u64>,
    /// The first byte of each page.
    pub begins: u8,
}

/// The times of such a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Used {
    /// From the request until the memory may be touched, ns.
    pub ready_ns: u64,
    /// From then until each page was written to, ns.
    pub touch_ns: u64,
    /// The number of pages that did not begin as they should.
    pub stale: u64,
    /// The median of the times of single touches, ns; 0 if all pages were touched.
    pub fault_ns: u64,
    /// The memory that the process then has of its own, bytes.
    pub own_bytes: u64,
}

/// The answer of such a process: its times, or the reason why it has no memory.
pub(super) type Answer = std::result::Result<Used, String>;

/// The word before the answer, which tells their line from what a test harness prints.
pub(super) const ANSWER: &str = "used ";

/// Runs the process that `specification` describes, and prints its times, or the pool's or the
/// kernel's reason if the memory cannot be had.
///
/// # Errors
/// `specification` is none.
pub fn serve(specification: &str) -> Result<()> {
    let spec: UserSpec = serde_json::from_str(specification).context("a specification")?;
    let answer: Answer = use_memory(&spec).map_err(|error| format!("{error:#}"));
    println!("\n{ANSWER}{}", serde_json::to_string(&answer)?);
    Ok(())
}

fn use_memory(spec: &UserSpec) -> Result<Used> {
    pin(&spec.cpus)?;
    // As a launcher asks: for the node of the processors that it may use.
    let topology = Topology::of_host();
    let near = topology.allowed_cpus().and_then(|cpus| topology.node_of(&cpus));
    let began = Instant::now();
    let before = anonymous();
    let mapped = Mapped::take(spec, near)?;
    let ready_ns = began.elapsed().as_nanos() as u64;
    let mut used = Used { ready_ns, ..Used::default() };
    let began = Instant::now();
    match spec.pages {
        None => used.stale = mapped.touch(spec.begins),
        Some(pages) => (used.stale, used.fault_ns) = mapped.touch_some(spec.begins, pages),
    }
    used.touch_ns = began.elapsed().as_nanos() as u64;
    used.own_bytes = match &mapped.file {
        // Blocks of 512 bytes (stat(2)).
        Some(file) => rustix::fs::fstat(file)?.st_blocks.unsigned_abs() * 512,
        None => anonymous().saturating_sub(before),
    };
    Ok(used)
}

/// Returns the bytes of this process's pages that are in no file.
fn anonymous() -> u64 {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("Anonymous:"));
    let kib = line.and_then(|line| line.split_whitespace().next()).and_then(|kib| kib.parse().ok());
    kib.unwrap_or(0_u64) << 10
}

/// Memory of this process, mapped until the process ends.
struct Mapped {
    base: *mut u8,
    len: usize,
    /// A descriptor that names the file; `None` for private memory.
    file: Option<OwnedFd>,
    /// The connection to the pool.
    _kept: Option<OwnedFd>,
}

impl Mapped {
    fn take(spec: &UserSpec, near: Option<NumaNode>) -> Result<Self> {
        let len = usize::try_from(spec.bytes)?;
        let (path, template) = match &spec.origin {
            Origin::New => {
                let file = new_file(spec)?;
                let base = map(Some(&file), MapFlags::SHARED, len)?;
                return Ok(Self { base, len, file: Some(file), _kept: None });
            }
            Origin::Transparent => {
                return Ok(Self { base: transparent(len)?, len, file: None, _kept: None });
            }
            Origin::Private(path) => {
                let file = std::fs::File::open(path).context("a template")?.into();
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                return Ok(Self {
                    base: map(Some(&file), flags, len)?,
                    len,
                    file: None,
                    _kept: None,
                });
            }
            Origin::Pool(path) => (path, None),
            Origin::Fork(path) => (path, TemplateName::new(TEMPLATE)),
        };
        let page = match spec.page {
            PageSize::Base => Page::Base,
            PageSize::Huge => Page::Huge,
        };
        let lease = Lease::ask(path, Request { bytes: spec.bytes, page, near, template })?;
        let hand_over = HandOver::begin(lease.connection)?;
        let base = map(Some(&lease.file), MapFlags::SHARED, len)?;
        let range = Range { address: base.addr() as u64, len: spec.bytes, offset: 0 };
        let (kept, token) = hand_over.finish(&[range])?;
        Ok(Self { base, len, file: Some(token), _kept: Some(kept) })
    }

    /// Writes to each page. Returns the number of pages that did not begin with `begins`.
    fn touch(&self, begins: u8) -> u64 {
        (0..self.len).step_by(STEP).filter(|at| self.write(*at) != begins).count() as u64
    }

    /// Writes to so many pages, evenly apart. Returns the number of those that did not begin with
    /// `begins`, and the median time in ns.
    fn touch_some(&self, begins: u8, pages: u64) -> (u64, u64) {
        let (mut stale, mut times) = (0, Vec::with_capacity(pages as usize));
        for at in touched(self.len as u64, pages) {
            let began = Instant::now();
            stale += u64::from(self.write(at as usize) != begins);
            times.push(began.elapsed().as_nanos() as f64);
        }
        (stale, median(times) as u64)
    }

    /// Writes to the byte at `at`. Returns what it was.
    fn write(&self, at: usize) -> u8 {
        assert!(at < self.len);
        #[allow(unsafe_code)] // accesses that the compiler may not leave out
        // SAFETY: within the mapping, which is readable and writable, is never unmapped, and has no
        // references into it.
        unsafe {
            let byte = self.base.add(at);
            let was = byte.read_volatile();
            byte.write_volatile(MARK);
            was
        }
    }
}

/// Returns the offsets of `pages` pages, evenly apart in `bytes` bytes.
pub(super) fn touched(bytes: u64, pages: u64) -> impl Iterator<Item = u64> {
    let step = STEP as u64;
    let apart = (bytes / step / pages.max(1)).max(1);
    (0..pages).map(move |page| page * apart * step)
}

/// Makes a file in memory of new pages.
fn new_file(spec: &UserSpec) -> Result<OwnedFd> {
    let mut flags = MemfdFlags::CLOEXEC;
    if spec.page == PageSize::Huge {
        flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    }
    let file = rustix::fs::memfd_create("slipway-bench", flags).context("a file in memory")?;
    rustix::fs::ftruncate(&file, spec.bytes)?;
    Ok(file)
}

/// Maps a file, or memory of no file.
fn map(file: Option<&OwnedFd>, flags: MapFlags, len: usize) -> Result<*mut u8> {
    let (any, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
    #[allow(unsafe_code)]
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe {
        match file {
            Some(file) => rustix::mm::mmap(any, len, access, flags, file, 0),
            None => rustix::mm::mmap_anonymous(any, len, access, flags),
        }
    };
    Ok(start.with_context(|| format!("cannot map {len} bytes"))?.cast())
}

/// Maps private memory for which the kernel makes huge pages at their first touch.
fn transparent(len: usize) -> Result<*mut u8> {
    let start = map(None, MapFlags::PRIVATE | MapFlags::NORESERVE, len)?;
    #[allow(unsafe_code)]
    // SAFETY: advice about the mapping just made changes no byte of it.
    let advised = unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxHugepage) };
    advised.context("transparent huge pages")?;
    Ok(start)
}
