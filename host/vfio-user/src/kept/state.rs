//! What a session is, as a successor needs it.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use slipway_ram::{Lasting, Snapshots};

pub(super) const LEN: usize = 1 << 20;
/// Version of the format. Another one is refused.
pub(super) const VERSION: u32 = 1;

/// All of a session that messages change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionState {
    pub version: u32,
    /// Process and user at the other end; None: nobody.
    pub client: Option<(u32, u32)>,
    pub negotiated: Option<NegotiatedState>,
    pub regions: Vec<RegionState>,
    /// Each interrupt: whether it has a route, whether it is masked.
    pub lines: Vec<(bool, bool)>,
    /// The message that this is the effect of.
    pub applied: Option<Applied>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NegotiatedState {
    pub max_xfer: usize,
    pub write_multiple: bool,
}

/// A DMA map.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegionState {
    pub iova: u64,
    pub len: u64,
    /// In its file.
    pub offset: u64,
    pub read: bool,
    pub write: bool,
    /// Where its file is on the shelf; None: message-only.
    pub slot: Option<u32>,
}

/// A message whose effect is in the state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Applied {
    pub number: u64,
    /// Bytes in the socket.
    pub size: usize,
    /// Empty: none is wanted.
    pub reply: Vec<u8>,
}

/// States, the last of which counts.
#[derive(Clone)]
pub(crate) struct States(Arc<Snapshots>);

impl States {
    pub fn new(memory: &Lasting) -> Option<Self> {
        let (own, _) = memory.split(LEN)?;
        Some(Self(Arc::new(Snapshots::new(&own)?)))
    }

    /// False: it is too long.
    #[must_use]
    pub fn store(&self, state: &SessionState) -> bool {
        let state = SessionState { version: VERSION, ..state.clone() };
        serde_json::to_vec(&state).is_ok_and(|bytes| self.0.store(&bytes))
    }

    /// What a predecessor stored last; None: nothing.
    ///
    /// # Errors
    /// Another version, or no state at all.
    pub fn load(&self) -> std::io::Result<Option<SessionState>> {
        let Some(bytes) = self.0.load() else { return Ok(None) };
        let state: SessionState = serde_json::from_slice(&bytes)?;
        if state.version != VERSION {
            return Err(std::io::Error::other("a session of another version"));
        }
        Ok(Some(state))
    }
}
