//! Identify data structures (section 5.15.2).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Bytes of every Identify data structure.
pub const IDENTIFY_SIZE: usize = 4096;

open_enum! {
    /// CNS: the requested data structure (section 5.15.1).
    Cns(u8) {
        /// Identify Namespace.
        Namespace = 0x00,
        /// Identify Controller.
        Controller = 0x01,
        /// Active namespace ID list.
        ActiveNamespaces = 0x02,
        /// Namespace Identification Descriptor list.
        NamespaceDescriptors = 0x03,
        /// Allocated namespace ID list.
        AllocatedNamespaces = 0x10,
        /// Identify Namespace of an allocated namespace.
        AllocatedNamespace = 0x11,
        /// List of the controllers that a namespace is attached to.
        AttachedControllers = 0x12,
        /// List of the controllers of the NVM subsystem.
        Controllers = 0x13,
    }
}

/// Identify Controller (section 5.15.2.2). Fields that are not named are zero.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IdentifyController {
    /// VID, PCI vendor ID.
    pub vendor: U16,
    /// SSVID, PCI subsystem vendor ID.
    pub subsystem_vendor: U16,
    /// SN, ASCII padded with spaces.
    pub serial: [u8; 20],
    /// MN, ASCII padded with spaces.
    pub model: [u8; 40],
    /// FR, ASCII padded with spaces.
    pub firmware: [u8; 8],
    /// RAB, recommended arbitration burst, log2 of commands.
    pub arbitration_burst: u8,
    /// IEEE OUI.
    pub oui: [u8; 3],
    /// CMIC.
    pub multi_path: u8,
    /// MDTS: largest transfer is `page_min << MDTS` bytes; 0 is no limit.
    pub max_transfer: u8,
    /// CNTLID.
    pub controller_id: U16,
    /// VER, as the register VS.
    pub version: U32,
    /// RTD3R, microseconds.
    pub resume_latency: U32,
    /// RTD3E, microseconds.
    pub entry_latency: U32,
    /// OAES, optional asynchronous events.
    pub events: U32,
    /// CTRATT.
    pub attributes: U32,
    /// RRLS.
    pub read_recovery: U16,
    reserved102: [u8; 9],
    /// CNTRLTYPE: 1 is an I/O controller.
    pub controller_type: u8,
    /// FGUID.
    pub fru: [u8; 16],
    /// CRDT1 to CRDT3, units of 100 ms.
    pub retry_delays: [U16; 3],
    reserved134: [u8; 122],
    /// OACS, optional admin commands.
    pub admin_commands: U16,
    /// ACL, concurrent aborts less one.
    pub abort_limit: u8,
    /// AERL, outstanding Asynchronous Event Requests less one.
    pub event_limit: u8,
    /// FRMW, firmware updates.
    pub firmware_updates: u8,
    /// LPA, log page attributes.
    pub log_attributes: u8,
    /// ELPE, error log entries less one.
    pub error_entries: u8,
    /// NPSS, power states less one.
    pub power_states: u8,
    /// AVSCC.
    pub admin_vendor: u8,
    /// APSTA.
    pub power_transitions: u8,
    /// WCTEMP, kelvins.
    pub warning_temperature: U16,
    /// CCTEMP, kelvins.
    pub critical_temperature: U16,
    reserved270: [u8; 10],
    /// TNVMCAP, bytes.
    pub total_capacity: [u8; 16],
    /// UNVMCAP, bytes.
    pub unallocated_capacity: [u8; 16],
    reserved312: [u8; 8],
    /// KAS, keep alive granularity in units of 100 ms; 0 if Keep Alive is not supported.
    pub keep_alive: U16,
    reserved322: [u8; 190],
    /// SQES: log2 of the entry size, required in 3:0, maximum in 7:4.
    pub submission_entry: u8,
    /// CQES: log2 of the entry size, required in 3:0, maximum in 7:4.
    pub completion_entry: u8,
    /// MAXCMD.
    pub max_commands: U16,
    /// NN: the highest namespace ID.
    pub namespaces: U32,
    /// ONCS, optional NVM commands.
    pub nvm_commands: U16,
    /// FUSES.
    pub fused: U16,
    /// FNA.
    pub format: u8,
    /// VWC: bit 0, the controller has a volatile write cache; bits 2:1, the meaning of a Flush of
    /// all namespaces.
    pub write_cache: u8,
    /// AWUN, blocks less one.
    pub atomic_write: U16,
    /// AWUPF, blocks less one.
    pub atomic_write_power_fail: U16,
    /// NVSCC.
    pub nvm_vendor: u8,
    /// NWPC, namespace write protection.
    pub write_protection: u8,
    /// ACWU.
    pub atomic_compare_write: U16,
    /// OCFS: supported source range formats of Copy, one bit each (TP 4065).
    pub copy_formats: U16,
    /// SGLS.
    pub sgl: U32,
    /// MNAN.
    pub max_allocated: U32,
    reserved544: [u8; 224],
    /// SUBNQN, UTF-8, padded with zeros.
    pub nqn: [u8; 256],
    reserved1024: [u8; 1024],
    /// PSD0 to PSD31, 32 bytes each.
    pub power: [[u8; 32]; 32],
    /// Vendor specific.
    pub vendor_specific: [u8; 1024],
}

