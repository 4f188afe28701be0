//! A hostile guest of a virtio entropy device: registers, memory, notifications, saved states.
#![no_main]
slipway_fuzz::target!(slipway_virtio_rng::fuzz::device);
