//! Connections and listeners of this process that survive execve(2).

use libc::c_int;

use super::streams::Streams;
use crate::descriptors::{self, What};
use crate::fds::{self, DescriptorKind};

/// Descriptors that survive execve(2) and may be ours.
#[derive(Default)]
pub struct Survivors {
    /// Connections. In a child of vfork(2) every eventfd is among them: the child's descriptors are
    /// not those of the table, which is its parent's.
    eventfds: Streams,
    listens: bool,
}

impl Survivors {
    /// Finds the descriptors that survive.
    pub fn look() -> Self {
        let mut found = Self::default();
        let borrowed = fds::in_vfork_child();
        descriptors::surviving(|fd, what| match what {
            What::Eventfd if borrowed || fds::stream(fd).is_some() => found.eventfds.insert(fd),
            What::Eventfd => {}
            What::Listener => found.listens = true,
        });
        found
    }

    /// Returns whether there may be connections or listeners.
    pub fn are_any(&self) -> bool {
        self.listens || !self.eventfds.is_empty()
    }

    /// Returns the descriptors that may be connections.
    pub fn eventfds(&self) -> impl Iterator<Item = c_int> {
        self.eventfds.iter()
    }

    /// Returns the connections. Takes a look at each descriptor of a child of vfork(2).
    pub fn connections(self) -> Streams {
        if !fds::in_vfork_child() {
            return self.eventfds;
        }
        self.eventfds.filter(descriptors::is_a_streams)
    }
}

/// Returns whether this process has connections or listeners that could be handed on.
pub fn has_ours() -> bool {
    fds::all(0, c_int::MAX - 1).any(|(_, object)| {
        matches!(object.kind(), DescriptorKind::Stream(_) | DescriptorKind::Listener(_))
    })
}
