//! Log pages (section 5.14.1).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::status::Status;

open_enum! {
    /// Log page identifiers (section 5.14.1).
    LogId(u8) {
        /// Error Information (section 5.14.1.1).
        ErrorInformation = 0x01,
        /// SMART / Health Information (section 5.14.1.2).
        Health = 0x02,
        /// Firmware Slot Information (section 5.14.1.3).
        FirmwareSlot = 0x03,
        /// Changed Namespace List (section 5.14.1.4).
        ChangedNamespaces = 0x04,
        /// Commands Supported and Effects (section 5.14.1.5).
        Effects = 0x05,
    }
}

/// An entry of the Error Information log (section 5.14.1.1).
#[derive(
    Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq,
)]
#[repr(C)]
pub struct ErrorEntry {
    /// Number of this error, from 1 on; 0 marks an unused entry.
    pub count: U64,
    /// SQID: id of the submission queue.
    pub queue: U16,
    /// Command ID; 0xffff for an error that belongs to no command.
    pub command: U16,
    /// Status field in bits 15:1, phase tag in bit 0.
    pub status: U16,
    /// Location of the wrong parameter in the command: byte in 7:0, bit in 10:8; 0xffff if the
    /// error is not about a parameter.
    pub location: U16,
    /// First LBA that failed.
    pub lba: U64,
    /// Namespace ID.
    pub nsid: U32,
    /// Identifier of the log page with vendor specific information; 0 if there is none.
    pub vendor: u8,
    /// Transport type.
    pub transport: u8,
    reserved30: [u8; 2],
    /// Command specific information.
    pub specific: U64,
    reserved40: [u8; 24],
}

const _: () = assert!(size_of::<ErrorEntry>() == 64);

impl ErrorEntry {
    /// Command ID of an error that belongs to no command.
    pub const NO_COMMAND: u16 = 0xffff;

    /// Returns an error of command `command` of submission queue `queue`, without a parameter
    /// location.
    pub fn new(queue: u16, command: u16, status: Status) -> Self {
        Self {
            queue: queue.into(),
            command: command.into(),
            status: (status.0 << 1).into(),
            location: 0xffff.into(),
            ..Self::default()
        }
    }
}

/// SMART / Health Information (section 5.14.1.2).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Health {
    /// Critical Warning: bit 1 is temperature.
    pub warning: u8,
    /// Composite Temperature, kelvins.
    pub temperature: U16,
    /// Available Spare, percent.
    pub spare: u8,
    /// Available Spare Threshold, percent.
    pub spare_threshold: u8,
    /// Percentage Used.
    pub used: u8,
    /// Endurance group summary.
    pub endurance: u8,
    reserved7: [u8; 25],
    /// Data Units Read, thousands of 512 bytes, rounded up.
    pub units_read: [u8; 16],
    /// Data Units Written, thousands of 512 bytes, rounded up.
    pub units_written: [u8; 16],
    /// Host Read Commands.
    pub reads: [u8; 16],
    /// Host Write Commands.
    pub writes: [u8; 16],
    /// Controller Busy Time, minutes.
    pub busy: [u8; 16],
    /// Power Cycles.
    pub power_cycles: [u8; 16],
    /// Power On Hours.
    pub hours: [u8; 16],
    /// Unsafe Shutdowns.
    pub unsafe_shutdowns: [u8; 16],
    /// Media and Data Integrity Errors.
    pub media_errors: [u8; 16],
    /// Number of Error Information Log Entries over the controller's life.
    pub error_entries: [u8; 16],
    reserved192: [u8; 320],
}

const _: () = assert!(size_of::<Health>() == 512);
const _: () = assert!(core::mem::offset_of!(Health, error_entries) == 176);

impl Health {
    /// Critical Warning: a temperature is beyond a threshold.
    pub const WARNING_TEMPERATURE: u8 = 1 << 1;
}

/// Firmware Slot Information (section 5.14.1.3).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct FirmwareSlot {
    /// AFI: the active slot in bits 2:0.
    pub active: u8,
    reserved1: [u8; 7],
    /// FRS1 to FRS7: revisions, ASCII padded with spaces; zeros for an empty slot.
    pub revisions: [[u8; 8]; 7],
    reserved64: [u8; 448],
}

const _: () = assert!(size_of::<FirmwareSlot>() == 512);

/// Bytes of the Changed Namespace List: up to 1,024 namespace IDs (section 5.14.1.4).
pub const CHANGED_NAMESPACES_SIZE: usize = 4096;

/// Commands Supported and Effects (section 5.14.1.5).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Effects {
    /// ACS0 to ACS255, by admin opcode.
    pub admin: [U32; 256],
    /// IOCS0 to IOCS255, by I/O opcode.
    pub io: [U32; 256],
    reserved2048: [u8; 2048],
}

const _: () = assert!(size_of::<Effects>() == 4096);

impl Effects {
    /// CSUPP: the command is supported.
    pub const SUPPORTED: u32 = 1;
    /// LBCC: the command may change the content of logical blocks.
    pub const CONTENT: u32 = 1 << 1;
}
