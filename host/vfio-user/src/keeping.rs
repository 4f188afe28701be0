//! The state that an endpoint keeps for its successor, and the steps of its messages.
//! [`crate::kept`] describes their order.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use slipway_keeper::Shelf;
use slipway_peer::{Bin, Foreign, Peer};
use slipway_ram::{DmaMap, Permissions};
use slipway_vfio_user_spec::{HEADER_LEN, Header};
use zerocopy::IntoBytes;

use crate::channel::Channel;
use crate::doorbells::SharedPage;
use crate::interrupts::{Line, adopt};
use crate::kept::{
    Applied, Attachments, KeptRun, MessageJournal, NegotiatedState, Parts, Progress, RegionState,
    SessionState, StateHistory,
};
use crate::peek::{Peeked, Peeker};
use crate::run_state::RunState;
use crate::slots::{BELL, CLIENT, LINES, REGIONS};
use crate::version::Negotiated;
use crate::{Config, fault};
use slipway_vfio_user_wire::{End, Message};

/// The state that an endpoint leaves with the keeper for its successor, with or without a client.
pub(crate) struct Keeping {
    shelf: Shelf,
    steps: MessageJournal,
    states: StateHistory,
    bin: Bin,
    pub state: SessionState,
    /// The state has changed since it was stored.
    changed: bool,
    /// Slots to clear once the state is stored.
    stale: Vec<u32>,
    /// The identity of each interrupt's route on the shelf, to detect that a route has changed.
    routes: Vec<usize>,
    peeker: Peeker,
    /// The size of the current message in bytes.
    size: usize,
    /// The time since when only a part of a message has arrived.
    partial: Option<Instant>,
    /// The socket does not accept all of a reply at present.
    blocked: bool,
}

/// The result of looking for the next message.
pub(crate) enum Next {
    Message(Message),
    Nothing,
    Wait,
}

impl Keeping {
    /// Continues from the state that a predecessor left, if there is any.
    pub fn new(parts: &mut Parts) -> std::io::Result<Self> {
        let Parts { shelf, steps, inbox, states, bin, .. } = parts;
        let state = states.load()?.unwrap_or_default();
        Ok(Self {
            shelf: shelf.clone(),
            steps: MessageJournal::new(steps.clone(), inbox.clone(), bin),
            states: states.clone(),
            bin: bin.clone(),
            state,
            changed: false,
            stale: Vec::new(),
            routes: Vec::new(),
            peeker: Peeker::default(),
            size: 0,
            partial: None,
            blocked: false,
        })
    }

    /// Registers `page`, which clients map, for replies that carry its descriptor.
    pub fn share(&mut self, page: Arc<SharedPage>) {
        self.steps.share(page);
    }

    /// Puts the eventfd `bell`, which the client raises for its doorbells, on the shelf at the
    /// keeper, where a successor finds it.
    ///
    /// # Errors
    /// `EIO`: the keeper is gone.
    pub fn hang(&mut self, bell: &Arc<OwnedFd>) -> Result<(), Errno> {
        // The slot's earlier eventfd was a former client's.
        self.stale.retain(|slot| *slot != BELL);
        self.shelf.put(BELL, bell.as_ref()).map_err(|_| Errno::IO)?;
        self.steps.hang(bell.clone());
        Ok(())
    }

    /// Returns the eventfd that a predecessor's client raises, or `None` if it has none.
    pub fn resume_bell(&mut self, parts: &mut Parts) -> Option<Arc<OwnedFd>> {
        let bell = parts.found.remove(&BELL).and_then(adopt)?;
        self.steps.hang(bell.clone());
        Some(bell)
    }

    /// Returns the client of the connection that a predecessor had, or `None` if it had none.
    pub fn client(&self) -> Option<Peer> {
        self.state.client.map(|(pid, uid)| Peer { pid, uid })
    }

    /// Stores the state of a new client that connected over `socket`.
    ///
    /// # Errors
    /// The keeper is gone, or the state is too long. Then the keeper does not hold the connection,
    /// which would stay open after the endpoint has refused the client.
    pub fn connect(&mut self, socket: &Foreign, peer: Peer) -> std::io::Result<()> {
        self.shelf.put(CLIENT, socket)?;
        self.steps.clear();
        self.state = SessionState { client: Some((peer.pid, peer.uid)), ..SessionState::default() };
        self.store().map_err(|_| {
            self.disconnect();
            // A state that cannot be stored leaves the slots that it makes stale as they are.
            let _ = self.shelf.clear(CLIENT);
            std::io::Error::other("a session's state is too long")
        })
    }

