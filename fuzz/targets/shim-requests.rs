//! Bytes on the connection of containerd: frames, requests, and the configurations in them.
#![no_main]
slipway_fuzz::target!(slipway_shim::fuzz::requests);
