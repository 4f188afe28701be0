//! Tests of the device on heap memory, through a real switch, with the small driver.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

mod control;
mod features;
mod hostile;
mod lifecycle;
mod offloads;
mod rig;
mod saved;
mod traffic;
