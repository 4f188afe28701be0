//! The description of a template or snapshot of the node's own.
#![no_main]
slipway_fuzz::target!(slipway_runtime::fuzz::template);
