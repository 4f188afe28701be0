//! The server, spoken to in raw messages: one file per request, every error included.
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do
#![allow(clippy::disallowed_methods, reason = "the tests are their own peers")]

mod access;
mod common;
mod device_info;
mod dma_map;
mod dma_unmap;
mod framing;
mod hardware;
mod intx;
mod irq_info;
mod isolation;
mod kept_memory;
mod lifecycle;
mod lingering;
mod log;
mod migration;
mod qemu;
mod region_info;
mod region_io_fds;
mod remote;
mod reset;
mod same_body;
mod second_opinion;
mod set_irqs;
mod stall;
mod version;
mod write_multi;
