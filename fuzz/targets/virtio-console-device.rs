//! A hostile guest of a virtio console: registers, memory, notifications; its host reads and writes.
#![no_main]
slipway_fuzz::target!(slipway_virtio_console::fuzz::device);