    /// Clears the state of a client that disconnected. If the keeper is gone as well, nothing needs
    /// clearing.
    pub fn disconnect(&mut self) {
        let regions = self.state.regions.iter().filter_map(|region| region.slot);
        let lines = (LINES.start..).zip(&self.state.lines).filter(|(_, line)| line.0);
        let slots: Vec<u32> =
            regions.chain(lines.map(|(slot, _)| slot)).chain([CLIENT, BELL]).collect();
        self.stale.extend(slots);
        self.state = SessionState::default();
        self.routes.clear();
        (self.partial, self.blocked) = (None, false);
        let _ = self.store();
        self.steps.clear();
    }

    /// Returns whether the function is held for the client of a predecessor, or of an earlier
    /// connection: it is not connected, and connects again by itself.
    pub fn holds(&self) -> bool {
        self.state.client.is_none() && self.state.resuming.is_some()
    }

    /// Returns whether user `uid` may resume the function of a predecessor's client.
    pub fn may_resume(&self, uid: u32) -> bool {
        self.state.resuming == Some(uid)
    }

    /// Returns whether the client has mapped no memory and routed no interrupt so far.
    pub fn has_just_begun(&self) -> bool {
        self.state.regions.is_empty() && self.state.lines.is_empty()
    }

    /// Forgets all that the keeper has of the client, except its user, who may connect again by
    /// itself and resume the function. The caller is between two messages.
    pub fn release(&mut self) {
        let resuming = self.state.client.map(|(_, uid)| uid).or(self.state.resuming);
        self.state = SessionState { resuming, ..SessionState::default() };
        self.stale.push(CLIENT);
        let _ = self.store();
        self.steps.clear();
    }

    /// Maps the regions that a predecessor's client had mapped. Message-only regions follow when
    /// there is a session.
    pub fn map_regions(
        &self,
        map: &mut DmaMap,
        parts: &Parts,
        config: &Config,
    ) -> std::io::Result<()> {
        for region in &self.state.regions {
            let RegionState { iova, len, offset, read, write, slot } = *region;
            let Some(slot) = slot else { continue };
            let lost = || std::io::Error::other("memory of the client was not kept");
            let file = parts.found.get(&slot).ok_or_else(lost)?;
            let permissions = Permissions { read, write };
            let file = (file.as_fd(), config.late.added());
            let mapped = config.map(file, (offset, len), permissions, &self.bin)?;
            map.add(iova, mapped).map_err(|error| std::io::Error::other(error.to_string()))?;
        }
        Ok(())
    }

    /// Returns whether no message is to be read now.
    pub fn waits(&self) -> bool {
        self.blocked || self.partial.is_some()
    }

    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    fn store(&mut self) -> Result<(), End> {
        self.changed = false;
        if !self.states.store(&self.state) {
            return Err(End::Broken("the session has too much state to be kept"));
        }
        for slot in self.stale.drain(..) {
            // An error means that the keeper is gone, and then nothing holds the slot's file.
            let _ = self.shelf.clear(slot);
        }
        Ok(())
    }

    /// Records the message that a predecessor applied if it did not record its end.
    pub fn catch_up(&mut self) -> Result<(), End> {
        match &self.state.applied {
            Some(applied) if applied.number == self.steps.number() && !self.steps.is_replying() => {
                self.steps.record(applied.size, &[&applied.reply], Attachments::default())
            }
            _ => Ok(()),
        }
    }

    /// Looks for the next message, after the rest of the last reply has been sent.
    pub fn next(&mut self, channel: &Channel, config: &Config, now: Instant) -> Result<Next, End> {
        channel.with(|wire| {
            self.blocked = self.steps.go_on(wire.file())? == Progress::Blocked;
            if self.blocked {
                return Ok(Next::Wait);
            }
            if self.steps.holds() {
                return self.next_held(wire.file(), config, now);
            }
            match self.peeker.peek(wire)? {
                Peeked::Nothing => Ok(Next::Nothing),
                // The rest of the message did not arrive by now: it may be waiting for room in the
                // socket.
                Peeked::Partial(Some(size)) if self.partial.is_some() => {
                    self.steps.hold(size);
                    self.next_held(wire.file(), config, now)
                }
                Peeked::Partial(_) => self.wait_for_rest(config, now),
                Peeked::Whole(message, size) => Ok(self.begin(message, size)),
            }
        })
    }

