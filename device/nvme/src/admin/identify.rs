//! Identify (section 5.15).
//!
//! A new field is one of `IdentifyController` or `IdentifyNamespace`, in place of reserved bytes
//! (`spec/nvme-spec/src/identify.rs`, where assertions hold its offset). `identify_controller` or
//! `fill_namespace` fills it in; a new data structure is a `Cns` there and an arm of
//! `Home::identify`. What the program that hosts the controller decides is a field of `Parts`
//! (`parts`), which `host/plane` fills in (`controller.rs`). If drivers rely on a value for as long
//! as they run, it is in `Shape` of `persist::state`, so that no successor has another. Tests:
//! `parts` and `bad_commands` of `src/tests`; the fuzz target `nvme-admin` reaches it as it is.

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::identify::{
    Cns, IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, NamespaceDescriptor, NamespaceIdType,
};
use slipway_nvme_spec::registers::VERSION_1_4;
use slipway_nvme_spec::status::Status;
use zerocopy::{FromZeros, IntoBytes};

use super::ABORT_LIMIT;
use crate::engine::{COPY_BLOCKS, COPY_RANGE_BLOCKS, COPY_RANGES};
use crate::events::EVENT_LIMIT;
use crate::health::{ERROR_ENTRIES, WARNING_TEMPERATURE};
use crate::home::Home;
use crate::namespace::Attached;
use crate::parts::MAX_NSID;
use crate::registers::PCI_VENDOR;

/// KAS: the keep alive timer counts seconds.
pub(crate) const KEEP_ALIVE_GRANULARITY: u16 = 10;
/// RTD3E, microseconds: the time that a shutdown may take, since it flushes disks that may be slow.
/// Drivers that see 0 give up after a few seconds.
const SHUTDOWN_TIME: u32 = 30_000_000;
/// CCTEMP, kelvins: 100 °C.
const CRITICAL_TEMPERATURE: u16 = 373;

/// CNTLID: each controller is a subsystem of its own.
const CONTROLLER_ID: u16 = 1;

impl Home {
    pub(super) fn identify(&mut self, entry: &SubmissionEntry) -> Result<u32, Status> {
        let nsid = entry.nsid.get();
        match Cns(entry.dword(10) as u8) {
            Cns::Namespace | Cns::AllocatedNamespace => {
                let page = self.identify_namespace(nsid)?;
                self.reply(entry, page.as_bytes())?;
            }
            Cns::Controller => {
                let page = self.identify_controller();
                self.reply(entry, page.as_bytes())?;
            }
            Cns::ActiveNamespaces | Cns::AllocatedNamespaces => {
                let page = self.namespace_list(nsid)?;
                self.reply(entry, &page)?;
            }
            Cns::NamespaceDescriptors => {
                let page = self.namespace_descriptors(nsid)?;
                self.reply(entry, &page)?;
            }
            Cns::AttachedControllers if nsid != u32::MAX => {
                let attached = self.engine.namespaces.get(nsid).is_some();
                self.reply(entry, &controller_list(entry, attached))?;
            }
            Cns::Controllers => self.reply(entry, &controller_list(entry, true))?,
            _ => return Err(Status::INVALID_FIELD.dnr()),
        }
        Ok(0)
    }

    /// Returns the Identify Controller data structure (section 5.15.2.2).
    fn identify_controller(&self) -> Box<IdentifyController> {
        type Page = IdentifyController;
        let mut page = Box::new(Page::new_zeroed());
        page.vendor.set(PCI_VENDOR);
        page.subsystem_vendor.set(PCI_VENDOR);
        pad(&mut page.serial, &self.identity.serial);
        pad(&mut page.model, &self.identity.model);
        pad(&mut page.firmware, &self.identity.firmware);
        page.arbitration_burst = 6;
        page.max_transfer = (self.engine.limits.transfer / 4096).trailing_zeros() as u8;
        page.controller_id.set(CONTROLLER_ID);
        page.version.set(VERSION_1_4);
        page.entry_latency.set(SHUTDOWN_TIME);
        page.attributes.set(Page::WIDE_HOST_ID);
        page.events.set(Page::EVENT_NAMESPACE);
        page.controller_type = 1;
        if !self.engine.doorbells.is_shared() {
            page.admin_commands.set(Page::DOORBELL_BUFFER);
        }
        page.abort_limit = ABORT_LIMIT;
        page.event_limit = EVENT_LIMIT as u8 - 1;
        // One firmware slot, read-only.
        page.firmware_updates = 1 | 1 << 1;
        page.log_attributes = Page::LOG_EFFECTS | Page::LOG_EXTENDED;
        page.error_entries = (ERROR_ENTRIES - 1) as u8;
        page.warning_temperature.set(WARNING_TEMPERATURE);
        page.critical_temperature.set(CRITICAL_TEMPERATURE);
        page.keep_alive.set(KEEP_ALIVE_GRANULARITY);
        page.submission_entry = 6 | 6 << 4;
        page.completion_entry = 4 | 4 << 4;
        page.namespaces.set(MAX_NSID);
        page.nvm_commands.set(
            Page::COMPARE
                | Page::DATASET_MANAGEMENT
                | Page::WRITE_ZEROES
                | Page::FEATURE_SELECT
                | Page::TIMESTAMP
                | Page::VERIFY
                | Page::COPY,
        );
        // A pair is atomic among the commands of one thread of this controller. That suffices only
        // if no other controller has the disk and there are no lanes.
        let shared = self.engine.namespaces.iter().any(|namespace| namespace.shared);
        let fused = self.fleet.is_empty() && !shared;
        page.fused.set(if fused { Page::COMPARE_AND_WRITE } else { 0 });
        page.copy_formats.set(1);
        page.sgl.set(Page::SGL_DWORD_ALIGNED | Page::SGL_LONGER);
        page.write_cache = Page::WRITE_CACHE_FLUSH_ALL;
        page.nqn[..self.identity.nqn.len()].copy_from_slice(self.identity.nqn.as_bytes());
        // There is only power state 0, all zeros ("not reported").
        page
    }

