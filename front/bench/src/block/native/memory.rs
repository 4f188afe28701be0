//! Memory that driver and target share.

use std::os::fd::AsFd;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result};
use rustix::fs::{MemfdFlags, SealFlags};
use slipway_ram::{DmaMap, Memory, Permissions, Region};

/// The address of the memory in the target's address space.
pub(super) const BASE: u64 = 1 << 32;

/// A memfd, sealed against shrinking, with a map of it.
pub(super) struct Shared {
    pub file: OwnedFd,
    pub len: u64,
    pub memory: Memory,
    /// The owner of the mapping that `memory` shows.
    _map: DmaMap,
}

impl Shared {
    pub fn new(len: u64) -> Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file =
            rustix::fs::memfd_create("slipway-bench", flags).context("no memory to share")?;
        rustix::fs::ftruncate(&file, len)?;
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK)?;
        let mut map = DmaMap::new();
        let region = Region::mapped(file.as_fd(), 0, len, Permissions::READ_WRITE);
        map.add(BASE, region.with_context(|| format!("cannot map {len} bytes"))?)?;
        Ok(Self { file, len, memory: map.memory(), _map: map })
    }
}
