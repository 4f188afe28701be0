//! Frames in flight from one port to others.
//!
//! - A port puts frames into a [`Burst`], whole or piece by piece ([`Builder`]).
//! - The switch checks each frame by its private head, and may take a tag off it or drop it.
//! - A destination gets a [`Pick`]: a frame, with the tag to insert. It copies the frame at once
//!   ([`Burst::copy`]) or through a [`Reader`].

mod reader;

use slipway_ram::{Fault, Span};

pub use self::reader::Reader;

/// The largest number of frames in a burst: large enough that the work for each burst does not
/// count, small enough that the heads stay in the first-level cache.
pub const BURST: usize = 256;
/// Bytes of a frame's private head. All addresses that the switch checks lie in it: the farthest is
/// the target of a neighbour advertisement, which ends at byte 82 in a tagged frame.
pub const HEAD: usize = 96;
/// Bytes of the largest frame: an IP packet of 64 KiB with a tagged header.
pub const MAX_FRAME: usize = 65_535 + 18;

/// The way to cut a frame that is too long for a link (virtio 1.2, section 5.1.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Segmentation {
    /// The frame is not to be cut.
    #[default]
    None,
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP over IPv4 or IPv6.
    Udp,
}

/// The work on a frame that its sender left to the device that puts it on a wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Offload {
    /// The start of the checksummed bytes and, counted from there, the place of the checksum, which
    /// holds the pseudo header's sum.
    pub checksum: Option<(u16, u16)>,
    /// A trusted party has checked the checksum, or no wire could have damaged the frame.
    pub valid: bool,
    /// The way to cut the frame.
    pub segmentation: Segmentation,
    /// Bytes of payload in each piece; meaningless if the frame is not cut.
    pub segment: u16,
    /// The frame has virtio's ECN flag: CWR is for the first piece only.
    pub ecn: bool,
}

impl Offload {
    /// A frame that is complete.
    pub const NONE: Self = Self {
        checksum: None,
        valid: false,
        segmentation: Segmentation::None,
        segment: 0,
        ecn: false,
    };

    /// Returns whether work is left: a checksum or segmentation.
    #[inline]
    pub fn is_some(&self) -> bool {
        self.checksum.is_some() || self.segmentation != Segmentation::None
    }
}

/// A frame of a burst, without its bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Frame {
    /// Bytes of the frame, without a tag that was taken off.
    pub len: u32,
    /// The part of the private head that is the frame's: start and end.
    head: (u8, u8),
    first_span: u32,
    spans: u16,
    /// The work that is left to do.
    pub offload: Offload,
}

/// A private head, aligned to half a cache line, so that heads spread over a cache's sets.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct Head([u8; HEAD]);

/// Frames that a port took from its peer: a private copy of each one's first 96 bytes, which is
/// both checked and delivered, and spans of the rest in the peer's memory, which are never checked.
///
/// So a peer that rewrites its memory meanwhile changes payload, but no address.
pub struct Burst {
    frames: Vec<Frame>,
    heads: Box<[Head; BURST]>,
    /// Spans of the frames' rests, of which the first `used` are in use. The others wait to be
    /// reused.
    spans: Vec<Span>,
    used: usize,
    bytes: u64,
    longest: u32,
    /// Some frame's checksum or segmentation is left to do.
    offloads: bool,
    /// Every frame has [`Offload::NONE`].
    plain: bool,
}

impl Default for Burst {
    fn default() -> Self {
        Self::new()
    }
}

impl Burst {
    /// Creates an empty burst.
    pub fn new() -> Self {
        Self {
            frames: Vec::with_capacity(BURST),
            heads: Box::new([Head([0; HEAD]); BURST]),
            spans: Vec::new(),
            used: 0,
            bytes: 0,
            longest: 0,
            offloads: false,
            plain: true,
        }
    }

    /// Removes the frames. Spans stay for reuse; they keep the peer's memory alive, even after it
    /// was removed: see [`Burst::release`].
    #[inline]
    pub fn clear(&mut self) {
        self.frames.clear();
        (self.used, self.bytes, self.longest) = (0, 0, 0);
        (self.offloads, self.plain) = (false, true);
    }

    /// Removes the frames and releases all memory of peers.
    pub fn release(&mut self) {
        self.clear();
        self.spans.clear();
    }

    /// Returns the number of frames.
    #[inline]
    pub fn len(&self) -> usize {
        self.frames.len()
    }

    /// Returns whether there are no frames.
    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Returns the bytes of all frames.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of the longest frame.
    pub(crate) fn longest(&self) -> u32 {
        self.longest
    }

