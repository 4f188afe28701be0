//! Counters of a port: the frames that passed, and those that were dropped, by cause.

/// Declares [`Drop`] with the names of its causes, so that no cause is without a counter.
macro_rules! causes {
    ($($(#[$doc:meta])* $cause:ident = $name:literal,)*) => {
        /// The cause for which a frame was dropped.
        ///
        /// A new cause is one more line among the causes, with the name that users see, and a count
        /// where frames are dropped for it:
        /// - `admit` (`judge`) returns the cause of a frame that is malformed, or that the settings
        ///   of its port refuse, and its caller counts it (`PortStats::drop_in`).
        /// - `Switch` counts [`Drop::Down`], for the port that frames are from (`drop_all_in`) and
        ///   for the port that they are for (`drop_out`), [`Drop::Nobody`] (`drop_in`),
        ///   [`Drop::Stalled`] (`drop_out`), and [`Drop::Malformed`] for frames whose rest it
        ///   copies and cannot read (`Burst::make_private`, `drop_all_in`).
        /// - [`Port::deliver`](crate::Port::deliver) reports frames that the peer did not get in
        ///   [`Delivered`], one field for each cause. All of these fields are in `Delivered::add`
        ///   and `PortStats::count_out`, and in `ports/threaded.rs`: its `Counts`, their `add` and
        ///   `ThreadedPort::account`. `Rings::deliver` (`ports/rings.rs`) and `LoopbackPort`
        ///   (`ports/simple.rs`) compute `full` as the rest of the picks, after all other fields.
        /// - [`Port::account`](crate::Port::account) adds drops that no result has reported:
        ///   [`Drop::Malformed`]; for decorators [`Drop::Loss`], [`Drop::Queue`] and
        ///   [`Drop::Rate`], by `PortStats::lose_in` for frames from the peer, which the switch
        ///   never had, and by `drop_out` for frames to the peer; for a port with a thread of its
        ///   own also [`Drop::Full`] and [`Drop::Refused`].
        ///
        /// Users see a new cause without further changes of code. Names and counts go through the
        /// fields `dropped_in` and `dropped_out` of `SwitchPort` in the plane's interface to
        /// `slipway port stats` and `inspect`, and to the metric
        /// `slipway_port_dropped_frames_total`. `slipway inspect --live` shows the sum of all
        /// causes for each direction (`inspect` and `running` of this crate). The table of causes
        /// in `docs/networks.md` explains each name; `deploy/check/docs.py` fails if it lacks one.
        /// Of this crate's tests, `forwarding`, `receive_rate`, `decorators` and `threaded` compare
        /// the counts of causes.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Drop {
            $($(#[$doc])* $cause,)*
        }

        impl Drop {
            /// Every cause, with its name in reports.
            pub const ALL: [(Self, &'static str); [$($name),*].len()] =
                [$((Self::$cause, $name)),*];
        }
    };
}

causes! {
    /// The frame is shorter than an Ethernet header.
    Short = "short",
    /// The source address is a group's or all zeros.
    BadSource = "bad-source",
    /// The source address is not the port's.
    SpoofedMac = "spoofed-mac",
    /// The frame claims an IP address that is not the port's.
    SpoofedAddress = "spoofed-address",
    /// The port is not in the frame's VLAN.
    Vlan = "vlan",
    /// The destination is reserved for bridges' own protocols (802.1Q, table 8-1).
    Reserved = "reserved",
    /// No other port is a destination.
    Nobody = "nobody",
    /// The destination has no room.
    Full = "full",
    /// The destination cannot take the frame: it is too long, or the memory is gone.
    Refused = "refused",
    /// The port's link is down, by its setting or since no peer is there to take frames.
    Down = "down",
    /// The peer's descriptors describe no frame: its length or its header is invalid, or its memory
    /// does not exist. A malformed ring of a function is not counted: the function needs a reset.
    Malformed = "malformed",
    /// The frame's offload is impossible, or its checksum would change addresses.
    BadOffload = "bad-offload",
    /// An impairment lost the frame.
    Loss = "loss",
    /// The queue of an impairment had no room.
    Queue = "queue",
    /// The frame was above the receive rate of its destination, whose queue had no room.
    Rate = "rate",
    /// The destination stands still for a time, because its peer's memory made the switch's thread
    /// sleep.
    Stalled = "stalled",
}

/// The result of a delivery. Every pick is counted once, as delivered, without room, or refused;
/// here, or later by [`Port::account`](crate::Port::account).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Delivered {
    /// The number of frames that the peer has got.
    pub frames: u32,
    /// Bytes of those frames.
    pub bytes: u64,
    /// The number of frames for which there was no room.
    pub full: u32,
    /// The number of frames that the peer cannot take, because of their size or since its memory is
    /// gone.
    pub refused: u32,
}

impl Delivered {
    /// Adds another delivery.
    #[inline]
    pub fn add(&mut self, other: &Self) {
        self.frames += other.frames;
        self.bytes += other.bytes;
        self.full += other.full;
        self.refused += other.refused;
    }
}

/// Counters of a port since it was attached. *In* is from its peer, *out* to its peer.
#[repr(C)] // the counters of every frame are first, in one cache line
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PortStats {
    /// Frames taken from the peer, those dropped included.
    pub frames_in: u64,
    /// Bytes of those frames, tags included.
    pub bytes_in: u64,
    /// Frames delivered to the peer.
    pub frames_out: u64,
    /// Bytes of those frames.
    pub bytes_out: u64,
    /// Frames from the peer that reached no other port, by cause.
    pub dropped_in: [u64; Drop::ALL.len()],
    /// Frames for the peer that were not delivered, by cause.
    pub dropped_out: [u64; Drop::ALL.len()],
}

impl PortStats {
    /// Returns the counters that are not zero of frames dropped on the way in, with the causes'
    /// names.
    pub fn causes_in(&self) -> impl Iterator<Item = (&'static str, u64)> {
        causes(&self.dropped_in)
    }

    /// Returns the counters that are not zero of frames dropped on the way out, with the causes'
    /// names.
    pub fn causes_out(&self) -> impl Iterator<Item = (&'static str, u64)> {
        causes(&self.dropped_out)
    }

    #[inline]
    pub(crate) fn drop_in(&mut self, cause: Drop) {
        self.dropped_in[cause as usize] += 1;
    }

    /// Counts a whole burst as dropped. Returns 0, the number of frames that are left.
    pub(crate) fn drop_all_in(&mut self, cause: Drop, count: usize) -> usize {
        self.dropped_in[cause as usize] += count as u64;
        0
    }

    #[inline]
    pub(crate) fn count_out(&mut self, delivered: &Delivered) {
        self.frames_out += u64::from(delivered.frames);
        self.bytes_out += delivered.bytes;
        // Without drops, no other cache line is touched.
        if delivered.full | delivered.refused != 0 {
            self.drop_out(Drop::Full, delivered.full.into());
            self.drop_out(Drop::Refused, delivered.refused.into());
        }
    }

    /// Counts frames that were lost between the peer and the switch, and resets the counters
    /// passed.
    pub(crate) fn lose_in(&mut self, cause: Drop, frames: &mut u64, bytes: &mut u64) {
        self.dropped_in[cause as usize] += *frames;
        self.frames_in += std::mem::take(frames);
        self.bytes_in += std::mem::take(bytes);
    }

    /// Adds another port's outward counters.
    pub(crate) fn add_out(&mut self, other: &Self) {
        self.frames_out += other.frames_out;
        self.bytes_out += other.bytes_out;
        self.dropped_out.iter_mut().zip(other.dropped_out).for_each(|(count, more)| *count += more);
    }

    #[inline]
    pub(crate) fn drop_out(&mut self, cause: Drop, count: u64) {
        self.dropped_out[cause as usize] += count;
    }
}

fn causes(counts: &[u64]) -> impl Iterator<Item = (&'static str, u64)> {
    let named = Drop::ALL.iter().map(|(cause, name)| (*name, counts[*cause as usize]));
    named.filter(|(_, count)| *count > 0)
}
