//! The end of a VM: its cause, and that of the VMM's process.
//!
//! A new cause is a variant of `ShutdownReason`, which `qmp::message` makes of the event's word.
//! The words are QEMU's; `slipway-vmm` says them in its `qmp`, by `End` of `host/vmm` (`board`).
//! Tests: those of `qmp/message.rs`, and `qmp` of `front/vmm`.

/// The cause of a VM's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShutdownReason {
    /// The guest powered off.
    GuestPowerOff,
    /// The guest reset itself, or a CPU had a triple fault. Guests are started with `panic=-1` and
    /// without reboots, so a panic that no panic device has reported appears as a reset: QEMU's
    /// machines have no such device, and a guest's kernel may have no driver for that of
    /// `slipway-vmm`.
    GuestReset,
    /// The guest's kernel reported a panic.
    GuestPanic,
    /// The host requested it.
    Host,
    /// A reason that this version does not know.
    Other,
}

/// The end of a VM's process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmExit {
    /// The exit status, if the process exited and this process had started it.
    pub code: Option<i32>,
    /// The signal number, if the process was killed and this process had started it.
    pub signal: Option<i32>,
    /// The last reason that the VM reported for its end.
    pub reason: Option<ShutdownReason>,
    /// The end of the process's standard error, at most [`STDERR_TAIL`](crate::STDERR_TAIL) bytes.
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