const _: () = assert!(size_of::<IdentifyController>() == IDENTIFY_SIZE);
const _: () = assert!(core::mem::offset_of!(IdentifyController, admin_commands) == 256);
const _: () = assert!(core::mem::offset_of!(IdentifyController, submission_entry) == 512);
const _: () = assert!(core::mem::offset_of!(IdentifyController, copy_formats) == 534);
const _: () = assert!(core::mem::offset_of!(IdentifyController, nqn) == 768);
const _: () = assert!(core::mem::offset_of!(IdentifyController, power) == 2048);

impl IdentifyController {
    /// OAES bit 8: namespace attribute notices.
    pub const EVENT_NAMESPACE: u32 = 1 << 8;
    /// CTRATT bit 0: 128-bit host identifier.
    pub const WIDE_HOST_ID: u32 = 1;
    /// OACS bit 8: Doorbell Buffer Config (section 5.7).
    pub const DOORBELL_BUFFER: u16 = 1 << 8;
    /// LPA bit 1: the Commands Supported and Effects log is supported.
    pub const LOG_EFFECTS: u8 = 1 << 1;
    /// LPA bit 2: Get Log Page takes offsets and 32-bit lengths.
    pub const LOG_EXTENDED: u8 = 1 << 2;
    /// ONCS bit 0: Compare.
    pub const COMPARE: u16 = 1;
    /// ONCS bit 2: Dataset Management.
    pub const DATASET_MANAGEMENT: u16 = 1 << 2;
    /// ONCS bit 3: Write Zeroes.
    pub const WRITE_ZEROES: u16 = 1 << 3;
    /// ONCS bit 4: Save and Select of features.
    pub const FEATURE_SELECT: u16 = 1 << 4;
    /// ONCS bit 6: Timestamp.
    pub const TIMESTAMP: u16 = 1 << 6;
    /// ONCS bit 7: Verify.
    pub const VERIFY: u16 = 1 << 7;
    /// ONCS bit 8: Copy.
    pub const COPY: u16 = 1 << 8;
    /// FUSES bit 0: Compare and Write.
    pub const COMPARE_AND_WRITE: u16 = 1;
    /// SGLS bits 1:0: I/O commands may use SGLs; data blocks must be aligned to dwords.
    pub const SGL_DWORD_ALIGNED: u32 = 2;
    /// SGLS bit 18: an SGL may be longer than the data.
    pub const SGL_LONGER: u32 = 1 << 18;
    /// VWC: a write cache is present, and Flush accepts the namespace ID for all namespaces.
    pub const WRITE_CACHE_FLUSH_ALL: u8 = 1 | 3 << 1;
}

