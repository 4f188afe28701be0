//! The way to the agent of a guest that talked to another host until now.

use std::time::Duration;

use crate::Result;
use crate::agent::{Agent, Hello};
use crate::node::Node;
use crate::sandbox::Sandbox;

/// The time for one answer of the agent before the connection is made anew. Messages to the last
/// daemon that are still in flight may arrive first, and are not an answer.
const ANSWER: Duration = Duration::from_secs(5);
/// The pause between two connections.
const AGAIN: Duration = Duration::from_millis(100);

/// Connects to an agent until it answers. The caller limits the time.
pub(crate) async fn reach(
    node: &Node,
    sandbox: &Sandbox,
    socket: &std::path::Path,
) -> Result<(Agent, Hello)> {
    loop {
        let tried =
            tokio::time::timeout(ANSWER, Agent::connect(&node.guests, socket, &sandbox.bin)).await;
        if let Ok(Ok(reached)) = tried {
            return Ok(reached);
        }
        tokio::time::sleep(AGAIN).await;
    }
}
