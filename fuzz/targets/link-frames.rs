//! Frames between two socket engines, of one that holds the keys.
#![no_main]
slipway_fuzz::target!(slipway_link::fuzz::frames);
