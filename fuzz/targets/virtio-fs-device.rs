//! A hostile guest of a virtio file system device: registers, memory, notifications, states.
#![no_main]
slipway_fuzz::target!(slipway_virtio_fs::fuzz::device);
