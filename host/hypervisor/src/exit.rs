//! How a VMM ended.

use std::io;
use std::time::Duration;

use crate::VmExit;
use crate::process::{self, Process};
use crate::qmp::Qmp;

/// The task that reads the end of a VMM's standard error.
pub(crate) type StderrTail = tokio::task::JoinHandle<io::Result<String>>;

/// Returns how a process that has ended did so.
pub(crate) async fn exit_of(
    process: &mut Process,
    stderr: &mut StderrTail,
    qmp: Option<&Qmp>,
) -> VmExit {
    // Both pipes close with the process; the limit is for a descriptor that another process holds.
    let limit = Duration::from_secs(2);
    let stderr = match tokio::time::timeout(limit, stderr).await {
        Ok(Ok(Ok(text))) => text,
        _ => String::new(),
    };
    let reason = match qmp {
        Some(qmp) => {
            let _ = tokio::time::timeout(limit, qmp.drained()).await;
            qmp.last_shutdown()
        }
        None => None,
    };
    let (code, signal) = match process.exited().await {
        Ok(Some(status)) => process::code_and_signal(status),
        _ => (None, None),
    };
    VmExit { code, signal, reason, stderr }
}
