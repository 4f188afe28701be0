//! The session of one client: takes its messages in order and answers them.
//!
//! Requests are grouped by file: [`info`] (the device's description),
//! [`io_fds`] (what a client writes without messages), [`irqs`], [`dma`] (client
//! memory), [`access`] (registers), [`migration`] (stopping the function, and its state),
//! [`log`] (the pages of client memory that the function writes to), [`resume`] (functions that
//! outlive a connection). A request that cannot be answered yet is [`Pending`]; later messages wait
//! behind it, since commands are processed in order (section *Command Concurrency*).

mod access;
mod dma;
mod info;
mod io_fds;
mod irqs;
mod kept;
mod log;
mod migration;
mod resume;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slipway_peer::Foreign;
use slipway_vfio_user_spec::{Command, Header};
use zerocopy::FromBytes;

use crate::Config;
use crate::channel::Channel;
use crate::device::Device;
use crate::keeping::Keeping;
use crate::kept::Attachments;
use crate::stats::{Live, add};
use crate::version::{self, Extensions, Negotiated};
use slipway_vfio_user_wire::{End, Message};

/// The cost that one turn may reach, so that clients share a thread fairly. A message costs one,
/// plus one for every [`BYTES_PER_COST`] of registers that it accesses, plus one for every
/// [`REGIONS_PER_COST`] DMA maps that are copied when the map changes.
const COST_PER_TURN: usize = 32;
const BYTES_PER_COST: usize = 64;
const REGIONS_PER_COST: usize = 16;
/// The largest number of descriptors, connections and mappings of clients that may await closing
/// before an endpoint stops reading messages and accepting connections.
pub const MAX_HELD: usize = 64;
/// The largest number of bytes of earlier clients' memory that may await unmapping before an
/// endpoint stops accepting clients.
pub const MAX_HELD_BYTES: usize = 1 << 30;
/// The time that a request waits for the function to become quiet, after an earlier one ran into
/// its deadline.
const STUCK_PATIENCE: Duration = Duration::from_millis(20);

/// The outcome of a request.
enum Answer {
    /// A reply with this payload.
    Reply(Vec<u8>),
    /// A reply with this payload and these descriptors, which are those that the attachments name.
    ReplyWith(Vec<u8>, Attachments, Vec<OwnedFd>),
    /// No reply yet: the request waits.
    Later(Waiting),
}

/// The condition that a pending request waits for.
enum Waiting {
    Unmap(dma::Unmap),
    /// A reset waits for requests in flight, which may still write to the client's memory.
    Reset,
    /// A change of the function's state waits for requests in flight.
    Quiet(migration::Transition),
    /// A log of writes to the client's memory begins, or is reported, without requests in flight.
    Log(log::Log),
    /// The rest of a message's accesses waits for the next turn.
    Turn(access::PendingAccess),
    /// The session waits to move to a thread of its own before message-only memory is mapped.
    Thread(dma::RemoteMap),
}

/// A request that is not answered yet.
struct Pending {
    header: Header,
    deadline: Instant,
    waiting: Waiting,
}

/// The session's state after a turn: what its caller has to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SessionTurn {
    /// More messages may be waiting: take another turn.
    More,
    /// No message is left: nothing to do until the socket is readable.
    Drained,
    /// A request is pending: take another turn soon. No message is read before that request ends.
    Pending,
    /// The client needs a thread of its own; [`Session::settle_on_thread`] continues there.
    Move,
}

/// A client's session: what was negotiated, and the request at hand.
pub(crate) struct Session {
    pub(crate) channel: Arc<Channel>,
    config: Arc<Config>,
    live: Arc<Live>,
    negotiated: Option<Negotiated>,
    pending: Option<Pending>,
    /// The session runs on a thread of its own, where message-only memory works.
    private: bool,
    /// The total size, in bytes, of DMA maps that came with a descriptor.
    mapped_bytes: u64,
    /// The number of late memories that were known when the client came: it has none of the later
    /// ones.
    late_added: u64,
    /// The cost of the current turn so far.
    cost: usize,
    /// The state that a successor process needs; `None` if the session is not kept.
    pub(crate) kept: Option<Box<Keeping>>,
    /// The state that a successor needs of a client that resumes its function by itself.
    pub(crate) released: Option<Box<Keeping>>,
    /// The client does not resume a held function, which the endpoint is to give up.
    pub(crate) gives_up: bool,
    /// A request that waited for the function to become quiet ran into its deadline, and no later
    /// one has found the function quiet.
    stuck: bool,
    /// The number and bytes of the client's resources that await closing or unmapping, and the time
    /// since when both are unchanged. `None` while they are few enough for the next message to be
    /// read.
    held_since: Option<((usize, usize), Instant)>,
}

