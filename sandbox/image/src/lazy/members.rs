//! The gzip members of an image's layers that hold its spans. A member is what can be fetched by
//! itself: a span is read from the beginning of its member on.

use super::MOST_MEMBER;
use super::map::{Map, Span};

/// The most compressed bytes of a member that are needed: of [`MOST_MEMBER`]
/// uncompressed ones that are stored as they are. A fetcher has them in memory.
pub(crate) const MOST_STREAM: u64 = 72 << 20;
/// The most bytes between two members that one request skips over.
const GAP: u64 = 64 << 10;
/// The most members of one request. With [`MOST_MEMBER`] uncompressed bytes of all of them, it
/// bounds the work that one answer of a registry makes.
const MOST_TOGETHER: usize = 4096;

/// The most memory that the members take for each span of the map. The list of members is twice as
/// long as it must be at most.
pub(crate) const BYTES_PER_SPAN: usize = 2 * size_of::<Member>() + 2 * size_of::<u32>();

/// A gzip member.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Member {
    /// The position of the layer.
    pub layer: u32,
    /// The offset in the layer's blob.
    pub stream: u64,
    pub bytes: u64,
    /// The uncompressed bytes up to the end of the last span.
    inflated: u32,
    /// The range of the member's spans in [`Members::order`].
    first: u32,
    count: u32,
}

impl Member {
    fn end(&self) -> u64 {
        self.stream + self.bytes
    }
}

/// All members, by layer and offset.
#[derive(Debug)]
pub(crate) struct Members {
    all: Vec<Member>,
    /// The spans' numbers by member, and there by offset.
    order: Vec<u32>,
    /// The member of each span.
    of_span: Vec<u32>,
    /// The bytes of each layer that are fetched first.
    prefetch: Vec<u64>,
}

/// A range of a layer's blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub layer: u32,
    pub from: u64,
    pub bytes: u64,
}

impl Members {
    /// Finds the members of a map.
    ///
    /// # Errors
    /// Text that says what is wrong with the map.
    pub(crate) fn of(map: &Map) -> Result<Self, String> {
        let count = u32::try_from(map.spans.len()).map_err(|_| "too many chunks")?;
        check(map)?;
        let span = |number: &u32| &map.spans[*number as usize];
        let mut order: Vec<u32> = (0..count).collect();
        order.sort_unstable_by_key(|number| {
            let Span { layer, stream, inner, .. } = *span(number);
            (layer, stream, inner)
        });
        let mut all: Vec<Member> = Vec::new();
        let mut of_span = vec![0; order.len()];
        let mut end = 0;
        for (at, number) in order.iter().enumerate() {
            let Span { layer, stream, stream_bytes, inner, bytes, .. } = *span(number);
            let reaches = inner + bytes;
            let inflated = u32::try_from(reaches).unwrap_or(u32::MAX);
            match all.last_mut().filter(|last| (last.layer, last.stream) == (layer, stream)) {
                Some(_) if inner < end => return Err("chunks that overlap".into()),
                Some(last) => {
                    last.bytes = last.bytes.max(stream_bytes);
                    last.inflated = inflated;
                    last.count += 1;
                }
                None => {
                    let (first, bytes) = (at as u32, stream_bytes);
                    all.push(Member { layer, stream, bytes, inflated, first, count: 1 });
                }
            }
            end = reaches;
            of_span[*number as usize] = (all.len() - 1) as u32;
        }
        let prefetch = map.layers.iter().map(|layer| layer.prefetch).collect();
        Ok(Self { all, order, of_span, prefetch })
    }

    /// Returns the number of members.
    pub(crate) fn len(&self) -> u32 {
        self.all.len() as u32
    }

    pub(crate) fn get(&self, member: u32) -> &Member {
        &self.all[member as usize]
    }

    /// Returns the numbers of a member's spans, by their offset in the uncompressed member.
    pub(crate) fn spans(&self, member: u32) -> &[u32] {
        let Member { first, count, .. } = *self.get(member);
        &self.order[first as usize..][..count as usize]
    }

    /// Returns the member with a span.
    pub(crate) fn of_span(&self, span: usize) -> u32 {
        self.of_span[span]
    }

    /// Returns whether a member is in the part of its layer that is to be fetched first.
    pub(crate) fn is_prefetched(&self, member: u32) -> bool {
        let member = self.get(member);
        member.stream < self.prefetch[member.layer as usize]
    }

    /// Returns `first` and the members after it that one request of at most `most` bytes fetches,
    /// up to the first one that does not fit. A member that is longer than `most` is alone. All
    /// together have at most [`MOST_MEMBER`] uncompressed bytes.
    pub(crate) fn batch(
        &self,
        first: u32,
        most: u64,
        mut fits: impl FnMut(u32) -> bool,
    ) -> Vec<u32> {
        let begin = self.get(first);
        let (mut batch, mut end) = (vec![first], begin.end());
        let mut inflated = u64::from(begin.inflated);
        for next in first + 1..self.len() {
            let member = self.get(next);
            inflated += u64::from(member.inflated);
            let is_near = member.layer == begin.layer && member.stream <= end.saturating_add(GAP);
            let is_much = inflated > MOST_MEMBER || batch.len() == MOST_TOGETHER;
            if !is_near || is_much || member.end() - begin.stream > most || !fits(next) {
                break;
            }
            end = end.max(member.end());
            batch.push(next);
        }
        batch
    }

