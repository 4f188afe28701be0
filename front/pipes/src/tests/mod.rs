//! Tests of several modules together.

mod executors;
mod pieces;
mod pipes;
mod random;
mod sealing;
