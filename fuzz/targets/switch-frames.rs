//! Frames that are not what they say, through a switch to ports that can take little.
#![no_main]
slipway_fuzz::target!(slipway_switch::fuzz::frames);
