//! Parts of the library that are values: their unit tests, which the library itself cannot run,
//! since its exports have the names of libc's functions.
#![allow(clippy::unwrap_used, dead_code, unsafe_code)]

#[path = "../src/address.rs"]
mod address;
#[path = "../src/epoll/groups.rs"]
mod groups;
#[path = "../src/halves.rs"]
mod halves;
#[path = "../src/epoll/ready.rs"]
mod ready;
#[path = "../src/time.rs"]
mod time;
