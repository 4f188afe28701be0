//! A layer that is an EROFS file, merged over itself and written out.
#![no_main]

slipway_fuzz::target!(slipway_image::fuzz_erofs);
