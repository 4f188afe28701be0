//! The interface of hypervisors: programs that run virtual machines, the machines that they run,
//! and the events and the ends of these.
//!
//! A new ability of machines is a method of [`Vm`], which refuses by default if some VMMs lack it.
//! Module `vm` implements it, by commands of `qmp`. If callers have to know it before a start, it
//! is a field of [`Capabilities`] too, which `native`, `qemu` and `hollow` fill in. Tests:
//! `qmp/tests.rs`, and `tests/native` with a program in the VMM's place; `NoVm` of
//! `sandbox/runtime/tests/harness` needs the method if the runtime calls it there.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::{Duration, Instant};

use tokio::sync::broadcast;

use crate::{
    Accel, Error, LeftVm, Result, ShutdownReason, Spare, SpareSpec, VmExit, VmRecord, VmSpec,
};

/// Takes the pages of a machine's memory, each with its offset in the memory, on a thread that may
/// wait. An error of it ends the save.
pub type PageSink = Box<dyn FnMut(u64, &[u8]) -> std::io::Result<()> + Send>;

/// A future that may cross threads. With it, the traits can be used as objects.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The abilities that some VMMs have, and others have not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// A VM can be given pages that guests share, [`VmSpec::shared`].
    pub shares_pages: bool,
    /// A machine can be [saved](Vm::save), and begin with one that was saved
    /// ([`VmSpec::restore`]).
    pub saves_machines: bool,
    /// A guest can be given memory, and give it back, while it runs ([`VmSpec::hot_memory`]).
    pub plugs_memory: bool,
    /// A guest can report pages that it does not use, and the host has them back
    /// ([`VmSpec::free_pages`]).
    pub reports_free_pages: bool,
}

/// A program that can run virtual machines.
pub trait Hypervisor: Send + Sync {
    /// Returns the short name for logs and tables, such as `qemu`.
    fn name(&self) -> &'static str;

    /// Returns the host memory in bytes that the VMM of such a VM needs at most beside the guest's
    /// memory. Neither control groups nor sockets of the spec are looked at. If this depends on the
    /// accelerator, the first call may boot the spec's kernel for a moment.
    ///
    /// # Errors
    /// There is no VMM for such a VM.
    fn overhead<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<u64>>;

    /// Returns what the VMM of such a VM can do. The first call may boot the spec's kernel for a
    /// moment.
    ///
    /// # Errors
    /// There is no VMM for such a VM.
    fn capabilities<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<Capabilities>>;

    /// Starts a VM and returns once it answers on its control channel; its guest has begun to run
    /// by then.
    ///
    /// The caller has prepared everything that the spec names: kernel and initramfs are readable by
    /// the VM's user, vfio-user sockets listen, parent directories exist. After an error nothing is
    /// left: the process is dead and reaped, the agent socket removed. Dropping the future ends the
    /// VM, too.
    ///
    /// Must be called within a tokio runtime that has I/O and time enabled.
    fn launch<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<Box<dyn Vm>>>;

    /// Starts a VMM without a VM, ahead of a [launch in it](Hypervisor::launch_in). Returns once it
    /// waits for its VM. After an error nothing is left.
    ///
    /// Must be called within a tokio runtime that has I/O and time enabled.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a VMM that is not started ahead, or if VMs get such a one.
    fn launch_spare<'a>(&'a self, spec: &'a SpareSpec) -> BoxFuture<'a, Result<Spare>> {
        let _ = spec;
        Box::pin(std::future::ready(no_spares()))
    }

