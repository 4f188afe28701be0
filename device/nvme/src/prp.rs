//! Finds the ranges of guest memory that a command's data pointer names: PRPs (section 4.3) here,
//! SGLs in [`sgl`](crate::sgl).

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::prp::{self, is_data_aligned, is_list_aligned, is_page_aligned};
use slipway_nvme_spec::sgl::SglDescriptor;
use slipway_nvme_spec::status::Status;
use slipway_ram::Memory;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// A contiguous range of guest addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub address: u64,
    pub len: usize,
}

/// Finds the places of data. It keeps its buffers from command to command.
#[derive(Default)]
pub(crate) struct Walker {
    /// The places of the last command, in order, neighbours joined.
    pub runs: Vec<Run>,
    /// A private copy of a PRP list page: each entry is read once.
    entries: Vec<U64>,
    /// A private copy of an SGL segment: each descriptor is read once.
    pub descriptors: Vec<SglDescriptor>,
    /// The number of list entries and descriptors that were read.
    walked: u32,
}

impl Walker {
    /// Adds to the number of list entries and descriptors that were read.
    pub fn note_walked(&mut self, entries: u32) {
        self.walked = self.walked.saturating_add(entries);
    }

    /// Returns the number of list entries and descriptors that were read since the last call.
    pub fn take_walked(&mut self) -> u32 {
        std::mem::take(&mut self.walked)
    }

    /// Fills `runs` with the places of `len` bytes (at least 1) that `entry`'s data pointer names,
    /// by PRPs with memory pages of `page` bytes or by an SGL (PSDT, section 4.2).
    ///
    /// # Errors
    /// The errors of [`Walker::walk`] and [`Walker::walk_sgl`].
    pub fn find(
        &mut self,
        memory: &Memory,
        page: u64,
        entry: &SubmissionEntry,
        len: usize,
    ) -> Result<(), Status> {
        if entry.data_pointer_type() == 0 {
            return self.walk(memory, page, (entry.prp1.get(), entry.prp2.get()), len);
        }
        self.walk_sgl(memory, entry.sgl(), len)
    }

    /// Fills `runs` with the places of `len` bytes (at least 1) that `prp1` and `prp2` name, with
    /// memory pages of `page` bytes.
    ///
    /// # Errors
    /// PRP Offset Invalid for entries without the alignment of section 4.3, Data Transfer Error for
    /// a list that cannot be read.
    pub fn walk(
        &mut self,
        memory: &Memory,
        page: u64,
        (prp1, prp2): (u64, u64),
        len: usize,
    ) -> Result<(), Status> {
        self.runs.clear();
        if !is_data_aligned(prp1) {
            return Err(Status::PRP_OFFSET_INVALID.dnr());
        }
        let first = (len as u64).min(prp::left_in_page(prp1, page));
        self.push(prp1, first);
        let left = len as u64 - first;
        match left {
            0 => Ok(()),
            _ if left <= page => {
                aligned(prp2, page)?;
                self.push(prp2, left);
                Ok(())
            }
            _ => self.lists(memory, page, prp2, left),
        }
    }

    /// Follows a chain of PRP lists. The chain ends: every list after the first starts on a page,
    /// and a page has room for at least an entry and a pointer.
    fn lists(
        &mut self,
        memory: &Memory,
        page: u64,
        mut list: u64,
        mut left: u64,
    ) -> Result<(), Status> {
        if !is_list_aligned(list) {
            return Err(Status::PRP_OFFSET_INVALID.dnr());
        }
        loop {
            let needed = left.div_ceil(page);
            let room = prp::left_in_page(list, page) / prp::ENTRY as u64;
            self.read_list(memory, list, needed.min(room))?;
            // If the page has too little room, its last entry points to the next list.
            let data = if needed > room { room - 1 } else { needed };
            for index in 0..data as usize {
                let entry = self.entries[index].get();
                aligned(entry, page)?;
                let len = left.min(page);
                self.push(entry, len);
                left -= len;
            }
            if left == 0 {
                return Ok(());
            }
            list = self.entries[data as usize].get();
            aligned(list, page)?;
        }
    }

    /// Reads the first `entries` entries of the list at `list` into `self.entries`.
    ///
    /// # Errors
    /// Data Transfer Error if the list cannot be read.
    fn read_list(&mut self, memory: &Memory, list: u64, entries: u64) -> Result<(), Status> {
        // A list does not leave its page, so the number of entries fits.
        self.note_walked(entries as u32);
        self.entries.resize(entries as usize, U64::ZERO);
        memory
            .read(list, self.entries.as_mut_slice().as_mut_bytes())
            .map_err(|_| Status::DATA_TRANSFER_ERROR)
    }

    /// Appends a range to `runs`, or extends the last run if the range follows it.
    pub fn push(&mut self, address: u64, len: u64) {
        let len = len as usize;
        match self.runs.last_mut() {
            Some(last) if last.address.wrapping_add(last.len as u64) == address => last.len += len,
            _ => self.runs.push(Run { address, len }),
        }
    }

    /// Copies `from` to `runs`, which must hold at least as many bytes.
    ///
    /// # Errors
    /// Data Transfer Error if the memory cannot be reached.
    pub fn write(&self, memory: &Memory, from: &[u8]) -> Result<(), Status> {
        write_runs(memory, &self.runs, from)
    }

    /// Fills `into` from `runs`, which must hold at least as many bytes.
    ///
    /// # Errors
    /// Data Transfer Error if the memory cannot be reached.
    pub fn read(&self, memory: &Memory, into: &mut [u8]) -> Result<(), Status> {
        let mut rest = into;
        for run in &self.runs {
            let len = run.len.min(rest.len());
            let (part, next) = std::mem::take(&mut rest).split_at_mut(len);
            memory.read(run.address, part).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
            rest = next;
        }
        Ok(())
    }
}

/// Copies `from` to `runs` in order. `runs` must hold at least as many bytes.
///
/// # Errors
/// Data Transfer Error if the memory cannot be reached.
pub(crate) fn write_runs(memory: &Memory, runs: &[Run], from: &[u8]) -> Result<(), Status> {
    let mut rest = from;
    for run in runs {
        let (part, next) = rest.split_at(run.len.min(rest.len()));
        memory.write(run.address, part).map_err(|_| Status::DATA_TRANSFER_ERROR)?;
        rest = next;
    }
    Ok(())
}

/// Checks that a PRP entry is the address of a page.
///
/// # Errors
/// PRP Offset Invalid.
fn aligned(address: u64, page: u64) -> Result<(), Status> {
    if is_page_aligned(address, page) { Ok(()) } else { Err(Status::PRP_OFFSET_INVALID.dnr()) }
}