impl Session {
    pub(crate) fn new(channel: Channel, config: Arc<Config>, live: Arc<Live>) -> Self {
        Self {
            channel: Arc::new(channel),
            late_added: config.late.added(),
            config,
            live,
            negotiated: None,
            pending: None,
            private: false,
            mapped_bytes: 0,
            cost: 0,
            kept: None,
            released: None,
            gives_up: false,
            stuck: false,
            held_since: None,
        }
    }

    /// Returns whether the session runs on a thread of its own, for its message-only memory.
    #[inline]
    pub(crate) fn is_private(&self) -> bool {
        self.private
    }

    /// Returns whether version and capabilities have been negotiated.
    pub(crate) fn is_negotiated(&self) -> bool {
        self.negotiated.is_some()
    }

    /// Returns whether a request is pending; no message is read before it is answered.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.is_some()
            || self.held_since.is_some()
            || self.kept.as_ref().is_some_and(|kept| kept.waits())
    }

    /// Returns whether output is waiting to be sent.
    pub(crate) fn has_output(&self) -> bool {
        let blocked = self.kept.as_ref().is_some_and(|kept| kept.is_blocked());
        blocked || self.channel.with(|wire| wire.has_output())
    }

    /// Returns whether a request is quiescing the function. A poll would end the quiescence.
    pub(crate) fn is_quiescing(&self) -> bool {
        let waiting = self.pending.as_ref().map(|pending| &pending.waiting);
        matches!(
            waiting,
            Some(Waiting::Unmap(_) | Waiting::Reset | Waiting::Quiet(_) | Waiting::Log(_))
        )
    }

    /// Returns whether the rest of a message's accesses waits for the next turn, and for nothing
    /// else.
    pub(crate) fn is_accessing(&self) -> bool {
        self.pending.as_ref().is_some_and(|pending| matches!(pending.waiting, Waiting::Turn(_)))
    }

    /// Returns whether a message, or the end of the connection, came while the function waited for
    /// the client's memory, and is yet to be received. No descriptor announces it.
    pub(crate) fn has_kept(&self) -> bool {
        self.private && self.channel.has_kept()
    }

    /// Processes the messages that have arrived, up to [`COST_PER_TURN`].
    pub(crate) fn turn(&mut self, device: &mut Device, now: Instant) -> Result<SessionTurn, End> {
        if self.kept.is_some() {
            return self.turn_kept(device, now);
        }
        self.channel.with(|wire| wire.flush())?;
        self.cost = 0;
        device.begin_turn();
        while self.cost < COST_PER_TURN {
            self.cost += 1;
            if let Some(pending) = self.pending.take() {
                self.resume(device, pending, now)?;
            }
            if let Some(pending) = &self.pending {
                let moving = matches!(pending.waiting, Waiting::Thread(_));
                return Ok(if moving { SessionTurn::Move } else { SessionTurn::Pending });
            }
            if self.holds_much(device, now)? {
                return Ok(SessionTurn::Pending);
            }
            match self.channel.receive()? {
                Some(message) => self.take(device, message, now)?,
                None => return Ok(SessionTurn::Drained),
            }
        }
        Ok(SessionTurn::More)
    }

    /// Returns whether so much of the client's resources awaits closing or unmapping that no
    /// further message is read. A VMM that unmaps much at once waits here until less is left. A
    /// client whose resources cannot be closed within the reply deadline is disconnected.
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

    /// Continues after [`SessionTurn::Move`]: on the session's own thread, or with an error if it
    /// has none.
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

    /// Carries out a message and answers it, or keeps it as pending.
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
            return Err(End::Broken("its version request was refused"));
        }
        Ok(())
    }

    /// Carries out the request in `message`. Descriptors that the request does not use are closed
    /// elsewhere.
    fn dispatch(
        &mut self,
        device: &mut Device,
        message: Message,
        now: Instant,
    ) -> Result<Answer, Errno> {
        let command = Command::from_code(message.header.command.get());
        // An unmap needs no descriptor, but SPDK sends the one that it mapped with. Refusing it
        // would keep memory mapped that the client considers unmapped.
        let takes_files =
            matches!(command, Some(Command::DmaMap | Command::DmaUnmap | Command::DeviceSetIrqs));
        if message.excess || !(takes_files || message.files.is_empty()) {
            add(&self.live.refused_files, message.files.len() as u64);
            return Err(Errno::INVAL);
        }
        // Before version and capabilities are negotiated, only a version request is valid, and
        // afterwards it no longer is (section *Versioning*).
        if self.is_negotiated() == (command == Some(Command::Version)) {
            return Err(Errno::INVAL);
        }
        let payload = &message.payload;
        let command = command.ok_or(Errno::INVAL)?;
        if device.is_held() && resume::touches(command, payload) {
            device.abandon();
        }
        match command {
            Command::Version => self.version(device, payload),
            Command::DmaMap => self.dma_map(device, payload, message.files),
            Command::DmaUnmap => self.dma_unmap(device, payload),
            Command::DeviceGetInfo => self.device_info(payload),
            Command::DeviceGetRegionInfo => info::region_info(device, payload),
            Command::DeviceGetRegionIoFds => self.region_io_fds(device, payload),
            Command::DeviceGetIrqInfo => irqs::info(device, payload),
            Command::DeviceSetIrqs => self.set_irqs(device, payload, message.files),
            Command::RegionRead => self.region_read(device, payload),
            Command::RegionWrite => self.region_write(device, payload, now),
            Command::RegionWriteMulti => self.region_write_multi(device, payload, now),
            Command::DeviceReset => self.device_reset(device, payload),
            // The server sends these commands; a client must not.
            Command::DmaRead | Command::DmaWrite => Err(Errno::INVAL),
            Command::DeviceFeature => self.device_feature(device, payload),
            Command::MigDataRead => self.migration_read(device, payload),
            Command::MigDataWrite => self.migration_write(device, payload),
            Command::DirtyPages => Err(Errno::NOTSUP),
        }
    }

    /// Sets interrupts, also of the hardware and in the kept state.
    fn set_irqs(
        &mut self,
        device: &mut Device,
        payload: &[u8],
        files: Vec<Foreign>,
    ) -> Result<Answer, Errno> {
        let routes = !files.is_empty() && irqs::is_msix(payload);
        let answer = irqs::set(device, payload, files, &self.live)?;
        irqs::pass_on(device, payload)?;
        if let Some(kept) = &mut self.kept {
            // The kept state is written anew, including all regions.
            self.cost += device.map.regions().len() / REGIONS_PER_COST;
            kept.lines_changed(device.lines())?;
        }
        if routes {
            self.live.stamp_first(&self.live.first_route_at);
        }
        Ok(answer)
    }

    /// Negotiates version and capabilities.
    fn version(&mut self, device: &mut Device, payload: &[u8]) -> Result<Answer, Errno> {
        let has = Extensions {
            resume: self.is_resumable(device),
            one_connection: self.config.one_connection,
        };
        let (negotiated, reply) = version::negotiate(payload, has)?;
        if device.is_held() && !negotiated.resume {
            // Once it is disconnected, the endpoint is as for any first client.
            self.gives_up = true;
            return Err(Errno::AGAIN);
        }
        self.channel.set_max_xfer(negotiated.max_xfer);
        self.negotiated = Some(negotiated);
        if let Some(kept) = &mut self.kept {
            kept.negotiated(negotiated);
        }
        self.live.stamp(&self.live.negotiated_at);
        Ok(Answer::Reply(reply))
    }

    /// Returns the time that the reply to a request may take. Clients send several unmaps and then
    /// wait for all replies: if the function did not become quiet for the first unmap, the others
    /// must not each wait for the full deadline. They still wait for [`STUCK_PATIENCE`], since the
    /// function may have become quiet meanwhile, and some functions take a turn to report it.
    fn patience(&self, header: &Header) -> Duration {
        let code = header.command.get();
        let wait_for_rest = [Command::DmaUnmap, Command::DeviceReset, Command::DeviceFeature];
        match self.stuck && wait_for_rest.iter().any(|command| *command as u16 == code) {
            true => STUCK_PATIENCE.min(self.config.reply_deadline),
            false => self.config.reply_deadline,
        }
    }

    /// Does a function-level reset; memory and routes stay (section *VFIO_USER_DEVICE_RESET*). A
    /// function that was stopped or has failed runs afterwards. The reply is sent when no earlier
    /// request can reach the client's memory any more.
    fn device_reset(&mut self, device: &mut Device, payload: &[u8]) -> Result<Answer, Errno> {
        if !payload.is_empty() {
            return Err(Errno::INVAL);
        }
        device.function.reset();
        self.resume_reset(device, false)
    }

    /// Ends a reset if the function is quiet, or its time is over.
    fn resume_reset(&mut self, device: &mut Device, expired: bool) -> Result<Answer, Errno> {
        let quiet = device.function.quiesce();
        if !quiet && !expired {
            return Ok(Answer::Later(Waiting::Reset));
        }
        self.stuck = !quiet;
        device.start();
        self.note_run(device);
        if quiet { Ok(Answer::Reply(Vec::new())) } else { Err(Errno::BUSY) }
    }

    /// Goes on with a pending request.
    fn resume(&mut self, device: &mut Device, pending: Pending, now: Instant) -> Result<(), End> {
        let Pending { header, deadline, waiting } = pending;
        let outcome = match waiting {
            Waiting::Unmap(unmap) => self.resume_unmap(device, unmap, now >= deadline),
            Waiting::Reset => self.resume_reset(device, now >= deadline),
            Waiting::Quiet(transition) => self.walk(device, transition, now >= deadline),
            Waiting::Log(log) => self.log(device, log, now >= deadline),
            Waiting::Turn(rest) => self.go_on(device, rest, now),
            waiting @ Waiting::Thread(_) => Ok(Answer::Later(waiting)),
        };
        self.answer(&header, outcome, deadline)
    }

    /// Sends the reply, or stores the request as pending.
    fn answer(
        &mut self,
        header: &Header,
        outcome: Result<Answer, Errno>,
        deadline: Instant,
    ) -> Result<(), End> {
        let none = Attachments::default();
        let (reply, payload, attachments, files) = match outcome {
            Ok(Answer::Later(waiting)) => {
                self.pending = Some(Pending { header: *header, deadline, waiting });
                return Ok(());
            }
            Ok(Answer::Reply(payload)) => (header.reply(payload.len()), payload, none, Vec::new()),
            Ok(Answer::ReplyWith(payload, attachments, files)) => {
                (header.reply(payload.len()), payload, attachments, files)
            }
            Err(errno) => {
                self.live.error(errno.raw_os_error());
                (header.error_reply(errno.raw_os_error()), Vec::new(), none, Vec::new())
            }
        };
        if let Some(kept) = &mut self.kept {
            let reply = (&reply, payload.as_slice(), attachments);
            return kept.answer(&self.channel, reply, header.no_reply());
        }
        if header.no_reply() {
            return Ok(());
        }
        self.channel.with(|wire| wire.send(&reply, &payload, files))
    }
}

/// Parses `payload` as exactly one `T`.
fn exactly<T: FromBytes>(payload: &[u8]) -> Result<T, Errno> {
    T::read_from_bytes(payload).map_err(|_| Errno::INVAL)
}

/// Parses the `T` at the start of `payload`; returns it with the bytes that follow.
fn prefix<T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable>(
    payload: &[u8],
) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(payload).map_err(|_| Errno::INVAL)
}
