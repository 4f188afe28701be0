//! Get Log Page (section 5.14).
//!
//! A new page has its number in `slipway_nvme_spec::log::LogId`, its arm in `Home::fill_log`, and
//! in `event_type` the event that reading it unmasks, if any. Its bit of LPA, if it has one, is a
//! constant of `IdentifyController` (`spec/nvme-spec/src/identify.rs`), which `admin::identify`
//! sets. If a read without Retain Asynchronous Event clears what it reported, `get_log_page` does
//! so once the reply has been sent, for the part that was sent: see `LogId::ChangedNamespaces`.
//! Tests read pages by `log` of `device/nvme/src/tests/admin.rs`, where `logs_have_offsets` reads
//! parts of them, and `docs/measurements/suites.md` has what tests of others miss. State that the
//! page alone has is also a field in `persist::state`, so that a successor of the controller
//! reports it (`tests/killed.rs`, `saved.rs`):
//! - With a new version there, the next daemon refuses to start while the keeper has endpoints of
//!   the last one (`JOURNAL_VERSION`): their sandboxes must end first.
//! - A field that may be missing has `#[serde(default)]` and leaves the version, as in `features`.
//!   An older build then refuses the state, whose field it does not know.
//!
//! Content that arises on a lane reaches the home by `Report` (`engine::report`), as failed
//! commands do: the lane's engine adds it, `Link::leave` (`fleet/link.rs`) passes it on,
//! `collect_reports` takes it before a page is read, and `note_errors` (`home/mod.rs`) enters it
//! into the home's state. A new field of `Report` is also in `is_empty` and `clear`.
//!
//! A saved counter is as of the last snapshot: `kill -9` loses what was counted since.

use slipway_nvme_spec::NSID_ALL;
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::event::EventType;
use slipway_nvme_spec::log::{CHANGED_NAMESPACES_SIZE, Effects, FirmwareSlot, LogId};
use slipway_nvme_spec::opcode::{AdminOpcode, NvmOpcode};
use slipway_nvme_spec::status::Status;
use zerocopy::{FromZeros, IntoBytes};

use super::COMMANDS;
use super::identify::pad;
use crate::health::ERROR_ENTRIES;
use crate::home::Home;

impl Home {
    /// Carries out Get Log Page: checks length and offset, and sends that part of the page.
    pub(super) fn get_log_page(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let (cdw10, cdw11) = (entry.dword(10), entry.dword(11));
        let id = LogId(cdw10 as u8);
        let retain = cdw10 >> 15 & 1 == 1;
        let dwords = u64::from(cdw11 & 0xffff) << 16 | u64::from(cdw10 >> 16);
        let offset = u64::from(entry.dword(13)) << 32 | u64::from(entry.dword(12));
        // The length is checked before anything of that size is allocated.
        let len = usize::try_from((dwords + 1) * 4).unwrap_or(usize::MAX);
        if !offset.is_multiple_of(4) || len > self.engine.limits.transfer as usize {
            return Err(Status::INVALID_FIELD.dnr());
        }
        self.collect_reports();
        let mut page = std::mem::take(&mut self.page);
        page.clear();
        let sent = self.fill_log(id, entry.nsid.get(), &mut page).and_then(|()| {
            let offset = usize::try_from(offset).unwrap_or(usize::MAX);
            if offset > page.len() {
                return Err(Status::INVALID_FIELD.dnr());
            }
            // The bytes past the end of a log page are undefined; zeros reveal nothing.
            page.resize(page.len().max(offset + len), 0);
            self.reply(entry, &page[offset..offset + len])?;
            if id == LogId::ChangedNamespaces && !retain {
                self.events.told(&page[offset..offset + len]);
            }
            Ok(())
        });
        self.page = page;
        sent?;
        if !retain && let Some(kind) = event_type(id) {
            self.events.log_read(kind);
        }
        Ok(0)
    }

    /// Appends the log page `id` to `page`, which is empty.
    fn fill_log(&self, id: LogId, nsid: u32, page: &mut Vec<u8>) -> Result<(), Status> {
        match id {
            LogId::ErrorInformation => {
                for error in self.health.newest_first() {
                    page.extend_from_slice(error.as_bytes());
                }
                page.resize(ERROR_ENTRIES * 64, 0);
            }
            LogId::Health => {
                // There is no SMART log per namespace (LPA bit 0).
                if nsid != 0 && nsid != NSID_ALL {
                    return Err(Status::INVALID_FIELD.dnr());
                }
                let (warning, powered) = (self.features.warning(), self.powered());
                let log = self.health.log_page(warning, powered, &self.counters());
                page.extend_from_slice(log.as_bytes());
            }
            LogId::FirmwareSlot => {
                let mut log = FirmwareSlot::new_zeroed();
                log.active = 1;
                pad(&mut log.revisions[0], &self.identity.firmware);
                page.extend_from_slice(log.as_bytes());
            }
            LogId::ChangedNamespaces => {
                page.extend(self.events.changed.iter().flat_map(|nsid| nsid.to_le_bytes()));
                page.resize(CHANGED_NAMESPACES_SIZE, 0);
            }
            LogId::Effects => {
                let shadow = !self.engine.doorbells.is_shared();
                page.extend_from_slice(effects(shadow).as_bytes());
            }
            _ => return Err(Status::INVALID_LOG_PAGE.dnr()),
        }
        Ok(())
    }
}

/// Returns the event type that reading a log unmasks (section 5.2.1).
fn event_type(id: LogId) -> Option<EventType> {
    match id {
        LogId::ErrorInformation => Some(EventType::Error),
        LogId::Health => Some(EventType::Health),
        LogId::ChangedNamespaces => Some(EventType::Notice),
        _ => None,
    }
}

/// Returns the Commands Supported and Effects log (section 5.14.1.5). `shadow` says whether
/// Doorbell Buffer Config is offered.
fn effects(shadow: bool) -> Box<Effects> {
    let mut log = Box::new(Effects::new_zeroed());
    let shadow = shadow.then_some(AdminOpcode::DoorbellBufferConfig);
    for opcode in COMMANDS.into_iter().chain(shadow) {
        log.admin[usize::from(opcode.0)].set(Effects::SUPPORTED);
    }
    let io = [
        (NvmOpcode::Flush, 0),
        (NvmOpcode::Read, 0),
        (NvmOpcode::Write, Effects::CONTENT),
        (NvmOpcode::WriteZeroes, Effects::CONTENT),
        (NvmOpcode::DatasetManagement, Effects::CONTENT),
        (NvmOpcode::Compare, 0),
        (NvmOpcode::Verify, 0),
        (NvmOpcode::Copy, Effects::CONTENT),
    ];
    for (opcode, effect) in io {
        log.io[usize::from(opcode.0)].set(Effects::SUPPORTED | effect);
    }
    log
}
