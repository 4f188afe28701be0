//! The values of features (section 5.21.1).

use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_nvme_spec::identify::IdentifyController;
use slipway_nvme_spec::log::Health;

use crate::health::{TEMPERATURE, WARNING_TEMPERATURE};

/// A timestamp has 48 bits.
pub(crate) const TIMESTAMP_MASK: u64 = (1 << 48) - 1;

/// The limits of Interrupt Coalescing: an interrupt that is held back is due as soon as either is
/// reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Coalescing {
    /// Entries of a completion queue that wait for the host, 2 to 256.
    pub entries: u32,
    /// The time since the first of these entries was written.
    pub time: Duration,
}

/// The part of the features that the threads of I/O commands know.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tuning {
    /// The Arbitration Burst (section 4.13): the most commands that a queue may start in its turn.
    /// `None` if there is no limit.
    pub burst: Option<u32>,
    /// WCE: whether the volatile write cache is in use (section 5.21.1.6).
    pub write_cache: bool,
    /// The limits of Interrupt Coalescing (section 5.21.1.8), or `None` if it is off.
    pub coalescing: Option<Coalescing>,
    /// Vectors with coalescing disabled (section 5.21.1.9, CD).
    uncoalesced: Vec<bool>,
}

impl Tuning {
    /// Returns whether interrupts of `vector` may be coalesced.
    pub fn coalesces(&self, vector: u16) -> bool {
        self.uncoalesced.get(usize::from(vector)).is_some_and(|disabled| !disabled)
    }
}

/// Values of all features that do not belong to a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Features {
    pub arbitration: u32,
    /// The workload hint of Power Management, whose power state is 0.
    #[serde(default)]
    pub power: u32,
    /// Composite temperature thresholds in kelvins: over, under.
    pub temperature: [u16; 2],
    pub write_cache: bool,
    /// I/O queue pairs that the host was granted.
    pub queue_pairs: u16,
    /// The most I/O queue pairs that can be granted.
    pub most_queue_pairs: u16,
    pub coalescing: u32,
    /// Vectors with coalescing disabled.
    pub uncoalesced: Vec<bool>,
    pub write_atomicity: u32,
    pub events: u32,
    /// The keep alive timeout in milliseconds; 0 is off.
    pub keep_alive: u32,
    /// The timestamp that the host set, milliseconds since 1970; 0 after a reset.
    pub timestamp: u64,
    /// `true` if the host has set the timestamp.
    pub timestamp_set: bool,
    /// When the timestamp was set, on the controller's clock.
    pub timestamp_at: Duration,
    pub host_id: [u8; 16],
    /// ACRE of Host Behavior Support. The value is only kept: no status of this controller asks for
    /// a delay.
    #[serde(default)]
    pub advanced_retry: bool,
}

impl Features {
    /// Returns the defaults of a controller with so many queue pairs and vectors, at time `now`.
    pub fn new(queue_pairs: u16, vectors: usize, now: Duration) -> Self {
        Self {
            // Burst of 64 (2^6), as Identify recommends.
            arbitration: 6,
            power: 0,
            temperature: [WARNING_TEMPERATURE, 0],
            write_cache: true,
            queue_pairs,
            most_queue_pairs: queue_pairs,
            coalescing: 0,
            uncoalesced: vec![false; vectors],
            write_atomicity: 0,
            events: 0,
            keep_alive: 0,
            timestamp: 0,
            timestamp_set: false,
            timestamp_at: now,
            host_id: [0; 16],
            advanced_retry: false,
        }
    }

    /// Returns what the threads that carry out I/O commands need.
    pub fn tuning(&self) -> Tuning {
        let log2 = self.arbitration & 7;
        Tuning {
            burst: (log2 < 7).then(|| 1 << log2),
            write_cache: self.write_cache,
            coalescing: self.coalescing(),
            uncoalesced: self.uncoalesced.clone(),
        }
    }

    /// Returns the limits of Interrupt Coalescing, or `None` if either field is 0, which switches
    /// it off.
    fn coalescing(&self) -> Option<Coalescing> {
        let (threshold, time) = (self.coalescing & 0xff, self.coalescing >> 8 & 0xff);
        let time_unit = Duration::from_micros(100);
        (threshold > 0 && time > 0)
            .then(|| Coalescing { entries: threshold + 1, time: time_unit * time })
    }

    /// Returns whether the host wants events of changed namespaces (section 5.21.1.11).
    pub fn namespace_notices(&self) -> bool {
        self.events & IdentifyController::EVENT_NAMESPACE != 0
    }

    /// Returns the keep alive timeout, or `None` if it is off.
    pub fn keep_alive(&self) -> Option<Duration> {
        (self.keep_alive > 0).then(|| Duration::from_millis(self.keep_alive.into()))
    }

    /// Returns the Critical Warning of the SMART log.
    pub fn warning(&self) -> u8 {
        let [over, under] = self.temperature;
        let outside = TEMPERATURE >= over || TEMPERATURE <= under;
        if outside { Health::WARNING_TEMPERATURE } else { 0 }
    }

    /// Returns the values at time `now`, independent of this process's clock.
    pub fn stopped(&self, now: Duration) -> Self {
        let elapsed = now.saturating_sub(self.timestamp_at).as_millis() as u64;
        let timestamp = self.timestamp.saturating_add(elapsed) & TIMESTAMP_MASK;
        Self { timestamp, timestamp_at: Duration::ZERO, ..self.clone() }
    }

    /// Returns the values of [`Features::stopped`], continued at time `now` of this process's
    /// clock.
    pub fn started(self, now: Duration) -> Self {
        Self { timestamp_at: now, ..self }
    }

    /// Returns whether a saved state has the shape of `self`: the same numbers of queues and
    /// vectors.
    pub fn fits(&self, saved: &Self) -> bool {
        saved.most_queue_pairs == self.most_queue_pairs
            && (1..=self.most_queue_pairs).contains(&saved.queue_pairs)
            && saved.uncoalesced.len() == self.uncoalesced.len()
            && saved.timestamp <= TIMESTAMP_MASK
            && saved.timestamp_at == Duration::ZERO
    }

    pub fn queue_dword(&self) -> u32 {
        let less_one = u32::from(self.queue_pairs) - 1;
        less_one << 16 | less_one
    }

    /// Returns the Timestamp data structure (section 5.21.1.14).
    pub fn timestamp_bytes(&self, now: Duration) -> [u8; 8] {
        let mut bytes = self.stopped(now).timestamp.to_le_bytes();
        bytes[6] = u8::from(self.timestamp_set) << 1;
        bytes
    }
}
