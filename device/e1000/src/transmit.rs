//! Frames from the driver (sections 3.3 and 3.4).
//!
//! Descriptors are read in order, once. A frame whose last descriptor has come is put into the
//! switch's burst; its descriptors are written back when the switch has released the burst. A frame
//! that is not complete yet is read again, from its first descriptor on, when the path changes
//! hands. A frame with too many descriptors cannot be read again, because they are reported as they
//! are read; the path takes along that the rest of the frame is to be dropped.

use std::collections::VecDeque;

use slipway_e1000_spec::{Context, Data, Legacy, Transmit, command, option, statistic};
use slipway_ethernet_spec::{EthernetFrame, MIN_FRAME, TAG};
use slipway_ram::{Access, Fault, Span};
use slipway_switch::{BURST, Burst, Offload, Segmentation};

use crate::common::Common;
use crate::moderation::Sent;
use crate::offload::{HEAD, LONGEST_HEAD, OffloadRequest, insert_tag};
use crate::packet::{Malformed, Packet};
use crate::ring::Ring;

/// Most descriptors of one turn, so that a ring without frames takes no longer than others.
const MAX_TURN_DESCRIPTORS: usize = 1024;
/// Most descriptors of a frame, contexts among them included: 64 KiB in pieces of a page, several
/// times over.
const MAX_FRAME_DESCRIPTORS: usize = 256;

/// A descriptor that was read and is to be written back.
#[derive(Clone, Copy)]
struct Done {
    /// The descriptor's place in the ring.
    index: u32,
    /// The descriptor's last word with the status "done".
    word: u32,
    /// The descriptor's command, bits of [`command`].
    command: u8,
    /// `true` if a descriptor of the same frame was reported before ([`Packet::overlong`]).
    overlong: bool,
    /// `true` if it is a context ([`Transmitter::replaced`]).
    is_context: bool,
}

/// The outcome of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DescriptorOutcome {
    /// The frame goes on, or the descriptor belongs to none.
    Continue,
    /// A frame is complete.
    Frame,
    /// The frame's memory is being zeroed: it is read again later.
    Busy,
}

/// The contexts that data descriptors refer to (section 3.3.6): one for segmentation, and one for
/// checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Contexts {
    pub segmentation: Context,
    pub checksum: Context,
}

/// The transmitter's state that no register holds: it goes with the path, and into the saved state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct TransmitState {
    pub contexts: Contexts,
    /// `true` if the head lies within a frame with too many descriptors: the descriptors up to the
    /// frame's last one are dropped.
    pub overlong: bool,
}

/// The transmit ring.
pub(crate) struct Transmitter {
    ring: Ring,
    contexts: Contexts,
    packet: Packet,
    /// Descriptors to write back. The first `ready` can be reported; at most
    /// [`MAX_FRAME_DESCRIPTORS`] of a frame that is not complete follow.
    done: VecDeque<Done>,
    /// The number of descriptors of `done` whose frames are complete, or that belong to no frame.
    ready: usize,
    /// For each context descriptor in `done`, in the same order, the contexts that were in force
    /// before it. Descriptors that are read again are read with these.
    replaced: VecDeque<Contexts>,
    /// Heads of frames that were changed: [`HEAD`] bytes for each frame of a burst.
    bounce: Span,
    /// The pinned buffers of the frame at hand.
    spans: Vec<Span>,
    /// Invalid frames since the last [`Transmitter::take_malformed`].
    malformed: u64,
}

impl Transmitter {
    pub fn new(ring: Ring, state: TransmitState) -> Self {
        let TransmitState { contexts, overlong } = state;
        Self {
            ring,
            contexts,
            packet: Packet {
                ranges: Vec::with_capacity(MAX_FRAME_DESCRIPTORS),
                overlong,
                ..Packet::default()
            },
            done: VecDeque::with_capacity(MAX_TURN_DESCRIPTORS + MAX_FRAME_DESCRIPTORS),
            ready: 0,
            replaced: VecDeque::with_capacity(BURST),
            bounce: Span::heap(BURST * HEAD),
            spans: Vec::new(),
            malformed: 0,
        }
    }

