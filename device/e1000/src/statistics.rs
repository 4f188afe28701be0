//! The statistics registers (section 13.7). The data path counts, and never clears; the function
//! remembers the count at which a register was last read, and gives the difference.
//!
//! All offsets of the section are registers that read 0 if nothing counts them. So a further one
//! has its offset in `spec/e1000-spec` (`statistic`) and is counted by `Statistics::received` or
//! `sent`, or by `add` where its event is found (`receive`, `transmit`); it needs no new version of
//! the saved state. One of 64 bits is in `WIDE`. Tests: below, and `tests/traffic.rs`. What
//! `slipway port inspect` shows of an e1000 is in `counters`: a register whose accesses are counted
//! by name is a row of `COUNTED`, and another figure a field of `E1000Counters` (`plane.proto`),
//! which `e1000_counters` of `host/plane` (`network.rs`) fills in and `e1000_json` of the CLI's
//! `port.rs` prints.

use slipway_e1000_spec::statistic::{self, length_class};
use slipway_ethernet_spec::{MIN_FRAME, Mac};

use crate::counters::Count;

/// Registers, by words from the first one on.
pub(crate) const REGISTERS: usize = ((statistic::END - statistic::FIRST) / 4) as usize;

/// Registers of 64 bits, by their low word. Reading the high word clears both.
const WIDE: [u32; 4] = [statistic::GORCL, statistic::GOTCL, statistic::TORL, statistic::TOTL];

const fn place(offset: u32) -> usize {
    ((offset - statistic::FIRST) / 4) as usize
}

/// The counts of the data path, which alone changes them.
pub(crate) struct Statistics([Count; REGISTERS]);

impl Default for Statistics {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Count::default()))
    }
}

impl Statistics {
    /// Adds to the register at `offset`.
    #[inline]
    pub fn add(&self, offset: u32, more: u64) {
        if let Some(count) = self.0.get(place(offset)) {
            count.add(more);
        }
    }

    /// Counts a received frame of `len` bytes without its check sequence.
    #[inline]
    pub fn received(&self, to: Mac, len: usize) {
        let bytes = len.max(MIN_FRAME) + slipway_e1000_spec::FCS;
        self.add(statistic::PRC64 + 4 * length_class(bytes), 1);
        self.add(statistic::GPRC, 1);
        self.add(statistic::GORCL, bytes as u64);
        self.add(statistic::TPR, 1);
        self.add(statistic::TORL, bytes as u64);
        if to.is_group() {
            let broadcast = to == Mac::BROADCAST;
            self.add(if broadcast { statistic::BPRC } else { statistic::MPRC }, 1);
        }
    }

    /// Counts `frames` frames that were sent with `bytes` bytes in all, check sequences included,
    /// each of the length `each`.
    #[inline]
    pub fn sent(&self, to: Mac, frames: u64, bytes: u64, each: usize) {
        self.add(statistic::PTC64 + 4 * length_class(each), frames);
        self.add(statistic::GPTC, frames);
        self.add(statistic::GOTCL, bytes);
        self.add(statistic::TPT, frames);
        self.add(statistic::TOTL, bytes);
        if to.is_group() {
            let broadcast = to == Mac::BROADCAST;
            self.add(if broadcast { statistic::BPTC } else { statistic::MPTC }, frames);
        }
    }
}

/// The counts at which the registers were last cleared.
pub(crate) struct Cleared([u64; REGISTERS]);

impl Default for Cleared {
    fn default() -> Self {
        Self([0; REGISTERS])
    }
}

impl Cleared {
    fn value(&self, statistics: &Statistics, place: usize) -> u64 {
        statistics.0[place].get().wrapping_sub(self.0[place])
    }

    /// Reads the register at `offset`, which clears it. A register of 32 bits stops at its largest
    /// value. Returns `None` if there is no such register.
    pub fn read(&mut self, statistics: &Statistics, offset: u32) -> Option<u32> {
        let at = place(offset.checked_sub(statistic::FIRST)? + statistic::FIRST);
        if at >= REGISTERS {
            return None;
        }
        if WIDE.contains(&offset) {
            return Some(self.value(statistics, at) as u32);
        }
        let wide = WIDE.contains(&(offset.wrapping_sub(4)));
        let at = if wide { at - 1 } else { at };
        let value = self.value(statistics, at);
        self.0[at] = self.0[at].wrapping_add(value);
        Some(if wide { (value >> 32) as u32 } else { u32::try_from(value).unwrap_or(u32::MAX) })
    }

    /// Clears all registers.
    pub fn clear(&mut self, statistics: &Statistics) {
        for (cleared, count) in self.0.iter_mut().zip(&statistics.0) {
            *cleared = count.get();
        }
    }

    /// Returns the registers' values, for a successor.
    pub fn save(&self, statistics: &Statistics) -> Vec<u64> {
        (0..REGISTERS).map(|place| self.value(statistics, place)).collect()
    }

    /// Makes the registers have these values. Returns `false` if there are others.
    pub fn restore(&mut self, statistics: &Statistics, values: &[u64]) -> bool {
        if values.len() != REGISTERS {
            return false;
        }
        for (at, value) in values.iter().enumerate() {
            self.0[at] = statistics.0[at].get().wrapping_sub(*value);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_register_is_cleared_when_it_is_read() {
        let (statistics, mut cleared) = (Statistics::default(), Cleared::default());
        statistics.received(Mac::BROADCAST, 46);
        statistics.received(Mac::local(1), 1000);
        let mut read = |offset| cleared.read(&statistics, offset);
        assert_eq!((read(statistic::GPRC), read(statistic::GPRC)), (Some(2), Some(0)));
        assert_eq!((read(statistic::BPRC), read(statistic::MPRC)), (Some(1), Some(0)));
        assert_eq!((read(statistic::PRC64), read(statistic::PRC64 + 16)), (Some(1), Some(1)));
        assert_eq!(read(statistic::GORCL), Some(64 + 1004));
        assert_eq!(read(statistic::GORCL), Some(64 + 1004), "the high word clears");
        assert_eq!(read(statistic::GORCL + 4), Some(0));
        assert_eq!(read(statistic::GORCL), Some(0));
        assert_eq!((read(statistic::END), read(0)), (None, None));
    }

    #[test]
    fn large_counts_are_split_or_stop() {
        let (statistics, mut cleared) = (Statistics::default(), Cleared::default());
        statistics.add(statistic::TOTL, 5 << 32 | 7);
        statistics.add(statistic::MPC, 1 << 40);
        let saved = cleared.save(&statistics);
        let (others, mut again) = (Statistics::default(), Cleared::default());
        assert!(again.restore(&others, &saved) && !again.restore(&others, &saved[1..]));
        for (statistics, cleared) in [(&statistics, &mut cleared), (&others, &mut again)] {
            assert_eq!(cleared.read(statistics, statistic::TOTL), Some(7));
            assert_eq!(cleared.read(statistics, statistic::TOTL + 4), Some(5));
            assert_eq!(cleared.read(statistics, statistic::TOTL), Some(0));
            assert_eq!(cleared.read(statistics, statistic::MPC), Some(u32::MAX));
        }
    }
}
