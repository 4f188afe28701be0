//! Lines of the control socket: those of `slipway_qmp_spec`, with this program's name, the time,
//! and the events that have several causes.
//!
//! A new command is a variant of `Command`, with its name in `parse` and in the list of the head
//! (`spec/qmp-spec`); `Process::carry_out` (`process.rs`) carries it out; `filter` admits the
//! system calls that it needs beyond those of before; `docs/vmm.md`, "Control", has a row for it.
//! A command that the daemon uses has a method of `Qmp` (`host/hypervisor`, `qmp`), and one of the
//! trait `Vm` if the runtime calls it. `slipway-hollow` refuses it, unless `execute` of
//! `front/hollow` (`process`) has an arm for it. Tests: `tests/process` of this crate, and
//! `qmp/tests.rs` of `host/hypervisor`; the fuzz target `vmm-control` reads it as it is.

use serde_json::{Value, json};
pub use slipway_qmp_spec::{CPU_DRIVER, Command, Request, answer, parse, path, status};
use slipway_vmm::board::End;

/// Returns the first line of a connection.
pub fn greeting() -> Vec<u8> {
    slipway_qmp_spec::greeting(concat!("slipway-vmm ", env!("CARGO_PKG_VERSION")))
}

/// Returns an event.
pub fn event(name: &str, data: Value) -> Vec<u8> {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    slipway_qmp_spec::event(name, data, (now.tv_sec, now.tv_nsec / 1000))
}

/// Returns the event of a device that is removed.
pub fn device_deleted(name: &str) -> Vec<u8> {
    event("DEVICE_DELETED", json!({ "device": name, "path": path(name) }))
}

/// Returns the event of the machine's end. Returns `None` if the guest has not ended it.
pub fn shutdown(end: &End) -> Option<Vec<u8>> {
    let reason = match end {
        End::PowerOff => "guest-shutdown",
        End::Reset => "guest-reset",
        End::Panic => "guest-panic",
        End::Failed(_) => return None,
    };
    Some(event("SHUTDOWN", json!({ "guest": true, "reason": reason })))
}

/// Returns the event of an end that the client asked for.
pub fn quit() -> Vec<u8> {
    event("SHUTDOWN", json!({ "guest": false, "reason": "host-qmp-quit" }))
}
