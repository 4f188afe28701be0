//! The state of a session that a successor needs.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use slipway_ram::{Lasting, Snapshots};

pub(super) const LEN: usize = 1 << 20;
/// The version of the format. A state of another version is refused.
pub(super) const VERSION: u32 = 4;

/// All session state that messages change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionState {
    pub version: u32,
    /// The process and the user of the client; `None` without a client.
    pub client: Option<(u32, u32)>,
    /// The user of a client that connects again by itself and then resumes the function. Of such a
    /// client nothing else is kept.
    pub resuming: Option<u32>,
    pub negotiated: Option<NegotiatedState>,
    pub regions: Vec<RegionState>,
    /// Each interrupt: (it has a route, it is masked).
    pub lines: Vec<(bool, bool)>,
    /// The function's state for a successor.
    pub run: KeptRun,
    /// The message whose effect this state includes.
    pub applied: Option<Applied>,
}

/// The state in which a successor takes the function over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum KeptRun {
    /// The function goes on.
    #[default]
    Running,
    /// The function stays stopped. A state that was being read is saved anew.
    Stopped,
    /// The client was replacing the function's state, or that had failed: the function is reset,
    /// and the client has to reset it again.
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NegotiatedState {
    pub max_xfer: usize,
    pub max_files: usize,
    pub write_multiple: bool,
    pub resume: bool,
}

/// A DMA map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegionState {
    pub iova: u64,
    pub len: u64,
    /// The offset in the region's file.
    pub offset: u64,
    pub read: bool,
    pub write: bool,
    /// The shelf slot of the region's file; `None` if the region is message-only.
    pub slot: Option<u32>,
}

/// A message whose effect is in the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Applied {
    pub number: u64,
    /// The length in the socket in bytes.
    pub size: usize,
    /// The reply; empty if the client wants none.
    pub reply: Vec<u8>,
}

/// A sequence of states, of which only the last counts.
#[derive(Clone)]
pub(crate) struct StateHistory(Arc<Snapshots>);

impl StateHistory {
    pub fn new(memory: &Lasting) -> Option<Self> {
        let (own, _) = memory.split(LEN)?;
        Some(Self(Arc::new(Snapshots::new(&own)?)))
    }

    /// Returns states that have this much room, for tests of a lack of it.
    #[cfg(test)]
    pub fn within(memory: &Lasting) -> Option<Self> {
        Some(Self(Arc::new(Snapshots::new(memory)?)))
    }

    /// Stores a state. Returns false if it is too long.
    #[must_use]
    pub fn store(&self, state: &SessionState) -> bool {
        let state = SessionState { version: VERSION, ..state.clone() };
        serde_json::to_vec(&state).is_ok_and(|bytes| self.0.store(&bytes))
    }

    /// Returns the state that a predecessor stored last, or `None` if there is none.
    ///
    /// # Errors
    /// The state is of another version, or malformed.
    pub fn load(&self) -> std::io::Result<Option<SessionState>> {
        let Some(bytes) = self.0.load() else { return Ok(None) };
        let state: SessionState = serde_json::from_slice(&bytes)?;
        if state.version != VERSION {
            return Err(std::io::Error::other("a session of another version"));
        }
        Ok(Some(state))
    }
}
