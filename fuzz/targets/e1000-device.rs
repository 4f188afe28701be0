//! A hostile guest of an e1000: registers, descriptors, the communication status block, time.
#![no_main]
slipway_fuzz::target!(slipway_e1000::fuzz::device);
