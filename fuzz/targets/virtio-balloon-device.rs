//! A hostile guest of a virtio balloon: registers, memory, notifications, saved states.
#![no_main]
slipway_fuzz::target!(slipway_virtio_balloon::fuzz::device);
