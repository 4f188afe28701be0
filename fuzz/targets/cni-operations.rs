//! Environment and configuration of the CNI plugin.
#![no_main]
slipway_fuzz::target!(slipway_cni::fuzz::operation);
