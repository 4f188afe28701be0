//! The handshake of two socket engines.
#![no_main]
slipway_fuzz::target!(slipway_link::fuzz::hello);
