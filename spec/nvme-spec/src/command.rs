//! Queue entries (sections 4.2 and 4.6).

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::sgl::{self, SglDescriptor};
use crate::status::Status;

/// Bytes of a submission queue entry (section 4.2).
pub const SUBMISSION_ENTRY: usize = 64;
/// Bytes of a completion queue entry (section 4.6).
pub const COMPLETION_ENTRY: usize = 16;

/// A command in a submission queue (section 4.2, "Command Format").
#[derive(
    Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq,
)]
#[repr(C)]
pub struct SubmissionEntry {
    /// OPC: an [`AdminOpcode`](crate::opcode::AdminOpcode) or
    /// [`NvmOpcode`](crate::opcode::NvmOpcode).
    pub opcode: u8,
    /// FUSE in bits 1:0, PSDT in bits 7:6.
    pub flags: u8,
    /// CID: the host's identifier for the command.
    pub id: U16,
    /// NSID.
    pub nsid: U32,
    /// Command dwords 2 and 3.
    pub cdw2: [U32; 2],
    /// MPTR, metadata pointer.
    pub metadata: U64,
    /// PRP1.
    pub prp1: U64,
    /// PRP2.
    pub prp2: U64,
    /// Command dwords 10 to 15.
    pub cdw10: [U32; 6],
}

const _: () = assert!(size_of::<SubmissionEntry>() == SUBMISSION_ENTRY);

impl SubmissionEntry {
    /// Returns an entry with this opcode and namespace and zeros elsewhere.
    pub fn new(opcode: u8, nsid: u32) -> Self {
        Self { opcode, nsid: nsid.into(), ..Self::default() }
    }

    /// Returns command dword `number`, 10 to 15; 0 for other numbers.
    pub fn dword(&self, number: usize) -> u32 {
        number.checked_sub(10).and_then(|at| self.cdw10.get(at)).map_or(0, |dword| dword.get())
    }

    /// Sets command dword `number`, 10 to 15; other numbers change nothing.
    #[must_use]
    pub fn with_dword(mut self, number: usize, value: u32) -> Self {
        if let Some(dword) = number.checked_sub(10).and_then(|at| self.cdw10.get_mut(at)) {
            dword.set(value);
        }
        self
    }

    /// Returns command dwords 10 and 11 as one number: a starting LBA.
    pub fn starting_lba(&self) -> u64 {
        u64::from(self.dword(11)) << 32 | u64::from(self.dword(10))
    }

    /// Returns NLB of reads, writes and Write Zeroes, as a plain count, 1 to 65,536 (section 6.9).
    pub fn block_count(&self) -> u32 {
        (self.dword(12) & 0xffff) + 1
    }

    /// Returns FUA of reads, writes and Write Zeroes (section 6.15).
    pub fn force_unit_access(&self) -> bool {
        self.dword(12) >> 30 & 1 == 1
    }

    /// Returns DEAC of Write Zeroes (section 6.17).
    pub fn deallocate(&self) -> bool {
        self.dword(12) >> 25 & 1 == 1
    }

    /// Returns FUSE: 0 for a command that is not fused.
    pub fn fuse(&self) -> u8 {
        self.flags & 3
    }

    /// Returns PSDT: 0 for PRPs, else SGLs.
    pub fn data_pointer_type(&self) -> u8 {
        self.flags >> 6
    }

    /// Returns SGL1, which takes the place of the PRPs (section 4.2).
    pub fn sgl(&self) -> SglDescriptor {
        let mut bytes = [0; sgl::DESCRIPTOR];
        let (first, second) = bytes.split_at_mut(8);
        first.copy_from_slice(self.prp1.as_bytes());
        second.copy_from_slice(self.prp2.as_bytes());
        zerocopy::transmute!(bytes)
    }

    /// Returns the entry with an SGL instead of PRPs (PSDT 01b).
    #[must_use]
    pub fn with_sgl(mut self, descriptor: SglDescriptor) -> Self {
        let [first, second]: [U64; 2] = zerocopy::transmute!(descriptor);
        (self.prp1, self.prp2) = (first, second);
        self.flags = self.flags & 0x3f | 1 << 6;
        self
    }
}

/// A completion in a completion queue (section 4.6, "Completion Queue Entry Layout").
#[derive(
    Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq,
)]
#[repr(C)]
pub struct CompletionEntry {
    /// Dword 0: the command's result.
    pub result: U32,
    /// Dword 1, reserved.
    pub reserved: U32,
    /// SQHD: head of the submission queue.
    pub head: U16,
    /// SQID: id of the submission queue.
    pub queue: U16,
    /// CID: id of the command.
    pub id: U16,
    /// Phase tag in bit 0, status field in bits 15:1.
    pub status: U16,
}

const _: () = assert!(size_of::<CompletionEntry>() == COMPLETION_ENTRY);

impl CompletionEntry {
    /// Offset of the dword with the phase tag, which is written last.
    pub const PHASE_DWORD: usize = 12;

    /// Returns the status field.
    pub fn status(&self) -> Status {
        Status(self.status.get() >> 1)
    }

    /// Returns P, the phase tag.
    pub fn phase(&self) -> bool {
        self.status.get() & 1 == 1
    }

    /// Returns the dword with command id, status and phase tag.
    pub fn phase_dword(&self) -> u32 {
        u32::from(self.status.get()) << 16 | u32::from(self.id.get())
    }

    /// Returns the entry as a little-endian number.
    #[inline]
    pub fn bits(&self) -> u128 {
        let command = u64::from(self.head.get())
            | u64::from(self.queue.get()) << 16
            | u64::from(self.id.get()) << 32
            | u64::from(self.status.get()) << 48;
        let result = u64::from(self.reserved.get()) << 32 | u64::from(self.result.get());
        u128::from(command) << 64 | u128::from(result)
    }

    /// Sets status field and phase tag.
    #[inline]
    pub fn set_status(&mut self, status: Status, phase: bool) {
        self.status.set(status.0 << 1 | u16::from(phase));
    }
}

/// A range of Dataset Management (section 6.7, "Range Definition").
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct DatasetRange {
    /// Context attributes, which are hints.
    pub attributes: U32,
    /// Length in logical blocks; not "0's based".
    pub blocks: U32,
    /// First logical block.
    pub lba: U64,
}

/// Most ranges in one Dataset Management command (section 6.7, NR).
pub const MAX_DATASET_RANGES: usize = 256;

/// FUSE of the first command of a fused operation (section 4.2).
pub const FUSE_FIRST: u8 = 1;
/// FUSE of the second command of a fused operation.
pub const FUSE_SECOND: u8 = 2;

/// A source range of Copy, format 0 (NVM Command Set Specification 1.0, section 3.2.2).
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct CopyRange {
    reserved0: [u8; 8],
    /// First logical block.
    pub lba: U64,
    /// Number of logical blocks, less one.
    pub blocks_less_one: U16,
    reserved18: [u8; 14],
}

const _: () = assert!(size_of::<CopyRange>() == 32);

impl CopyRange {
    /// Returns a range of `blocks` blocks, 1 to 65,536.
    pub fn new(lba: u64, blocks: u32) -> Self {
        let blocks_less_one = (blocks.wrapping_sub(1) as u16).into();
        Self { lba: lba.into(), blocks_less_one, ..Self::default() }
    }

    /// Returns the number of logical blocks, 1 to 65,536.
    pub fn block_count(&self) -> u32 {
        u32::from(self.blocks_less_one.get()) + 1
    }
}
