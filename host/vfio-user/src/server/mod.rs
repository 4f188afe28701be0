//! One client's session: takes messages in order and answers them.
//!
//! Requests are grouped by file: [`info`] (what the device is), [`irqs`], [`dma`] (client memory),
//! [`access`] (registers). A request that cannot be answered yet is [`Pending`]; later messages
//! wait behind it, since commands are processed in order (section *Command Concurrency*).

mod access;
mod dma;
mod info;
mod irqs;
mod kept;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_vfio_user_spec::{Command, Header};
use zerocopy::FromBytes;

use crate::Config;
use crate::channel::Channel;
use crate::device::Device;
use crate::stats::{Live, add};
use crate::version::{self, Negotiated};
use crate::wire::{End, Message};

pub(crate) use kept::Keeping;

/// What one turn may cost, so that clients share a thread fairly: a message costs one, and one more
/// for every [`BYTES_PER_COST`] of registers that it accesses or [`REGIONS_PER_COST`] DMA maps that a
/// change of the map copies.
const COST_PER_TURN: usize = 32;
const BYTES_PER_COST: usize = 64;
const REGIONS_PER_COST: usize = 16;
/// Descriptors, connections and mappings of clients that an endpoint holds at most until they are closed,
/// before it reads or accepts more.
pub const MAX_HELD: usize = 64;
/// Bytes of earlier clients' memory that an endpoint holds at most before it accepts another client.
pub const MAX_HELD_BYTES: usize = 1 << 30;
/// How long an unmap or a reset waits after one for which the function did not come to rest in time.
const STUCK_PATIENCE: Duration = Duration::from_millis(20);

/// What a request leads to.
enum Answer {
    /// A reply with this payload.
    Reply(Vec<u8>),
    /// The same with a descriptor.
    ReplyWith(Vec<u8>, OwnedFd),
    /// Not yet.
    Later(Waiting),
}

/// What a request waits for.
enum Waiting {
    Unmap(dma::Unmap),
    /// A reset: requests in flight, which may still write to the client's memory.
    Reset,
    Access(access::Access),
    /// A thread of its own, before message-only memory is mapped.
    Thread(dma::RemoteMap),
}

struct Pending {
    header: Header,
    deadline: Instant,
    waiting: Waiting,
}

/// What a turn left behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Messages may wait: another turn, please.
    More,
    /// Nothing until the socket is readable.
    Drained,
    /// A request is pending: a turn soon, and nothing is read before it has ended.
    Pending,
    /// The client needs a thread of its own; [`Session::settle_on_thread`] goes on.
    Move,
}

pub(crate) struct Session {
    pub(crate) channel: Arc<Channel>,
    config: Arc<Config>,
    live: Arc<Live>,
    negotiated: Option<Negotiated>,
    pending: Option<Pending>,
    /// On a thread of its own, where message-only memory works.
    private: bool,
    /// Bytes of DMA maps with descriptors.
    mapped_bytes: u64,
    /// What the current turn has cost.
    cost: usize,
    /// What a successor needs.
    pub(crate) kept: Option<Box<Keeping>>,
    /// An unmap or a reset ran into its deadline and the function has not been quiet since.
    stuck: bool,
    /// Things and bytes of the client's that are still to be closed or unmapped, and since when there are so many.
    /// `None` if there are few enough for the next message to be read.
    held_since: Option<((usize, usize), Instant)>,
}

impl Session {
    pub(crate) fn new(channel: Channel, config: Arc<Config>, live: Arc<Live>) -> Self {
        Self {
            channel: Arc::new(channel),
            config,
            live,
            negotiated: None,
            pending: None,
            private: false,
            mapped_bytes: 0,
            cost: 0,
            kept: None,
            stuck: false,
            held_since: None,
        }
    }

    /// Whether version and capabilities were agreed on.
    pub(crate) fn is_negotiated(&self) -> bool {
        self.negotiated.is_some()
    }

