//! Requests of programs to the socket engine, and what they write into memory that they share with
//! it.
#![no_main]
slipway_fuzz::target!(slipway_sgiov::fuzz::control);
