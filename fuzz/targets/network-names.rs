//! Queries to a network's name server, and words for addresses and ports.
#![no_main]
slipway_fuzz::target!(slipway_network::fuzz::name_query);
