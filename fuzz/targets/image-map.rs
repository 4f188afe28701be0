//! The map of a lazily pulled image, without the digest at its end.
#![no_main]

slipway_fuzz::target!(slipway_image::fuzz_map);
