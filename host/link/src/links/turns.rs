//! Turns: connections are served by their tenants' shares, one quantum after the other.

use std::time::{Duration, Instant};

use rustix::event::epoll;
use slipway_family::Stalls;
use slipway_rate::Bucket;
use slipway_warp::share::Ticket;

use super::{LISTENER, Links};
use crate::connection::{Around, Broken, Connection};
use crate::shares::{Direction, Served, Transfer};

/// The most events of epoll in a turn.
const EVENTS: usize = 64;
/// The bytes to move in a quantum, which ends with the call that reaches them: at 1 it is one
/// recv(2), or one look at each stream, however much that moves.
const QUANTUM: usize = 1;
/// Received bytes of a quantum from which on the socket has more, most likely.
const FULL: u64 = 64 << 10;
/// The most quanta before the kernel and the programs are polled again.
const QUANTA: usize = 1024;

/// The outcome of a quantum of a connection.
struct Quantum {
    /// The bytes that it moved.
    bytes: u64,
    /// There is more to send: the quantum was not enough, or received frames need answers.
    sends: bool,
    /// The socket has more to receive, most likely.
    receives: bool,
    /// `true` if there was anything to do; an error ends the connection.
    done: Result<bool, Broken>,
}

impl Quantum {
    /// Has `connection` move bytes in one direction.
    fn run(connection: &mut Connection, direction: Direction, around: &mut Around<'_>) -> Self {
        let moved = |connection: &Connection| match direction {
            Direction::In => connection.received(),
            Direction::Out => connection.sent(),
        };
        let before = moved(connection);
        let done = match direction {
            _ if connection.left_out.is_some() => Ok(false),
            Direction::In => connection.receive(QUANTUM, around),
            Direction::Out if connection.held.is_some() => Ok(false),
            Direction::Out => connection.send(QUANTUM, around),
        };
        let bytes = moved(connection) - before;
        let sends = *done.as_ref().unwrap_or(&false) && connection.wants_to_send(false);
        let receives = direction == Direction::In && bytes >= FULL && !connection.coalesces();
        Self { bytes, sends, receives, done }
    }
}

impl Links {
    /// Serves the connections that have something to do, as their tenants' shares say. Returns
    /// whether there was anything: if so, there may be more.
    pub fn turn(&mut self, now: Instant) -> bool {
        self.stalls.settle(now);
        if self.paused.take_if(|until| *until <= now).is_some() {
            self.listen_for(epoll::EventFlags::IN);
        }
        let mut ready = [(0, false, false); EVENTS];
        let count = self.ready(&mut ready);
        let mut worked = false;
        if ready[..count].iter().any(|(key, ..)| *key == LISTENER) {
            worked |= self.accept(now);
        }
        self.order.rotate_left(usize::from(!self.order.is_empty()));
        self.stalls.begin(now);
        for at in 0..self.order.len() {
            let Some(key) = self.order.get(at).copied() else { break };
            let found = ready[..count].iter().find(|(number, ..)| *number == u64::from(key));
            let (readable, writable) = found.map_or((false, false), |(_, r, w)| (*r, *w));
            worked |= self.prepare(key, readable, writable, now);
            self.charge(key, now);
        }
        self.stalls.end();
        worked |= self.share(now);
        for at in 0..self.order.len() {
            let Some(key) = self.order.get(at).copied() else { break };
            self.throttle(key, now);
            self.watch(key);
        }
        self.order.retain(|key| self.connections.contains_key(key));
        worked
    }

    /// Polls epoll(7), and does not wait. Fills in the key of each ready connection, whether it can
    /// be read, and whether it can be written. Returns their number.
    fn ready(&self, ready: &mut [(u64, bool, bool); EVENTS]) -> usize {
        let none = epoll::EventFlags::empty();
        let mut events = [epoll::Event { flags: none, data: epoll::EventData::new_u64(0) }; EVENTS];
        let at_once = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        let count = epoll::wait(&self.epoll, &mut events, Some(&at_once)).unwrap_or(0);
        let failed = epoll::EventFlags::ERR | epoll::EventFlags::HUP;
        for (to, event) in ready.iter_mut().zip(&events[..count]) {
            let flags = event.flags;
            let read = flags.intersects(failed | epoll::EventFlags::IN);
            let write = flags.intersects(failed | epoll::EventFlags::OUT);
            *to = (event.data.u64(), read, write);
        }
        count
    }

    /// Queues the directions in which a connection has something to do, and does the work that is
    /// not scheduled by shares: the handshake, and timers.
    fn prepare(&mut self, key: u32, readable: bool, writable: bool, now: Instant) -> bool {
        self.throttle(key, now);
        let (mut around, connections, _) = self.around(now);
        let Some(connection) = connections.get_mut(&key) else { return false };
        let was_up = connection.is_up();
        let shakes = !was_up && (readable || writable);
        let done = if shakes { connection.shake_hands(&mut around) } else { Ok(false) };
        let done = done.and_then(|worked| connection.tend(&mut around).map(|()| worked));
        let (is_up, sends) = (connection.is_up(), connection.wants_to_send(writable));
        let (due, is_served) = (connection.is_due(now), connection.left_out.is_none());
        match done {
            Ok(worked) => {
                if !was_up && is_up {
                    self.came_up(key, now);
                }
                if (readable || due) && is_up && is_served {
                    self.shares.want(key, Direction::In);
                }
                if sends {
                    self.shares.want(key, Direction::Out);
                }
                worked
            }
            Err(broken) => {
                self.end(key, &broken, now);
                true
            }
        }
    }