    /// Starts a VM as [`launch`](Hypervisor::launch) does, in a VMM that was started ahead. If that
    /// does not [fit](Spare::fits), or the VM gets another kind of VMM, it is ended first, and the
    /// VM has a VMM of its own.
    fn launch_in<'a>(
        &'a self,
        spare: Spare,
        spec: &'a VmSpec,
    ) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move {
            spare.end().await;
            self.launch(spec).await
        })
    }

    /// Takes over a VM whose launcher has ended. Returns once the VM answers.
    ///
    /// After an error the VM continues to run unchanged: [`reap_leftover`](crate::reap_leftover)
    /// ends it.
    ///
    /// Must be called within a tokio runtime that has I/O and time enabled.
    fn adopt<'a>(&'a self, left: &'a LeftVm) -> BoxFuture<'a, Result<Box<dyn Vm>>>;
}

/// A virtual machine that was launched or taken over. Dropping it kills the machine, unless it was
/// [detached](Vm::detach).
pub trait Vm: Send + Sync {
    /// Returns the record by which the VM is found again after a restart of its launcher; keep it
    /// on disk, and again after each [plug](Vm::plug).
    fn record(&self) -> VmRecord;

    /// Returns the times of the launch, or `None` if another launcher launched the VM.
    fn times(&self) -> Option<LaunchTimes>;

    /// Returns the accelerator that the guest runs on.
    fn accel(&self) -> Accel;

    /// Returns a receiver of the VM's events from now on. A receiver that falls behind loses the
    /// oldest events.
    fn events(&self) -> broadcast::Receiver<VmEvent>;

    /// Waits until the VM's process has ended. There may be any number of callers, and each may be
    /// cancelled.
    fn wait(&self) -> BoxFuture<'_, VmExit>;

    /// Asks the guest to power off (the ACPI power button), which the guest may ignore.
    fn power_down(&self) -> BoxFuture<'_, Result<()>>;

    /// Ends the VM in an orderly way without involving its guest.
    fn quit(&self) -> BoxFuture<'_, Result<()>>;

