//! Saved states of a virtio console.
#![no_main]
slipway_fuzz::target!(slipway_virtio_console::fuzz::state);
