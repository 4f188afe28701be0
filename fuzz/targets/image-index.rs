//! The index of an eStargz layer: a JSON document, merged over itself into an image without data.
#![no_main]

slipway_fuzz::target!(slipway_image::fuzz_index);
