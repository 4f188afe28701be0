//! In the steady state a command allocates nothing.
#![allow(unsafe_code)] // an allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_pci::{Function, Progress};
use slipway_telemetry::MonotonicClock;

use super::rig::Setup;
use crate::driver::io;
use crate::{Controller, Latencies, Tracer};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise about `layout` is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `alloc` above, with this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn commands_allocate_nothing() {
    in_the_steady_state(|_| {});
}

#[test]
fn traced_commands_allocate_nothing() {
    in_the_steady_state(|controller| {
        let clock = Arc::new(MonotonicClock::new());
        let tracer = Tracer::new(clock, 1, &controller.limits, Latencies::new(1));
        controller.trace(Some(Box::new(tracer)));
    });
}

fn in_the_steady_state(prepare: fn(&mut Controller)) {
    let mut rig = Setup::new().rig();
    prepare(rig.controller());
    let data = rig.buffer(128 << 10);
    let commands = [
        rig.with_data(io(NvmOpcode::Read, 1, 0, 8), data, 4096),
        rig.with_data(io(NvmOpcode::Write, 1, 8, 16), data, 8192),
        rig.with_data(io(NvmOpcode::Read, 1, 64, 256), data, 128 << 10),
        SubmissionEntry::new(NvmOpcode::Flush.0, 1),
        io(NvmOpcode::WriteZeroes, 1, 500, 8),
        io(NvmOpcode::Read, 7, 0, 1),
    ];
    let mut round = |counted: bool| {
        let mut allocated = 0;
        for command in commands.iter().cycle().take(12) {
            rig.driver.submit(1, *command).unwrap();
        }
        let before = ALLOCATIONS.get();
        while rig.controller().poll() == Progress::Busy {}
        if counted {
            allocated = ALLOCATIONS.get() - before;
        }
        // Two polls at most, as the ring may wrap. The interrupts' queue and the driver are not the controller.
        rig.sink.take();
        assert_eq!(rig.reap(1).len(), 12);
        allocated
    };
    for _ in 0..20 {
        round(false);
    }
    // The FIFO of the test's interrupt sink allocates once per round: it was taken empty.
    let allocated: u64 = (0..10).map(|_| round(true)).sum();
    assert_eq!(allocated, 10);
}
