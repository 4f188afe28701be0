//! The register file (section 3.1), and what lies where in BAR0.
//!
//! A new register has its offset in `slipway_nvme_spec::registers`, a field of `Registers`, and its
//! place in `image`, for reads, and in `write_dword`; `FILE` ends behind the last one. An effect of
//! a write is the affair of `home::lifecycle`. A value that a driver has set is a field of
//! `RegisterState` too (`persist::state`), with the check of what no driver can have reached.
//! Tests: `init`, `lifecycle` and `saved` of `src/tests`; the fuzz target `nvme-controller` reaches
//! it as it is.

use slipway_nvme_spec::registers::{
    AdminQueueAttributes, Capabilities, Configuration, ControllerStatus, VERSION_1_4, offset,
};
use slipway_pci::Access;

/// The page of BAR0 that holds doorbells and nothing else.
pub(crate) const DOORBELL_PAGE: std::ops::Range<u64> = offset::DOORBELLS..0x2000;
/// Offset of the MSI-X table in BAR0. Up to 256 vectors fit its page.
pub(crate) const MSIX_TABLE: u64 = 0x2000;
/// Offset of the MSI-X pending bits in BAR0.
pub(crate) const MSIX_PENDING: u64 = 0x3000;
/// Most vectors whose table ends before the pending bits.
pub(crate) const MAX_VECTORS: usize = ((MSIX_PENDING - MSIX_TABLE) / 16) as usize;

/// PCI identity. Drivers bind by class (01 08 02: mass storage, non-volatile memory, NVM Express;
/// section 2.1.5), so the IDs need only be honest. 1af4:10f0 to 1af4:10ff are set aside by their
/// vendor (Red Hat) for software devices that have no ID of their own. With the IDs of another
/// vendor's product, drivers would apply that product's quirks.
pub(crate) const PCI_IDENTITY: slipway_pci::Identity = slipway_pci::Identity {
    vendor: 0x1af4,
    device: 0x10f0,
    subsystem_vendor: 0x1af4,
    subsystem: 0x10f0,
    class: 0x01_08_02,
    revision: 1,
};
/// VID and SSVID, which Identify Controller repeats.
pub(crate) const PCI_VENDOR: u16 = PCI_IDENTITY.vendor;

/// Largest memory page: `4096 << PAGE_MAX` bytes (CAP.MPSMAX).
pub(crate) const PAGE_MAX: u8 = 4;
/// CAP.TO in 500 ms: a reset waits for the disks, which may be slow.
const TIMEOUT: u8 = 60;
/// Bytes with registers before the doorbells.
const FILE: usize = 0x38;

/// The registers alone: the controller carries out the effects of a write.
#[derive(Clone, Debug)]
pub(crate) struct Registers {
    pub capabilities: Capabilities,
    pub configuration: Configuration,
    pub status: ControllerStatus,
    pub admin_queues: AdminQueueAttributes,
    pub admin_submission: u64,
    pub admin_completion: u64,
    /// INTMS and INTMC: the mask of pin interrupts, bit 0 (sections 3.1.3 and 3.1.4). MSI-X has a
    /// mask of its own.
    pub interrupt_mask: u32,
}

impl Registers {
    pub fn new(queue_entries: u16) -> Self {
        Self {
            capabilities: Capabilities::new(u32::from(queue_entries), TIMEOUT, PAGE_MAX),
            configuration: Configuration::default(),
            status: ControllerStatus::default(),
            admin_queues: AdminQueueAttributes::default(),
            admin_submission: 0,
            admin_completion: 0,
            interrupt_mask: 0,
        }
    }

    /// Returns the bytes of a memory page, from CC.MPS.
    pub fn page_size(&self) -> u64 {
        4096 << self.configuration.page_shift().min(PAGE_MAX)
    }

    /// Reads in any width and alignment. Bytes without a register read as zero.
    pub fn read(&self, at: u64, into: &mut [u8]) {
        let file = self.image();
        for (index, byte) in into.iter_mut().enumerate() {
            let at = at as usize + index;
            *byte = file.get(at).copied().unwrap_or(0);
        }
    }

    /// Writes 4 or 8 aligned bytes, and refuses everything else (section 3.1: accesses are of the
    /// register's width or aligned 32 bits). Read-only registers keep their value.
    pub fn write(&mut self, at: u64, from: &[u8]) -> Access {
        if !at.is_multiple_of(4) || !matches!(from.len(), 4 | 8) {
            return Access::Refused;
        }
        for (index, dword) in from.chunks_exact(4).enumerate() {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(dword);
            self.write_dword(at + 4 * index as u64, u32::from_le_bytes(bytes));
        }
        Access::Done
    }

    fn write_dword(&mut self, at: u64, value: u32) {
        match at {
            offset::INTMS => self.interrupt_mask |= value,
            offset::INTMC => self.interrupt_mask &= !value,
            offset::CC => self.configure(Configuration(value & Configuration::DEFINED)),
            offset::AQA => {
                self.admin_queues = AdminQueueAttributes(value & AdminQueueAttributes::DEFINED);
            }
            offset::ASQ => set_low(&mut self.admin_submission, value & !0xfff),
            0x2c => set_high(&mut self.admin_submission, value),
            offset::ACQ => set_low(&mut self.admin_completion, value & !0xfff),
            0x34 => set_high(&mut self.admin_completion, value),
            // Read-only, reserved, or not supported (NSSR: CAP.NSSRS is 0).
            _ => {}
        }
    }

    /// Writes CC. Fields that must not change while the controller is enabled keep their value.
    fn configure(&mut self, new: Configuration) {
        let old = self.configuration;
        let keep = if old.enabled() && new.enabled() { Configuration::FROZEN } else { 0 };
        self.configuration = Configuration(new.0 & !keep | old.0 & keep);
    }

    fn image(&self) -> [u8; FILE] {
        let mut file = [0; FILE];
        let mut put = |at: u64, bytes: &[u8]| {
            file[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        };
        put(offset::CAP, &self.capabilities.0.to_le_bytes());
        put(offset::VS, &VERSION_1_4.to_le_bytes());
        put(offset::INTMS, &self.interrupt_mask.to_le_bytes());
        put(offset::INTMC, &self.interrupt_mask.to_le_bytes());
        put(offset::CC, &self.configuration.0.to_le_bytes());
        put(offset::CSTS, &self.status.0.to_le_bytes());
        put(offset::AQA, &self.admin_queues.0.to_le_bytes());
        put(offset::ASQ, &self.admin_submission.to_le_bytes());
        put(offset::ACQ, &self.admin_completion.to_le_bytes());
        file
    }
}

fn set_low(register: &mut u64, value: u32) {
    *register = *register & !0xffff_ffff | u64::from(value);
}

fn set_high(register: &mut u64, value: u32) {
    *register = *register & 0xffff_ffff | u64::from(value) << 32;
}