    /// Waits until the guest has nothing to do, for some seconds at most, since it may never rest.
    /// A machine that is saved then has nothing left to do when others begin with it. Does not wait
    /// where the kernel does not tell the VM's processor time.
    fn rest(&self) -> BoxFuture<'_, ()> {
        Box::pin(std::future::ready(()))
    }

    /// Stops the guest's CPUs.
    fn pause(&self) -> BoxFuture<'_, Result<()>>;

    /// Resumes the guest's CPUs.
    fn resume(&self) -> BoxFuture<'_, Result<()>>;

    /// Saves the machine of a guest that is [paused](Vm::pause): its CPUs, devices and functions,
    /// without its memory, which does not change until the VM ends or is resumed. Other VMs begin
    /// with it ([`VmSpec::restore`]). The functions are stopped until the VM is resumed.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a VMM that saves no machines; [`Error::Refused`] with the reason
    /// for which this one cannot be saved.
    fn save(&self) -> BoxFuture<'_, Result<Vec<u8>>> {
        Box::pin(std::future::ready(saves_none()))
    }

    /// Saves a paused machine, as [`save`](Vm::save), and its memory of `bytes` bytes
    /// ([`GuestMemory::bytes`](crate::GuestMemory::bytes)): `page` gets each page of 4 KiB that has
    /// bytes other than zeros, with its offset in the memory, ascending. `page` runs on a thread
    /// that may wait; all of its work and the VMM's have a minute.
    ///
    /// Memory that began as a template lacks the pages that nobody has touched, unless it is
    /// [complete](crate::GuestMemory::complete).
    ///
    /// After an error `page` may have got any part of the memory, and the VM can be resumed. If the
    /// future is dropped, `page` may be called until the minute is over, and a resume may be
    /// refused.
    ///
    /// # Errors
    /// As for [`save`](Vm::save); [`Error::System`] with an error of `page`; [`Error::Control`] if
    /// the VMM sends no such memory; [`Error::Timeout`].
    fn save_with_memory(&self, bytes: u64, page: PageSink) -> BoxFuture<'_, Result<Vec<u8>>> {
        let _ = (bytes, page);
        Box::pin(std::future::ready(saves_none()))
    }

    /// Copies the memory of a machine that runs, of `bytes` bytes, ahead of
    /// [`save_rest`](Vm::save_rest): `page` gets pages as with
    /// [`save_with_memory`](Vm::save_with_memory), and then some of them again, among them pages of
    /// zeros. The guest goes on, a little slower until it goes on after a pause. Has five minutes.
    ///
    /// # Errors
    /// As for [`save_with_memory`](Vm::save_with_memory); [`Error::Refused`] by a VMM of an earlier
    /// version, or for a machine with a writer that keeps no log. `page` may have got any
    /// part of the memory.
    fn copy_ahead(&self, bytes: u64, page: PageSink) -> BoxFuture<'_, Result<()>> {
        let _ = (bytes, page);
        Box::pin(std::future::ready(saves_none()))
    }

    /// Does what [`save_with_memory`](Vm::save_with_memory) does with a machine that was
    /// [copied ahead](Vm::copy_ahead), and has not been resumed since: `page` gets only the pages
    /// that were written to since it got them, among them pages of zeros.
    ///
    /// # Errors
    /// As for [`save_with_memory`](Vm::save_with_memory).
    fn save_rest(&self, bytes: u64, page: PageSink) -> BoxFuture<'_, Result<Vec<u8>>> {
        let _ = (bytes, page);
        Box::pin(std::future::ready(saves_none()))
    }

    /// Adds the function that the vfio-user server at `socket` serves, under a name of at most 64
    /// letters, digits, `-`, `_` and `.` that begins with a letter. Returns its PCI address in the
    /// guest, which has been told of it. The function takes one of [`VmSpec::plug_slots`].
    ///
    /// The socket is in the VM's [record](Vm::record) from then on: a successor of this launcher
    /// that takes the VM over by it connects the function again when its server has ended.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a VMM that has no hot plug; [`Error::Refused`] if the name or
    /// all slots are taken, or the server does not answer as one.
    fn plug<'a>(&'a self, name: &'a str, socket: &'a Path) -> BoxFuture<'a, Result<String>> {
        let _ = (name, socket);
        Box::pin(std::future::ready(no_hot_plug()))
    }

    /// Returns the sockets of the functions that the VMM has reported broken for good: their
    /// registers read as all ones, and no new connection mends them. After
    /// [adopt](Hypervisor::adopt), functions that broke while no launcher ran are among them. The
    /// list is empty with a VMM that does not report such functions.
    fn broken_functions(&self) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Returns the CPUs that the machine has or can be given, in ascending order of their numbers.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a VMM that has no hot plug; [`Error::Control`] or
    /// [`Error::Timeout`] if the VMM does not answer as one.
    fn cpus(&self) -> BoxFuture<'_, Result<Vec<CpuSlot>>> {
        Box::pin(std::future::ready(no_hot_plug()))
    }

    /// Adds CPU `cpu` under such a name, and tells the guest. The first one that can be added has
    /// the number [`VmSpec::cpus`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a VMM that has no hot plug; [`Error::Refused`] if the name is
    /// taken, or the machine cannot have the CPU or has it.
    fn plug_cpu<'a>(&'a self, name: &'a str, cpu: u32) -> BoxFuture<'a, Result<()>> {
        let _ = (name, cpu);
        Box::pin(std::future::ready(no_hot_plug()))
    }

    /// Asks the guest to give up the function or CPU `name`, which the guest may ignore. Functions
    /// that the machine began with are called `function-0` and so on, in the order of
    /// [`VmSpec::vfio_user_sockets`]. [`VmEvent::Unplugged`] says that a device is gone; until then
    /// the guest uses it, and may be asked again.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a VMM that has no hot plug, and under software emulation, which
    /// takes no CPU back; [`Error::Refused`] if there is no such device, as with a function of
    /// QEMU's.
    fn unplug<'a>(&'a self, name: &'a str) -> BoxFuture<'a, Result<()>> {
        let _ = name;
        Box::pin(std::future::ready(no_hot_plug()))
    }

    /// Returns the devices of hot-plug memory, in the order of [`VmSpec::hot_memory`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a VMM that has no such memory; [`Error::Control`] or
    /// [`Error::Timeout`] if the VMM does not answer as one.
    fn memory_devices(&self) -> BoxFuture<'_, Result<Vec<MemoryDevice>>> {
        Box::pin(std::future::ready(no_hot_memory()))
    }

    /// Asks the guest to have `bytes` bytes of device `device` plugged, a number of whole blocks.
    /// The guest may take its time, or do less; [`VmEvent::MemoryChanged`] says what it has done.
    ///
    /// # Errors
    /// [`Error::Unsupported`] with a VMM that has no such memory; [`Error::Refused`] if there is no
    /// such device, or it cannot have this size.
    fn set_memory(&self, device: usize, bytes: u64) -> BoxFuture<'_, Result<()>> {
        let _ = (device, bytes);
        Box::pin(std::future::ready(no_hot_memory()))
    }

    /// Kills the process at once. Succeeds if it has ended already.
    fn kill(&self) -> Result<()>;

    /// Lets the VM outlive this object. Afterwards the VM can be ended or taken over by its record.
    fn detach(&self);
}

