//! Saved states of a virtio-net device.
#![no_main]
slipway_fuzz::target!(slipway_virtio_net::fuzz::state);
