//! Counters of the SMART / Health log and the Error Information log (section 5.14.1).

use std::time::Duration;

use slipway_nvme_spec::log::{self, ErrorEntry};
use slipway_nvme_spec::status::Status;
use zerocopy::FromZeros;

use crate::inflight::CommandKind;

/// Entries of the Error Information log (ELPE is one less).
pub(crate) const ERROR_ENTRIES: usize = 64;
/// The reported temperature, 25 °C in kelvins. A software device has none, so this is one that
/// exceeds no default threshold.
pub(crate) const TEMPERATURE: u16 = 298;

/// Counters since the device was made; they outlive resets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health {
    /// Units of 512 bytes.
    pub sectors_read: u64,
    /// Units of 512 bytes.
    pub sectors_written: u64,
    pub reads: u64,
    pub writes: u64,
    pub unsafe_shutdowns: u64,
    pub media_errors: u64,
    /// The number of all errors ever; the newest `ERROR_ENTRIES` are kept.
    pub errors: u64,
    /// A ring of errors: number `n` (from 1 on) lies at `(n - 1) % ERROR_ENTRIES`.
    pub entries: Vec<ErrorEntry>,
    /// Time powered on before this process took over.
    pub powered_before: Duration,
}

impl Health {
    /// Counts a finished command of `bytes` bytes.
    #[inline]
    pub fn count(&mut self, kind: CommandKind, status: Status, bytes: u64) {
        let media = status.code() >> 8 == 2;
        self.media_errors += u64::from(media);
        let sectors = if status.is_success() { bytes / 512 } else { 0 };
        match kind {
            // Verify and Compare count as data that the host read. Verify does not count as a
            // command (section 5.14.1.2). Copy ends as `Other`.
            CommandKind::Scan => self.sectors_read += sectors,
            CommandKind::Read | CommandKind::Compare => {
                self.reads += 1;
                self.sectors_read += sectors;
            }
            CommandKind::Write => {
                self.writes += 1;
                self.sectors_written += sectors;
            }
            CommandKind::Other => {}
        }
    }

    /// Returns the counters that a lane counts for itself: units read, units written, reads,
    /// writes, media errors.
    pub fn counters_mut(&mut self) -> [&mut u64; 5] {
        let Self { sectors_read, sectors_written, reads, writes, media_errors, .. } = self;
        [sectors_read, sectors_written, reads, writes, media_errors]
    }

    /// Adds `entry` to the Error Information log, and sets its number.
    pub fn log(&mut self, mut entry: ErrorEntry) {
        let at = (self.errors % ERROR_ENTRIES as u64) as usize;
        self.errors += 1;
        entry.count.set(self.errors);
        match self.entries.get_mut(at) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
    }

    /// Returns the Error Information log, newest first.
    pub fn newest_first(&self) -> impl Iterator<Item = &ErrorEntry> {
        let newest = (self.errors % ERROR_ENTRIES as u64) as usize;
        let (new, old) = self.entries.split_at(newest.min(self.entries.len()));
        new.iter().rev().chain(old.iter().rev())
    }

    /// Returns the SMART / Health log (section 5.14.1.2), with `warning` as Critical Warning and
    /// `powered` as the time powered on in all.
    pub fn log_page(&self, warning: u8, powered: Duration) -> log::Health {
        let mut page = log::Health::new_zeroed();
        page.warning = warning;
        page.temperature.set(TEMPERATURE);
        page.spare = 100;
        page.spare_threshold = 10;
        page.units_read = wide(self.sectors_read.div_ceil(1000));
        page.units_written = wide(self.sectors_written.div_ceil(1000));
        page.reads = wide(self.reads);
        page.writes = wide(self.writes);
        page.power_cycles = wide(1);
        page.hours = wide(powered.as_secs() / 3600);
        page.unsafe_shutdowns = wide(self.unsafe_shutdowns);
        page.media_errors = wide(self.media_errors);
        page.error_entries = wide(self.errors);
        page
    }
}

fn wide(value: u64) -> [u8; 16] {
    u128::from(value).to_le_bytes()
}
