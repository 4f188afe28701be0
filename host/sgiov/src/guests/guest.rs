//! One guest: its channel, and the pairs of its streams.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use slipway_sgiov_function::{Channel, Peer};
use slipway_vfio_user::Control;

use super::book::Counts;

pub struct Guest {
    pub peer: Peer,
    pub control: Control,
    /// The channel to the guest, or `None` if the guest has not started its function.
    pub channel: Option<Channel>,
    /// The guest has sent its hello.
    pub greeted: bool,
    /// Set while the channel maps no memory.
    pub suspended: bool,
    /// The pair, and the guest's end of it, by connection.
    pub connections: HashMap<u32, (u32, usize)>,
    /// The connection, by arena and stream.
    pub streams: HashMap<(u32, u32), u32>,
    /// Arenas that the guest wants back.
    pub leaving: HashSet<u32>,
    /// The number of requests that the guest has not answered.
    pub unanswered: usize,
    /// The number of the guest's requests that the engine has not answered. They outlast the
    /// channel, as their answers do.
    pub asks: usize,
    pub counts: Arc<Counts>,
}

impl Guest {
    pub fn new(peer: Peer, control: Control, counts: Arc<Counts>) -> Self {
        Self {
            peer,
            control,
            channel: None,
            greeted: false,
            suspended: false,
            connections: HashMap::new(),
            streams: HashMap::new(),
            leaving: HashSet::new(),
            unanswered: 0,
            asks: 0,
            counts,
        }
    }

    /// Removes an arena that the guest wants back and that holds no stream any more. Returns
    /// whether there was such an arena.
    pub fn take_free(&mut self, arena: u32) -> bool {
        let used = self.streams.keys().any(|(of, _)| *of == arena);
        if used || !self.leaving.remove(&arena) {
            return false;
        }
        self.channel.as_mut().is_some_and(|channel| channel.remove_arena(arena))
    }
}
