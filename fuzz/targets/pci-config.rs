//! Configuration space and MSI-X table of a PCI function.
#![no_main]
slipway_fuzz::target!(slipway_pci::fuzz::config_space);
