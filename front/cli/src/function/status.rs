//! The figures of a function, as its server tells them to root by its socket.

use serde::{Deserialize, Serialize};

/// The settings of a function that its server shows.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct About {
    /// The function's name.
    pub name: String,
    /// The image of its replicas.
    pub image: String,
    /// The command of an invocation.
    pub command: Vec<String>,
    /// The address at which invocations are accepted.
    pub address: String,
    /// The process of the server.
    pub pid: u32,
}

/// The figures of one sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SandboxStatus {
    /// The sandbox's name.
    pub name: String,
    /// "starting", "ready" or "removing".
    pub state: String,
    /// Replicas in it, also those that are being made or removed.
    pub replicas: u32,
    /// Invocations in it.
    pub busy: u32,
}

/// The figures of a function. Sums begin with its server.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Status {
    /// The function.
    #[serde(flatten)]
    pub about: About,
    /// "serving" or "ending"; "killed": its server is gone, and what it made may be left.
    pub state: String,
    /// The sandboxes.
    pub sandboxes: Vec<SandboxStatus>,
    /// Replicas in all sandboxes.
    pub replicas: u32,
    /// Invocations in replicas.
    pub busy: u32,
    /// Invocations that wait for a replica.
    pub waiting: usize,
    /// Invocations that were given to a replica.
    pub invocations: u64,
    /// Invocations that failed in a replica.
    pub failed: u64,
    /// Invocations that no replica had.
    pub refused: u64,
    /// Replicas that were begun: scaling up.
    pub replicas_made: u64,
    /// Sandboxes that were begun: scaling out.
    pub sandboxes_made: u64,
    /// Replicas that were removed again.
    pub recycled: u64,
    /// "yes", or "no: " and the first reason why an invocation was no fork. Empty: none was to be.
    #[serde(default)]
    pub zygote: String,
    /// Invocations that were forks of zygotes.
    #[serde(default)]
    pub forked: u64,
}
