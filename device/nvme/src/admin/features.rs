//! Get Features and Set Features (sections 5.13 and 5.21).

use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_nvme_spec::NSID_ALL;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::feature::{FeatureId, Select, capability};
use slipway_nvme_spec::identify::IdentifyController;
use slipway_nvme_spec::log::Health;
use slipway_nvme_spec::status::Status;

use super::identify::{KEEP_ALIVE_GRANULARITY, WARNING_TEMPERATURE};
use crate::controller::Controller;
use crate::health::TEMPERATURE;
use crate::io::Outcome;

/// The limits of Interrupt Coalescing: an interrupt that is held back is due as soon as either is
/// reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Coalescing {
    /// Entries of a completion queue that wait for the host, 2 to 256.
    pub entries: u32,
    /// The time since the first of these entries was written.
    pub time: Duration,
}

/// Values of all features that do not belong to a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Features {
    arbitration: u32,
    /// Composite temperature thresholds in kelvins: over, under.
    temperature: [u16; 2],
    write_cache: bool,
    /// I/O queue pairs that the host was granted.
    queue_pairs: u16,
    /// The most I/O queue pairs that can be granted.
    most_queue_pairs: u16,
    coalescing: u32,
    /// Vectors with coalescing disabled.
    uncoalesced: Vec<bool>,
    write_atomicity: u32,
    events: u32,
    /// The keep alive timeout in milliseconds; 0 is off.
    keep_alive: u32,
    /// The timestamp that the host set, milliseconds since 1970; 0 after a reset.
    timestamp: u64,
    /// `true` if the host has set the timestamp.
    timestamp_set: bool,
    /// When the timestamp was set, on the controller's clock.
    timestamp_at: Duration,
    host_id: [u8; 16],
    /// ACRE of Host Behavior Support. The value is only kept: no status of this controller asks for
    /// a delay.
    #[serde(default)]
    advanced_retry: bool,
}

