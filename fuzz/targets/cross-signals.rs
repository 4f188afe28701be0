//! A party that writes what it likes into a FIFO of signals.
#![no_main]
slipway_fuzz::target!(slipway_ring::fuzz::signals);