    /// Returns whether every frame has [`Offload::NONE`], so that none need be looked at.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.plain
    }

    /// Returns whether some frame's checksum or segmentation is left to do.
    pub(crate) fn has_offloads(&self) -> bool {
        self.offloads
    }

    /// Returns the number of frames that still fit.
    #[inline]
    pub fn room(&self) -> usize {
        BURST - self.frames.len()
    }

    /// Returns the frames, in the order in which they came.
    #[inline]
    pub fn frames(&self) -> &[Frame] {
        &self.frames
    }

    /// Returns the private copy of a frame's first bytes, up to [`HEAD`].
    ///
    /// # Panics
    /// If there is no such frame.
    #[inline]
    pub fn head(&self, frame: usize) -> &[u8] {
        let (from, to) = self.frames[frame].head;
        &self.heads[frame].0[usize::from(from)..usize::from(to)]
    }

    /// Returns the private copy of a frame's first bytes, up to [`HEAD`], to be changed.
    ///
    /// # Panics
    /// If there is no such frame.
    #[inline]
    pub(crate) fn head_mut(&mut self, frame: usize) -> &mut [u8] {
        let (from, to) = self.frames[frame].head;
        &mut self.heads[frame].0[usize::from(from)..usize::from(to)]
    }

    /// Adds a frame of another burst, with a head of its own. The rest of the frame stays where it
    /// is, so this burst must be [released](Self::release) before the other one's memory is.
    ///
    /// # Panics
    /// If the burst has no room, or there is no such frame.
    pub(crate) fn adopt(&mut self, other: &Self, number: usize) {
        let (frame, head) = (other.frames[number], other.head(number));
        self.heads[self.frames.len()].0[..head.len()].copy_from_slice(head);
        let first_span = self.used as u32;
        for span in &other.spans[frame.first_span as usize..][..usize::from(frame.spans)] {
            self.append(span, 0, span.len());
        }
        // A head has at most 96 bytes.
        self.add(Frame { head: (0, head.len() as u8), first_span, ..frame });
    }

    /// Adds a frame that lies in one piece of memory.
    ///
    /// # Errors
    /// [`Fault`] if its head cannot be read; the burst is then unchanged.
    ///
    /// # Panics
    /// If the burst has no room, or the range leaves the span: programmer's errors.
    #[inline]
    pub fn push(
        &mut self,
        span: &Span,
        offset: usize,
        len: usize,
        offload: Offload,
    ) -> Result<(), Fault> {
        let head = len.min(HEAD);
        span.read(offset, &mut self.heads[self.frames.len()].0[..head])?;
        let first_span = self.used as u32;
        if len > head {
            self.append(span, offset + head, len - head);
        }
        let spans = (self.used as u32 - first_span) as u16;
        // `head` is at most 96.
        self.add(Frame { len: len as u32, head: (0, head as u8), first_span, spans, offload });
        Ok(())
    }

    /// Begins a frame that lies in several pieces. [`Builder::finish`] adds it.
    ///
    /// # Panics
    /// If the burst has no room.
    pub fn begin(&mut self) -> Builder<'_> {
        assert!(self.frames.len() < BURST, "no room in the burst");
        Builder { first_span: self.used, head: 0, len: 0, burst: self }
    }

    #[inline]
    fn add(&mut self, frame: Frame) {
        self.bytes += u64::from(frame.len);
        self.longest = self.longest.max(frame.len);
        if frame.offload != Offload::NONE {
            self.plain = false;
            self.offloads |= frame.offload.is_some();
        }
        self.frames.push(frame);
    }

    #[inline]
    fn append(&mut self, span: &Span, offset: usize, len: usize) {
        match self.spans.get_mut(self.used) {
            Some(place) => place.assign(span, offset, len),
            None => self.spans.push(span.slice(offset, len)),
        }
        self.used += 1;
    }

    /// Copies the frames' rests into `memory`, which is this process's own, and has the burst refer
    /// to the copies. Removes frames that cannot be read or have no room, and returns their number.
    #[cold]
    pub(crate) fn make_private(&mut self, memory: &Span) -> usize {
        let (mut whole, mut end) = ([true; BURST], 0);
        for (frame, whole) in self.frames.iter().zip(&mut whole) {
            let spans = &mut self.spans[frame.first_span as usize..][..usize::from(frame.spans)];
            *whole = spans.iter_mut().all(|span| {
                let (at, len) = (end, span.len());
                let copied = at + len <= memory.len() && span.copy_to(0, memory, at, len).is_ok();
                if copied {
                    span.assign(memory, at, len);
                    end += len;
                }
                copied
            });
        }
        let (before, mut whole) = (self.len(), whole.into_iter());
        self.retain(0, || whole.next().unwrap_or(true));
        before - self.len()
    }

    /// Removes the frame's tag: the four bytes at offset 12 of its head.
    ///
    /// # Panics
    /// If the head has fewer than 16 bytes.
    pub(crate) fn take_tag(&mut self, frame: usize) {
        let Frame { len, head: (from, to), offload, .. } = &mut self.frames[frame];
        assert!(*to - *from >= 16, "a frame without a tag");
        let at = usize::from(*from);
        self.heads[frame].0.copy_within(at..at + 12, at + 4);
        *from += 4;
        *len -= 4;
        if let Some((start, _)) = &mut offload.checksum {
            *start = start.saturating_sub(4);
        }
    }

    /// Removes frames for which `keep` returns `false`, from number `from` on. Calls `keep` once
    /// for each frame, in order.
    pub(crate) fn retain(&mut self, from: usize, mut keep: impl FnMut() -> bool) {
        let mut kept = from;
        for at in from..self.frames.len() {
            if !keep() {
                self.bytes -= u64::from(self.frames[at].len);
                continue;
            }
            if kept < at {
                self.frames[kept] = self.frames[at];
                self.heads[kept] = self.heads[at];
            }
            kept += 1;
        }
        self.frames.truncate(kept);
    }

    /// Returns a reader of the frame's bytes, with the tag `pick.tci` inserted unless that is 0.
    ///
    /// # Panics
    /// If there is no such frame.
    #[inline]
    pub fn read(&self, pick: Pick) -> Reader<'_> {
        let frame = &self.frames[usize::from(pick.frame)];
        let head = self.head(usize::from(pick.frame));
        let spans = &self.spans[frame.first_span as usize..][..usize::from(frame.spans)];
        if pick.tci == 0 {
            return Reader { lead: [0; 16], lead_at: 16, head, spans, skip: 0 };
        }
        let mut lead = [0; 16];
        lead[..12].copy_from_slice(&head[..12]);
        lead[12..14].copy_from_slice(&slipway_ethernet_spec::ethertype::VLAN.to_be_bytes());
        lead[14..].copy_from_slice(&pick.tci.to_be_bytes());
        Reader { lead, lead_at: 0, head: &head[12..], spans, skip: 0 }
    }

    /// Returns the frame's bytes if all of them are in the private head and no tag is to be
    /// inserted, else `None`.
    ///
    /// # Panics
    /// If there is no such frame.
    #[inline]
    pub fn whole(&self, pick: Pick) -> Option<&[u8]> {
        let number = usize::from(pick.frame);
        let whole = pick.tci == 0 && self.frames[number].spans == 0;
        whole.then(|| self.head(number))
    }

    /// Copies the whole frame to `at` of `to`, as a [`Reader`] would.
    ///
    /// # Errors
    /// [`Fault`] of the source's or of the destination's memory.
    ///
    /// # Panics
    /// If there is no such frame, or it leaves `to`.
    #[inline]
    pub fn copy(&self, pick: Pick, to: &Span, at: usize) -> Result<(), Fault> {
        if pick.tci != 0 {
            return self.read(pick).copy_to(to, at, self.len_of(pick)).map(drop);
        }
        let number = usize::from(pick.frame);
        let head = self.head(number);
        to.write(at, head)?;
        let Frame { first_span, spans, .. } = self.frames[number];
        let mut done = head.len();
        for span in &self.spans[first_span as usize..][..usize::from(spans)] {
            span.copy_to(0, to, at + done, span.len())?;
            done += span.len();
        }
        Ok(())
    }

    /// Returns the bytes of the frame with the tag to be inserted.
    #[inline]
    pub fn len_of(&self, pick: Pick) -> usize {
        self.frames[usize::from(pick.frame)].len as usize + if pick.tci == 0 { 0 } else { 4 }
    }

    /// Returns the offload of the frame with the tag to be inserted.
    #[inline]
    pub fn offload_of(&self, pick: Pick) -> Offload {
        let mut offload = self.frames[usize::from(pick.frame)].offload;
        if let (true, Some((start, _))) = (pick.tci != 0, &mut offload.checksum) {
            *start = start.saturating_add(4);
        }
        offload
    }
}

