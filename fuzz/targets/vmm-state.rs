//! A file that is given to the VMM as the saved state of a machine.
#![no_main]
slipway_fuzz::target!(slipway_vmm::fuzz::state);
