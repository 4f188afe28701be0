//! The description of a snapshot in a directory that is copied in.
#![no_main]
slipway_fuzz::target!(slipway_runtime::fuzz::import);
