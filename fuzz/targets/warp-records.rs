//! Records of another engine: valid, damaged, and arbitrary bytes.
#![no_main]
slipway_fuzz::target!(slipway_pipes::fuzz::records);
