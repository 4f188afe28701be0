//! What two socket engines begin with.
#![no_main]
slipway_fuzz::target!(slipway_link::fuzz::hello);