    /// Sets the rules of the ring. With another epoch the ring begins anew; if it is disabled, what
    /// was read and not sent is read again when it is enabled.
    pub fn set_rules(&mut self, rules: crate::rules::RingRules) {
        if self.ring.set_rules(rules) {
            self.packet.clear();
            self.done.clear();
            self.replaced.clear();
            self.ready = 0;
        } else if !rules.enabled {
            self.start_over();
        }
    }

    /// Returns the state for a successor. The caller has called [`Transmitter::rest`] before, so
    /// that the state is that of the head.
    pub fn state(&self) -> TransmitState {
        TransmitState { contexts: self.contexts, overlong: self.packet.overlong }
    }

    /// Returns the ring.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Appends up to `limit` frames up to `tail` to `burst`. Returns whether more wait.
    pub fn take(
        &mut self,
        common: &mut Common,
        tail: u32,
        burst: &mut Burst,
        limit: usize,
    ) -> bool {
        let mut left = limit.min(burst.room());
        for _ in 0..MAX_TURN_DESCRIPTORS {
            if left == 0 {
                return self.ring.waiting(tail) > 0;
            }
            let memory = (&common.memory, &common.view);
            if !self.ring.look(memory, (tail, 1), Access::Read) {
                return false;
            }
            let before = burst.len();
            match self.step(common, burst) {
                DescriptorOutcome::Continue => {}
                DescriptorOutcome::Frame => left -= burst.len() - before,
                DescriptorOutcome::Busy => {
                    self.start_over();
                    return true;
                }
            }
        }
        self.ring.waiting(tail) > 0
    }

    /// Reads one descriptor.
    #[inline]
    fn step(&mut self, common: &mut Common, burst: &mut Burst) -> DescriptorOutcome {
        let Some((index, raw)) = self.ring.take() else { return DescriptorOutcome::Continue };
        let descriptor = Transmit::read(&raw);
        let (command, overlong) = (descriptor.command(), self.packet.overlong);
        let is_context = matches!(descriptor, Transmit::Context(_));
        let word = Transmit::done(&raw);
        self.done.push_back(Done { index, word, command, overlong, is_context });
        match descriptor {
            Transmit::Context(context) => {
                self.replaced.push_back(self.contexts);
                match context.command & command::TSE {
                    0 => self.contexts.checksum = context,
                    _ => self.contexts.segmentation = context,
                }
                if self.packet.descriptors == 0 {
                    self.ready = self.done.len();
                } else {
                    // A context among a frame's descriptors is reported with the frame.
                    self.drop_overlong();
                }
                return DescriptorOutcome::Continue;
            }
            Transmit::Legacy(legacy) => self.legacy(common, &legacy),
            Transmit::Data(data) => self.data(common, &data),
            Transmit::Unknown(_) => self.packet.fault = Some(Malformed::Shape),
        }
        self.packet.descriptors += 1;
        if command & command::EOP != 0 {
            return self.finish(common, burst);
        }
        self.drop_overlong();
        DescriptorOutcome::Continue
    }

    /// Drops what is known of the frame if it has too many descriptors. The frame is counted at its
    /// last descriptor. The others are reported before, so that a frame as long as the ring ends,
    /// and one without an end holds no memory.
    fn drop_overlong(&mut self) {
        if self.packet.overlong || self.done.len() - self.ready >= MAX_FRAME_DESCRIPTORS {
            self.packet.clear();
            self.packet.overlong = true;
            self.ready = self.done.len();
        }
    }

