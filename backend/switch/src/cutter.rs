//! Completes frames for ports whose peers cannot do it: fills in checksums, and cuts frames that
//! are too long for a link, in memory of the switch's own.

use slipway_ethernet_spec::TAG;
use slipway_ram::Span;

use crate::burst::{BURST, Burst, Frame, MAX_FRAME, Offload, Pick, Segmentation};
use crate::segment::{self, MAX_HEADER};
use crate::{Abilities, Delivered, Port};

/// Room for a frame, its tag, and the headers of all the pieces that it may be cut into.
const OUT: usize = MAX_FRAME + TAG + BURST * MAX_HEADER;

/// Cuts frames, one at a time. Its memory is allocated at the first use.
#[derive(Default)]
pub(crate) struct Cutter(Option<Box<Workplace>>);

struct Workplace {
    frame: Vec<u8>,
    out: Span,
    pieces: Burst,
    picks: Vec<Pick>,
}

/// The way to deliver a frame to a port.
enum Delivery {
    Whole,
    Work,
    Refuse,
}

impl Cutter {
    /// Delivers the picks in order, and completes those that the port cannot take unchanged. Frames
    /// of more than `max_frame` bytes are refused; 0 is no limit.
    #[inline]
    pub fn deliver(
        &mut self,
        burst: &Burst,
        picks: &[Pick],
        port: &mut dyn Port,
        max_frame: u32,
    ) -> Delivered {
        let abilities = port.abilities();
        let plain = !burst.has_offloads() || abilities == Abilities::ALL;
        match plain && (max_frame == 0 || burst.longest() <= max_frame) {
            true => port.deliver(burst, picks),
            false => self.complete(burst, picks, abilities, port, max_frame),
        }
    }

    #[cold]
    fn complete(
        &mut self,
        burst: &Burst,
        picks: &[Pick],
        abilities: Abilities,
        port: &mut dyn Port,
        max_frame: u32,
    ) -> Delivered {
        let mut sum = Delivered::default();
        for (at, pick) in picks.iter().enumerate() {
            let frame = &burst.frames()[usize::from(pick.frame)];
            let done = match way(frame, abilities, max_frame) {
                Delivery::Whole => port.deliver(burst, std::slice::from_ref(pick)),
                Delivery::Refuse => Delivered { refused: 1, ..Delivered::default() },
                Delivery::Work => self.work(burst, *pick, abilities, port, max_frame),
            };
            sum.add(&done);
            if done.full > 0 {
                // Later frames must not overtake this one.
                sum.full += (picks.len() - at - 1) as u32;
                break;
            }
        }
        sum
    }

    fn work(
        &mut self,
        burst: &Burst,
        pick: Pick,
        abilities: Abilities,
        port: &mut dyn Port,
        max_frame: u32,
    ) -> Delivered {
        let place = self.0.get_or_insert_with(Box::default);
        match place.prepare(burst, pick, abilities, max_frame) {
            Some(()) => port.deliver(&place.pieces, &place.picks),
            None => Delivered { refused: 1, ..Delivered::default() },
        }
    }

    /// Releases all memory.
    pub fn release(&mut self) {
        self.0 = None;
    }
}

impl Default for Workplace {
    fn default() -> Self {
        Self {
            frame: Vec::with_capacity(MAX_FRAME + TAG),
            out: Span::heap(OUT),
            pieces: Burst::new(),
            picks: Vec::with_capacity(BURST),
        }
    }
}

impl Workplace {
    /// Makes the pieces of a frame. Returns `None` if the frame does not match its offload, or if a
    /// piece is longer than `max_frame` bytes without a tag (0 for no limit).
    fn prepare(
        &mut self,
        burst: &Burst,
        pick: Pick,
        abilities: Abilities,
        max_frame: u32,
    ) -> Option<()> {
        let most = match max_frame {
            0 => usize::MAX,
            most => most as usize + if pick.tci == 0 { 0 } else { TAG },
        };
        let (len, offload) = (burst.len_of(pick), burst.offload_of(pick));
        self.frame.resize(len, 0);
        let read = burst.read(pick).read(&mut self.frame).ok()?;
        self.frame.truncate(read);
        self.pieces.clear();
        self.picks.clear();
        let (out, pieces, picks) = (&self.out, &mut self.pieces, &mut self.picks);
        let mut end = 0;
        let mut add = |header: &[u8], payload: &[u8], offload: Offload| {
            let len = header.len() + payload.len();
            if len > most || pieces.room() == 0 || end + len > OUT {
                return None;
            }
            out.write(end, header).ok()?;
            out.write(end + header.len(), payload).ok()?;
            pieces.push(out, end, len, offload).ok()?;
            picks.push(Pick { frame: picks.len() as u16, tci: 0 });
            end += len;
            Some(())
        };
        match offload.segmentation {
            Segmentation::None => {
                segment::fill_checksum(&mut self.frame, offload.checksum?)?;
                add(&self.frame, &[], Offload::NONE)
            }
            _ => segment::cut(&self.frame, &offload, abilities.checksum, &mut add),
        }
    }
}

fn way(frame: &Frame, abilities: Abilities, max: u32) -> Delivery {
    let Offload { checksum, segmentation, .. } = frame.offload;
    let whole = match segmentation {
        Segmentation::None => {
            if max != 0 && frame.len > max {
                return Delivery::Refuse;
            }
            checksum.is_none() || abilities.checksum
        }
        Segmentation::Tcp4 => abilities.tcp4,
        Segmentation::Tcp6 => abilities.tcp6,
        Segmentation::Udp => abilities.udp,
    };
    if whole { Delivery::Whole } else { Delivery::Work }
}
