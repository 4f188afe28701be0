//! An overlay that was left in a file, with bytes of its head and maps changed.
#![no_main]
slipway_fuzz::target!(slipway_block::fuzz::adoption);
