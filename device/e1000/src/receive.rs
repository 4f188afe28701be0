//! Frames to the driver (section 3.2).

use slipway_e1000_spec::{
    LONGEST, LONGEST_LONG, Receive, cause, csb, rctl, receive_status, statistic,
};
use slipway_ethernet_spec::{EthernetFrame, HEADER, MIN_FRAME, Mac, TAG, TYPE};
use slipway_ram::{Access, Fault, Span};
use slipway_switch::{Burst, Delivered, MAX_FRAME, Offload, Pick, Reader, Segmentation, vnet};

use crate::common::Common;
use crate::filter::Verdict;
use crate::offload::get;
use crate::ring::Ring;
use crate::verify;

/// Most buffers of a frame: the longest one, with its header, in buffers of 256 bytes.
const MOST: usize = (csb::HEADER + MAX_FRAME).div_ceil(256);

/// The receive ring.
pub(crate) struct Receiver {
    ring: Ring,
    spans: Vec<Span>,
    /// Descriptors of the frame in hand.
    buffers: Vec<(u64, usize)>,
    /// Frames have come since the driver was last told.
    pub arrived: bool,
    /// Further causes since then.
    pub causes: u32,
}

/// The form in which a frame is given to the driver.
struct Shape {
    /// Bytes of the frame, padded, without a tag that is stripped and without check sequence.
    len: usize,
    /// Bytes of zeros behind the frame's own bytes.
    pad: usize,
    /// The tag that is stripped, and whether it is in the frame's own bytes.
    tag: Option<(u16, bool)>,
    inexact: bool,
    /// The destination, and the frame's bytes before it was padded, for the statistics.
    to: Mac,
    bytes: usize,
}

/// The outcome of a frame.
enum Outcome {
    Done,
    Filtered,
    /// The driver has no buffers.
    Full,
    /// The frame is not one that the driver takes, or memory is gone.
    Refused,
}

impl Receiver {
    pub fn new(ring: Ring) -> Self {
        let buffers = Vec::with_capacity(MOST);
        Self { ring, spans: Vec::new(), buffers, arrived: false, causes: 0 }
    }

    /// Takes new rules.
    pub fn set_rules(&mut self, rules: crate::rules::RingRules) {
        self.ring.set_rules(rules);
    }

    /// Returns the ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Implements [`slipway_switch::Port::deliver`], with buffers up to `tail`.
    #[inline]
    pub fn deliver(
        &mut self,
        common: &mut Common,
        tail: u32,
        burst: &Burst,
        picks: &[Pick],
    ) -> Delivered {
        let mut delivered = Delivered::default();
        let before = self.ring.waiting(tail);
        for (index, &pick) in picks.iter().enumerate() {
            match self.put(common, tail, burst, pick) {
                Outcome::Done => {
                    delivered.frames += 1;
                    delivered.bytes += burst.len_of(pick) as u64;
                }
                Outcome::Filtered => {
                    // For the switch, filtered frames count as delivered.
                    delivered.frames += 1;
                    delivered.bytes += burst.len_of(pick) as u64;
                    common.shared.live.filtered.add(1);
                }
                Outcome::Refused => delivered.refused += 1,
                Outcome::Full => {
                    delivered.full = (picks.len() - index) as u32;
                    break;
                }
            }
        }
        self.note(common, tail, before, &delivered);
        delivered
    }

    /// Counts frames that were lost, and notes the causes of the driver's interrupt.
    fn note(&mut self, common: &Common, tail: u32, before: u32, delivered: &Delivered) {
        let shared = &common.shared;
        if delivered.full > 0 {
            let lost = u64::from(delivered.full);
            shared.live.no_buffer.add(lost);
            shared.statistics.add(statistic::MPC, lost);
            shared.statistics.add(statistic::RNBC, lost);
            self.causes |= cause::RXO;
        }
        shared.live.too_large.add(delivered.refused.into());
        let low = self.ring.entries() >> (1 + (common.rules.rctl >> rctl::RDMTS & 0b11));
        let after = self.ring.waiting(tail);
        if before > low && after <= low {
            self.causes |= cause::RXDMT0;
        }
    }

