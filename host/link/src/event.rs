//! Events of streams for the owner of the links.

use slipway_ring::cross::Region;
use slipway_sgiov_spec::Address;

/// A stream of an engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(u64);

impl StreamId {
    pub(crate) fn new(connection: u32, number: u32) -> Self {
        Self(u64::from(connection) << 32 | u64::from(number))
    }

    pub(crate) fn connection(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(crate) fn number(self) -> u32 {
        self.0 as u32
    }
}

/// The reason why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// The stream was never open; an error number of errno(3).
    Refused(u32),
    /// Both sides have finished, and all bytes that arrived are in the FIFO.
    Finished,
    /// The stream was reset by this side, the other, or a broken connection. The FIFO says so, too.
    Reset,
}

/// An event for the owner of a [`Links`](crate::Links).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A program at another engine connects: the owner answers with [`Links::attach`] or
    /// [`Links::refuse`], even if the stream has ended meanwhile. Further streams are refused while
    /// too many wait for an answer.
    ///
    /// [`Links::attach`]: crate::Links::attach
    /// [`Links::refuse`]: crate::Links::refuse
    Asked {
        /// The stream.
        stream: StreamId,
        /// The other engine.
        engine: String,
        /// The tenant, which the other engine vouches for.
        tenant: String,
        /// The program's address.
        source: Address,
        /// The address that the program connects to.
        destination: Address,
    },
    /// A stream that the owner asked for is open. The owner attaches an end to it
    /// ([`Links::attach`](crate::Links::attach)), if it has not before.
    Opened(StreamId),
    /// A stream has ended, and its [`End`](crate::End) is released. This is the
    /// stream's last event.
    Ended {
        /// The stream.
        stream: StreamId,
        /// The reason.
        ended: Ended,
        /// The stream had an end. If `false` and one is attached later all the same, that end
        /// is reset and another event of this kind follows.
        attached: bool,
        /// The region with bytes that the program has not read, in the engine's half of the arena:
        /// the owner frees it when the program has closed.
        region: Option<Region>,
    },
}