impl Features {
    /// Returns the defaults of a controller with so many queue pairs and vectors, at time `now`.
    pub fn new(queue_pairs: u16, vectors: usize, now: Duration) -> Self {
        Self {
            // Burst of 64 (2^6), as Identify recommends.
            arbitration: 6,
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

    /// Returns the Arbitration Burst: the most commands that a queue may start in its turn. Returns
    /// `None` if there is no limit.
    pub fn burst(&self) -> Option<u32> {
        let log2 = self.arbitration & 7;
        (log2 < 7).then(|| 1 << log2)
    }

    /// Returns the limits of Interrupt Coalescing (section 5.21.1.8), or `None` if either field is
    /// 0, which switches it off.
    pub fn coalescing(&self) -> Option<Coalescing> {
        let (threshold, time) = (self.coalescing & 0xff, self.coalescing >> 8 & 0xff);
        let time_unit = Duration::from_micros(100);
        (threshold > 0 && time > 0)
            .then(|| Coalescing { entries: threshold + 1, time: time_unit * time })
    }

    /// Returns whether interrupts of `vector` may be coalesced (section 5.21.1.9, CD).
    pub fn coalesces(&self, vector: u16) -> bool {
        self.uncoalesced.get(usize::from(vector)).is_some_and(|disabled| !disabled)
    }

    /// Returns WCE: whether the volatile write cache is in use (section 5.21.1.6).
    pub fn write_cache(&self) -> bool {
        self.write_cache
    }

    /// Returns whether the host wants events of changed namespaces (section 5.21.1.11).
    pub fn namespace_notices(&self) -> bool {
        self.events & IdentifyController::EVENT_NAMESPACE != 0
    }

    /// Returns the number of I/O queue pairs that the host was granted.
    pub fn queue_pairs(&self) -> u16 {
        self.queue_pairs
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

    fn queue_dword(&self) -> u32 {
        let less_one = u32::from(self.queue_pairs) - 1;
        less_one << 16 | less_one
    }

    /// Returns the Timestamp data structure (section 5.21.1.14).
    fn timestamp_bytes(&self, now: Duration) -> [u8; 8] {
        let mut bytes = self.stopped(now).timestamp.to_le_bytes();
        bytes[6] = u8::from(self.timestamp_set) << 1;
        bytes
    }
}

/// Bytes of the Host Behavior Support data structure (section 5.21.1.18).
const HOST_BEHAVIOR: usize = 512;
/// A timestamp has 48 bits.
const TIMESTAMP_MASK: u64 = (1 << 48) - 1;

/// Returns the capabilities of a feature, or `None` if the feature is not supported.
fn capabilities(id: FeatureId) -> Option<u32> {
    match id {
        FeatureId::Arbitration
        | FeatureId::PowerManagement
        | FeatureId::TemperatureThreshold
        | FeatureId::VolatileWriteCache
        | FeatureId::NumberOfQueues
        | FeatureId::InterruptCoalescing
        | FeatureId::InterruptVectorConfiguration
        | FeatureId::WriteAtomicity
        | FeatureId::AsynchronousEventConfiguration
        | FeatureId::Timestamp
        | FeatureId::KeepAliveTimer
        | FeatureId::HostBehaviorSupport
        | FeatureId::HostIdentifier => Some(capability::CHANGEABLE),
        FeatureId::ErrorRecovery => Some(capability::CHANGEABLE | capability::NAMESPACE_SPECIFIC),
        _ => None,
    }
}

impl Controller {
    /// Carries out Get Features (section 5.13). Nothing is saveable, so the saved value is the
    /// default.
    pub(super) fn get_features(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let id = FeatureId(entry.dword(10) as u8);
        let select = Select((entry.dword(10) >> 8) as u8 & 7);
        let capabilities = capabilities(id).ok_or(Status::INVALID_FIELD.dnr())?;
        match select {
            Select::Current => {
                let features = self.features.clone();
                self.value(&features, id, entry, true)
            }
            Select::Default | Select::Saved => {
                let defaults = self.default_features();
                self.value(&defaults, id, entry, false)
            }
            Select::Capabilities => Ok(capabilities),
            _ => Err(Status::INVALID_FIELD.dnr()),
        }
    }

    /// Returns a feature's value in `from`. For a feature of a namespace, `current` chooses the
    /// namespace's value instead of the default.
    fn value(
        &mut self,
        from: &Features,
        id: FeatureId,
        entry: &SubmissionEntry,
        current: bool,
    ) -> Result<u32, Status> {
        let cdw11 = entry.dword(11);
        Ok(match id {
            FeatureId::Arbitration => from.arbitration,
            FeatureId::TemperatureThreshold => {
                u32::from(from.temperature[threshold(cdw11, false)?])
            }
            FeatureId::ErrorRecovery => self.error_recovery(entry.nsid.get(), current)?,
            FeatureId::VolatileWriteCache => u32::from(from.write_cache),
            FeatureId::NumberOfQueues => from.queue_dword(),
            FeatureId::InterruptCoalescing => from.coalescing,
            FeatureId::InterruptVectorConfiguration => {
                let vector = usize::from(cdw11 as u16);
                let disabled = from.uncoalesced.get(vector).ok_or(Status::INVALID_FIELD.dnr())?;
                u32::from(*disabled) << 16 | vector as u32
            }
            FeatureId::WriteAtomicity => from.write_atomicity,
            FeatureId::AsynchronousEventConfiguration => from.events,
            FeatureId::KeepAliveTimer => from.keep_alive,
            FeatureId::Timestamp => {
                self.reply(entry, &from.timestamp_bytes(self.clock.now()))?;
                0
            }
            FeatureId::HostBehaviorSupport => {
                let mut behavior = [0; HOST_BEHAVIOR];
                behavior[0] = from.advanced_retry.into();
                self.reply(entry, &behavior)?;
                0
            }
            FeatureId::HostIdentifier => {
                let wide = cdw11 & 1;
                self.reply(entry, &from.host_id[..if wide == 1 { 16 } else { 8 }])?;
                wide
            }
            // Power Management: there is only state 0.
            _ => 0,
        })
    }

    /// Carries out Set Features (section 5.21). Switching the write cache off ends when the cached
    /// data is on stable storage (section 5.21.1.6); with lanes, the others end when all lanes have
    /// the new value.
    pub(super) fn set_features(&mut self, entry: &SubmissionEntry) -> Outcome {
        let cache = FeatureId(entry.dword(10) as u8) == FeatureId::VolatileWriteCache;
        // A predecessor may have switched the cache off and been killed before its flush.
        let cached = cache && (self.features.write_cache || self.journal.is_some());
        let set = self.set_feature(entry);
        match set {
            Ok(_) if cached && !self.features.write_cache => {
                let features = self.features.clone();
                self.order(move |lane| lane.features = features.clone());
                self.flush_all(0, entry)
            }
            // The command ends when all lanes have the value, so a guest has no more in flight than
            // its queue holds.
            Ok(result) if self.lanes.is_some() => self.set_far_features(entry.id.get(), result),
            ended => ended.into(),
        }
    }

    fn set_feature(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let (cdw10, cdw11) = (entry.dword(10), entry.dword(11));
        let id = FeatureId(cdw10 as u8);
        capabilities(id).ok_or(Status::INVALID_FIELD.dnr())?;
        if cdw10 >> 31 == 1 {
            return Err(Status::FEATURE_NOT_SAVEABLE.dnr());
        }
        let controllers = id != FeatureId::ErrorRecovery;
        if controllers && !matches!(entry.nsid.get(), 0 | NSID_ALL) {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr());
        }
        match id {
            FeatureId::Arbitration => self.features.arbitration = cdw11,
            FeatureId::PowerManagement if cdw11 & 0x1f != 0 => {
                return Err(Status::INVALID_FIELD.dnr());
            }
            FeatureId::TemperatureThreshold => self.set_temperature(cdw11)?,
            FeatureId::ErrorRecovery => self.set_error_recovery(entry.nsid.get(), cdw11)?,
            FeatureId::VolatileWriteCache => self.features.write_cache = cdw11 & 1 == 1,
            FeatureId::NumberOfQueues => return self.set_queue_pairs(cdw11),
            FeatureId::InterruptCoalescing => self.features.coalescing = cdw11 & 0xffff,
            FeatureId::InterruptVectorConfiguration => {
                let vector = self.features.uncoalesced.get_mut(usize::from(cdw11 as u16));
                *vector.ok_or(Status::INVALID_FIELD.dnr())? = cdw11 >> 16 & 1 == 1;
            }
            FeatureId::WriteAtomicity => self.features.write_atomicity = cdw11 & 1,
            FeatureId::AsynchronousEventConfiguration => self.features.events = cdw11,
            FeatureId::KeepAliveTimer => self.set_keep_alive(cdw11),
            FeatureId::Timestamp => self.set_timestamp(entry)?,
            FeatureId::HostBehaviorSupport => self.set_host_behavior(entry)?,
            FeatureId::HostIdentifier => self.set_host_id(entry)?,
            _ => {}
        }
        Ok(0)
    }

    /// Sets Number of Queues (section 5.21.1.7): grants at most as many pairs as there are.
    fn set_queue_pairs(&mut self, cdw11: u32) -> Result<u32, Status> {
        let (submission, completion) = (cdw11 & 0xffff, cdw11 >> 16);
        if submission == 0xffff || completion == 0xffff {
            return Err(Status::INVALID_FIELD.dnr());
        }
        if self.queues.has_io() || self.has_far_queues() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr());
        }
        // One number is for both kinds of queue: a host that asks for fewer of one kind uses fewer
        // of it.
        let asked = submission.max(completion) + 1;
        self.features.queue_pairs = asked.min(self.features.most_queue_pairs.into()) as u16;
        Ok(self.features.queue_dword())
    }

