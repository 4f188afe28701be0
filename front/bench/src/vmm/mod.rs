//! Measurements of VMMs: from the start of the process to the first byte of its guest, in turn
//! (ABAB, never AABB).
//!
//! The guest is a [`stub`]: a kernel of a few instructions that writes one byte to the serial port
//! and halts. So what is measured is the VMM and nothing of a guest's own start, and any KVM that
//! runs 32-bit code can be measured on, also one that is software itself.
//!
//! - [`VmmLoad`]: the size of the guest's memory;
//! - [`VmmSubject`]: a subject. [`Vmm`] is a VMM's program, [`Caged`] the same within the
//!   namespaces that Slipway starts VMMs in, [`Fork`] is Slipway's own with a saved machine in
//!   place of a boot, with functions or without, and [`Bare`] is KVM alone, which no VMM can beat;
//! - [`Measurement::take`](crate::Measurement::take) runs a [`VmmPlan`]; [`VmmReport`] is
//!   everything measured, as JSON, with percentiles over the rounds; [`vmm_table`] shows it.

mod bare;
mod fork;
mod functions;
mod load;
mod process;
mod programs;
mod report;
pub mod stub;
mod table;

pub use crate::keeping::keeper_in;
pub use bare::Bare;
pub use fork::{Fork, ForkPlane};
pub use load::VmmLoad;
pub use programs::{Caged, Program, Vmm};
pub use report::{VmmMeasured, VmmPlan, VmmReport, VmmSubject};
pub use table::vmm_table;
