//! Shadow doorbells: an honest queue among hostile ones.
#![no_main]
slipway_fuzz::target!(slipway_nvme::fuzz::doorbells::fuzz);
