//! Hostile I/O commands of an NVMe controller.
#![no_main]
slipway_fuzz::target!(slipway_nvme::fuzz::io);