    /// Sets until when a connection may not send: its tenant has sent enough, its way is busy, or
    /// it is left out, so that it does not receive either.
    fn throttle(&mut self, key: u32, now: Instant) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        let opens = self.rates.get(&connection.tenant).map(Bucket::opens_at);
        let way = self.shares.held(key, now.saturating_duration_since(self.begin));
        let until = opens.max(way).map(|until| self.begin + until);
        connection.left_out = self.stalls.until(connection.tenant.as_str());
        connection.held = until.filter(|until| *until > now).max(connection.left_out);
    }

    /// Serves chosen connections, one quantum after the other. Returns whether there was anything
    /// to do.
    fn share(&mut self, now: Instant) -> bool {
        let (mut worked, mut began) = (false, Instant::now());
        self.stalls.begin(began);
        for _ in 0..QUANTA.min(2 * self.order.len() + 2) {
            let Some(turn) = self.shares.next(self.since_begin(began)) else { break };
            // The connection may have waited for its way while its tenant sent elsewhere.
            self.throttle(turn.item.connection, began);
            let (some, ended) = self.serve(turn, began, now);
            worked |= some;
            began = ended;
        }
        self.stalls.end();
        worked
    }

    /// Serves one quantum, which begins at `began`, and pays for it. Returns whether there was
    /// anything to do, and when the quantum ended.
    fn serve(&mut self, turn: Ticket<Transfer>, began: Instant, now: Instant) -> (bool, Instant) {
        let Transfer { connection: key, direction } = turn.item;
        let (mut around, connections, _) = self.around(now);
        let Some(connection) = connections.get_mut(&key) else {
            let at = self.since_begin(began);
            self.shares.done(turn, Served::default(), at);
            return (false, began);
        };
        let quantum = Quantum::run(connection, direction, &mut around);
        let Quantum { bytes, sends, receives, done } = quantum;
        let blocked = connection.is_blocked();
        let ended = Instant::now();
        let busy = ended.saturating_duration_since(began);
        if *done.as_ref().unwrap_or(&true) {
            connection.busy += busy;
        }
        let at = self.since_begin(ended);
        self.shares.done(turn, Served { bytes, busy, blocked }, at);
        if direction == Direction::Out && bytes > 0 {
            self.count(key, bytes, now);
        }
        self.charge(key, now);
        if sends {
            self.shares.want(key, Direction::Out);
        }
        if receives {
            self.shares.want(key, Direction::In);
        }
        let worked = match done {
            Ok(worked) => worked,
            Err(broken) => {
                self.end(key, &broken, now);
                // The next connection does not pay for that.
                self.stalls.begin(Instant::now());
                true
            }
        };
        (worked, ended)
    }

    /// Charges the tenant of a connection that made the thread sleep, in a quantum or in work that
    /// is due by the clock, as the release of a FIFO's memory. A connection that has ended pays
    /// nothing.
    fn charge(&mut self, key: u32, now: Instant) {
        let Some(slept) = self.stalls.slept() else { return };
        let Self { connections, stalls, logs, settings, events, .. } = self;
        if let Some(connection) = connections.get(&key) {
            let mut around = Around { now, settings, events, logs };
            charge_tenant(stalls, slept, &connection.tenant, &mut around);
        }
    }

    /// Calls `act` for all connections, and charges the tenants of those that make the thread sleep
    /// in it.
    pub(super) fn each(
        &mut self,
        now: Instant,
        mut act: impl FnMut(&mut Connection, &mut Around<'_>),
    ) {
        let Self { connections, stalls, logs, settings, events, .. } = self;
        let mut around = Around { now, settings, events, logs };
        stalls.begin(now);
        for connection in connections.values_mut() {
            act(connection, &mut around);
            if let Some(slept) = stalls.slept() {
                charge_tenant(stalls, slept, &connection.tenant, &mut around);
            }
        }
        stalls.end();
    }

    /// Logs that the signals of a tenant's programs are not taken for a while, since one of their
    /// tables made the thread sleep for the time `slept`.
    pub(crate) fn leaves_signals(&mut self, tenant: &str, slept: Duration, now: Instant) {
        let what = format!(
            "tenant {tenant}: all streams waited {} ms for a table of its programs: their signals \
             are left for a while",
            slept.as_millis()
        );
        self.logs.warn(now, &self.settings.name, &what);
    }

    /// Counts bytes that a connection has sent for its tenant's rate.
    fn count(&mut self, key: u32, sent: u64, now: Instant) {
        let tenant = self.connections.get(&key).map(|connection| &connection.tenant);
        if let Some(rate) = tenant.and_then(|tenant| self.rates.get_mut(tenant)) {
            rate.take(sent, now.saturating_duration_since(self.begin));
        }
    }
}

/// Charges a tenant whose programs' memory made the thread sleep.
fn charge_tenant(
    stalls: &mut Stalls<String>,
    slept: Duration,
    tenant: &str,
    around: &mut Around<'_>,
) {
    if stalls.charge(tenant, slept) {
        let what = format!(
            "tenant {tenant}: all streams waited {} ms for memory of its programs: its streams \
             stand still for a while",
            slept.as_millis()
        );
        around.logs.warn(around.now, &around.settings.name, &what);
    }
}
