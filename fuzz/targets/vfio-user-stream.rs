//! Any bytes on a vfio-user socket.
#![no_main]
slipway_fuzz::target!(slipway_vfio_user::fuzz);
