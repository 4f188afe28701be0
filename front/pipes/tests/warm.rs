//! Counts allocations: a job allocates nothing once all is warm. (zstd's own heap is C's and is not
//! counted; its contexts are made once.)
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)] // an allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use slipway_pipes::{
    Compression, Core, Executor, Input, Job, JobEnd, Options, Output, Stretch, Work, Worker,
};
use slipway_ram::Span;
use slipway_telemetry::MonotonicClock;
use slipway_warp::share::{Scheduler, TenantOptions};
use slipway_warp::{Cipher, Class, Opener, Sealer, Secret, record};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system allocator with the same arguments; counting allocates
// nothing, since the cell needs neither initialisation nor a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller upholds `GlobalAlloc::alloc`'s contract, which is the system
        // allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller passes memory and layout of `alloc`, which took them from the system
        // allocator.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Returns the number of allocations of this thread in 100 calls of `work`, after three uncounted
/// ones.
fn allocations(mut work: impl FnMut()) -> u64 {
    (0..3).for_each(|_| work());
    let before = COUNT.with(Cell::get);
    (0..100).for_each(|_| work());
    COUNT.with(Cell::get) - before
}

#[test]
fn the_count_counts() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(7)))), 100);
}

#[test]
fn transforms_allocate_nothing() {
    let secret = Secret::derive(&[1; 32], &[]);
    let mut sealer = Sealer::new(Cipher::Aes128Gcm, &secret);
    let mut opener = Opener::new(Cipher::Aes128Gcm, &secret);
    let (mut worker, ring) = (Worker::new(), Span::heap(65_536));
    ring.write(0, &[b"a text that compresses ".repeat(40)].concat()).unwrap();
    let mut link = vec![0; 20_000 + record::OVERHEAD];
    let mut position = 0;
    let count = allocations(|| {
        for compression in [Compression::None, Compression::Lz4, Compression::Zstd] {
            position += 20_000;
            let at = Stretch::new(position, 20_000, 65_536).unwrap();
            let (input, options) =
                (Input::Ring(&ring, at), Options { compression, checksum: true });
            let mut output = Output::Bytes(&mut link);
            let length = worker.seal(Some(&mut sealer), options, &input, &mut output).unwrap();
            let (record, mut output) = (&mut link[..length], Output::Ring(&ring, at));
            worker.open(Some(&mut opener), record, &mut output).unwrap();
            worker.copy_checked(&input, &mut Output::Ring(&ring, at)).unwrap();
        }
    });
    assert_eq!(count, 0);
}

#[test]
fn jobs_are_scheduled_done_and_queued_again_without_an_allocation() {
    let clock = Arc::new(MonotonicClock::new());
    let mut scheduler = Scheduler::new();
    let resource = scheduler.add_resource("core", 1);
    let seal = scheduler.add_executor("seal", Class::I, resource, 1_000_000_000);
    let send = scheduler.add_executor("copy", Class::F, resource, 1_000_000_000);
    let (mut core, ring) = (Core::new(Class::I, clock), Span::heap(65_536));
    let mut buffers: Vec<Vec<u8>> = vec![vec![0; 5000]];
    let chains: Vec<_> = (0..64)
        .map(|_| {
            let tenant = scheduler.add_tenant(TenantOptions::default()).unwrap();
            scheduler.open(tenant, &[seal, send]).unwrap()
        })
        .collect();
    chains.iter().for_each(|chain| scheduler.push(*chain, 4000, *chain).unwrap());
    let (mut jobs, mut ended) = (VecDeque::new(), Vec::new());
    // Virtual time stands still: capacities stay as guessed, and weights are not recomputed.
    let (now, busy) = (Duration::ZERO, Duration::from_micros(4));
    let count = allocations(|| {
        for tag in 0..1000 {
            let ticket = scheduler.next(resource, now).unwrap();
            let at = Stretch::new(tag * 4000, ticket.bytes, 65_536).unwrap();
            let options = Options::default();
            let work = if ticket.executor == seal { Work::Seal(None, options) } else { Work::Copy };
            let sink = JobEnd::Buffer(buffers.pop().unwrap());
            jobs.push_back(Job { tag, work, source: JobEnd::Ring(ring.clone(), at), sink });
            core.submit(&mut jobs, &mut ended);
            let completion = ended.pop().unwrap();
            completion.result.unwrap();
            let JobEnd::Buffer(buffer) = completion.job.sink else { unreachable!() };
            buffers.push(buffer);
            if let Some(chain) = scheduler.done(ticket, 4000, busy, now) {
                scheduler.push(chain, 4000, chain).unwrap();
            }
        }
    });
    assert_eq!(count, 0);
}
