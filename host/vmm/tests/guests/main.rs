//! The machine under guests of a few instructions, on this machine's KVM, a software KVM included.
#![allow(unsafe_code)] // guests are assembled into this program, and their bytes found by labels
#![allow(clippy::unwrap_used)] // helpers of tests state facts as tests do

#[macro_use]
mod common;
mod events;
mod free_pages;
mod hostile;
mod hot_memory;
mod pci;
#[path = "../../../vfio-user/examples/ramdisk.rs"]
mod ramdisk;
mod saved;
mod saved_console;
mod shared;
mod templates;
mod tiny;
