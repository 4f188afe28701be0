//! The times of `Stop` for a container of a pod, which the daemon keeps and its clients wait for.

use std::time::Duration;

/// The longest time from SIGKILL to the end of a container of a pod. After that the daemon answers
/// that the container does not end.
pub const KILLED: Duration = Duration::from_secs(30);
/// The time for the answer itself on a machine that is busy: the daemon notes the end of
/// [`KILLED`], and the answer goes through its socket.
const ANSWER: Duration = Duration::from_secs(10);

/// Returns the time within which the daemon answers a `Stop` of a container of a pod whose stop
/// signal is followed by SIGKILL after `patience`. The guest of a restarted daemon has `patience`
/// to answer first. A client that gives up earlier does not learn why the container did not end.
/// While the pod's memory goes to a file, the daemon answers when that is over, which may be later.
pub const fn longest(patience: Duration) -> Duration {
    patience.saturating_mul(2).saturating_add(KILLED).saturating_add(ANSWER)
}