/// A frame of a burst for one destination port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Pick {
    /// The frame's number in the burst.
    pub frame: u16,
    /// The control information of the tag to insert; 0 for no tag.
    pub tci: u16,
}

/// A frame in the making. Dropping the builder before [`Builder::finish`] discards the frame.
pub struct Builder<'a> {
    burst: &'a mut Burst,
    first_span: usize,
    head: usize,
    len: usize,
}

impl Builder<'_> {
    /// Returns the number of bytes so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends a piece. The caller bounds their number: at most 65,535 in a frame.
    ///
    /// # Errors
    /// [`Fault`] if a part of the piece belongs to the head and cannot be read.
    ///
    /// # Panics
    /// If the range leaves the span.
    #[inline]
    pub fn append(&mut self, span: &Span, offset: usize, len: usize) -> Result<(), Fault> {
        let to_head = len.min(HEAD - self.head);
        if to_head > 0 {
            let head = &mut self.burst.heads[self.burst.frames.len()].0;
            span.read(offset, &mut head[self.head..self.head + to_head])?;
            self.head += to_head;
        }
        if len > to_head {
            self.burst.append(span, offset + to_head, len - to_head);
        }
        self.len += len;
        Ok(())
    }

    /// Adds the frame to the burst.
    #[inline]
    pub fn finish(mut self, offload: Offload) {
        let Self { burst, first_span, head, len } = &mut self;
        let (first_span, spans) = (*first_span as u32, (burst.used - *first_span) as u16);
        let frame = Frame { len: *len as u32, head: (0, *head as u8), first_span, spans, offload };
        self.burst.add(frame);
        std::mem::forget(self);
    }
}

impl Drop for Builder<'_> {
    fn drop(&mut self) {
        self.burst.used = self.first_span;
    }
}
