//! Tests across modules. Those that need a program of the machine say so when they skip.

mod build;
mod cache;
mod erofs;
mod estargz;
mod fetch;
mod folder;
mod hostile;
mod hostile_registry;
mod layout;
mod lazy;
mod merge;
mod private;
mod registry;
mod support;