    fn legacy(&mut self, common: &Common, legacy: &Legacy) {
        self.packet.add(legacy.address, legacy.length.into());
        if legacy.command & command::EOP == 0 {
            return;
        }
        let request = &mut self.packet.request;
        if legacy.command & command::IC != 0 {
            request.options = option::TXSM;
            request.context =
                Context { tucss: legacy.css, tucso: legacy.cso, ..Context::default() };
        }
        let tagged = legacy.command & command::VLE != 0 && common.rules.vlans;
        request.tag = tagged.then_some((common.rules.tag, legacy.special));
    }

    fn data(&mut self, common: &Common, data: &Data) {
        if self.packet.descriptors == 0 {
            // Options and segmentation are those of the first data descriptor (section 3.3.7).
            let segments = data.command & command::TSE != 0;
            let Contexts { segmentation, checksum } = self.contexts;
            self.packet.request = OffloadRequest {
                options: data.options,
                context: if segments { segmentation } else { checksum },
                segments,
                tag: None,
            };
        }
        self.packet.add(data.address, data.length as usize);
        if data.command & command::VLE != 0 && common.rules.vlans {
            self.packet.request.tag = Some((common.rules.tag, data.special));
        }
    }

    /// Puts a complete frame into the burst, or drops it.
    #[inline]
    fn finish(&mut self, common: &mut Common, burst: &mut Burst) -> DescriptorOutcome {
        match self.push(common, burst) {
            Ok(true) => {}
            Ok(false) => return DescriptorOutcome::Busy,
            Err(fault) => {
                self.malformed += 1;
                fault.counter(&common.shared.live).add(1);
            }
        }
        self.packet.clear();
        self.ready = self.done.len();
        DescriptorOutcome::Frame
    }

    /// Puts the frame into the burst. Returns `false` if its memory is being zeroed.
    ///
    /// # Errors
    /// The reason for which the frame is to be dropped.
    #[inline]
    fn push(&mut self, common: &mut Common, burst: &mut Burst) -> Result<bool, Malformed> {
        let packet = &self.packet;
        packet.check()?;
        match common.view.pin(packet.ranges.iter().copied(), Access::Read, &mut self.spans) {
            Ok(()) => {}
            Err(Fault::Busy { .. }) => return Ok(false),
            Err(_) => return Err(Malformed::Memory),
        }
        let offload = if packet.request.edits() {
            self.push_edited(burst)?
        } else {
            let offload = packet.request.offload(packet.len).ok_or(Malformed::Offload)?;
            match self.spans.as_slice() {
                [span] => burst.push(span, 0, packet.len, offload),
                spans => scatter(spans, burst, offload),
            }
            .map_err(|_| Malformed::Memory)?;
            offload
        };
        self.count_sent(common, burst, &offload);
        Ok(true)
    }

    /// Puts a frame into the burst whose head is changed first, in a private copy.
    fn push_edited(&mut self, burst: &mut Burst) -> Result<Offload, Malformed> {
        let Packet { len: total, request, .. } = &self.packet;
        let mut head = [0; HEAD];
        let len = (*total).min(LONGEST_HEAD);
        gather(&self.spans, &mut head[..len]).map_err(|_| Malformed::Memory)?;
        let edited = request.edit(&mut head[..len], *total);
        let mut offload = edited.ok_or(Malformed::Offload)?;
        let mut end = len;
        if let Some(tag) = request.tag {
            if !insert_tag(&mut head, len, tag, &mut offload) {
                return Err(Malformed::Offload);
            }
            end += TAG;
        }
        let offset = burst.len() * HEAD;
        let mut put = || {
            self.bounce.write(offset, &head[..end])?;
            let mut frame = burst.begin();
            frame.append(&self.bounce, offset, end)?;
            append(&self.spans, len, &mut frame)?;
            frame.finish(offload);
            Ok(())
        };
        put().map_err(|_: Fault| Malformed::Memory)?;
        Ok(offload)
    }

