//! The pages of the client's memory that the function writes to: the features
//! `VFIO_DEVICE_FEATURE_DMA_LOGGING_START`, `_STOP` and `_REPORT` of `VFIO_USER_DEVICE_FEATURE`.
//!
//! The log covers all memory that the client has mapped with a descriptor when it begins, whatever
//! ranges the client names; message-only memory needs none. It has a bit for each page of 4 KiB, of
//! which a report may have up to 512 Ki (2 GiB), as far as they fit into a message. It belongs to
//! the mapping: memory that is mapped later, or by a later connection, has no log, and a report of
//! it is an error. So a client learns that a server that took over does not know what its
//! predecessor wrote.
//!
//! A log begins, and is reported, while the function is quiet, and the function then goes on: all
//! that it began before is in the report, and in memory.

use rustix::io::Errno;
use slipway_ram::PAGE;
use slipway_vfio_user_spec::{LogControl, LogReport};
use slipway_vfio_user_wire::MAX_DATA_XFER_SIZE;
use zerocopy::IntoBytes;

use super::migration::reply;
use super::{Answer, BYTES_PER_COST, REGIONS_PER_COST, Session, Waiting, exactly, prefix};
use crate::device::Device;

/// The most bytes of bits in a report.
const MOST_BITS: usize = 64 << 10;
/// Bytes of a range behind the start of a request for a log.
const RANGE: usize = 16;

/// A request that waits for the function to become quiet.
pub(super) struct Log {
    flags: u32,
    /// The range to report; `None` if a log is to begin.
    report: Option<LogReport>,
}

impl Session {
    /// Begins a log, once the function is quiet. A log that there is begins anew.
    pub(super) fn start_log(
        &mut self,
        device: &mut Device,
        (flags, data): (u32, &[u8]),
    ) -> Result<Answer, Errno> {
        let (control, ranges): (LogControl, _) = prefix(data)?;
        let count = usize::try_from(control.num_ranges.get()).map_err(|_| Errno::INVAL)?;
        if count.checked_mul(RANGE) != Some(ranges.len()) {
            return Err(Errno::INVAL);
        }
        self.log(device, Log { flags, report: None }, false)
    }

    /// Ends the log, if there is one.
    pub(super) fn stop_log(&mut self, device: &Device, flags: u32) -> Result<Answer, Errno> {
        let regions = device.map.regions();
        self.cost += regions.len() / REGIONS_PER_COST;
        regions.iter().for_each(|(_, region)| region.end_log());
        reply(flags, usize::MAX, &[])
    }

    /// Reports a range to a client with `room` bytes for the reply, once the function is quiet.
    pub(super) fn report_log(
        &mut self,
        device: &mut Device,
        (flags, room): (u32, usize),
        data: &[u8],
    ) -> Result<Answer, Errno> {
        let report: LogReport = exactly(data)?;
        let theirs = self.negotiated.map_or(0, |agreed| agreed.max_xfer);
        let words = words_of(&report)?;
        let most = theirs.min(MAX_DATA_XFER_SIZE).min(MOST_BITS);
        let bits = words.checked_mul(8).filter(|bits| *bits <= most).ok_or(Errno::INVAL)?;
        // Before any bit is taken.
        reply(flags, room, &vec![0; size_of::<LogReport>() + bits])?;
        self.log(device, Log { flags, report: Some(report) }, false)
    }

    /// Goes on with a request.
    pub(super) fn log(
        &mut self,
        device: &mut Device,
        log: Log,
        expired: bool,
    ) -> Result<Answer, Errno> {
        if device.is_held() {
            return Err(Errno::AGAIN);
        }
        let quiet = device.function.quiesce();
        if !quiet && !expired {
            return Ok(Answer::Later(Waiting::Log(log)));
        }
        let done = if quiet { self.log_quietly(device, &log) } else { Err(Errno::BUSY) };
        self.stuck = !quiet;
        if device.runs() {
            device.pace.kick();
        }
        done
    }

    fn log_quietly(&mut self, device: &Device, log: &Log) -> Result<Answer, Errno> {
        let Some(report) = &log.report else {
            // As if each page had a bit to be cleared.
            let bytes = usize::try_from(self.mapped_bytes).unwrap_or(usize::MAX) / PAGE / 8;
            let regions = device.map.regions();
            self.cost += bytes / BYTES_PER_COST + regions.len() / REGIONS_PER_COST;
            for (_, region) in &regions {
                // Accesses to message-only memory are seen by the client.
                region.log_writes();
            }
            return reply(log.flags, usize::MAX, &[]);
        };
        let (iova, len) = (report.iova.get(), report.length.get());
        let (start, region) = device.map.region_at(iova).ok_or(Errno::INVAL)?;
        let within = iova - start;
        let end = within.checked_add(len).filter(|end| *end <= region.len());
        let page = |at: u64| usize::try_from(at / PAGE as u64).map_err(|_| Errno::INVAL);
        let pages = page(within)?..page(end.ok_or(Errno::INVAL)?)?;
        let mut words = vec![0u64; words_of(report)?];
        if !region.take_written(pages, &mut words) {
            return Err(Errno::INVAL);
        }
        self.cost += words.len() * 8 / BYTES_PER_COST;
        let bits = words.iter().flat_map(|word| word.to_le_bytes());
        let data: Vec<u8> = report.as_bytes().iter().copied().chain(bits).collect();
        reply(log.flags, usize::MAX, &data)
    }
}

/// Returns the number of words that the bits of a range take.
fn words_of(report: &LogReport) -> Result<usize, Errno> {
    let (iova, len, page) = (report.iova.get(), report.length.get(), PAGE as u64);
    let sound = report.page_size.get() == page
        && len > 0
        && len.is_multiple_of(page)
        && iova.is_multiple_of(page)
        && iova.checked_add(len).is_some();
    let words = (len / page).div_ceil(64);
    sound.then_some(words).and_then(|words| usize::try_from(words).ok()).ok_or(Errno::INVAL)
}
