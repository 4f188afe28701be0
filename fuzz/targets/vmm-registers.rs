//! A hostile guest's accesses to the VMM's IOAPIC and power management.
#![no_main]
slipway_fuzz::target!(slipway_vmm::fuzz::registers);
