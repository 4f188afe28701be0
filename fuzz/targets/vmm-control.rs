//! Bytes of a hostile client on the VMM's control socket.
#![no_main]
slipway_fuzz::target!(slipway_vmm_process::fuzz::control);
