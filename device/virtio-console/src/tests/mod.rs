//! A driver and a host on one device, on heap memory.

mod hostile;
mod ports;
mod rig;
mod saved;
mod traffic;
