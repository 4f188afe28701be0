//! The template of forks that are measured: no page of it is zeros.

use std::os::fd::AsFd;

use anyhow::{Context, Result};
use rustix::fs::MemfdFlags;
use slipway_pool::Template;

/// The first byte of each page.
pub(super) const FIRST: u8 = 0x5a;

/// Makes a template of `bytes` bytes, whole MiB.
pub(super) fn make(bytes: u64) -> Result<Template> {
    let file = rustix::fs::memfd_create("slipway-bench", MemfdFlags::CLOEXEC);
    let file = file.context("a file in memory")?;
    let block = vec![FIRST; 1 << 20];
    for at in (0..bytes).step_by(block.len()) {
        let written = rustix::io::pwrite(&file, &block, at).context("a template")?;
        anyhow::ensure!(written == block.len(), "the host has no memory left for a template");
    }
    Template::copy_of(file.as_fd()).context("a template")
}
