//! Views of the plane's live objects, for people who look for what one of them waits for.
//!
//! Each part of the plane has views of its own, which it makes of its own state. Here they are put
//! together, as `InspectLive` of the plane's interface sends them: one [`LivePart`] as JSON in each
//! message.

use serde::{Deserialize, Serialize};
pub use slipway_nvme::{CompletionView, ControllerView, SubmissionView, ThreadView};
pub use slipway_switch::{FilterView, PortView, QueuesView, RingView, SwitchView};
pub use slipway_vfio_user::{ServerView, Stage};

/// A part of the plane.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LivePart {
    /// The threads that serve everything else, by number.
    Reactors(Vec<ReactorView>),
    /// An endpoint with its function.
    Endpoint(Box<EndpointView>),
    /// A switch.
    Switch(PlacedSwitch),
}

/// A reactor of the plane.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReactorView {
    /// The time in nanoseconds for which the reactor has had work since it started.
    pub busy_ns: u64,
    /// The number of endpoints whose messages the reactor serves.
    pub endpoints: usize,
    /// The number of lanes of controllers on the reactor.
    pub lanes: usize,
    /// The number of switches on the reactor.
    pub switches: usize,
}

/// An endpoint and its function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointView {
    /// The endpoint's id.
    pub id: String,
    /// The kind of the function: `nvme`, `network`, or `hardware`.
    pub kind: String,
    /// The number of the reactor on which the endpoint is; `None` for hardware, which has a thread
    /// of its own. A client can cause the endpoint to have a thread of its own instead
    /// ([`ServerView::private`], [`ServerView::stalls`]).
    pub reactor: Option<usize>,
    /// The endpoint's server.
    pub server: ServerView,
    /// The threads of an NVMe controller: its own, which is that of the endpoint, and then those of
    /// its lanes. Other functions have none; a network function's rings are at its switch's port.
    pub threads: Vec<PlacedThread>,
}

/// A thread of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedThread {
    /// The number of the thread's reactor.
    pub reactor: usize,
    /// The view, or `None` if the thread did not answer in time: its client has stopped the
    /// function or has not come back, or the endpoint cleans up after a client.
    pub view: Option<ThreadView>,
}

/// A switch and its reactor.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedSwitch {
    /// The switch's name.
    pub name: String,
    /// The number of the switch's reactor.
    pub reactor: usize,
    /// The view, or `None` if the switch did not answer in time.
    pub view: Option<SwitchView>,
}
