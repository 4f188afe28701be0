//! Requests for members of an image, and the way of their data into the image's file.

use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use flate2::bufread::MultiGzDecoder;
use sha2::{Digest as _, Sha256};
use slipway_space::Allowance;

use super::budget::{Room, Urgency};
use super::map::Span;
use super::members::Member;
use super::partial::Partial;
use crate::source::blocking;
use crate::{Digest, Error, Event, Result};

/// The pauses before a failed request for wanted members is repeated.
const RETRIES: [Duration; 3] = match cfg!(test) {
    false => [Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(3)],
    true => [Duration::from_millis(1); 3],
};
/// The bytes that are read at once.
const PIECE: usize = 128 << 10;

impl Partial {
    /// Fetches members that were taken, and tells those who wait for them.
    ///
    /// # Errors
    /// The error of the last request. Members that are right are there nevertheless.
    pub(crate) async fn fetch(self: Arc<Self>, members: Vec<u32>, urgency: Urgency) -> Result<()> {
        let mut left = members;
        let pauses: &[Duration] = match urgency {
            Urgency::Wanted => &RETRIES,
            Urgency::Ahead => &[],
        };
        let mut retries = pauses.iter();
        loop {
            let outcome = self.request(&left, urgency).await;
            left = self.land(left);
            let error = match outcome {
                Err(error) if !left.is_empty() => error,
                _ => return Ok(()),
            };
            match retries.next() {
                Some(pause) => tokio::time::sleep(*pause).await,
                None => {
                    self.give_up(&left, urgency);
                    return Err(error);
                }
            }
        }
    }

    /// Requests the members once.
    async fn request(self: &Arc<Self>, members: &[u32], urgency: Urgency) -> Result<()> {
        let Some(range) = self.members.range(members) else { return Ok(()) };
        // The blob, and the longest span of these members.
        let spans = members.iter().flat_map(|member| self.members.spans(*member));
        let longest = spans.map(|span| self.span(*span).bytes).max().unwrap_or(0);
        let (origin, _room) = self.room(range.bytes + longest, urgency).await;
        let layer = self.map.layers[range.layer as usize].digest;
        let blob = self.origins.blob_range(origin, &layer, range.from, range.bytes).await?;
        let (partial, members) = (Arc::clone(self), members.to_vec());
        // It goes away with this future, whose thread then works for nobody.
        let requester = Arc::new(());
        let waits = Arc::downgrade(&requester);
        let waits = move || waits.strong_count() > 0;
        let unpack = move || partial.unpack(&members, range.from, &blob, waits);
        let unpacked = blocking(unpack).await;
        match unpacked {
            Ok(()) => self.origins.worked(origin),
            // The repository is not to blame.
            Err(Error::NoSpace { .. } | Error::Io { .. }) => {}
            Err(_) => self.origins.failed(origin),
        }
        unpacked
    }

    /// Waits for room for a request of `bytes` bytes. Returns it with the number of the repository
    /// to ask: if other requests have all room of a registry for long, the next one.
    pub(crate) async fn room(&self, bytes: u64, urgency: Urgency) -> (usize, Room<'_>) {
        let mut room = self.share.room(bytes, urgency).await;
        let number = loop {
            let (number, patience) = self.origins.turn();
            let Some(patience) = patience else {
                room.of_registry(number).await;
                break number;
            };
            match tokio::time::timeout(patience, room.of_registry(number)).await {
                Ok(()) => break number,
                Err(_) => self.origins.failed(number),
            }
        };
        room.of_whole().await;
        (number, room)
    }

    /// Writes the spans of the members that are in `blob`, which begins at offset `from` of the
    /// layer's. Each member is uncompressed from its own bytes alone. Returns the first error;
    /// spans that are right are written nevertheless, as far as a part of the disk stays free for
    /// others. Ends before the next member once `waits` returns `false`.
    pub(crate) fn unpack(
        &self,
        members: &[u32],
        from: u64,
        blob: &[u8],
        waits: impl Fn() -> bool,
    ) -> Result<()> {
        let space = Allowance::of(&self.file);
        let mut space = space.map_err(|e| Error::io("look at", &self.path, e))?;
        let mut outcome = Ok(());
        for member in members.iter().take_while(|_| waits()) {
            let Member { stream, bytes, .. } = *self.members.get(*member);
            let begin = (stream - from) as usize;
            let unpacked = match blob.get(begin..begin.saturating_add(bytes as usize)) {
                Some(stream) => self.unpack_member(*member, stream, &mut space),
                None => Err(self.bad_member(*member, "the registry sends too little of it")),
            };
            outcome = outcome.and(unpacked);
        }
        outcome
    }

