//! The process that memory is given to: it takes memory as a VMM does, and touches all of it.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};
use slipway_hypervisor::Topology;
use slipway_pool_wire::{HandOver, Lease, NumaNode, Page, Range, Request};

use super::PageSize;
use crate::block::native::pin;

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
}

/// The work of such a process, as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UserSpec {
    pub origin: Origin,
    pub bytes: u64,
    pub page: PageSize,
    /// Processors that it may use.
    pub cpus: Vec<usize>,
}

/// The times of such a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Used {
    /// From the request until the memory may be touched, ns.
    pub ready_ns: u64,
    /// From then until each page was written to, ns.
    pub touch_ns: u64,
    /// The number of pages that were not zero.
    pub stale: u64,
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
    let mapped = Mapped::take(spec, near)?;
    let ready_ns = began.elapsed().as_nanos() as u64;
    let began = Instant::now();
    let stale = mapped.touch();
    Ok(Used { ready_ns, touch_ns: began.elapsed().as_nanos() as u64, stale })
}

/// Memory of this process, mapped until the process ends.
struct Mapped {
    base: *mut u8,
    len: usize,
    /// The connection to the pool, and the name of its file.
    _kept: Option<(OwnedFd, OwnedFd)>,
}

impl Mapped {
    fn take(spec: &UserSpec, near: Option<NumaNode>) -> Result<Self> {
        let len = usize::try_from(spec.bytes)?;
        let (base, kept) = match &spec.origin {
            Origin::New => (map(Some(&new_file(spec)?), len)?, None),
            Origin::Transparent => (transparent(len)?, None),
            Origin::Pool(path) => {
                let page = match spec.page {
                    PageSize::Base => Page::Base,
                    PageSize::Huge => Page::Huge,
                };
                let lease =
                    Lease::ask(path, Request { bytes: spec.bytes, page, near, template: None })?;
                let hand_over = HandOver::begin(lease.connection)?;
                let base = map(Some(&lease.file), len)?;
                let range = Range { address: base.addr() as u64, len: spec.bytes, offset: 0 };
                (base, Some(hand_over.finish(&[range])?))
            }
        };
        Ok(Self { base, len, _kept: kept })
    }

    /// Writes to each page. Returns the number of pages that were not zero.
    fn touch(&self) -> u64 {
        let mut stale = 0;
        for at in (0..self.len).step_by(STEP) {
            #[allow(unsafe_code)] // accesses that the compiler may not leave out
            // SAFETY: within the mapping, which is readable and writable, is never unmapped, and
            // has no references into it.
            unsafe {
                let byte = self.base.add(at);
                stale += u64::from(byte.read_volatile() != 0);
                byte.write_volatile(MARK);
            }
        }
        stale
    }
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

/// Maps a file, or private memory of the kernel's.
fn map(file: Option<&OwnedFd>, len: usize) -> Result<*mut u8> {
    let (any, access) = (std::ptr::null_mut(), ProtFlags::READ | ProtFlags::WRITE);
    #[allow(unsafe_code)]
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe {
        match file {
            Some(file) => rustix::mm::mmap(any, len, access, MapFlags::SHARED, file, 0),
            None => {
                let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
                rustix::mm::mmap_anonymous(any, len, access, flags)
            }
        }
    };
    Ok(start.with_context(|| format!("cannot map {len} bytes"))?.cast())
}

/// Maps private memory for which the kernel makes huge pages at their first touch.
fn transparent(len: usize) -> Result<*mut u8> {
    let start = map(None, len)?;
    #[allow(unsafe_code)]
    // SAFETY: advice about the mapping just made changes no byte of it.
    let advised = unsafe { rustix::mm::madvise(start.cast(), len, Advice::LinuxHugepage) };
    advised.context("transparent huge pages")?;
    Ok(start)
}
