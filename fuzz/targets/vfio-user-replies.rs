//! Any bytes from a vfio-user server.
#![no_main]
slipway_fuzz::target!(slipway_vfio_user_client::fuzz);
