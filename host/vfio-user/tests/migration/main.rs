//! Functions of every kind are stopped, saved, and loaded into another endpoint, under a driver
//! that goes on as if nothing had happened.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed
#![allow(clippy::disallowed_methods, reason = "the tests are their own peers")]

mod common;
mod networks;
mod nvme;
