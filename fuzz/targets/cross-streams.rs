//! A party that writes what it likes into the words of a Cross-FIFO, beside a stream that is used
//! well.
#![no_main]
slipway_fuzz::target!(slipway_ring::fuzz::streams);
