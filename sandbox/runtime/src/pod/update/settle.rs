//! Updates of a pod's limits that the end of a daemon cut off, and how the next one settles them.
//!
//! From before an update changes anything until what it set free has gone back to the host, the
//! pod's record says that an update is under way. The next daemon then sets the recorded limits in
//! the guest once more, since the guest may have others, and gives back what these limits do not
//! need. Memory that is bound to containers follows their recorded limits in any case: a container
//! may have been given a part of it only.

use std::sync::Arc;

use super::super::bound;
use super::limit_in_guest;
use super::surplus::give_back_spare;
use crate::node::Node;
use crate::record::{Added, Limits, SandboxState};
use crate::sandbox::Sandbox;
use crate::target::Target;

/// Has a task settle what a daemon that ended has left of updates of an adopted pod.
pub fn settle(node: &Node, sandbox: &Arc<Sandbox>) {
    let is_cut = sandbox.look(|record| record.changing_limits);
    if is_cut || sandbox.look(|record| record.bound.room() > 0) {
        node.guests.spawn(run(Arc::clone(sandbox), is_cut));
    }
}

/// Settles the limits of bound memory and, if `is_cut`, of an update that was cut off.
async fn run(sandbox: Arc<Sandbox>, is_cut: bool) {
    let turn = sandbox.wait_to_change_size().await;
    let containers = sandbox.added().into_iter();
    let running = containers.filter(|one| one.state() == SandboxState::Running);
    let running: Vec<Target> =
        running.map(|container| Target { sandbox: Arc::clone(&sandbox), container }).collect();
    if is_cut {
        for target in &running {
            repeat(target).await;
        }
    }
    bound::settle(&sandbox, &running).await;
    // Giving back waits for a turn of its own.
    drop(turn);
    if !is_cut {
        return;
    }
    // Without a place there are updates that give back what no limit needs.
    if let Ok(place) = sandbox.update_of_limits()
        && let Err(error) = give_back_spare(&sandbox, place).await
    {
        tracing::warn!(sandbox = sandbox.name, %error, "more than its limits need stays");
    }
}

/// Sets the recorded limits of a container in the guest.
async fn repeat(target: &Target) {
    let Some(limits) = target.look_added(|added| added.map(recorded)) else { return };
    if let Err(error) = limit_in_guest(target, limits).await {
        tracing::warn!(container = target.name(), %error, "its limits may be others");
    }
}

/// Returns the change after which a container has the recorded limits. The guest has made its huge
/// pages for it, which stay.
fn recorded(added: &Added) -> Limits {
    Limits { huge_page_bytes: 0, ..added.limits.in_full() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::added_of;

    #[test]
    fn limits_are_repeated_without_huge_pages() {
        let limits = Limits { memory_bytes: 5, huge_page_bytes: 2 << 20, ..Limits::default() };
        let added = Added { limits, ..added_of("c", SandboxState::Running) };
        let asked = recorded(&added);
        assert_eq!((asked.memory_bytes, asked.huge_page_bytes), (5, 0));
        assert_eq!(limits.changed_by(asked), limits);
    }
}
