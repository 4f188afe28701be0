//! Tests across modules. Those that need a program of the machine say so when they skip.

mod build;
mod cache;
mod fetch;
mod hostile;
mod merge;
mod registry;
mod support;
