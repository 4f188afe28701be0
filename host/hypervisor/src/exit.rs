//! How a VMM ended.

use std::time::Duration;

use crate::VmExit;
use crate::console::{StderrTail, last_words};
use crate::process::{self, Process};
use crate::qmp::Qmp;

/// Returns how a process that has ended did so.
pub(crate) async fn exit_of(
    process: &mut Process,
    stderr: &mut StderrTail,
    qmp: Option<&Qmp>,
) -> VmExit {
    let stderr = last_words(stderr).await;
    let reason = match qmp {
        Some(qmp) => {
            // The channel closes with the process, as the pipe of standard error does.
            let limit = Duration::from_secs(2);
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
