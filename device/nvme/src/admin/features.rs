//! Get Features and Set Features (sections 5.13 and 5.21).
//!
//! A new feature has its number in `slipway_nvme_spec::feature::FeatureId`, its arms in
//! `capabilities`, `Home::value` and `Home::set_feature`, and in `identify` the bit that announces
//! it, if there is one. Its value is a field of `crate::features::Features`: with
//! `#[serde(default)]`, so that the state of an older build can be read, and with a check in
//! `Features::fits` if not every saved value is valid. Threads of I/O commands get it in
//! `crate::features::Tuning`. The test `features_can_be_set_and_read` (`tests/admin.rs`) has a row
//! for it, and `tests/saved.rs` tries saved states; the fuzz target `nvme-admin` reaches it as it
//! is.
//!
//! A feature whose value is a data structure, as Timestamp's, is sent to the host by `Home::reply`
//! and got from it by `Home::payload`. Its test is `features_with_data_can_be_set_and_read`. The
//! value of a feature of a namespace, as Error Recovery's, is in the namespace, and `set_feature`
//! has its number beside Error Recovery's in `is_of_controller`.

use slipway_nvme_spec::NSID_ALL;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::Event;
use slipway_nvme_spec::feature::{FeatureId, Select, capability};
use slipway_nvme_spec::log::Health;
use slipway_nvme_spec::status::Status;

use super::identify::KEEP_ALIVE_GRANULARITY;
use crate::features::{Features, TIMESTAMP_MASK};
use crate::fleet::Question;
use crate::home::Home;
use crate::permit::Permit;

/// Bytes of the Host Behavior Support data structure (section 5.21.1.22).
const HOST_BEHAVIOR: usize = 512;

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

impl Home {
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
                self.reply(entry, &from.timestamp_bytes(self.engine.clock.now()))?;
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
            FeatureId::PowerManagement => from.power,
            // `capabilities` has none of the others.
            _ => return Err(Status::INVALID_FIELD.dnr()),
        })
    }

    /// Carries out Set Features (section 5.21). Switching the write cache off ends when the cached
    /// data is on stable storage (section 5.21.1.6). With lanes, the others end when all lanes have
    /// the new value, so a guest has no more in flight than its queue holds.
    pub(super) fn set_features(&mut self, entry: &SubmissionEntry, permit: Permit) {
        let is_cache = FeatureId(entry.dword(10) as u8) == FeatureId::VolatileWriteCache;
        // A predecessor may have switched the cache off and been killed before its flush.
        let may_need_flush =
            is_cache && (self.features.write_cache || self.engine.journal.is_some());
        let result = match self.set_feature(entry) {
            Ok(result) => result,
            Err(status) => return self.end_admin(permit, status, 0, entry.nsid.get()),
        };
        self.tune();
        let tuning = self.features.tuning();
        let left = if may_need_flush && !self.features.write_cache {
            self.fleet.tune(&tuning);
            self.engine.flush_all(Some(permit))
        } else {
            self.fleet.ask(permit, result, &Question::Tune(tuning))
        };
        if let Some(permit) = left {
            self.end_admin(permit, Status::SUCCESS, result, 0);
        }
    }

    fn set_feature(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let (cdw10, cdw11) = (entry.dword(10), entry.dword(11));
        let id = FeatureId(cdw10 as u8);
        capabilities(id).ok_or(Status::INVALID_FIELD.dnr())?;
        if cdw10 >> 31 == 1 {
            return Err(Status::FEATURE_NOT_SAVEABLE.dnr());
        }
        let is_of_controller = id != FeatureId::ErrorRecovery;
        if is_of_controller && !matches!(entry.nsid.get(), 0 | NSID_ALL) {
            return Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC.dnr());
        }
        match id {
            FeatureId::Arbitration => self.features.arbitration = cdw11,
            FeatureId::PowerManagement => self.set_power(cdw11)?,
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
            // `capabilities` has none of the others.
            _ => return Err(Status::INVALID_FIELD.dnr()),
        }
        Ok(0)
    }

    /// Sets Number of Queues (section 5.21.1.7): grants at most as many pairs as there are.
    fn set_queue_pairs(&mut self, cdw11: u32) -> Result<u32, Status> {
        let (submission, completion) = (cdw11 & 0xffff, cdw11 >> 16);
        if submission == 0xffff || completion == 0xffff {
            return Err(Status::INVALID_FIELD.dnr());
        }
        if self.engine.queues.has_io() || self.fleet.has_queues() {
            return Err(Status::COMMAND_SEQUENCE_ERROR.dnr());
        }
        // One number is for both kinds of queue: a host that asks for fewer of one kind uses fewer
        // of it.
        let asked = submission.max(completion) + 1;
        self.features.queue_pairs = asked.min(self.features.most_queue_pairs.into()) as u16;
        Ok(self.features.queue_dword())
    }

    /// Sets Power Management (section 5.21.1.2): there is only power state 0 (PS, bits 4:0). The
    /// workload hint (WH, bits 7:5) is only kept.
    fn set_power(&mut self, cdw11: u32) -> Result<(), Status> {
        if cdw11 & 0x1f != 0 {
            return Err(Status::INVALID_FIELD.dnr());
        }
        self.features.power = cdw11 & 0xe0;
        Ok(())
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
        self.keep_alive_since = self.engine.clock.now();
    }

    fn set_timestamp(&mut self, entry: &SubmissionEntry) -> Result<(), Status> {
        let mut bytes = [0; 8];
        self.payload(entry, &mut bytes)?;
        self.features.timestamp = u64::from_le_bytes(bytes) & TIMESTAMP_MASK;
        self.features.timestamp_set = true;
        self.features.timestamp_at = self.engine.clock.now();
        Ok(())
    }

    fn set_host_id(&mut self, entry: &SubmissionEntry) -> Result<(), Status> {
        let mut id = [0; 16];
        let len = if entry.dword(11) & 1 == 1 { 16 } else { 8 };
        self.payload(entry, &mut id[..len])?;
        self.features.host_id = id;
        Ok(())
    }

    /// Sets Host Behavior Support (section 5.21.1.22): one of its bytes has a meaning.
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
        let namespace = self.engine.namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        Ok(if current { namespace.error_recovery.into() } else { 0 })
    }

    /// Sets Error Recovery (section 5.21.1.5): the time limit is only kept, since disks have limits
    /// of their own. Deallocated blocks never fail (NSFEAT), so DULBE is refused.
    fn set_error_recovery(&mut self, nsid: u32, cdw11: u32) -> Result<(), Status> {
        const DULBE: u32 = 1 << 16;
        if cdw11 & DULBE != 0 {
            return Err(Status::INVALID_FIELD.dnr());
        }
        if nsid != NSID_ALL && self.engine.namespaces.get(nsid).is_none() {
            return Err(Status::INVALID_NAMESPACE.dnr());
        }
        let chosen =
            self.engine.namespaces.iter_mut().filter(|one| nsid == NSID_ALL || one.nsid == nsid);
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
