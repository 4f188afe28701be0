//! The memory that overlays hold: each endpoint's part of the node's budget.

use slipway_block::{Budget, Refusal};
use slipway_plane_api::v1;

/// Returns the budget of an endpoint's overlays, a part of the node's. `most` is in bytes; 0: the
/// node's budget is the only bound. The first write that is refused for want of memory is told in
/// the daemon's log, once for each bound, since a guest decides how many there are.
pub fn of_endpoint(id: &str, most: u64, node: &Budget) -> Budget {
    let (id, all) = (id.to_owned(), node.most());
    let most = if most == 0 { u64::MAX } else { most };
    node.part(most, move |refusal| match refusal {
        Refusal::Part => tracing::warn!(
            endpoint = id,
            limit_bytes = most,
            "its overlays hold all that they may: writes to new blocks fail"
        ),
        Refusal::Whole => tracing::warn!(
            endpoint = id,
            limit_bytes = all,
            "the overlays of the node hold all that they may: writes to new blocks fail"
        ),
    })
}

/// Returns the figures of a budget for the interface.
pub fn describe(budget: &Budget) -> v1::OverlayMemory {
    let most = budget.most();
    v1::OverlayMemory {
        held_bytes: budget.held(),
        limit_bytes: if most == u64::MAX { 0 } else { most },
        refused_writes: budget.refused(),
    }
}