    /// Whether a request waits; nothing is read before it is answered.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.is_some()
            || self.held_since.is_some()
            || self.kept.as_ref().is_some_and(|kept| kept.waits())
    }

    /// Whether something waits to be sent.
    pub(crate) fn has_output(&self) -> bool {
        let blocked = self.kept.as_ref().is_some_and(|kept| kept.is_blocked());
        blocked || self.channel.with(|wire| wire.has_output())
    }

    /// Whether the function is being quiesced: a poll would end that.
    pub(crate) fn is_quiescing(&self) -> bool {
        let waiting = self.pending.as_ref().map(|pending| &pending.waiting);
        matches!(waiting, Some(Waiting::Unmap(_) | Waiting::Reset))
    }

    /// Processes what is here, up to a bound.
    pub(crate) fn turn(&mut self, device: &mut Device, now: Instant) -> Result<Turn, End> {
        if self.kept.is_some() {
            return self.turn_kept(device, now);
        }
        self.channel.with(|wire| wire.flush())?;
        self.cost = 0;
        while self.cost < COST_PER_TURN {
            self.cost += 1;
            if let Some(pending) = self.pending.take() {
                self.resume(device, pending, now)?;
            }
            if let Some(pending) = &self.pending {
                let moving = matches!(pending.waiting, Waiting::Thread(_));
                return Ok(if moving { Turn::Move } else { Turn::Pending });
            }
            if self.holds_much(device, now)? {
                return Ok(Turn::Pending);
            }
            match self.channel.receive()? {
                Some(message) => self.take(device, message, now)?,
                None => return Ok(Turn::Drained),
            }
        }
        Ok(Turn::More)
    }

    /// Returns whether so much of the client's is still to be closed or unmapped that it may not send more. A
    /// VMM that unmaps much at once waits here while that becomes less; one that sends what cannot be closed goes.
    fn holds_much(&mut self, device: &Device, now: Instant) -> Result<bool, End> {
        let held = (device.bin.held(), device.bin.held_bytes());
        if held.0 <= MAX_HELD && held.1 as u64 <= self.config.max_dma_bytes {
            self.held_since = None;
            return Ok(false);
        }
        let since = match self.held_since {
            Some((as_now, since)) if as_now == held => since,
            _ => now,
        };
        self.held_since = Some((held, since));
        match now.duration_since(since) >= self.config.reply_deadline {
            true => Err(End::Broken("too much of what the client sent cannot be closed")),
            false => Ok(true),
        }
    }

    /// Goes on after [`Turn::Move`]: on its own thread, or with an error where there is none.
    pub(crate) fn settle_on_thread(&mut self, device: &mut Device, moved: bool) -> Result<(), End> {
        self.private |= moved;
        self.channel.allow_waiting(self.private);
        let Some(Pending { header, waiting, deadline }) = self.pending.take() else {
            return Ok(());
        };
        let Waiting::Thread(map) = waiting else {
            self.pending = Some(Pending { header, waiting, deadline });
            return Ok(());
        };
        let outcome = if moved { self.add_remote(device, map) } else { Err(Errno::AGAIN) };
        self.answer(&header, outcome.map(|()| Answer::Reply(Vec::new())), deadline)
    }

    fn take(&mut self, device: &mut Device, message: Message, now: Instant) -> Result<(), End> {
        add(&self.live.messages, 1);
        let header = message.header;
        if !header.is_command() {
            return Err(End::Broken("a reply to nothing that was asked"));
        }
        let first = !self.is_negotiated();
        let outcome = self.dispatch(device, message, now);
        let refused = outcome.is_err();
        self.answer(&header, outcome, now + self.patience(&header))?;
        if first && refused && header.command.get() == Command::Version as u16 {
            return Err(End::Broken("no common version of the protocol"));
        }
        Ok(())
    }

    /// What the request in `message` leads to. Descriptors that are not taken are closed elsewhere.
    fn dispatch(
        &mut self,
        device: &mut Device,
        message: Message,
        now: Instant,
    ) -> Result<Answer, Errno> {
        let command = Command::from_code(message.header.command.get());
        // An unmap needs none, but SPDK sends the one that it mapped with; refusing it would keep
        // memory mapped that the client takes for free.
        let takes_files =
            matches!(command, Some(Command::DmaMap | Command::DmaUnmap | Command::DeviceSetIrqs));
        if message.excess || !(takes_files || message.files.is_empty()) {
            add(&self.live.refused_files, message.files.len() as u64);
            return Err(Errno::INVAL);
        }
        // Until version and capabilities are agreed on, nothing else is (section *Versioning*).
        if self.is_negotiated() == (command == Some(Command::Version)) {
            return Err(Errno::INVAL);
        }
        let payload = &message.payload;
        match command.ok_or(Errno::INVAL)? {
            Command::Version => self.version(payload),
            Command::DmaMap => self.dma_map(device, payload, message.files),
            Command::DmaUnmap => self.dma_unmap(device, payload),
            Command::DeviceGetInfo => self.device_info(payload),
            Command::DeviceGetRegionInfo => info::region_info(device, payload),
            Command::DeviceGetRegionIoFds => info::region_io_fds(payload),
            Command::DeviceGetIrqInfo => irqs::info(device, payload),
            Command::DeviceSetIrqs => {
                let routes = !message.files.is_empty() && irqs::is_msix(payload);
                let answer = irqs::set(device, payload, message.files, &self.live)?;
                if let Some(kept) = &mut self.kept {
                    // What is kept is written anew, regions included.
                    self.cost += device.map.regions().len() / REGIONS_PER_COST;
                    kept.lines_changed(device)?;
                }
                if routes {
                    self.live.stamp_first(&self.live.first_route_at);
                }
                Ok(answer)
            }
            Command::RegionRead => self.region_read(device, payload),
            Command::RegionWrite => self.region_write(device, payload, now),
            Command::RegionWriteMulti => self.region_write_multi(device, payload, now),
            Command::DeviceReset => self.device_reset(device, payload),
            // The server sends these.
            Command::DmaRead | Command::DmaWrite => Err(Errno::INVAL),
            Command::DirtyPages
            | Command::DeviceFeature
            | Command::MigDataRead
            | Command::MigDataWrite => Err(Errno::NOTSUP),
        }
    }

    fn version(&mut self, payload: &[u8]) -> Result<Answer, Errno> {
        let (negotiated, reply) = version::negotiate(payload)?;
        self.channel.set_max_xfer(negotiated.max_xfer);
        self.negotiated = Some(negotiated);
        if let Some(kept) = &mut self.kept {
            kept.negotiated(negotiated);
        }
        self.live.stamp(&self.live.negotiated_at);
        Ok(Answer::Reply(reply))
    }

    /// How long a reply may take. Clients send several unmaps and then wait for all replies: they must not
    /// each wait for the deadline in turn when the function did not come to rest for the first of them.
    /// A moment they do wait, since it may have come to rest meanwhile, and some take a turn to say so.
    fn patience(&self, header: &Header) -> Duration {
        let code = header.command.get();
        let waits_for_rest =
            [Command::DmaUnmap as u16, Command::DeviceReset as u16].contains(&code);
        match self.stuck && waits_for_rest {
            true => STUCK_PATIENCE.min(self.config.reply_deadline),
            false => self.config.reply_deadline,
        }
    }

    /// Section *VFIO_USER_DEVICE_RESET*: a function-level reset; memory and routes stay. It is
    /// answered when no request of before can reach the client's memory any more.
    fn device_reset(&mut self, device: &mut Device, payload: &[u8]) -> Result<Answer, Errno> {
        if !payload.is_empty() {
            return Err(Errno::INVAL);
        }
        device.function.reset();
        self.resume_reset(device, false)
    }

    fn resume_reset(&mut self, device: &mut Device, expired: bool) -> Result<Answer, Errno> {
        let quiet = device.function.quiesce();
        if !quiet && !expired {
            return Ok(Answer::Later(Waiting::Reset));
        }
        self.stuck = !quiet;
        device.pace.kick();
        if quiet { Ok(Answer::Reply(Vec::new())) } else { Err(Errno::BUSY) }
    }

    fn resume(&mut self, device: &mut Device, pending: Pending, now: Instant) -> Result<(), End> {
        let Pending { header, deadline, waiting } = pending;
        let outcome = match waiting {
            Waiting::Unmap(unmap) => self.resume_unmap(device, unmap, now >= deadline),
            Waiting::Reset => self.resume_reset(device, now >= deadline),
            Waiting::Access(access) => self.resume_access(device, access, now, now >= deadline),
            waiting @ Waiting::Thread(_) => Ok(Answer::Later(waiting)),
        };
        self.answer(&header, outcome, deadline)
    }

    /// Replies, or keeps the request for later.
    fn answer(
        &mut self,
        header: &Header,
        outcome: Result<Answer, Errno>,
        deadline: Instant,
    ) -> Result<(), End> {
        let (reply, payload, file) = match outcome {
            Ok(Answer::Later(waiting)) => {
                self.pending = Some(Pending { header: *header, deadline, waiting });
                return Ok(());
            }
            Ok(Answer::Reply(payload)) => (header.reply(payload.len()), payload, None),
            Ok(Answer::ReplyWith(payload, file)) => {
                (header.reply(payload.len()), payload, Some(file))
            }
            Err(errno) => {
                self.live.error(errno.raw_os_error());
                (header.error_reply(errno.raw_os_error()), Vec::new(), None)
            }
        };
        if let Some(kept) = &mut self.kept {
            // The only descriptor that a reply brings is that of the doorbells.
            let reply = (&reply, payload.as_slice(), file.is_some());
            return kept.answer(&self.channel, reply, header.no_reply());
        }
        if header.no_reply() {
            return Ok(());
        }
        self.channel.with(|wire| wire.send(&reply, &payload, file))
    }
}

/// The structure that `payload` is.
fn exactly<T: FromBytes>(payload: &[u8]) -> Result<T, Errno> {
    T::read_from_bytes(payload).map_err(|_| Errno::INVAL)
}

/// The structure that `payload` begins with, and what follows.
fn prefix<T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable>(
    payload: &[u8],
) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(payload).map_err(|_| Errno::INVAL)
}