    /// Returns the Identify Namespace data structure (section 5.15.2.1); zeros for a valid NSID
    /// without a namespace.
    fn identify_namespace(&self, nsid: u32) -> Result<Box<IdentifyNamespace>, Status> {
        if nsid == 0 || nsid > MAX_NSID {
            return Err(Status::INVALID_NAMESPACE.dnr());
        }
        let mut page = Box::new(IdentifyNamespace::new_zeroed());
        if let Some(namespace) = self.engine.namespaces.get(nsid) {
            fill_namespace(&mut page, namespace);
        }
        Ok(page)
    }

    /// Returns the list of namespaces above `after`, ascending (section 5.15.2.3). All are active
    /// and allocated.
    fn namespace_list(&self, after: u32) -> Result<Vec<u8>, Status> {
        if after >= 0xffff_fffe {
            return Err(Status::INVALID_NAMESPACE.dnr());
        }
        let above = self.engine.namespaces.iter().map(|one| one.nsid).filter(|nsid| *nsid > after);
        let mut page: Vec<u8> = above.flat_map(u32::to_le_bytes).collect();
        page.resize(IDENTIFY_SIZE, 0);
        Ok(page)
    }

    /// Returns the list of a namespace's identification descriptors (section 5.15.2.4).
    fn namespace_descriptors(&self, nsid: u32) -> Result<Vec<u8>, Status> {
        let namespace = self.engine.namespaces.get(nsid).ok_or(Status::INVALID_NAMESPACE.dnr())?;
        let mut page = Vec::with_capacity(IDENTIFY_SIZE);
        let mut put = |kind: NamespaceIdType, id: &[u8]| {
            if id.iter().any(|byte| *byte != 0) {
                page.extend_from_slice(NamespaceDescriptor::new(kind, id.len() as u8).as_bytes());
                page.extend_from_slice(id);
            }
        };
        put(NamespaceIdType::Eui64, &namespace.eui64);
        put(NamespaceIdType::Nguid, &namespace.nguid);
        put(NamespaceIdType::Uuid, &namespace.uuid);
        page.resize(IDENTIFY_SIZE, 0);
        Ok(page)
    }
}

/// Returns a controller list: the number of identifiers, then those from CDW10's CNTID on. It has
/// this controller if `listed`.
fn controller_list(entry: &SubmissionEntry, listed: bool) -> Vec<u8> {
    let from = (entry.dword(10) >> 16) as u16;
    let listed = listed && CONTROLLER_ID >= from;
    let mut page = Vec::with_capacity(IDENTIFY_SIZE);
    page.extend_from_slice(&u16::from(listed).to_le_bytes());
    page.extend_from_slice(&if listed { CONTROLLER_ID } else { 0 }.to_le_bytes());
    page.resize(IDENTIFY_SIZE, 0);
    page
}

fn fill_namespace(page: &mut IdentifyNamespace, namespace: &Attached) {
    let geometry = namespace.geometry;
    page.size.set(geometry.blocks);
    page.capacity.set(geometry.blocks);
    page.used.set(geometry.blocks);
    page.deallocated = IdentifyNamespace::READS_ZEROES;
    page.copy_range_blocks.set(COPY_RANGE_BLOCKS);
    page.copy_blocks.set(COPY_BLOCKS);
    page.copy_ranges = COPY_RANGES;
    page.nguid = namespace.nguid;
    page.eui64 = namespace.eui64;
    page.lba_formats[0]
        .set(IdentifyNamespace::lba_format(geometry.block_size.trailing_zeros() as u8));
    if namespace.shared {
        page.sharing = IdentifyNamespace::SHARED;
    }
    if geometry.read_only {
        page.attributes = IdentifyNamespace::WRITE_PROTECTED;
    }
}

/// Fills a field with ASCII text padded with spaces (section 1.5, "ASCII string").
pub(super) fn pad(field: &mut [u8], text: &str) {
    field.fill(b' ');
    let len = text.len().min(field.len());
    field[..len].copy_from_slice(&text.as_bytes()[..len]);
}
