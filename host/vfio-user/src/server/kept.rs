//! A session that outlives its process. [`crate::kept`] describes the order of its steps.

use std::sync::Arc;
use std::time::Instant;

use slipway_ram::{Permissions, Region};

use super::{COST_PER_TURN, Session, SessionTurn};
use crate::Config;
use crate::channel::{Channel, RemoteMemory};
use crate::device::Device;
use crate::keeping::{Keeping, Next};
use crate::kept::{NegotiatedState, Parts};
use crate::stats::Live;
use crate::version::Negotiated;
use slipway_vfio_user_wire::End;

impl Session {
    /// Continues with the client of a predecessor.
    pub(crate) fn resume_kept(
        channel: Channel,
        config: Arc<Config>,
        live: Arc<Live>,
        mut keeping: Keeping,
        (device, parts): (&mut Device, &mut Parts),
    ) -> Result<Self, End> {
        let vectors = device.sink.lines().len();
        keeping.resume_lines(device.lines(), vectors, parts);
        if let Some(bell) = keeping.resume_bell(parts) {
            device.hang(bell);
            // The predecessor may have taken an event and done nothing about it.
            device.note_event(0);
        }
        keeping.catch_up()?;
        let mut session = Self::new(channel, config, live);
        if let Some(agreed) = keeping.state.negotiated {
            let NegotiatedState { max_xfer, max_files, write_multiple, resume } = agreed;
            session.channel.set_max_xfer(max_xfer);
            session.negotiated = Some(Negotiated { max_xfer, max_files, write_multiple, resume });
            session.live.stamp(&session.live.negotiated_at);
        }
        device.take_over_run(keeping.state.run);
        session.add_kept_remotes(device, &keeping)?;
        let regions = device.map.regions();
        let mapped = regions.iter().filter(|(_, region)| !region.is_remote());
        session.mapped_bytes = mapped.map(|(_, region)| region.len()).sum();
        session.live.mapped(&device.map);
        session.kept = Some(Box::new(keeping));
        Ok(session)
    }

    /// Maps the message-only regions, which need the channel.
    fn add_kept_remotes(&mut self, device: &mut Device, keeping: &Keeping) -> Result<(), End> {
        for region in keeping.state.regions.iter().filter(|region| region.slot.is_none()) {
            let permissions = Permissions { read: region.read, write: region.write };
            let remote = Arc::new(RemoteMemory(self.channel.clone()));
            let region = (region.iova, Region::remote(remote, region.len, permissions));
            let added = device.map.add(region.0, region.1);
            added.map_err(|_| End::Broken("regions of a predecessor that overlap"))?;
        }
        Ok(())
    }

    /// Ends the keeping of the session, once it is agreed that the client connects again by itself.
    /// Returns whether that has just happened.
    fn release(&mut self) -> bool {
        let resumes = self.negotiated.is_some_and(|agreed| agreed.resume);
        let begun = |kept: &mut Box<Keeping>| resumes && !kept.waits() && kept.has_just_begun();
        let Some(mut kept) = self.kept.take_if(begun) else { return false };
        kept.release();
        self.released = Some(kept);
        true
    }

    /// Does what [`Session::turn`] does, for a session that is kept.
    pub(super) fn turn_kept(
        &mut self,
        device: &mut Device,
        now: Instant,
    ) -> Result<SessionTurn, End> {
        self.cost = 0;
        device.begin_turn();
        while self.cost < COST_PER_TURN {
            self.cost += 1;
            if let Some(pending) = self.pending.take() {
                self.resume(device, pending, now)?;
            }
            if self.pending.is_some() || self.holds_much(device, now)? {
                return Ok(SessionTurn::Pending);
            }
            if self.release() {
                return Ok(SessionTurn::More);
            }
            let Some(kept) = &mut self.kept else { return Ok(SessionTurn::Drained) };
            match kept.next(&self.channel, &self.config, now)? {
                Next::Message(message) => self.take(device, message, now)?,
                Next::Nothing => return Ok(SessionTurn::Drained),
                Next::Wait => return Ok(SessionTurn::Pending),
            }
        }
        Ok(SessionTurn::More)
    }
}
