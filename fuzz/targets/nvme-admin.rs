//! Hostile admin commands of an NVMe controller.
#![no_main]
slipway_fuzz::target!(slipway_nvme::fuzz::admin);
