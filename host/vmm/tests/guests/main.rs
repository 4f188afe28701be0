//! The machine under guests of a few instructions, on this machine's KVM, a software KVM included.
#![allow(unsafe_code)] // guests are assembled into this program, and their bytes found by labels

#[macro_use]
mod common;
mod hostile;
mod pci;
#[path = "../../../vfio-user/examples/ramdisk.rs"]
mod ramdisk;
mod tiny;
