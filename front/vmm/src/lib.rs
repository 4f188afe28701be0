//! The control socket of `slipway-vmm`, as a library for its program and for fuzzing: one client
//! at a time ([`stream`]), lines and descriptors ([`control`]), commands, answers and events
//! ([`qmp`]).
//!
//! Feature: `fuzz` has the body of the fuzz target.

pub mod control;
#[cfg(feature = "fuzz")]
pub mod fuzz;
pub mod qmp;
pub mod stream;
