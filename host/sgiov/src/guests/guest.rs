//! One guest: its channel, the streams that it has named, and its requests in flight.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use slipway_sgiov_function::{Attended, Broken, Channel, Peer};
use slipway_sgiov_spec::function::{Addresses, Line, Message};
use slipway_vfio_user::Control;

use super::SIGNALS;
use super::book::Counts;

/// The number of messages that a guest may leave unread before its own messages wait.
const BACKLOG: usize = 1024;
/// The number of requests that a guest may leave unanswered before it gets no more, and that it may
/// have in flight to the engine.
const UNANSWERED: usize = 1024;

/// The tenants of a stream's two ends, sorted. Streams between the same two are left out together
/// if the memory at one of their ends made the carrier sleep: nobody knows at which.
pub type Tenants = [Arc<str>; 2];

/// The guests by number.
pub type GuestTable = BTreeMap<u32, Guest>;

/// The number of requests that wait for an answer, of at most [`UNANSWERED`].
#[derive(Default)]
pub struct InFlight(pub usize);

impl InFlight {
    /// Counts one more request. Returns `false`, and does not count it, if there are too many.
    pub fn begin(&mut self) -> bool {
        let begins = self.0 < UNANSWERED;
        self.0 += usize::from(begins);
        begins
    }

    /// Counts an answer.
    pub fn end(&mut self) {
        self.0 = self.0.saturating_sub(1);
    }
}

/// The result of [`Guest::attend`] and [`Guest::attend_function`].
pub enum GuestSignals {
    /// There is no channel, or it is suspended, or was not looked at for signals.
    Unavailable,
    /// The guest has stopped its function. The caller ends the channel ([`Guest::end_channel`]).
    ChannelEnded,
    /// The pairs whose streams the guest has signalled, and whether there was anything to do.
    Taken { pairs: Vec<u32>, worked: bool },
}

/// A guest with a socket function, from the carrier's side.
pub struct Guest {
    peer: Peer,
    control: Control,
    /// The guest's tenant, twice: the guest is left out as its streams within its tenant are.
    pub tenants: Tenants,
    /// The channel to the guest, or `None` if the guest has not started its function.
    pub channel: Option<Channel>,
    /// Set once the guest has sent its hello.
    greeted: bool,
    /// Set while the channel maps no memory, and after that until all streams are looked at.
    suspended: bool,
    /// Set from [`Guest::sleep`] to [`Guest::awake`].
    is_asked_to_wake: bool,
    /// The pair, and the guest's end of it, by connection. Written by [`Guest::enter`],
    /// [`Guest::forget`] and [`Guest::end_channel`], as is `streams`.
    pub connections: HashMap<u32, (u32, usize)>,
    /// The pair, by arena and stream. Sorted, so that the streams of one arena are found without a
    /// look at those of the others, of which a guest may have thousands.
    pub streams: BTreeMap<(u32, u32), u32>,
    /// Arenas that the guest wants back.
    leaving: HashSet<u32>,
    /// Requests to the guest that it has not answered.
    pub asked: InFlight,
    /// Requests of the guest that the engine has not answered. They outlast the channel, as their
    /// answers do.
    pub asking: InFlight,
    counts: Arc<Counts>,
}

impl Guest {
    /// Makes a guest that has not started its function.
    pub fn new(peer: Peer, control: Control, tenant: Arc<str>, counts: Arc<Counts>) -> Self {
        Self {
            peer,
            control,
            tenants: [tenant.clone(), tenant],
            channel: None,
            greeted: false,
            suspended: false,
            is_asked_to_wake: false,
            connections: HashMap::new(),
            streams: BTreeMap::new(),
            leaving: HashSet::new(),
            asked: InFlight::default(),
            asking: InFlight::default(),
            counts,
        }
    }

    /// Returns whether the guest's VMM has connected and gone.
    pub fn is_gone(&self) -> bool {
        super::serve::is_over(&self.control)
    }

    /// Returns whether the guest has sent its hello on the present channel.
    pub fn is_greeted(&self) -> bool {
        self.channel.is_some() && self.greeted
    }

    /// Does what the function asks of the channel, without a look at the guest's memory: its VMM
    /// waits for that when it pauses or ends the guest. For a guest that is left out.
    ///
    /// # Errors
    /// [`Broken`]: the guest's memory has changed.
    pub fn attend_function(&mut self) -> Result<GuestSignals, Broken> {
        let Some(channel) = &mut self.channel else { return Ok(GuestSignals::Unavailable) };
        match channel.attend()? {
            Attended::Over => return Ok(GuestSignals::ChannelEnded),
            // Also noted if the channel is resumed: all streams are looked at in `attend`.
            Attended::Suspended => self.suspended = true,
            Attended::On => {}
        }
        Ok(GuestSignals::Unavailable)
    }

    /// Takes the channel once the guest has started its function, and then takes a limited number
    /// of its signals.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters are invalid, or its memory has changed.
    pub fn attend(&mut self) -> Result<GuestSignals, Broken> {
        if self.channel.is_none() {
            self.channel = self.peer.take();
            self.greeted = false;
        }
        let Some(channel) = &mut self.channel else { return Ok(GuestSignals::Unavailable) };
        let was_suspended = self.suspended;
        match channel.attend()? {
            Attended::Over => return Ok(GuestSignals::ChannelEnded),
            Attended::Suspended => {
                self.suspended = true;
                return Ok(GuestSignals::Unavailable);
            }
            Attended::On => self.suspended = false,
        }
        let mut pairs: Vec<u32> = Vec::new();
        let mut worked = channel.flush()?;
        // Signals are counted, not streams: a guest may signal entries without a stream for
        // ever.
        for _ in 0..SIGNALS {
            let Some(stream) = channel.signal()? else { break };
            pairs.extend(self.streams.get(&stream));
            worked = true;
        }
        if channel.overflowed() || was_suspended {
            pairs.extend(self.streams.values());
            worked = true;
        }
        Ok(GuestSignals::Taken { pairs, worked })
    }

