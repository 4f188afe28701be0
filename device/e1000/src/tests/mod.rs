//! Tests of the device on heap memory, through a real switch, with the small driver, in virtual
//! time.
#![allow(clippy::unwrap_used)] // a failed unwrap is the report of what failed

mod block;
mod hostile;
mod interrupts;
mod lifecycle;
mod offloads;
mod rig;
mod saved;
mod traffic;
mod ways;