    /// Judges a frame, and returns its form.
    #[inline]
    fn judge(&self, common: &Common, burst: &Burst, pick: Pick) -> Result<Shape, Outcome> {
        let rules = &common.rules;
        let head = burst.head(usize::from(pick.frame));
        let to = EthernetFrame::new_unchecked(head).destination();
        let own = if get(head, TYPE) == Some(rules.tag) { get(head, HEADER) } else { None };
        let tag = if pick.tci != 0 { Some((pick.tci, false)) } else { own.map(|tci| (tci, true)) };
        let vlan = tag.map(|(tci, _)| tci & slipway_ethernet_spec::tci::VLAN);
        let verdict = rules.filter.judge(to, vlan);
        if verdict == Verdict::Rejected {
            return Err(Outcome::Filtered);
        }
        let offload = burst.offload_of(pick);
        if offload.is_some() && !rules.offloads {
            // The rules have changed since the switch looked at the port's abilities.
            return Err(Outcome::Refused);
        }
        let len = burst.len_of(pick);
        let most = match (rules.rctl & rctl::LPE == 0, tag) {
            _ if offload.segmentation != Segmentation::None => usize::MAX,
            (true, None) => LONGEST,
            (true, Some(_)) => LONGEST + TAG,
            (false, _) => LONGEST_LONG,
        };
        if len + slipway_e1000_spec::FCS > most {
            common.shared.statistics.add(statistic::ROC, 1);
            return Err(Outcome::Refused);
        }
        let strips = rules.vlans && tag.is_some();
        let pad = MIN_FRAME.saturating_sub(len);
        let tag = tag.filter(|_| strips);
        Ok(Shape {
            len: len + pad - if strips { TAG } else { 0 },
            pad,
            tag,
            inexact: verdict == Verdict::Inexact,
            to,
            bytes: len,
        })
    }

    /// Copies one frame into as many buffers as it needs.
    #[inline]
    fn put(&mut self, common: &mut Common, tail: u32, burst: &Burst, pick: Pick) -> Outcome {
        if self.ring.waiting(tail) == 0 {
            return Outcome::Full;
        }
        let shape = match self.judge(common, burst, pick) {
            Ok(shape) => shape,
            Err(outcome) => return outcome,
        };
        let size = common.rules.buffer();
        let total = common.rules.header() + shape.len + common.rules.fcs();
        let count = total.div_ceil(size);
        if count >= self.ring.entries() as usize {
            return Outcome::Refused;
        }
        let memory = (&common.memory, &common.view);
        if !self.ring.look(memory, (tail, count), Access::Write) {
            return Outcome::Full;
        }
        self.buffers.clear();
        for number in 0..count {
            let Some(raw) = self.ring.ahead(number) else { return Outcome::Full };
            let part = size.min(total - number * size);
            self.buffers.push((Receive::read(raw).address, part));
        }
        match common.view.pin(self.buffers.iter().copied(), Access::Write, &mut self.spans) {
            Ok(()) => {}
            Err(Fault::Busy { .. }) => return Outcome::Full,
            Err(_) => {
                common.shared.live.memory.add(1);
                return Outcome::Refused;
            }
        }
        if self.copy(common, burst, pick, &shape).is_err() {
            common.shared.live.memory.add(1);
            return Outcome::Refused;
        }
        self.report(common, burst, pick, &shape);
        Outcome::Done
    }

