//! The run of a container, as the records of sandboxes and of containers have it.

use serde::{Deserialize, Serialize};

use crate::error::MOST_MESSAGE;

/// The run of a container, or of a pod as a whole: it may be paused, and it ends in some way.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The exit status of the container's first process, once it ended.
    pub exit_status: Option<u32>,
    /// Set while the container's processes are stopped.
    #[serde(default)]
    pub paused: bool,
    /// Why the container ended, if it did not end by itself.
    pub reason: String,
    /// Set if the guest's kernel ended the container for want of memory.
    #[serde(default)]
    pub out_of_memory: bool,
}

impl Run {
    /// Notes the exit status of the first process. `out_of_memory` is the reason if the guest's
    /// kernel ended the container for want of memory, and `None` otherwise.
    pub(crate) fn exit(&mut self, status: u32, out_of_memory: Option<&str>) {
        (self.exit_status, self.out_of_memory) = (Some(status), out_of_memory.is_some());
        if let Some(reason) = out_of_memory {
            reason.clone_into(&mut self.reason);
        }
    }

    /// Notes the exit status that the run has in the end, and the reason. With `None`, a reason
    /// that is known already stays.
    pub(crate) fn finish(&mut self, status: u32, reason: Option<String>) {
        self.exit_status = Some(status);
        if let Some(reason) = reason {
            self.reason = reason;
        }
    }

    /// Notes that the container ended with its microVM, as after SIGKILL, for this reason.
    pub(crate) fn lose(&mut self, reason: &str) {
        self.finish(
            128 + libc::SIGKILL as u32,
            Some(slipway_printable::line(reason, MOST_MESSAGE)),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::added_of;
    use crate::record::{Added, SandboxState};

    #[test]
    fn the_run_of_a_pods_container_is_keys_of_its_own_on_disk() {
        let mut added = added_of("a", SandboxState::Exited);
        added.run.lose("its pod ended");
        added.run.paused = true;
        let written = serde_json::to_value(&added).unwrap();
        let keys = serde_json::json!({
            "exit_status": 137, "paused": true, "reason": "its pod ended", "out_of_memory": false,
        });
        for (key, value) in keys.as_object().unwrap() {
            assert_eq!(&written[key], value, "{key}");
        }
        let read: Added = serde_json::from_value(written).unwrap();
        assert_eq!(read.run, added.run);
    }

    #[test]
    fn a_reason_that_is_known_stays_if_the_end_has_none() {
        let mut run = Run::default();
        run.exit(137, Some("it ran out of memory"));
        run.finish(137, None);
        assert_eq!((run.out_of_memory, &*run.reason), (true, "it ran out of memory"));
        run.finish(125, Some("its VMM failed".to_owned()));
        assert_eq!((run.exit_status, &*run.reason), (Some(125), "its VMM failed"));
    }
}
