//! Commands of a virtio-net device's control queue.
#![no_main]
slipway_fuzz::target!(slipway_virtio_net::fuzz::control);
