//! Frames that wait for room in a record.

use std::collections::VecDeque;

use slipway_sgiov_spec::link::{FRAME, Frame, Kind, OPEN, Open};

/// Frames other than stream data, in the order in which they will be sent.
#[derive(Default)]
pub(crate) struct Frames(VecDeque<(Frame, Option<Open>)>);

impl Frames {
    pub(crate) fn put(&mut self, kind: Kind, stream: u32, value: u64) {
        self.0.push_back((Frame { kind, stream, value }, None));
    }

    pub(crate) fn open(&mut self, stream: u32, open: Open) {
        self.0.push_back((Frame { kind: Kind::Open, stream, value: 0 }, Some(open)));
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the length in bytes of the next frame.
    pub(crate) fn next(&self) -> Option<usize> {
        self.0.front().map(|(_, open)| FRAME + open.map_or(0, |_| OPEN))
    }

    /// Writes the next frame into `bytes`, which has the length that [`Frames::next`] returned.
    pub(crate) fn take(&mut self, bytes: &mut [u8]) {
        let Some((frame, open)) = self.0.pop_front() else { return };
        bytes[..FRAME].copy_from_slice(&frame.encode());
        if let Some(open) = open {
            bytes[FRAME..].copy_from_slice(&open.encode());
        }
    }
}
