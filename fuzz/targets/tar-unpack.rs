//! An archive of `slipway cp`, unpacked as that of a guest and as that of the host's user.
#![no_main]

slipway_fuzz::target!(slipway_tar_tree::fuzz_unpack);
