//! The programs at the other ends of a set's connections, and whether they have woken anybody.

use slipway_socket::{Endpoint, Raises};

/// With more programs than this, looking at each of them costs more than it spares.
const FEW: usize = 16;

struct Peer {
    raises: Raises,
    /// Its count at the last look.
    seen: u64,
    /// The number of connections in the set.
    connections: usize,
}

/// The programs at the other ends.
#[derive(Default)]
pub(super) struct Peers(Vec<Peer>);

impl Peers {
    /// Adds a connection.
    pub(super) fn join(&mut self, endpoint: &Endpoint) {
        let raises = endpoint.raises();
        match self.0.iter_mut().find(|peer| peer.raises == raises) {
            Some(peer) => peer.connections += 1,
            // Eventfds that were raised before have not been looked at.
            None => {
                self.0.push(Peer { seen: raises.count().wrapping_sub(1), raises, connections: 1 })
            }
        }
    }

    /// Removes a connection.
    pub(super) fn leave(&mut self, endpoint: &Endpoint) {
        let raises = endpoint.raises();
        let Some(at) = self.0.iter().position(|peer| peer.raises == raises) else { return };
        self.0[at].connections -= 1;
        if self.0[at].connections == 0 {
            self.0.swap_remove(at);
        }
    }

    /// Returns whether a program may have raised an eventfd of this one since the last call. A
    /// program has raised it before the caller sees what the program sends after that.
    pub(super) fn have_raised(&mut self) -> bool {
        if self.0.len() > FEW {
            return true;
        }
        let mut raised = false;
        for peer in &mut self.0 {
            let count = peer.raises.count();
            raised |= count != std::mem::replace(&mut peer.seen, count);
        }
        raised
    }
}