    /// Copies a frame into the pinned buffers.
    #[inline]
    fn copy(&self, common: &Common, burst: &Burst, pick: Pick, shape: &Shape) -> Result<(), Fault> {
        let padding = [0; MIN_FRAME + slipway_e1000_spec::FCS];
        // No wire was there to damage the frame, and no driver looks at its check sequence: zeros.
        let padding = &padding[..shape.pad + common.rules.fcs()];
        if let ([span], None, false) = (&self.spans[..], &shape.tag, common.rules.offloads) {
            burst.copy(pick, span, 0)?;
            return span.write(shape.bytes, padding);
        }
        let mut cursor = Cursor { spans: &self.spans, at: 0 };
        if common.rules.offloads {
            cursor.write(&header(burst.offload_of(pick), shape.tag.is_some()))?;
        }
        match shape.tag {
            None => cursor.fill(&mut burst.read(pick))?,
            Some((_, in_frame)) => {
                let mut reader = burst.read(Pick { tci: 0, ..pick });
                if in_frame {
                    let mut addresses = [0; TYPE + TAG];
                    reader.read(&mut addresses)?;
                    cursor.write(&addresses[..TYPE])?;
                }
                cursor.fill(&mut reader)?;
            }
        }
        cursor.write(padding)
    }

    /// Writes back the descriptors of the frame, the last one with the frame's status.
    #[inline]
    fn report(&mut self, common: &Common, burst: &Burst, pick: Pick, shape: &Shape) {
        let checked = verify::check(burst, pick, common.rules.rxcsum);
        let mut status = receive_status::DD | checked.status;
        status |= if shape.inexact { receive_status::PIF } else { 0 };
        status |= if shape.tag.is_some() { receive_status::VP } else { 0 };
        let count = self.buffers.len();
        for (number, &(address, len)) in self.buffers.iter().enumerate() {
            let last = number + 1 == count;
            let descriptor = Receive {
                address,
                length: len as u16,
                checksum: 0,
                status: if last { status | receive_status::EOP } else { receive_status::DD },
                errors: if last { checked.errors } else { 0 },
                special: if last { shape.tag.map_or(0, |(tci, _)| tci) } else { 0 },
            };
            let Some((index, _)) = self.ring.take() else { return };
            self.ring.publish(&common.memory, index, descriptor.bits());
        }
        common.shared.live.received.add(1);
        common.shared.statistics.received(shape.to, shape.bytes);
        self.arrived = true;
        if shape.len + slipway_e1000_spec::FCS <= usize::from(common.rules.small) {
            self.causes |= cause::SRPD;
        }
    }

    /// Releases all memory.
    pub fn rest(&mut self) {
        self.ring.release();
        self.spans.clear();
    }
}

/// Returns the header of a frame. `strips` says that a tag is taken off, which counts in the places
/// of the frame's offload.
fn header(mut offload: Offload, strips: bool) -> [u8; csb::HEADER] {
    if let (true, Some((start, _))) = (strips, &mut offload.checksum) {
        *start = start.saturating_sub(TAG as u16);
    }
    let mut header = [0; csb::HEADER];
    header[..vnet::HEADER].copy_from_slice(&offload.to_header(0));
    header
}

/// A write position in a row of spans.
struct Cursor<'a> {
    spans: &'a [Span],
    /// Byte offset in the first span.
    at: usize,
}

impl<'a> Cursor<'a> {
    /// Returns the next span with room, and how much it has.
    #[inline]
    fn place(&mut self) -> Option<(&'a Span, usize)> {
        while let Some((span, rest)) = self.spans.split_first() {
            if self.at < span.len() {
                return Some((span, span.len() - self.at));
            }
            (self.spans, self.at) = (rest, 0);
        }
        None
    }

    /// Writes `bytes`, as far as there is room.
    #[inline]
    fn write(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let Some((span, room)) = self.place() else { break };
            let (part, rest) = bytes.split_at(room.min(bytes.len()));
            span.write(self.at, part)?;
            self.at += part.len();
            bytes = rest;
        }
        Ok(())
    }

    /// Copies the data of `reader`, as far as there is room.
    #[inline]
    fn fill(&mut self, reader: &mut Reader<'_>) -> Result<(), Fault> {
        while let Some((span, room)) = self.place() {
            let copied = reader.copy_to(span, self.at, room)?;
            self.at += copied;
            if copied < room {
                break;
            }
        }
        Ok(())
    }
}
