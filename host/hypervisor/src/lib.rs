//! Starts, supervises and ends the virtual machine of a sandbox.
//!
//! A [`Hypervisor`] turns a [`VmSpec`] into a running [`Vm`] (module `interface`). There are three:
//! - [`native::SlipwayVmm`], Slipway's own VMM, which needs KVM;
//! - [`qemu::Qemu`], any QEMU from 10.1 on (the first with a vfio-user client), with KVM if the
//!   machine can run a stock kernel on it, and with software emulation otherwise;
//! - [`hollow::Hollow`], a program that drives the functions in a guest's place, for measurements
//!   of the host's side of starts. It gets a VM only where the spec asks for [`Accel::Hollow`].
//!
//! [`Vmms`] chooses one of them for each VM; [`accel`] finds out what KVM is worth.
//!
//! All are launched, reached and ended in the same way. They speak QMP (module `qmp`), print
//! into FIFOs (`console`), and get what they use as descriptors; module `launch` does the steps,
//! and its trait `Program` has what differs: the command line and the descriptors.
//!
//! The steps of a launch: [`Hypervisor::launch`] opens everything that the VMM may use (the agent's
//! listening socket, the functions of vfio-user servers, files of emulated disks, the control
//! channel's listening socket, the KVM device) while it still has the right to. It starts the VMM
//! as an unprivileged process in a cage (module `cage`) that inherits exactly those descriptors,
//! waits until the VMM answers over QMP, closes the cage, and only then has the guest run. The
//! process does not die with its launcher: by a [`VmRecord`] kept on disk, a later process can end
//! it ([`reap_leftover`]), or take it over ([`Hypervisor::adopt`]), without ever hitting another
//! process that got the same id. To permit that, both channels are listening sockets that accept
//! one client after the other, the VMM prints into FIFOs that stay open, and a pidfd reports its
//! end to a process that is not its parent.
//!
//! QEMU connects to vfio-user servers itself, before its guest runs, and never again. `slipway-vmm`
//! gets connections, and new ones whenever it reports one lost (module `reconnect`). Both get those
//! of functions that are added while the guest runs ([`Vm::plug`]).
//!
//! Guest memory is one sealed memfd that the launcher makes ([`GuestMemory`]), so that the servers
//! of the VM's functions know the file and accept no other. Beside it, a `slipway-vmm` can be given
//! pages that guests share and only read ([`SharedPages`]).
//!
//! A `slipway-vmm` can be started ahead of its VM, as a [`Spare`] ([`Hypervisor::launch_spare`],
//! [`Hypervisor::launch_in`]).
//!
//! A process that serves functions of one VM alone is started in the same way, as a [`Helper`].
//! Files of the host come to it as [`Tree`]s.
//!
//! CPUs are added while the guest runs, with both VMMs ([`Vm::plug_cpu`]), and removed on KVM;
//! memory is added and given back with `slipway-vmm` ([`Vm::set_memory`]).
//!
//! A `slipway-vmm` saves its machine ([`Vm::save`], with its memory by
//! [`Vm::save_with_memory`], [`Vm::copy_ahead`]), and others begin with what was saved
//! ([`VmSpec::restore`]) and with the same memory ([`GuestMemory::of_template`]).
//!
//! Not implemented: removal of functions with QEMU, saving QEMU's machines. Limits: the exit
//! status of a VM that was taken over is known to its parent only; console text beyond the capacity
//! of a FIFO (64 KiB) waits in the guest while it has no reader.
//!
//! The processor that a guest of `slipway-vmm` sees is that of a template of `slipway-machine`;
//! [`cpu_templates`] says which ones this host can give.
//!
//! Dependencies: `kvm-ioctls` for the question what KVM offers, `rustix` for system calls, `libc`
//! for the few that it lacks (dropping groups and user of a forked child, `close_range`, `keyctl`,
//! `mount_setattr`, KVM's ioctl), `tokio` for the control channel and for waiting on processes,
//! `serde`/`serde_json` for QMP and the records,
//! `thiserror` for errors at the crate's edge, `tracing` for the log.
//!
//! `unsafe` is allowed for children, which give up their rights before they run their program, for
//! `unshare` on a thread, for `mount_setattr`, for watching a pidfd, and for the one ioctl of the
//! KVM probe.
#![allow(unsafe_code)]

pub mod accel;
mod assigned;
mod cache;
mod cage;
mod child;
mod choice;
mod console;
mod control;
mod cpu_templates;
mod ended;
mod error;
mod exit;
mod files;
mod helper;
pub mod hollow;
mod identity;
mod interface;
mod launch;
#[cfg(test)]
mod logged;
mod memory;
mod mounts;
pub mod native;
mod pages;
mod probe;
mod process;
pub mod qemu;
mod qmp;
mod reap;
mod reconnect;
mod rest;
mod saved;
mod shared;
mod spare;
mod spec;
mod tree;
mod unfinished;
mod vm;

pub use accel::{Accel, AccelChoice, AccelReport};
pub use cage::Cage;
pub use choice::{Preview, VmmChoice, Vmms};
pub use console::STDERR_TAIL;
pub use cpu_templates::{OfferedTemplate, cpu_templates};
pub use ended::{ShutdownReason, VmExit};
pub use error::{Error, Result};
pub use helper::{Helper, HelperSpec};
pub use identity::{VmRecord, reap_leftover};
pub use interface::{
    BoxFuture, Capabilities, CpuSlot, Hypervisor, LaunchTimes, MemoryDevice, PageSink, Vm, VmEvent,
};
pub(crate) use interface::{no_hot_memory, no_hot_plug, no_spares, saves_none};
pub use memory::GuestMemory;
pub use saved::checked_state;
pub use shared::SharedPages;
pub use slipway_machine::{HotRegion, MAX_STATE_BYTES, Template as CpuTemplate};
pub use slipway_numa::Topology;
pub use slipway_pool_wire::{Page, TemplateName, WireError};
pub use spare::{Spare, SpareSpec};
pub use spec::{
    AssignedFunction, Credentials, DiskModel, EmulatedDisk, EmulatedNic, FreePages, LeftVm,
    NicModel, VmSpec,
};
pub use tree::{Access, ENTRY, HelperFiles, Tree};