    /// Counts the frame that was put into the burst last.
    fn count_sent(&self, common: &Common, burst: &Burst, offload: &Offload) {
        let shared = &common.shared;
        shared.live.sent.add(1);
        let head = burst.head(burst.len() - 1);
        let to = EthernetFrame::new_unchecked(head).destination();
        let fcs = slipway_e1000_spec::FCS;
        let len = self.packet.len;
        if offload.segmentation == Segmentation::None {
            let each = len.max(MIN_FRAME) + fcs;
            return shared.statistics.sent(to, 1, each as u64, each);
        }
        let header = usize::from(self.packet.request.context.header);
        let payload = len - header;
        let frames = payload.div_ceil(usize::from(offload.segment));
        let bytes = payload + frames * (header + fcs);
        let each = header + usize::from(offload.segment) + fcs;
        shared.statistics.add(statistic::TSCTC, 1);
        shared.statistics.sent(to, frames as u64, bytes as u64, each);
    }

    /// Writes back the descriptors of frames that the switch has released. Returns the new head and
    /// the interrupts that the descriptors ask for, or `None` if there are none.
    #[inline]
    pub fn release(&mut self, common: &Common, tail: u32) -> Option<(u32, Sent)> {
        if self.ready == 0 {
            return None;
        }
        let mut sent = Sent::default();
        let mut head = 0;
        for done in self.done.drain(..self.ready) {
            head = self.ring.after(done.index, 1);
            if done.is_context {
                self.replaced.pop_front();
            }
            if done.command & (command::RS | command::RPS) == 0 {
                continue;
            }
            self.ring.report(&common.memory, done.index, done.word);
            let delayed = done.command & command::IDE != 0;
            sent.delayed |= delayed;
            sent.at_once |= !delayed;
        }
        self.ready = 0;
        sent.empty = head == tail;
        Some((head, sent))
    }

    /// Rewinds the ring to the first unreported descriptor of the incomplete frame, and restores
    /// the contexts that were in force there.
    fn start_over(&mut self) {
        let mut overlong = self.packet.overlong;
        if let Some(first) = self.done.get(self.ready) {
            overlong = first.overlong;
            self.ring.rewind(first.index);
        }
        let again = self.done.iter().skip(self.ready).filter(|done| done.is_context).count();
        let kept = self.replaced.len().saturating_sub(again);
        if let Some(contexts) = self.replaced.get(kept) {
            self.contexts = *contexts;
        }
        self.replaced.truncate(kept);
        self.done.truncate(self.ready);
        self.packet.clear();
        self.packet.overlong = overlong;
    }

    /// Returns the number of invalid frames since the last call.
    pub fn take_malformed(&mut self) -> u64 {
        std::mem::take(&mut self.malformed)
    }

    /// Releases all memory. What was read and not sent is read again.
    pub fn rest(&mut self) {
        self.ready = 0;
        self.start_over();
        self.ring.release();
        self.spans.clear();
    }
}

/// Copies the first bytes of `spans`, which have as many.
fn gather(spans: &[Span], into: &mut [u8]) -> Result<(), Fault> {
    let mut done = 0;
    for span in spans {
        let part = span.len().min(into.len() - done);
        span.read(0, &mut into[done..done + part])?;
        done += part;
        if done == into.len() {
            break;
        }
    }
    Ok(())
}

/// Appends a frame in several pieces.
fn scatter(spans: &[Span], burst: &mut Burst, offload: Offload) -> Result<(), Fault> {
    let mut frame = burst.begin();
    append(spans, 0, &mut frame)?;
    frame.finish(offload);
    Ok(())
}

/// Appends the bytes of `spans` from `skip` on.
fn append(
    spans: &[Span],
    mut skip: usize,
    frame: &mut slipway_switch::Builder<'_>,
) -> Result<(), Fault> {
    for span in spans {
        let skipped = skip.min(span.len());
        skip -= skipped;
        if span.len() > skipped {
            frame.append(span, skipped, span.len() - skipped)?;
        }
    }
    Ok(())
}