    /// Returns the next message if a part of it is held already and the rest has arrived.
    fn next_held(
        &mut self,
        socket: BorrowedFd<'_>,
        config: &Config,
        now: Instant,
    ) -> Result<Next, End> {
        match self.steps.take_held(socket)? {
            Some(message) => {
                let size = HEADER_LEN + message.payload.len();
                Ok(self.begin(message, size))
            }
            None => self.wait_for_rest(config, now),
        }
    }

    fn wait_for_rest(&mut self, config: &Config, now: Instant) -> Result<Next, End> {
        let since = *self.partial.get_or_insert(now);
        if now.duration_since(since) >= config.reply_deadline {
            return Err(End::Broken("a message that does not come to its end"));
        }
        Ok(Next::Wait)
    }

    fn begin(&mut self, message: Message, size: usize) -> Next {
        fault::point("peeked");
        (self.partial, self.size) = (None, size);
        Next::Message(message)
    }

    /// Ends the current message with a reply, or without one if `quiet`.
    pub fn answer(
        &mut self,
        channel: &Channel,
        (reply, payload, attachments): (&Header, &[u8], Attachments),
        quiet: bool,
    ) -> Result<(), End> {
        fault::point("applied");
        let parts = [reply.as_bytes(), payload];
        let parts = if quiet { &[][..] } else { &parts[..] };
        if self.changed {
            let (number, size) = (self.steps.number(), self.size);
            self.state.applied = Some(Applied { number, size, reply: parts.concat() });
            self.store()?;
            fault::point("stored");
        } else if quiet {
            return channel.with(|wire| self.steps.end_quietly(wire.file(), self.size));
        }
        let attachments = if quiet { Attachments::default() } else { attachments };
        self.steps.record(self.size, parts, attachments)?;
        self.blocked = channel.with(|wire| self.steps.go_on(wire.file()))? == Progress::Blocked;
        Ok(())
    }

    pub fn negotiated(&mut self, agreed: Negotiated) {
        let Negotiated { max_xfer, max_files, write_multiple, resume } = agreed;
        self.state.negotiated =
            Some(NegotiatedState { max_xfer, max_files, write_multiple, resume });
        self.changed = true;
    }

    /// Notes the function's state for a successor.
    pub fn run_changed(&mut self, run: &RunState) {
        let run = match run {
            RunState::Running | RunState::Held => KeptRun::Running,
            RunState::Stopped | RunState::Saving(_) => KeptRun::Stopped,
            RunState::Loading(_) | RunState::Restoring(_) | RunState::Failed => KeptRun::Lost,
        };
        self.changed |= std::mem::replace(&mut self.state.run, run) != run;
    }

    /// Leaves a region's file with the keeper and returns its slot.
    pub fn put_region(&mut self, file: &Foreign) -> Result<u32, Errno> {
        let taken = |slot: &u32| {
            self.state.regions.iter().any(|region| region.slot == Some(*slot))
                || self.stale.contains(slot)
        };
        let slot = REGIONS.clone().find(|slot| !taken(slot)).ok_or(Errno::NOSPC)?;
        self.shelf.put(slot, file).map_err(|_| Errno::IO)?;
        Ok(slot)
    }

    /// Has the keeper close the file of a region that was not added. It is in no stored state.
    pub fn clear_region(&self, slot: u32) {
        // An error means that the keeper is gone, and then nothing holds the slot's file.
        let _ = self.shelf.clear(slot);
    }

    pub fn region_added(
        &mut self,
        (iova, len, offset): (u64, u64, u64),
        permissions: Permissions,
        slot: Option<u32>,
    ) {
        let Permissions { read, write } = permissions;
        self.state.regions.push(RegionState { iova, len, offset, read, write, slot });
        self.changed = true;
    }

    /// Drops the regions that `map` no longer has.
    pub fn regions_removed(&mut self, map: &DmaMap) {
        let left: Vec<u64> = map.regions().iter().map(|(iova, _)| *iova).collect();
        let stale = &mut self.stale;
        self.state.regions.retain(|region| {
            let stays = left.contains(&region.iova);
            stale.extend(region.slot.filter(|_| !stays));
            stays
        });
        self.changed = true;
    }

