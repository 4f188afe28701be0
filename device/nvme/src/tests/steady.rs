//! In the steady state a command allocates nothing.
#![allow(unsafe_code)] // an allocator that counts

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use slipway_nvme_spec::command::{CopyRange, SubmissionEntry};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_pci::Function;
use slipway_telemetry::MonotonicClock;
use zerocopy::IntoBytes;

use super::rig::{Requested, Setup, ram};
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
fn commands_that_are_requests_allocate_nothing() {
    in_the_steady_state_of(Setup::new().disk(Box::new(Requested(ram(16 << 20, 512)))), |_| {});
}

#[test]
fn traced_commands_allocate_nothing() {
    in_the_steady_state(|controller| {
        let clock = Arc::new(MonotonicClock::new());
        let tracer = Tracer::new(clock, 1, &controller.home.engine.limits, Latencies::new(1));
        controller.trace(Some(Box::new(tracer)));
    });
}

fn in_the_steady_state(prepare: fn(&mut Controller)) {
    in_the_steady_state_of(Setup::new(), prepare);
}

fn in_the_steady_state_of(mut setup: Setup, prepare: fn(&mut Controller)) {
    // Of two verifies and two copies, which take several steps each, the buffers are kept.
    setup.limits.transfer = 128 << 10;
    let mut rig = setup.admin();
    // Without interrupts: the test's queue of them is not the controller.
    rig.driver.create_pair(1, 64, None).unwrap();
    prepare(rig.controller());
    let data = rig.buffer(128 << 10);
    let (zeros, ranges) = (rig.buffer(128 << 10), rig.buffer(4096));
    let copied = [CopyRange::new(2000, 64), CopyRange::new(3000, 2048)];
    rig.fill(ranges, copied.as_bytes());
    let mut fused = |opcode, fuse| {
        let command = rig.with_data(io(opcode, 1, 5000, 8), zeros, 4096);
        SubmissionEntry { flags: command.flags | fuse, ..command }
    };
    let pair = [fused(NvmOpcode::Compare, 1), fused(NvmOpcode::Write, 2)];
    let commands = [
        rig.with_data(io(NvmOpcode::Read, 1, 0, 8), data, 4096),
        rig.with_data(io(NvmOpcode::Write, 1, 8, 16), data, 8192),
        rig.with_data(io(NvmOpcode::Read, 1, 64, 256), data, 128 << 10),
        SubmissionEntry::new(NvmOpcode::Flush.0, 1),
        io(NvmOpcode::WriteZeroes, 1, 500, 8),
        io(NvmOpcode::Read, 7, 0, 1),
        // Blocks that nothing here writes.
        rig.with_data(io(NvmOpcode::Compare, 1, 2000, 8), zeros, 4096),
        rig.with_data(io(NvmOpcode::Compare, 1, 2000, 256), zeros, 128 << 10),
        io(NvmOpcode::Verify, 1, 2000, 4096),
        SubmissionEntry { prp1: ranges.into(), ..io(NvmOpcode::Copy, 1, 6000, 2) },
        pair[0],
        pair[1],
    ];
    let count = commands.len();
    let mut round = |counted: bool| {
        let mut allocated = 0;
        for command in commands.iter().chain(&commands) {
            rig.driver.submit(1, *command).unwrap();
        }
        let before = ALLOCATIONS.get();
        while rig.controller().poll().is_busy() {}
        if counted {
            allocated = ALLOCATIONS.get() - before;
        }
        let ended = rig.reap(1);
        assert_eq!(ended.len(), 2 * count);
        let failed = ended.iter().filter(|entry| !entry.status().is_success()).count();
        // Those of a namespace that is not there, and pairs where there are lanes.
        assert_eq!(failed, if super::lanes::wanted() > 1 { 6 } else { 2 });
        allocated
    };
    for _ in 0..40 {
        round(false);
    }
    let allocated: u64 = (0..10).map(|_| round(true)).sum();
    assert_eq!(allocated, 0);
}
