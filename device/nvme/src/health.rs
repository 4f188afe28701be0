//! Counters of the SMART / Health log and the Error Information log (section 5.14.1).

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slipway_nvme_spec::log::{self, ErrorEntry};
use slipway_nvme_spec::status::Status;
use zerocopy::FromZeros;

/// Entries of the Error Information log (ELPE is one less).
pub(crate) const ERROR_ENTRIES: usize = 64;
/// WCTEMP, kelvins: 70 °C.
pub(crate) const WARNING_TEMPERATURE: u16 = 343;
/// The reported temperature, 25 °C in kelvins. A software device has none, so this is one that
/// exceeds no default threshold.
pub(crate) const TEMPERATURE: u16 = 298;

/// The data that a command moved, as the SMART / Health log counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Moved {
    /// Data that the host read, by a command that counts as a read.
    Read,
    /// Data that the host wrote.
    Written,
    /// Data that counts as read, by a command that does not count.
    Scanned,
    Nothing,
}

/// The counters that each thread of a controller counts for itself.
///
/// A new one is a field here, in [`Counters::each`], `each_mut` and `From`, and in `HealthState` of
/// `persist::state`, which saves and restores it. [`Counters::count`] counts it:
/// `engine::complete` and `engine::io` call that for each command. [`Health::log_page`] reports it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    /// Units of 512 bytes.
    pub sectors_read: u64,
    /// Units of 512 bytes.
    pub sectors_written: u64,
    pub reads: u64,
    pub writes: u64,
    pub media_errors: u64,
}

impl Counters {
    /// Counts a finished command that moved `bytes` bytes.
    #[inline]
    pub fn count(&mut self, moved: Moved, status: Status, bytes: u64) {
        let media = status.code() >> 8 == 2;
        self.media_errors += u64::from(media);
        let sectors = if status.is_success() { bytes / 512 } else { 0 };
        match moved {
            Moved::Scanned => self.sectors_read += sectors,
            Moved::Read => {
                self.reads += 1;
                self.sectors_read += sectors;
            }
            Moved::Written => {
                self.writes += 1;
                self.sectors_written += sectors;
            }
            Moved::Nothing => {}
        }
    }

    /// Adds another thread's counts.
    pub fn add(&mut self, other: &Self) {
        let sums = self.each_mut().into_iter().zip(other.each());
        sums.for_each(|(sum, other)| *sum = sum.saturating_add(other));
    }

    /// Returns all counters, in the order of the fields.
    pub fn each(&self) -> [u64; 5] {
        let Self { sectors_read, sectors_written, reads, writes, media_errors } = *self;
        [sectors_read, sectors_written, reads, writes, media_errors]
    }

    fn each_mut(&mut self) -> [&mut u64; 5] {
        let Self { sectors_read, sectors_written, reads, writes, media_errors } = self;
        [sectors_read, sectors_written, reads, writes, media_errors]
    }
}

impl From<[u64; 5]> for Counters {
    /// The reverse of [`Counters::each`].
    fn from([sectors_read, sectors_written, reads, writes, media_errors]: [u64; 5]) -> Self {
        Self { sectors_read, sectors_written, reads, writes, media_errors }
    }
}

/// The counters of one thread, for other threads. They lag behind by one poll.
#[derive(Debug, Default)]
pub(crate) struct Published([AtomicU64; 5]);

impl Published {
    /// Returns the counters that were stored last, each by itself.
    pub fn get(&self) -> Counters {
        self.0.each_ref().map(|one| one.load(Ordering::Relaxed)).into()
    }

    /// Stores the thread's counters.
    pub fn put(&self, counters: &Counters) {
        let pairs = self.0.iter().zip(counters.each());
        pairs.for_each(|(shared, own)| shared.store(own, Ordering::Relaxed));
    }
}

/// Health since the device was made; it outlives resets.
#[derive(Clone, Debug, Default)]
pub(crate) struct Health {
    /// The counts of predecessors.
    pub counted_before: Counters,
    pub unsafe_shutdowns: u64,
    /// The number of all errors ever; the newest `ERROR_ENTRIES` are kept.
    pub errors: u64,
    /// A ring of errors: number `n` (from 1 on) lies at `(n - 1) % ERROR_ENTRIES`.
    pub entries: Vec<ErrorEntry>,
    /// Time powered on before this process took over.
    pub powered_before: Duration,
}

impl Health {
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

    /// Returns the SMART / Health log (section 5.14.1.2), with `warning` as Critical Warning,
    /// `powered` as the time powered on in all, and `counted` as the counts of all threads and
    /// predecessors.
    pub fn log_page(&self, warning: u8, powered: Duration, counted: &Counters) -> log::Health {
        let mut page = log::Health::new_zeroed();
        page.warning = warning;
        page.temperature.set(TEMPERATURE);
        page.spare = 100;
        page.spare_threshold = 10;
        page.units_read = wide(counted.sectors_read.div_ceil(1000));
        page.units_written = wide(counted.sectors_written.div_ceil(1000));
        page.reads = wide(counted.reads);
        page.writes = wide(counted.writes);
        page.power_cycles = wide(1);
        page.hours = wide(powered.as_secs() / 3600);
        page.unsafe_shutdowns = wide(self.unsafe_shutdowns);
        page.media_errors = wide(counted.media_errors);
        page.error_entries = wide(self.errors);
        page
    }
}

fn wide(value: u64) -> [u8; 16] {
    u128::from(value).to_le_bytes()
}
