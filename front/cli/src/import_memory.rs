//! A limit on the memory of the commands that read foreign images, and one line when it is met.
//!
//! The memory that an image makes the importer hold is counted ([`slipway_image::Limits`]), so the
//! limit is met only if something is not counted. Rust's runtime would then abort the process, with
//! lines about bytes and backtraces and perhaps a core file of gigabytes. The allocator here ends
//! the process as any other error of a command does.
#![allow(unsafe_code)] // an allocator, and an end that runs no handlers

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::out::FAILURE;

/// The most private memory of an importer, bytes. An image at its limit takes 2 GiB of it, vectors
/// that grow by doubling 0.6 GiB more, the windows of three decompressors 0.4, and the names of a
/// docker archive's members 0.4.
const MOST: u64 = 4 << 30;

const MESSAGE: &[u8] = b"slipway: this image needs more memory than its import may take (4 GiB, \
    or less by `ulimit -d`): use an image with fewer files\n";

static IS_LIMITED: AtomicBool = AtomicBool::new(false);

#[global_allocator]
static ALLOCATOR: Ending = Ending;

/// Limits the memory of this process, which serves nothing and starts no other process. An
/// allocation beyond the limit ends it.
pub fn limit() -> Result<()> {
    let have = getrlimit(Resource::Data);
    let current = have.current.map_or(MOST, |current| current.min(MOST));
    let limit = Rlimit { current: Some(current), maximum: have.maximum };
    setrlimit(Resource::Data, limit).context("cannot limit this program's memory")?;
    IS_LIMITED.store(true, Ordering::Relaxed);
    Ok(())
}

/// The system's allocator. Where the memory is limited, it ends the process when there is no more.
struct Ending;

/// Ends the process if `memory` was not to be had and is limited. Nothing here may allocate, take a
/// lock or unwind.
fn check(memory: *mut u8) -> *mut u8 {
    if memory.is_null() && IS_LIMITED.load(Ordering::Relaxed) {
        let stderr = rustix::stdio::stderr();
        // Progress may be shown on the line.
        if rustix::termios::isatty(stderr) {
            let _ = rustix::io::write(stderr, b"\n");
        }
        let _ = rustix::io::write(stderr, MESSAGE);
        // SAFETY: the call has no requirements. No handler and no destructor runs, any of which
        // could need memory.
        unsafe { libc::_exit(FAILURE) }
    }
    memory
}

// SAFETY: every method hands its arguments to the system's allocator unchanged, whose contract is
// the same, and returns what that has returned, or not at all.
unsafe impl GlobalAlloc for Ending {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `alloc`'s contract.
        check(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller keeps `alloc_zeroed`'s contract.
        check(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps `dealloc`'s contract, and the memory came from `System`.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller keeps `realloc`'s contract, and the memory came from `System`.
        check(unsafe { System.realloc(memory, layout, new_size) })
    }
}
