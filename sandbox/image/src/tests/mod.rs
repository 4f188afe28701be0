//! Tests across modules. Those that need a program of the machine say so when they skip.

mod build;
mod cache;
mod erofs;
mod estargz;
mod fetch;
mod fetcher;
mod fetcher_process;
mod folder;
mod hostile;
mod hostile_registry;
mod layout;
mod lazy;
mod links;
mod merge;
mod parts;
mod pick;
mod private;
mod registry;
mod slow;
mod support;
mod toc;
