//! Tests of several modules together.

mod random;
mod scheduling;
mod shares;
