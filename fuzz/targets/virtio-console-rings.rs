//! A hostile driver of a virtio console: rings, descriptors, control messages.
#![no_main]
slipway_fuzz::target!(slipway_virtio_console::fuzz::rings);