    /// Returns the range of the blob with all of these members of one layer, in ascending order.
    /// Returns `None` if there are none.
    pub(crate) fn range(&self, members: &[u32]) -> Option<Range> {
        let begin = self.get(*members.first()?);
        let end = members.iter().map(|member| self.get(*member).end()).max()?;
        Some(Range { layer: begin.layer, from: begin.stream, bytes: end - begin.stream })
    }
}

/// Checks that every span is within the image and within its layer, and can be fetched.
fn check(map: &Map) -> Result<(), String> {
    let mut end = 0;
    for span in &map.spans {
        let layer = map.layers.get(span.layer as usize).ok_or("a chunk of no layer")?;
        let within = |from: u64, bytes: u64, most: u64| {
            from.checked_add(bytes).is_some_and(|end| end <= most)
        };
        if span.image < end || !within(span.image, span.bytes, map.bytes) {
            return Err("a chunk that is not in its place".into());
        }
        if !within(span.stream, span.stream_bytes, layer.bytes)
            || span.inner.checked_add(span.bytes).is_none()
        {
            return Err("a chunk beyond the end of its layer".into());
        }
        if span.stream_bytes > MOST_STREAM {
            let text = format!("a chunk of more than {MOST_STREAM} compressed bytes");
            return Err(text);
        }
        end = span.image + span.bytes;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::map::MapLayer;
    use super::*;
    use crate::Digest;

    /// Makes a span of (layer, stream, bytes of the member, inner, bytes).
    fn span(image: u64, from: (u32, u64, u64, u64, u64)) -> Span {
        let (layer, stream, stream_bytes, inner, bytes) = from;
        Span { image, bytes, layer, stream, stream_bytes, inner, digest: Digest::of(b"") }
    }

    fn map(spans: Vec<Span>) -> Map {
        let layer = || MapLayer { digest: Digest::of(b""), bytes: 100 << 20, prefetch: 0 };
        Map {
            reference: "localhost/x".parse().unwrap(),
            plain_http: false,
            bytes: 1 << 30,
            layers: vec![layer(), layer()],
            spans,
        }
    }

    #[test]
    fn spans_share_members_and_members_share_requests() {
        let map = map(vec![
            span(4096, (1, 0, 50, 0, 10)),
            span(8192, (0, 100, 50, 20, 10)),
            span(12288, (0, 100, 50, 0, 20)),
            span(16384, (0, 150, 50, 0, 10)),
            span(20480, (0, 200 + GAP + 1, 50, 0, 10)),
        ]);
        let members = Members::of(&map).unwrap();
        assert_eq!(members.len(), 4);
        assert_eq!((members.spans(0), members.spans(3)), (&[2, 1][..], &[0][..]));
        assert_eq!((members.of_span(0), members.of_span(1), members.of_span(2)), (3, 0, 0));
        let batch = |first, most| members.batch(first, most, |_| true);
        assert_eq!(batch(0, 1 << 20), [0, 1], "the gap after them is too long");
        assert_eq!(batch(0, 99), [0]);
        assert_eq!(batch(0, 1), [0], "the first one is always in it");
        assert_eq!(batch(2, 1 << 20), [2], "the next one is of another layer");
        assert_eq!(members.batch(0, 1 << 20, |_| false), [0]);
        assert_eq!(members.range(&[0, 1]), Some(Range { layer: 0, from: 100, bytes: 100 }));
    }

    #[test]
    fn a_request_has_a_bounded_number_of_members_and_uncompressed_bytes() {
        let most = u64::MAX;
        let half = MOST_MEMBER / 2;
        let large = |at: u64| span(at * half, (0, at * 50, 50, half - 10, 10));
        let members = Members::of(&map((0..5).map(large).collect())).unwrap();
        assert_eq!(members.batch(0, most, |_| true), [0, 1]);
        assert_eq!(members.batch(4, most, |_| true), [4]);
        let small = |at: u64| span(at * 4096, (0, at * 50, 50, 0, 10));
        let spans = (0..MOST_TOGETHER as u64 + 1).map(small).collect();
        let members = Members::of(&map(spans)).unwrap();
        assert_eq!(members.batch(0, most, |_| true).len(), MOST_TOGETHER);
        assert_eq!(members.batch(1, most, |_| true).len(), MOST_TOGETHER);
    }

    #[test]
    fn maps_that_make_no_sense_are_refused() {
        for spans in [
            vec![span(0, (2, 0, 1, 0, 1))],
            vec![span(1 << 30, (0, 0, 1, 0, 1))],
            vec![span(u64::MAX, (0, 0, 1, 0, 1))],
            vec![span(0, (0, 100 << 20, 1, 0, 1))],
            vec![span(0, (0, u64::MAX, 1, 0, 1))],
            vec![span(0, (0, 0, 1, u64::MAX, 1))],
            vec![span(0, (0, 0, MOST_STREAM + 1, 0, 1))],
            vec![span(0, (0, 0, 1, 0, 10)), span(5, (0, 10, 1, 0, 10))],
            vec![span(0, (0, 0, 1, 0, 10)), span(10, (0, 0, 1, 9, 10))],
        ] {
            assert!(Members::of(&map(spans)).is_err());
        }
        assert_eq!(Members::of(&map(Vec::new())).unwrap().len(), 0);
    }
}
