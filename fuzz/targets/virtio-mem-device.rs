//! A hostile guest of a virtio memory device: registers, memory, notifications, states.
#![no_main]
slipway_fuzz::target!(slipway_virtio_mem::fuzz::device);