pub(crate) fn saves_none<T>() -> Result<T> {
    let what = "only slipway-vmm saves a machine";
    Err(Error::Unsupported { what })
}

pub(crate) fn no_spares<T>() -> Result<T> {
    let what = "only slipway-vmm is started ahead of its VM";
    Err(Error::Unsupported { what })
}

pub(crate) fn no_hot_plug<T>() -> Result<T> {
    let what = "only slipway-vmm adds functions to a running VM";
    Err(Error::Unsupported { what })
}

pub(crate) fn no_hot_memory<T>() -> Result<T> {
    let what = "only slipway-vmm adds memory to a running VM";
    Err(Error::Unsupported { what })
}

/// A device of hot-plug memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryDevice {
    /// The size of its region in bytes.
    pub bytes: u64,
    /// The guest's NUMA node.
    pub node: u8,
    /// The bytes of a block, a power of two of at least 2 MiB: sizes are whole blocks.
    pub block: u64,
    /// The bytes that the guest is asked to have plugged.
    pub requested: u64,
    /// The bytes that it has plugged.
    pub plugged: u64,
}

/// A CPU that a machine has or can be given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuSlot {
    /// The number of the CPU: 0 to [`VmSpec::MAX_CPUS`] - 1.
    pub cpu: u32,
    /// Set if the machine has the CPU, whether or not its guest uses it.
    pub present: bool,
}

/// The times at which a launch began and the VM answered: the `vmm` stage of a timeline.
#[derive(Clone, Copy, Debug)]
pub struct LaunchTimes {
    /// The time just before the process was spawned.
    pub spawned: Instant,
    /// The time at which the VM's machine was complete and its control channel answered.
    pub ready: Instant,
}

impl LaunchTimes {
    /// Returns the time from spawning until the VM answered.
    pub fn vmm(&self) -> Duration {
        self.ready.saturating_duration_since(self.spawned)
    }
}

/// An event that a hypervisor reports about a running VM.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VmEvent {
    /// The guest ended the VM.
    Shutdown(ShutdownReason),
    /// The guest's kernel reported a panic.
    GuestPanicked,
    /// The guest's CPUs stopped.
    Stopped,
    /// The guest's CPUs run again.
    Resumed,
    /// The guest has given up the function or CPU of this name; a function's connection has ended.
    Unplugged(String),
    /// The guest has plugged or unplugged memory.
    MemoryChanged {
        /// The number of the device, from 0.
        device: usize,
        /// The bytes that are plugged now.
        plugged: u64,
    },
    /// The control channel is closed, because the VM has ended or is broken.
    ControlLost,
}
