//! A hostile guest of a virtio-net device: registers, memory, notifications.
#![no_main]
slipway_fuzz::target!(slipway_virtio_net::fuzz::device);
