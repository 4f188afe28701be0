//! A memory port whose peer stores anything anywhere.
#![no_main]
slipway_fuzz::target!(slipway_switch::fuzz::link);
