//! Saved states of an e1000.
#![no_main]
slipway_fuzz::target!(slipway_e1000::fuzz::state);
