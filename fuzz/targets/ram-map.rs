//! Any sequence of maps, unmaps and accesses of guest memory, compared with a model.
#![no_main]
slipway_fuzz::target!(slipway_ram::fuzz::dma_map);
