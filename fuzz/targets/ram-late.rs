//! Any sequence of accesses, faults and changes of user of late memory, compared with a model.
#![no_main]
slipway_fuzz::target!(slipway_ram::fuzz::late_memory);
