//! Any sequence of requests on a disk, compared with a model.
#![no_main]
slipway_fuzz::target!(slipway_block::fuzz::disks);