    /// Reads the guest's next message. Returns `None` if there is none, or if the guest leaves too
    /// many messages unread itself.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters or its message are invalid.
    pub fn receive(&mut self) -> Result<Option<Message>, Broken> {
        match self.channel.as_mut().filter(|channel| is_read(channel)) {
            Some(channel) => channel.hear(),
            None => Ok(None),
        }
    }

    /// Sends a message to the guest, if it has a channel.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters are invalid.
    pub fn send(&mut self, message: &Message) -> Result<(), Broken> {
        self.channel.as_mut().map_or(Ok(()), |channel| channel.say(message))
    }

    /// Handles the guest's hello: sends it its addresses.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counters are invalid.
    pub fn greet(&mut self, addresses: Addresses) -> Result<(), Broken> {
        self.greeted = true;
        self.counts.running.store(true, Ordering::Relaxed);
        self.send(&Message::Welcome(addresses))
    }

    /// Opens an arena that the guest announced.
    ///
    /// # Errors
    /// [`Broken`], also for a number that is in use, and for memory that is another arena's.
    pub fn add_arena(&mut self, arena: u32, at: u64) -> Result<(), Broken> {
        self.channel.as_mut().map_or(Ok(()), |channel| channel.add_arena(arena, at))
    }

    /// Signals a stream to the guest, if it has a channel.
    ///
    /// # Errors
    /// [`Broken`]: the guest's counter is invalid.
    pub fn signal(&mut self, arena: u32, stream: u32) -> Result<(), Broken> {
        self.channel.as_mut().map_or(Ok(()), |channel| channel.raise(arena, stream))
    }

    /// Interrupts the guest if it waits for something that was done since the last call.
    pub fn notify(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.tell();
        }
    }

    /// Asks the guest to wake the carrier, and looks once more. Returns `false` if there is work.
    pub fn sleep(&mut self) -> bool {
        self.is_asked_to_wake = true;
        self.channel.as_mut().is_none_or(|channel| {
            let reads = is_read(channel);
            channel.sleep(reads)
        })
    }

    /// Withdraws the request of [`Guest::sleep`], if there is one: a store to the guest's memory.
    /// The memory of a guest that was not asked is not touched.
    pub fn awake(&mut self) {
        if let Some(channel) = &self.channel
            && std::mem::take(&mut self.is_asked_to_wake)
        {
            channel.awake();
        }
    }

    /// Returns whether the guest may use this connection and this stream, which it names: they are
    /// not in use, and the guest has the stream and has not asked for its arena back.
    pub fn is_unused(&self, connection: u32, line: Line) -> bool {
        let streams = self.channel.as_ref().and_then(|channel| channel.streams(line.arena));
        streams.is_some_and(|streams| line.stream < streams)
            && !self.leaving.contains(&line.arena)
            && !self.connections.contains_key(&connection)
            && !self.streams.contains_key(&(line.arena, line.stream))
    }

    /// Records that a connection and its stream are end `end` of a pair.
    pub fn enter(&mut self, connection: u32, line: Line, pair: u32, end: usize) {
        self.connections.insert(connection, (pair, end));
        self.streams.insert((line.arena, line.stream), pair);
        self.count_streams();
    }

    /// Forgets a connection and its stream.
    pub fn forget(&mut self, connection: u32, line: Line) {
        self.connections.remove(&connection);
        self.streams.remove(&(line.arena, line.stream));
        self.count_streams();
    }

    fn count_streams(&self) {
        self.counts.streams.store(self.streams.len() as u64, Ordering::Relaxed);
    }

    /// Adds to the counters of bytes.
    pub fn count(&self, sent: u64, received: u64) {
        Counts::add(&self.counts.sent, sent);
        Counts::add(&self.counts.received, received);
    }

    /// Notes that the guest wants an arena back.
    ///
    /// # Errors
    /// [`Broken::Message`]: the guest has no such arena, or has asked for it already.
    pub fn leave_arena(&mut self, arena: u32) -> Result<(), Broken> {
        let streams = self.channel.as_ref().and_then(|channel| channel.streams(arena));
        let leaves = streams.is_some() && self.leaving.insert(arena);
        leaves.then_some(()).ok_or(Broken::Message)
    }

    /// Removes an arena that the guest wants back and that holds no stream any more. Returns
    /// whether there was such an arena.
    pub fn take_free(&mut self, arena: u32) -> bool {
        let used = self.streams.range((arena, 0)..=(arena, u32::MAX)).next().is_some();
        if used || !self.leaving.remove(&arena) {
            return false;
        }
        self.channel.as_mut().is_some_and(|channel| channel.remove_arena(arena))
    }

    /// Forgets the channel and everything that ends with it. Returns the channel, which may be the
    /// last reference to the guest's memory, and the guest's ends of pairs by connection.
    pub fn end_channel(&mut self) -> (Option<Channel>, HashMap<u32, (u32, usize)>) {
        self.streams.clear();
        self.leaving.clear();
        (self.suspended, self.asked) = (false, InFlight::default());
        self.counts.running.store(false, Ordering::Relaxed);
        self.counts.streams.store(0, Ordering::Relaxed);
        (self.channel.take(), std::mem::take(&mut self.connections))
    }
}

/// Returns whether the guest reads its messages, so that its own are handled.
fn is_read(channel: &Channel) -> bool {
    channel.backlog() < BACKLOG
}