    /// Sets a Temperature Threshold (section 5.21.1.4). The temperature never changes, so the
    /// temperature can pass a threshold only when the threshold is set.
    fn set_temperature(&mut self, cdw11: u32) -> Result<(), Status> {
        let before = self.features.warning();
        self.features.temperature[threshold(cdw11, true)?] = cdw11 as u16;
        let now = self.features.warning();
        let enabled = self.features.events & u32::from(Health::WARNING_TEMPERATURE) != 0;
        if before == 0 && now != 0 && enabled {
            self.events.raise(Event::TEMPERATURE);
        }
        Ok(())
    }

    /// Sets the Keep Alive Timer (section 5.21.1.15), rounded up to the granularity that Identify
    /// reports.
    fn set_keep_alive(&mut self, milliseconds: u32) {
        let granularity = u32::from(KEEP_ALIVE_GRANULARITY) * 100;
        let rounded = milliseconds.div_ceil(granularity).saturating_mul(granularity);
        self.features.keep_alive = rounded;
        self.keep_alive_since = self.clock.now();
    }

    fn set_timestamp(&mut self, entry: &SubmissionEntry) -> Result<(), Status> {
        let mut bytes = [0; 8];
        self.payload(entry, &mut bytes)?;
        self.features.timestamp = u64::from_le_bytes(bytes) & TIMESTAMP_MASK;
        self.features.timestamp_set = true;
        self.features.timestamp_at = self.clock.now();
        Ok(())
    }

