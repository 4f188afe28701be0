//! Chains that were read and pinned, and are not used yet.

use slipway_ram::{Access, Fault, Span, View};
use slipway_virtio::queue::Range;

/// The memory of one chain.
#[derive(Default)]
pub(crate) struct Slot {
    /// The head of the driver's chain, which is reported.
    pub head: u16,
    /// The bytes of all spans.
    pub len: usize,
    pub spans: Vec<Span>,
}

impl Slot {
    /// Pins `ranges`. The caller has bounded their lengths.
    #[inline]
    pub fn pin(
        &mut self,
        view: &mut View,
        head: u16,
        ranges: &[Range],
        access: Access,
    ) -> Result<(), Fault> {
        let ranges = ranges.iter().map(|(at, len)| (*at, *len as usize));
        view.pin(ranges, access, &mut self.spans)?;
        self.head = head;
        self.len = self.spans.iter().map(Span::len).sum();
        Ok(())
    }

    /// Prefetches the first bytes.
    #[inline]
    pub fn prefetch(&self) {
        if let Some(span) = self.spans.first() {
            span.prefetch(0);
            span.prefetch(64);
        }
    }
}

/// A write position in a row of slots.
pub(crate) struct Cursor<'a> {
    slots: [&'a [Slot]; 2],
    /// Slot, span, and byte offset in the span.
    slot: usize,
    span: usize,
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Starts at the beginning of `slots`, which continue with those of `wrapped`.
    pub fn new(slots: &'a [Slot], wrapped: &'a [Slot]) -> Self {
        Self { slots: [slots, wrapped], slot: 0, span: 0, at: 0 }
    }

    /// Returns the place of the next byte, and how many bytes follow in the same span. Returns
    /// `None` if all slots are full.
    #[inline]
    fn place(&mut self) -> Option<(&'a Span, usize, usize)> {
        let [first, second] = self.slots;
        loop {
            let slot = match first.get(self.slot) {
                Some(slot) => slot,
                None => second.get(self.slot - first.len())?,
            };
            match slot.spans.get(self.span) {
                Some(span) if self.at < span.len() => {
                    return Some((span, self.at, span.len() - self.at));
                }
                Some(_) => (self.span, self.at) = (self.span + 1, 0),
                None => (self.slot, self.span, self.at) = (self.slot + 1, 0, 0),
            }
        }
    }

    /// Writes `bytes`, as far as there is room.
    #[inline]
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
        while let (false, Some((span, at, room))) = (bytes.is_empty(), self.place()) {
            let (part, rest) = bytes.split_at(room.min(bytes.len()));
            span.write(at, part)?;
            self.at += part.len();
            bytes = rest;
        }
        Ok(())
    }

    /// Copies the data of `reader`, as far as there is room.
    #[inline]
    pub fn fill(&mut self, reader: &mut slipway_switch::Reader<'_>) -> Result<(), Fault> {
        while let Some((span, at, room)) = self.place() {
            let copied = reader.copy_to(span, at, room)?;
            self.at += copied;
            if copied < room {
                break;
            }
        }
        Ok(())
    }
}
