//! A hostile guest of a virtio persistent memory device: registers, memory, notifications, states.
#![no_main]
slipway_fuzz::target!(slipway_virtio_pmem::fuzz::device);
