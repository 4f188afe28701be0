//! Finds the places in guest memory that an SGL names (section 4.4).
//!
//! SGLS reports what is supported: data blocks, segments and last segments, with data aligned to
//! dwords in address and length. A list may be longer than the data; the rest of it is not looked
//! at. Bit buckets, metadata and the types of fabrics are not supported.
//!
//! A list is hostile: it may point at itself, or be made of descriptors without data. So a command
//! may have at most [`MOST_DESCRIPTORS`], which is 16 times as many as a megabyte in pages of 4 KiB
//! takes.

use slipway_nvme_spec::sgl::{DESCRIPTOR, DescriptorSubType, DescriptorType, SglDescriptor};
use slipway_nvme_spec::status::Status;
use slipway_ram::Memory;
use zerocopy::IntoBytes;

use crate::prp::Walker;

/// Most descriptors that one command may lead to, not counting the descriptor in the command.
pub(crate) const MOST_DESCRIPTORS: u32 = 4096;

impl Walker {
    /// Fills `runs` with the places of `len` bytes (at least 1) that `first`, the descriptor in the
    /// command, leads to.
    ///
    /// # Errors
    /// - SGL Descriptor Type Invalid for a type or sub type that is not supported;
    /// - Invalid SGL Segment Descriptor for a segment of no length or no whole number of
    ///   descriptors, one that is not last and points to no other, and a last one that does;
    /// - Invalid Number of SGL Descriptors for a segment descriptor that is not the last of its
    ///   segment, and for more than [`MOST_DESCRIPTORS`];
    /// - SGL Data Block Granularity Invalid for data that is not aligned to dwords;
    /// - Data SGL Length Invalid for a list that ends before the data;
    /// - Data Transfer Error for a segment that cannot be read.
    pub fn walk_sgl(
        &mut self,
        memory: &Memory,
        first: SglDescriptor,
        len: usize,
    ) -> Result<(), Status> {
        self.runs.clear();
        let mut left = len as u64;
        let mut budget = MOST_DESCRIPTORS;
        let mut segment = match kind_of(&first)? {
            DescriptorType::DataBlock => {
                self.data_block(&first, &mut left)?;
                return ended(left);
            }
            _ => first,
        };
        while left > 0 {
            let last = segment.kind() == DescriptorType::LastSegment;
            self.read_segment(memory, &segment, &mut budget)?;
            match self.segment(last, &mut left)? {
                Some(next) => segment = next,
                None => return ended(left),
            }
        }
        Ok(())
    }

    /// Copies the descriptors of a segment, once.
    fn read_segment(
        &mut self,
        memory: &Memory,
        segment: &SglDescriptor,
        budget: &mut u32,
    ) -> Result<(), Status> {
        let len = segment.length.get();
        if len == 0 || !len.is_multiple_of(DESCRIPTOR as u32) {
            return Err(Status::SGL_SEGMENT_INVALID.dnr());
        }
        let count = len / DESCRIPTOR as u32;
        *budget = budget.checked_sub(count).ok_or(Status::SGL_COUNT_INVALID.dnr())?;
        self.note_walked(count);
        self.descriptors.resize(count as usize, SglDescriptor::default());
        memory
            .read(segment.address.get(), self.descriptors.as_mut_slice().as_mut_bytes())
            .map_err(|_| Status::DATA_TRANSFER_ERROR)
    }

    /// Takes the data of the segment that was read. Returns the descriptor of the next segment.
    fn segment(&mut self, last: bool, left: &mut u64) -> Result<Option<SglDescriptor>, Status> {
        let count = self.descriptors.len();
        for index in 0..count {
            let descriptor = self.descriptors[index];
            match kind_of(&descriptor)? {
                DescriptorType::DataBlock => self.data_block(&descriptor, left)?,
                _ if index + 1 < count => return Err(Status::SGL_COUNT_INVALID.dnr()),
                _ if last => return Err(Status::SGL_SEGMENT_INVALID.dnr()),
                _ => return Ok(Some(descriptor)),
            }
            if *left == 0 {
                return Ok(None);
            }
        }
        // Only a last segment may lead to no other segment.
        if last { Ok(None) } else { Err(Status::SGL_SEGMENT_INVALID.dnr()) }
    }

    fn data_block(&mut self, block: &SglDescriptor, left: &mut u64) -> Result<(), Status> {
        let (address, len) = (block.address.get(), u64::from(block.length.get()));
        if (address | len) & 3 != 0 {
            return Err(Status::SGL_GRANULARITY_INVALID.dnr());
        }
        let taken = len.min(*left);
        if taken > 0 {
            self.push(address, taken);
            *left -= taken;
        }
        Ok(())
    }
}

/// Returns the type of a descriptor, or an error if the type is not supported.
fn kind_of(descriptor: &SglDescriptor) -> Result<DescriptorType, Status> {
    let kind = descriptor.kind();
    let supported = matches!(
        kind,
        DescriptorType::DataBlock | DescriptorType::Segment | DescriptorType::LastSegment
    );
    if supported && descriptor.sub_type() == DescriptorSubType::Address {
        return Ok(kind);
    }
    Err(Status::SGL_TYPE_INVALID.dnr())
}

fn ended(left: u64) -> Result<(), Status> {
    if left == 0 { Ok(()) } else { Err(Status::SGL_LENGTH_INVALID.dnr()) }
}
