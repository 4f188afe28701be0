//! The view of an endpoint, for people who look for what it waits for.
//!
//! It is made of figures that the endpoint publishes anyway, so that the endpoint is not disturbed.

use serde::{Deserialize, Serialize};

/// The activity of an endpoint, as of its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Stage {
    /// It waits for a client.
    #[default]
    Listening,
    /// It was made shut, and admits no client yet.
    Shut,
    /// Its function waits for the client of a predecessor to connect again.
    Held,
    /// A client is connected and has not negotiated yet.
    Negotiating,
    /// A client is connected, and its function is polled.
    Connected,
    /// A request of the client waits until the function is quiet. The function is not polled.
    Quiescing,
    /// The client has stopped the function, as for a pause or a snapshot. The function is not
    /// polled.
    Stopped,
    /// It cleans up after a client.
    Draining,
    /// It has ended.
    Ended,
}

impl Stage {
    const ALL: [Self; 9] = [
        Self::Listening,
        Self::Shut,
        Self::Held,
        Self::Negotiating,
        Self::Connected,
        Self::Quiescing,
        Self::Stopped,
        Self::Draining,
        Self::Ended,
    ];

    /// Returns the stage with this number.
    pub(crate) fn of(number: u8) -> Self {
        Self::ALL.into_iter().find(|stage| *stage as u8 == number).unwrap_or_default()
    }

    /// Returns the stage's name, as in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::Listening => "listening",
            Self::Shut => "shut",
            Self::Held => "held",
            Self::Negotiating => "negotiating",
            Self::Connected => "connected",
            Self::Quiescing => "quiescing",
            Self::Stopped => "stopped",
            Self::Draining => "draining",
            Self::Ended => "ended",
        }
    }
}

/// An endpoint's server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerView {
    /// The endpoint's activity.
    pub stage: Stage,
    /// The client's process; 0 if it is in another PID namespace, `None` without a client.
    pub client_pid: Option<u32>,
    /// The endpoint has a thread of its own at present because of message-only memory.
    pub private: bool,
    /// The number of the client's DMA maps.
    pub maps: usize,
    /// Bytes of these maps.
    pub mapped_bytes: u64,
    /// The number of messages received from all clients.
    pub messages: u64,
    /// The number of polls that found work for the function.
    pub busy_polls: u64,
    /// The number of descriptors, connections and mappings of clients that await closing.
    pub held: usize,
    /// The number of times that the endpoint or one of its lanes slept in a step. It has a thread
    /// of its own after that.
    pub stalls: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_has_a_number_and_a_name() {
        for stage in Stage::ALL {
            assert_eq!(Stage::of(stage as u8), stage);
            assert_eq!(serde_json::to_string(&stage).unwrap(), format!("\"{}\"", stage.name()));
        }
        assert_eq!(Stage::of(u8::MAX), Stage::Listening);
    }

    #[test]
    fn a_view_goes_through_json_and_back() {
        let view = ServerView { stage: Stage::Draining, client_pid: Some(7), ..Default::default() };
        let json = serde_json::to_string(&view).unwrap();
        assert_eq!(serde_json::from_str::<ServerView>(&json).unwrap(), view);
    }
}
