//! A hostile guest of a virtio console: registers, memory, notifications.
#![no_main]
slipway_fuzz::target!(slipway_virtio_console::fuzz::device);
