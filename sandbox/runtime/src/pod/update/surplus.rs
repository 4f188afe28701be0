//! The surplus of a pod beyond its containers' limits, and how it goes back to the host.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, oneshot};

use super::super::quota;
use super::super::sums::Sums;
use super::{LONGEST, end};
use crate::record::{Limits, Record};
use crate::sandbox::Sandbox;
use crate::{Error, Result, resize};

/// The pauses before each time that a guest is asked to give back what no limit needs.
const PAUSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_secs(1), Duration::from_secs(4), Duration::from_secs(15)];

/// The memory that a pod gave back to the host after an update of its limits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GivenBack {
    /// Bytes.
    pub bytes: u64,
    /// The reason why the pod has more than its limits need. Empty: it has no more.
    pub kept: String,
}

/// Has a task give back to the host what a pod has beyond its limits. Returns what has gone back
/// after the first attempt, or, for a pod in a control group of its own, when the task has ended.
///
/// # Errors
/// [`Error::Agent`] if the task failed.
pub async fn give_back_spare(
    sandbox: &Arc<Sandbox>,
    place: OwnedSemaphorePermit,
) -> Result<GivenBack> {
    let has_spare = |record: &Record| spare(record).is_some() || quota::spare(record).is_some();
    if !sandbox.look(has_spare) {
        end(sandbox, 1).await;
        return Ok(GivenBack::default());
    }
    let (tell, told) = oneshot::channel();
    let giving = tokio::spawn(give_back(Arc::clone(sandbox), place, tell));
    if sandbox.look(waits) {
        return giving.await.map_err(|error| Error::Agent(error.to_string()));
    }
    // Another update was first if nothing is told.
    Ok(told.await.unwrap_or_default())
}

/// Returns whether an update of a pod's limits ends only after memory went back to the host.
pub fn waits(record: &Record) -> bool {
    record.confinement.asks_for_group()
}

/// Gives back to the host what a pod has beyond its containers' limits, and records that their
/// update has ended. Tells what memory has gone back after the first attempt, and returns what has
/// gone back in all.
async fn give_back(
    sandbox: Arc<Sandbox>,
    _place: OwnedSemaphorePermit,
    tell: oneshot::Sender<GivenBack>,
) -> GivenBack {
    quota::give_back(&sandbox).await;
    let given = give_back_memory(&sandbox, Some(tell)).await;
    end(&sandbox, 1).await;
    given
}

/// Gives the memory of a pod back to the host that its containers' limits do not need, as far as it
/// is free. What a container has just set free the guest may count as used for a moment, so it is
/// asked again. Tells what has gone back after the first attempt, and returns what has gone back in
/// all.
pub async fn give_back_memory(
    sandbox: &Arc<Sandbox>,
    mut tell: Option<oneshot::Sender<GivenBack>>,
) -> GivenBack {
    let mut all = GivenBack::default();
    for pause in PAUSES {
        tokio::time::sleep(pause).await;
        let Some((given, again)) = attempt(sandbox).await else {
            all.kept.clear();
            break;
        };
        all = GivenBack { bytes: all.bytes.saturating_add(given.bytes), ..given };
        if let Some(tell) = tell.take() {
            // The caller may have stopped waiting.
            let _ = tell.send(all.clone());
        }
        if !again {
            break;
        }
    }
    if !all.kept.is_empty() {
        let kept = &all.kept;
        tracing::info!(sandbox = sandbox.name, kept, "memory beyond its limits stays for now");
    }
    all
}

/// Has the guest of a pod give back memory. Returns what went back, and whether the guest may give
/// back more later. Returns `None` if its limits need all that it has, or its memory is in a file.
async fn attempt(sandbox: &Arc<Sandbox>) -> Option<(GivenBack, bool)> {
    let _turn = sandbox.wait_to_change_size().await;
    // Another update may have come first, or another container's end, or the pod may have been
    // paused into a file, from which it comes back with a task of its own.
    let wanted = sandbox.look(spare).filter(|_| !sandbox.is_in_file())?;
    let before = sandbox.look(|record| record.memory_bytes);
    let changed = resize::change_to(sandbox, wanted, LONGEST).await;
    let bytes = before.saturating_sub(sandbox.look(|record| record.memory_bytes));
    let Err(error) = changed else {
        return Some((GivenBack { bytes, kept: String::new() }, false));
    };
    let again = matches!(error, Error::Memory { .. });
    Some((GivenBack { bytes, kept: error.to_string() }, again))
}

/// Returns the bytes that suffice for a running pod, or `None` if it has no more: never fewer than
/// it began with or a user gave it. A pod with a function of hardware keeps what it has.
pub fn spare(record: &Record) -> Option<u64> {
    if record.plugged.has_hardware() {
        return None;
    }
    let kept = needed(record).max(floor(record));
    (kept < record.memory_bytes).then_some(kept)
}

/// Returns the bytes that the limits of a pod's live containers need with the guest's kernel.
pub fn needed(record: &Record) -> u64 {
    Sums::of(record, "", Limits::default()).needed(record.memory.boot_bytes)
}

/// Returns the bytes that a pod keeps whatever its limits are: what it began with, or a user gave
/// it.
pub fn floor(record: &Record) -> u64 {
    record.memory.boot_bytes.max(record.memory.chosen_bytes)
}
