//! Slipway's VMM as a library of small parts: an x86-64 machine on KVM with PCI functions and
//! almost nothing else. The program `slipway-vmm` is made of it.
//!
//! How the pieces meet:
//! - [`Machine::new`] makes everything of a [`Config`]: the guest's memory ([`memory`]) with the
//!   kernel in it ([`loader`]) and the tables that describe the machine ([`acpi`]), the CPUs, whose
//!   features `slipway-machine` makes of a template. KVM's virtual machine is made before, maybe
//!   long before ([`EmptyVm`]).
//! - [`Ahead`] makes huge pages of the memory that the guest will touch first, on a thread of its
//!   own.
//! - A guest may share read-only pages with other guests ([`shared`]): one file in the host's
//!   memory, however many machines read it.
//! - It may be given memory, and give it back, while it runs ([`hot_memory`]).
//! - Each CPU has a thread that runs the guest until its next exit; [`cpus`] pauses and ends all of
//!   them, by the state in [`seat`].
//! - An exit goes to the [`board`]: serial port, power management, IOAPIC ([`interrupts`]), and the
//!   PCI bus ([`pci`]).
//! - Functions on the bus are in this process ([`local`]; [`own`] has those of every machine), or
//!   behind vfio-user sockets ([`remote`]).
//! - [`layout`] has every address.
//!
//! The machine: hardware-reduced ACPI, PVH boot, local APICs in the kernel and an IOAPIC of seven
//! pins here, kvm-clock and the TSC deadline timer; no PIC, PIT, real-time clock, keyboard
//! controller, firmware or ROM.
//!
//! A hostile guest can write anything anywhere: an access is answered by exactly one device, which
//! checks it, or by nobody. No CPU's thread waits for anything but the server of the function that
//! its guest accesses.
//!
//! Functions and CPUs come and go while the guest runs, by registers ([`plug`]) that the guest's
//! byte code reads.
//!
//! A machine whose guest is stopped is saved, and any number of successors go on from its
//! [`state`], each with a copy of its memory: [`Running::saver`], [`Start::Saved`]. The state of a
//! CPU is that of its [`registers`]. Most of the memory can be copied while the guest still runs
//! ([`written`]).
//!
//! Dependencies, all of the rust-vmm project, which Firecracker and Cloud Hypervisor are made of:
//! `kvm-ioctls` and `kvm-bindings` for KVM's interface, `vmm-sys-util` for the eventfds in that
//! interface, `vm-superio` for the 16550, `acpi_tables` for tables and their byte code. Not used:
//! `vm-memory`, `linux-loader` and `virtio-queue`, which bring a second contract for guest memory
//! beside `slipway_ram`'s. `libc` for signals and reads into guest memory, `rustix` for the other
//! system calls, `zerocopy` for the kernel's file format, `thiserror`; for saved states `serde` and
//! `serde_json`, `hex` for bytes in them, and `sha2` for checksums.
//!
//! Feature: `fuzz` has the bodies of the fuzz targets.
//!
//! `unsafe` is allowed for KVM's memory slots, reads into guest memory, and the signal that makes a
//! thread leave the guest.
#![allow(unsafe_code)]

pub mod acpi;
mod ahead;
pub mod board;
pub mod cpu;
pub mod cpus;
mod error;
mod eventfd;
#[cfg(feature = "fuzz")]
pub mod fuzz;
mod hot_host;
pub mod hot_memory;
pub mod interrupts;
mod ioapic;
mod kick;
pub mod layout;
pub mod loader;
pub mod local;
mod lock;
mod machine;
pub mod memory;
pub mod output;
pub mod own;
mod pages;
pub mod part;
pub mod pci;
pub mod plug;
pub mod power;
pub mod registers;
pub mod remote;
pub mod routes;
pub mod seat;
mod serial;
pub mod shared;
pub mod state;
pub mod written;

pub use ahead::Ahead;
pub use error::{Error, Result};
pub use machine::{Chassis, Config, EmptyVm, Machine, Parts, Running, Saver, Start};
pub use slipway_machine::{HotRegion, Template, spare};
