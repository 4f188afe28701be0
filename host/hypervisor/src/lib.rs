//! Starts, watches and ends the virtual machine of a sandbox.
//!
//! A [`Hypervisor`] turns a [`VmSpec`] into a running [`Vm`]. There is one so far, [`qemu::Qemu`]:
//! any QEMU from 10.1 on (the first with a vfio-user client), with KVM where the machine can run a
//! stock kernel on it and with software emulation elsewhere ([`accel`] finds out, and says why).
//! Slipway's own VMM will be the second one; the traits are there so that nothing above has to
//! change then.
//!
//! How the pieces meet: [`qemu::Qemu::launch`](Hypervisor::launch) opens what QEMU may use (the
//! agent's listening socket, the vfio-user sockets, files of emulated disks, the control channel's
//! listening socket, the KVM device) while it
//! still has the right to, starts QEMU as an unprivileged process in a cage (module `cage`) that inherits
//! exactly those descriptors, waits until QEMU answers over QMP, closes the cage, and only then has
//! the guest run. The process does not die with its launcher:
//! a [`VmRecord`] kept on disk lets a later process end it ([`reap_leftover`]), or take it over
//! ([`Hypervisor::adopt`]), without ever hitting a stranger that got the same process id. Both
//! channels are listening sockets that take one client after the other, QEMU prints into FIFOs that
//! stay open, and a pidfd tells its end to whoever is not its parent.
//!
//! Guest memory is one sealed memfd that the launcher makes ([`GuestMemory`]), so that those who serve
//! functions to the VM know which file it is, and take no other.
//!
//! Not here: hot plug, templates and snapshots. How a VM
//! ended that was taken over (its exit status) only its parent knew; console text beyond what a FIFO
//! holds (64 KiB) waits in the guest while nobody reads it.
//!
//! Dependencies: `rustix` for system calls, `libc` for the few that it lacks
//! (dropping groups and user of a forked child, `close_range`, `keyctl`, KVM's ioctl), `tokio` for the control channel
//! and for waiting on processes, `serde`/`serde_json` for QMP and the records, `thiserror` for
//! errors at the crate's edge, `tracing` for what a log should show.
//!
//! `unsafe` is allowed for `pre_exec`: a child must give up its rights between fork and exec,
//! for `unshare` on a thread, for watching a pidfd, and for the one ioctl of the KVM probe.
#![allow(unsafe_code)]

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

use tokio::sync::broadcast;

pub mod accel;
mod cage;
mod error;
mod identity;
mod memory;
mod process;
pub mod qemu;
mod spec;

pub use accel::{Accel, AccelChoice, AccelReport};
pub use error::{Error, Result};
pub use identity::{VmRecord, reap_leftover};
pub use memory::GuestMemory;
pub use spec::{Credentials, DiskModel, EmulatedDisk, LeftVm, VmSpec};

/// A future that may cross threads; the traits stay usable as objects this way.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Something that can run a virtual machine.
pub trait Hypervisor: Send + Sync {
    /// Short name for logs and tables: `qemu`.
    fn name(&self) -> &'static str;

    /// Starts a VM and returns once it answers on its control channel; its guest has begun to
    /// run by then.
    ///
    /// The caller has made what the spec names: kernel and initramfs readable by the VM's user,
    /// vfio-user sockets listening, parent directories there. On an error nothing is left: the
    /// process is dead and reaped, the agent socket removed. Dropping the future ends the VM too.
    ///
    /// Must be called within a tokio runtime that has I/O and time enabled.
    fn launch<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<Box<dyn Vm>>>;

    /// Takes over a VM whose launcher has ended. Returns once it answers.
    ///
    /// The VM runs on as it is when this fails: [`reap_leftover`] ends it.
    ///
    /// Must be called within a tokio runtime that has I/O and time enabled.
    fn adopt<'a>(&'a self, left: &'a LeftVm) -> BoxFuture<'a, Result<Box<dyn Vm>>>;
}

/// A virtual machine that was launched or taken over. Dropping it kills the machine: keep it, or keep the
/// process itself from dropping it ([`Vm::detach`]).
pub trait Vm: Send + Sync {
    /// What identifies the VM's process after a restart of its launcher; keep it on disk.
    fn record(&self) -> &VmRecord;

    /// When the launch went through its steps; `None`: another launcher's.
    fn times(&self) -> Option<LaunchTimes>;

    /// Which accelerator the guest runs on.
    fn accel(&self) -> Accel;

    /// What happens to the VM from now on. A receiver that falls behind loses the oldest events.
    fn events(&self) -> broadcast::Receiver<VmEvent>;

    /// Waits until the VM's process has ended. Any number of callers, each may be cancelled.
    fn wait(&self) -> BoxFuture<'_, VmExit>;

    /// Asks the guest to power off (the ACPI power button). The guest may ignore it.
    fn power_down(&self) -> BoxFuture<'_, Result<()>>;

    /// Ends the VM in an orderly way without asking its guest.
    fn quit(&self) -> BoxFuture<'_, Result<()>>;

    /// Stops the guest's CPUs.
    fn pause(&self) -> BoxFuture<'_, Result<()>>;

    /// Lets the guest's CPUs run on.
    fn resume(&self) -> BoxFuture<'_, Result<()>>;

    /// Kills the process at once. No error when it has ended already.
    fn kill(&self) -> Result<()>;

    /// Lets the VM outlive this object. It can be ended or taken over through its record afterwards.
    fn detach(&self);
}

/// When a launch began, and when the VM answered: the `vmm` stage of a timeline.
#[derive(Clone, Copy, Debug)]
pub struct LaunchTimes {
    /// Before the process was spawned.
    pub spawned: Instant,
    /// The VM's machine was complete and its control channel answered.
    pub ready: Instant,
}

impl LaunchTimes {
    /// Time from spawning to an answering VM.
    pub fn vmm(&self) -> Duration {
        self.ready.saturating_duration_since(self.spawned)
    }
}

/// What a hypervisor reports about a running VM.
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
    /// The control channel is gone, because the VM has ended or is broken.
    ControlLost,
}

/// Who ended a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShutdownReason {
    /// The guest powered off.
    GuestPowerOff,
    /// The guest reset itself. Guests are started with `panic=-1` and without reboots, so this is
    /// what a panic looks like.
    GuestReset,
    /// The guest's kernel panicked and said so.
    GuestPanic,
    /// The host asked for it.
    Host,
    /// A reason that this version does not know.
    Other,
}

/// How a VM's process ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmExit {
    /// Exit status, when it exited and this process had started it.
    pub code: Option<i32>,
    /// Signal number, when it was killed and this process had started it.
    pub signal: Option<i32>,
    /// The last reason that the VM gave for its end.
    pub reason: Option<ShutdownReason>,
    /// The end of what the process wrote to its standard error, at most
    /// [`STDERR_TAIL`](qemu::STDERR_TAIL) bytes.
    pub stderr: String,
}

impl std::fmt::Display for VmExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "exited with status {code}")?,
            (None, Some(signal)) => write!(f, "was killed by signal {signal}")?,
            (None, None) => write!(f, "ended")?,
        }
        match self.stderr.trim().lines().last() {
            Some(line) => write!(f, ": {line}"),
            None => Ok(()),
        }
    }
}
