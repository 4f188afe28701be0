//! A file that is given to the VMM as a kernel and as an initramfs.
#![no_main]
slipway_fuzz::target!(slipway_vmm::fuzz::loader);
