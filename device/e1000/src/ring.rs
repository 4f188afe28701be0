//! A descriptor ring in guest memory (sections 3.2.6 and 3.4). Descriptors from the head up to the
//! tail are the device's.

use std::collections::VecDeque;

use slipway_e1000_spec::DESCRIPTOR;
use slipway_ram::{Access, Memory, View, Window};

use crate::rules::RingRules;

/// A private copy of a descriptor.
pub(crate) type Raw = [u8; DESCRIPTOR];

/// Descriptors that are read at once.
const AHEAD: usize = 32;
/// Bytes of a cache line.
const LINE: u16 = 64;

pub(crate) struct Ring {
    rules: RingRules,
    window: Window,
    /// Private copies of descriptors from `next` on.
    ahead: VecDeque<Raw>,
    /// The first descriptor that was not taken.
    next: u32,
    /// The version of the client's map and the tail with which the last read failed. `None` if no
    /// read has failed since the ring began, or was disabled or released.
    fault: Option<(u64, u32)>,
}

impl Ring {
    /// Makes a ring that begins with its rules' head. A head beyond the ring is taken for 0.
    pub fn new(rules: RingRules) -> Self {
        let len = rules.entries as usize * DESCRIPTOR;
        let next = if rules.head < rules.entries { rules.head } else { 0 };
        Self {
            rules,
            window: Window::new(rules.base, len, Access::Write),
            ahead: VecDeque::with_capacity(4 * AHEAD),
            next,
            fault: None,
        }
    }

    /// Takes new rules. Returns `true` if the ring begins anew.
    pub fn set_rules(&mut self, rules: RingRules) -> bool {
        if rules.epoch != self.rules.epoch {
            *self = Self::new(rules);
            return true;
        }
        self.rules.enabled = rules.enabled;
        if !rules.enabled {
            // A driver may change its descriptors before it enables the ring again.
            self.ahead.clear();
            self.fault = None;
        }
        false
    }

    /// Returns the number of descriptors in the ring.
    pub fn entries(&self) -> u32 {
        self.rules.entries
    }

    /// Returns the index of the first descriptor that was not taken.
    pub fn next(&self) -> u32 {
        self.next
    }

    /// Returns the number of descriptors up to `tail`; 0 if the ring is disabled, or the tail lies
    /// beyond it.
    #[inline]
    pub fn waiting(&self, tail: u32) -> u32 {
        let RingRules { enabled, entries, .. } = self.rules;
        if !enabled || tail >= entries {
            return 0;
        }
        if tail >= self.next { tail - self.next } else { tail + entries - self.next }
    }

    /// Returns whether descriptors wait before `tail` that the device has not failed to read. After
    /// a failure that needs another tail, another map of `memory`, or a ring that begins anew: a
    /// device that tried again by itself would never sleep.
    #[inline]
    pub fn has_work(&self, memory: &Memory, tail: u32) -> bool {
        self.waiting(tail) > 0 && self.fault.is_none_or(|fault| fault != (memory.version(), tail))
    }

    /// Returns the index `steps` behind `index`.
    #[inline]
    pub fn after(&self, index: u32, steps: u32) -> u32 {
        let sum = index + steps;
        if sum >= self.rules.entries { sum - self.rules.entries } else { sum }
    }

    /// Reads descriptors ahead until there are `count`. Returns `false` if fewer wait before
    /// `tail`, or the ring is not in one region of memory.
    ///
    /// The buffers of descriptors that were read are prefetched, for an access of the kind `access`
    /// by `view`.
    #[inline]
    pub fn look(
        &mut self,
        (memory, view): (&Memory, &View),
        (tail, count): (u32, usize),
        access: Access,
    ) -> bool {
        if self.ahead.len() >= count {
            return true;
        }
        let before = self.ahead.len();
        let found = self.fetch(memory, tail, count);
        for raw in self.ahead.range(before..) {
            // The address of a buffer, except in a context, whose bytes may be another address of
            // the guest's memory: a prefetch changes nothing.
            let address = raw.first_chunk().map_or(0, |address| u64::from_le_bytes(*address));
            view.prefetch(address, access);
            // A frame is read up to the end of its head, and written by streams of stores.
            if access == Access::Read && u16::from_le_bytes([raw[8], raw[9]]) > LINE {
                view.prefetch(address.wrapping_add(LINE.into()), access);
            }
        }
        found
    }

    fn fetch(&mut self, memory: &Memory, tail: u32, count: usize) -> bool {
        let waiting = self.waiting(tail) as usize;
        while self.ahead.len() < count {
            let have = self.ahead.len();
            let Some(left) = waiting.checked_sub(have).filter(|left| *left > 0) else {
                return false;
            };
            let from = self.after(self.next, have as u32) as usize;
            let read = left.min(AHEAD).min(self.rules.entries as usize - from);
            let mut bytes = [0; AHEAD * DESCRIPTOR];
            let bytes = &mut bytes[..read * DESCRIPTOR];
            // Before the read: a map that changes during the read is another one.
            let version = memory.version();
            let span = self.window.span(memory);
            if span.is_none_or(|span| span.read(from * DESCRIPTOR, bytes).is_err()) {
                self.fault = Some((version, tail));
                return false;
            }
            self.ahead.extend(bytes.as_chunks::<DESCRIPTOR>().0);
        }
        true
    }

    /// Returns the descriptor `number` places ahead, which was looked at.
    #[inline]
    pub fn ahead(&self, number: usize) -> Option<&Raw> {
        self.ahead.get(number)
    }

    /// Takes the next descriptor, which was looked at, with its index.
    #[inline]
    pub fn take(&mut self) -> Option<(u32, Raw)> {
        let raw = self.ahead.pop_front()?;
        let index = self.next;
        self.next = self.after(index, 1);
        Some((index, raw))
    }

    /// Writes a whole descriptor, whose status is in its last four bytes.
    #[inline]
    pub fn publish(&mut self, memory: &Memory, index: u32, bits: u128) -> bool {
        let span = self.window.span(memory);
        span.is_some_and(|span| span.publish(index as usize * DESCRIPTOR, bits).is_ok())
    }

    /// Writes the last four bytes of a descriptor.
    #[inline]
    pub fn report(&mut self, memory: &Memory, index: u32, word: u32) -> bool {
        let at = index as usize * DESCRIPTOR + DESCRIPTOR - 4;
        self.window.span(memory).is_some_and(|span| span.store_u32(at, word).is_ok())
    }

    /// Goes back to `next`, and forgets what was read ahead.
    pub fn rewind(&mut self, next: u32) {
        self.next = next;
        self.ahead.clear();
    }

    /// Releases the memory, and forgets what was read ahead.
    pub fn release(&mut self) {
        self.ahead.clear();
        self.fault = None;
        self.window.release();
    }
}