    /// Stores the routes and masks of all interrupts, at least one of which has changed.
    pub fn lines_changed<'a>(
        &mut self,
        lines: impl Iterator<Item = &'a Line>,
    ) -> Result<(), Errno> {
        let lines: Vec<&Line> = lines.collect();
        self.routes.resize(lines.len(), 0);
        self.state.lines.clear();
        for ((slot, line), known) in LINES.zip(&lines).zip(&mut self.routes) {
            let route = line.routed();
            let identity = route.as_ref().map_or(0, |file| Arc::as_ptr(file) as usize);
            if let Some(file) = route.as_ref().filter(|_| identity != *known) {
                self.shelf.put(slot, file.as_ref()).map_err(|_| Errno::IO)?;
            }
            *known = identity;
            self.state.lines.push((identity != 0, line.is_masked()));
        }
        self.changed = true;
        Ok(())
    }

    /// Returns the index of the write at which a multiple write continues.
    pub fn begin_multi(&self) -> usize {
        self.steps.begin_multi(self.size)
    }

    pub fn multi_done(&self, writes: usize) {
        self.steps.set_done(writes);
    }

    /// Restores the routes of the interrupts, the first `vectors` of which are MSI-X vectors.
    pub fn resume_lines<'a>(
        &mut self,
        lines: impl Iterator<Item = &'a Line>,
        vectors: usize,
        parts: &mut Parts,
    ) {
        let lines: Vec<&Line> = lines.collect();
        self.routes.resize(lines.len(), 0);
        for (at, (line, (routed, masked))) in lines.iter().zip(&self.state.lines).enumerate() {
            if *masked {
                line.mask();
            }
            let file = parts.found.remove(&(LINES.start + at as u32)).filter(|_| *routed);
            if let Some(file) = file.and_then(adopt) {
                self.routes[at] = Arc::as_ptr(&file) as usize;
                line.route(Some(file));
                // A signal may have been lost with the predecessor, and a spurious one on a vector
                // is harmless. The other types must not be signalled without a cause: QEMU stops a
                // guest whose device reports an error.
                if at < vectors {
                    line.signal();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::time::Duration;

    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use slipway_keeper::Keeper;
    use slipway_ram::Lasting;

    use super::*;
    use crate::slots::KEPT_SLOTS;
    use crate::{KEPT_LEN, Kept};

    const PATIENCE: Duration = Duration::from_secs(20);

    fn keeper(path: &std::path::Path) -> Arc<Keeper> {
        let at = path.to_path_buf();
        std::thread::spawn(move || slipway_keeper::serve(&at));
        let begin = Instant::now();
        loop {
            match Keeper::connect(path) {
                Ok(keeper) => return Arc::new(keeper),
                Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_keeper_does_not_hold_the_connection_of_a_client_whose_state_cannot_be_stored() {
        let directory = tempfile::tempdir().unwrap();
        let keeper = keeper(&directory.path().join("keeper"));
        let held = |slot: u32| {
            let slots = keeper.take(PATIENCE).unwrap();
            slots.iter().any(|(found, _)| *found == slot)
        };
        let shelf = Shelf::new(keeper.clone(), 0..KEPT_SLOTS);
        let (memory, found) = (Lasting::heap(KEPT_LEN), BTreeMap::new());
        let bin = Bin::new();
        let mut parts = Kept { shelf, memory, found }.take_apart(&bin).unwrap();
        let whole = parts.states.clone();
        let kind = (AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC);
        let (ours, _theirs) = socketpair(kind.0, kind.1, kind.2, None).unwrap();
        let socket = Foreign::new(ours, &bin);
        let peer = Peer { pid: 1, uid: 2 };
        // The header of the states, and no room for one.
        for (states, stored) in
            [(StateHistory::within(&Lasting::heap(64)).unwrap(), false), (whole, true)]
        {
            parts.states = states;
            let mut keeping = Keeping::new(&mut parts).unwrap();
            assert_eq!(keeping.connect(&socket, peer).is_ok(), stored);
            assert_eq!((held(CLIENT), keeping.client() == Some(peer)), (stored, stored));
        }
    }
}
