//! The plane in this process, with drivers on its sockets. One program has all of these tests: each
//! would be linked with the whole plane. Tests that start themselves again (`functions`, `kept`,
//! `killed`, `network`, `pool`), that count the process's descriptors (`overlays`), or that run in
//! a guest (`passthrough`) have programs of their own.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

mod balance;
mod client_memory;
#[path = "../common/mod.rs"]
mod common;
mod copies;
mod disks;
mod e1000;
mod hostile;
mod inspect;
mod kept_full;
mod lanes;
mod lazy;
mod native;
