//! Memory of a pool in the test's own process.

use std::os::fd::OwnedFd;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use slipway_pool_wire::{HandOver, Lease, Range, Request};

use crate::node::{BYTES, Node};

/// Memory of the pool in this process.
pub struct Own {
    base: *mut u8,
    pub lease: Lease,
    _kept: (OwnedFd, OwnedFd),
}

// SAFETY: the mapping is accessed by volatile bytes only, and stays until the process ends.
unsafe impl Sync for Own {}

impl Own {
    /// Takes memory for this process, which has both the guest's side and the device's.
    pub fn take(node: &Node, request: Request) -> Self {
        let mut lease = Lease::ask(&node.socket(), request).unwrap();
        let connection = lease.connection.try_clone().unwrap();
        let hand_over =
            HandOver::begin(std::mem::replace(&mut lease.connection, connection)).unwrap();
        let (prot, any) = (ProtFlags::READ | ProtFlags::WRITE, std::ptr::null_mut());
        let len = BYTES as usize;
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(any, len, prot, MapFlags::SHARED, &lease.file, 0) };
        let base = base.unwrap().cast::<u8>();
        let range = Range { address: base.addr() as u64, len: BYTES, offset: 0 };
        let _kept = hand_over.finish(&[range]).unwrap();
        Self { base, lease, _kept }
    }

    pub fn load(&self, at: usize) -> u8 {
        assert!(at < BYTES as usize);
        // SAFETY: within the mapping, which stays.
        unsafe { self.base.add(at).read_volatile() }
    }

    pub fn store(&self, at: usize, value: u8) {
        assert!(at < BYTES as usize);
        // SAFETY: as above.
        unsafe { self.base.add(at).write_volatile(value) };
    }

    /// Gives the host whole pages back, as a VMM does.
    #[allow(dead_code)] // not in every test
    pub fn give_back(&self, at: usize, len: usize) {
        assert!(at + len <= BYTES as usize);
        let start = self.base.wrapping_add(at).cast();
        // SAFETY: the range is the mapping's, whose bytes are accessed by volatile accesses only.
        unsafe { rustix::mm::madvise(start, len, Advice::LinuxRemove) }.unwrap();
    }
}