    /// Writes the missing spans of one member, each once its digest is known to be right: what
    /// readers have been told of stays as it is. No more is uncompressed than they need.
    fn unpack_member(&self, member: u32, stream: &[u8], space: &mut Allowance) -> Result<()> {
        let mut decoder = MultiGzDecoder::new(stream);
        let (mut at, mut data) = (0, Vec::new());
        let mut outcome = Ok(());
        for number in self.members.spans(member) {
            if self.lock().have().has(*number as usize) {
                continue;
            }
            let span = self.span(*number);
            let read = read_span(&mut decoder, span.inner - at, span.bytes, &mut data);
            read.map_err(|e| self.bad_member(member, &e.to_string()))?;
            at = span.inner + span.bytes;
            let actual = Digest::of(&data);
            if actual != span.digest {
                outcome = outcome.and(Err(self.mismatch(member, span, actual)));
                continue;
            }
            let written = space.take(&self.file, span.bytes);
            let written = written.and_then(|()| self.file.write_all_at(&data, span.image));
            written.map_err(|e| Error::io("write", &self.path, e))?;
            self.lock().set(*number as usize);
        }
        outcome
    }

    fn bad_member(&self, member: u32, reason: &str) -> Error {
        let member = self.members.get(member);
        let layer = self.map.layers[member.layer as usize].digest;
        Error::bad_layer(layer, format!("the part at {}: {reason}", member.stream))
    }

    fn mismatch(&self, member: u32, span: &Span, actual: Digest) -> Error {
        let layer = self.map.layers[self.members.get(member).layer as usize].digest;
        let what = format!("the part at {} of layer {layer}", span.stream);
        Error::DigestMismatch { what, expected: span.digest, actual }
    }

    /// Tells those who wait for members that are there now. Returns the others.
    fn land(&self, mut members: Vec<u32>) -> Vec<u32> {
        let mut state = self.lock();
        members.retain(|member| match state.land(&self.members, *member) {
            Some((index, done)) => {
                self.progress.event(Event::LayerBytes { index, done });
                false
            }
            None => true,
        });
        members
    }

    /// Ends a request for members that are still missing.
    fn give_up(&self, members: &[u32], urgency: Urgency) {
        let mut state = self.lock();
        members.iter().for_each(|member| state.give_up(*member, urgency));
    }

    /// Marks spans whose data is in the file already, whoever wrote it.
    pub(crate) fn find(&self, spans: impl Iterator<Item = usize>) -> Result<()> {
        let mut buffer = vec![0; PIECE];
        for number in spans {
            let span = &self.map.spans[number];
            let (mut hash, mut at) = (Sha256::new(), 0);
            while at < span.bytes {
                let room = (span.bytes - at).min(PIECE as u64) as usize;
                let read = self.file.read_exact_at(&mut buffer[..room], span.image + at);
                read.map_err(|e| Error::io("read", &self.path, e))?;
                hash.update(&buffer[..room]);
                at += room as u64;
            }
            if Digest::from(<[u8; 32]>::from(hash.finalize())) == span.digest {
                self.lock().set(number);
            }
        }
        Ok(())
    }
}

/// Reads `bytes` bytes of a member into `data`, after `skipped` others.
fn read_span(
    member: &mut impl Read,
    skipped: u64,
    bytes: u64,
    data: &mut Vec<u8>,
) -> io::Result<()> {
    data.clear();
    data.reserve_exact(bytes as usize);
    let passed = io::copy(&mut member.by_ref().take(skipped), &mut io::sink())?;
    let read = member.by_ref().take(bytes).read_to_end(data)?;
    match passed == skipped && read as u64 == bytes {
        true => Ok(()),
        false => Err(io::Error::other("it ends early")),
    }
}
