//! What another engine sends: records that are none, damaged ones, honest ones.
#![no_main]
slipway_fuzz::target!(slipway_warp::fuzz::records);
