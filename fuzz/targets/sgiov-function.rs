//! A guest's socket function: registers, control memory and messages of a guest that writes
//! anything.
#![no_main]
slipway_fuzz::target!(slipway_sgiov_function::fuzz::function);