/// Identify Namespace (section 5.15.2.1). Fields that are not named are zero.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct IdentifyNamespace {
    /// NSZE, logical blocks.
    pub size: U64,
    /// NCAP, logical blocks.
    pub capacity: U64,
    /// NUSE, logical blocks.
    pub used: U64,
    /// NSFEAT.
    pub features: u8,
    /// NLBAF, LBA formats less one.
    pub formats: u8,
    /// FLBAS, the format in use.
    pub format: u8,
    /// MC, DPC, DPS: no metadata, no protection.
    pub metadata: [u8; 3],
    /// NMIC.
    pub sharing: u8,
    /// RESCAP.
    pub reservations: u8,
    /// FPI.
    pub format_progress: u8,
    /// DLFEAT: the content that reads of deallocated blocks return.
    pub deallocated: u8,
    reserved34: [u8; 30],
    /// NPWG, NPWA, NPDG, NPDA, NOWS: blocks less one.
    pub granularity: [U16; 5],
    /// MSSRL: most blocks in one source range of Copy (TP 4065).
    pub copy_range_blocks: U16,
    /// MCL: most blocks in one Copy.
    pub copy_blocks: U32,
    /// MSRC: most source ranges in one Copy, less one.
    pub copy_ranges: u8,
    reserved81: [u8; 11],
    /// ANAGRPID.
    pub ana_group: U32,
    reserved96: [u8; 3],
    /// NSATTR: bit 0 is set if the namespace is write protected.
    pub attributes: u8,
    /// NVMSETID.
    pub set: U16,
    /// ENDGID.
    pub endurance_group: U16,
    /// NGUID, big-endian; zero is none.
    pub nguid: [u8; 16],
    /// EUI64, big-endian; zero is none.
    pub eui64: [u8; 8],
    /// LBAF0 to LBAF15.
    pub lba_formats: [U32; 16],
    reserved192: [u8; 3904],
}

const _: () = assert!(size_of::<IdentifyNamespace>() == IDENTIFY_SIZE);
const _: () = assert!(core::mem::offset_of!(IdentifyNamespace, copy_ranges) == 80);
const _: () = assert!(core::mem::offset_of!(IdentifyNamespace, nguid) == 104);
const _: () = assert!(core::mem::offset_of!(IdentifyNamespace, lba_formats) == 128);

impl IdentifyNamespace {
    /// NSFEAT bit 0: thin provisioning. (Bit 2, errors for reads of deallocated blocks, is never
    /// set by Slipway.)
    pub const THIN: u8 = 1;
    /// NSFEAT bit 4: the fields NPWG, NPWA, NPDG, NPDA and NOWS are valid.
    pub const OPTIMAL_IO: u8 = 1 << 4;
    /// DLFEAT: deallocated blocks read as zeros, and Write Zeroes may deallocate.
    pub const READS_ZEROES: u8 = 1 | 1 << 3;
    /// NMIC bit 0: two or more controllers may have the namespace attached at once.
    pub const SHARED: u8 = 1;
    /// NSATTR bit 0: the namespace is write protected.
    pub const WRITE_PROTECTED: u8 = 1;

    /// Returns an LBA format with blocks of `1 << shift` bytes and without metadata.
    pub const fn lba_format(shift: u8) -> u32 {
        (shift as u32) << 16
    }

    /// Returns the bytes of a logical block in the format in use, or 0 if the controller reports
    /// 2^32 bytes or more.
    pub fn block_size(&self) -> u32 {
        let format = self.lba_formats[usize::from(self.format & 15)].get();
        1u32.checked_shl(format >> 16 & 0xff).unwrap_or(0)
    }
}

open_enum! {
    /// NIDT: the type of a Namespace Identification Descriptor (section 5.15.2.4).
    NamespaceIdType(u8) {
        /// EUI-64, 8 bytes.
        Eui64 = 1,
        /// NGUID, 16 bytes.
        Nguid = 2,
        /// UUID, 16 bytes.
        Uuid = 3,
    }
}

/// Header of a Namespace Identification Descriptor (section 5.15.2.4); `length` bytes follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NamespaceDescriptor {
    /// NIDT, a [`NamespaceIdType`].
    pub kind: u8,
    /// NIDL, number of bytes that follow.
    pub length: u8,
    reserved: [u8; 2],
}

impl NamespaceDescriptor {
    /// Returns the header of a descriptor.
    pub const fn new(kind: NamespaceIdType, length: u8) -> Self {
        Self { kind: kind.0, length, reserved: [0; 2] }
    }
}
