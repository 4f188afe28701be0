//! Tests of several modules together.

mod executors;
mod pieces;
mod pipes;
mod random;
mod scheduling;
mod sealing;
mod shares;
