//! A hostile guest in front of an NVMe controller.
#![no_main]
slipway_fuzz::target!(slipway_nvme::fuzz::fuzz);