    fn set_host_id(&mut self, entry: &SubmissionEntry) -> Result<(), Status> {
        let mut id = [0; 16];
        let len = if entry.dword(11) & 1 == 1 { 16 } else { 8 };
        self.payload(entry, &mut id[..len])?;
        self.features.host_id = id;
        Ok(())
    }

    /// Sets Host Behavior Support (section 5.21.1.18): one of its bytes has a meaning.
    fn set_host_behavior(&mut self, entry: &SubmissionEntry) -> Result<(), Status> {
        let mut behavior = [0; HOST_BEHAVIOR];
        self.payload(entry, &mut behavior)?;
        self.features.advanced_retry = match behavior[0] {
            0 => false,
            1 => true,
            _ => return Err(Status::INVALID_FIELD.dnr()),
        };
        Ok(())
    }

    /// Returns the Error Recovery value of a namespace. Namespace 0 gives the default, 0: SPDK's
    /// compliance program asks for the value without naming a namespace.
    fn error_recovery(&self, nsid: u32, current: bool) -> Result<u32, Status> {
        if nsid == 0 {
            return Ok(0);
        }
        let namespace = self.namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        Ok(if current { namespace.error_recovery.into() } else { 0 })
    }

    /// Sets Error Recovery (section 5.21.1.5): the time limit is only kept, since disks have limits
    /// of their own. Deallocated blocks never fail (NSFEAT), so DULBE is refused.
    fn set_error_recovery(&mut self, nsid: u32, cdw11: u32) -> Result<(), Status> {
        const DULBE: u32 = 1 << 16;
        if cdw11 & DULBE != 0 {
            return Err(Status::INVALID_FIELD.dnr());
        }
        if nsid != NSID_ALL && self.namespaces.get(nsid).is_none() {
            return Err(Status::INVALID_NAMESPACE.dnr());
        }
        let chosen = self.namespaces.iter_mut().filter(|one| nsid == NSID_ALL || one.nsid == nsid);
        chosen.for_each(|namespace| namespace.error_recovery = cdw11 as u16);
        Ok(())
    }
}

/// Returns the threshold that dword 11 of Temperature Threshold selects (THSEL), of the composite
/// temperature. "All sensors" (TMPSEL Fh) is valid only for setting.
fn threshold(cdw11: u32, set: bool) -> Result<usize, Status> {
    let sensor = cdw11 >> 16 & 0xf;
    let which = (cdw11 >> 20 & 3) as usize;
    if which > 1 || !(sensor == 0 || set && sensor == 0xf) {
        return Err(Status::INVALID_FIELD.dnr());
    }
    Ok(which)
}
