//! Hostile PRPs and SGLs.
#![no_main]
slipway_fuzz::target!(slipway_nvme::fuzz::pointers);
