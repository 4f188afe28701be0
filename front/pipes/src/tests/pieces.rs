//! Cuts of all small stretches and of many large ones, checked against a model that moves single
//! bytes.

use super::random::Random;
use crate::{Needs, Pieces, Rule, Sizes, Stretch};

/// The value of each of the `overhead` bytes of a record in the sink, which its payload follows.
const MARK: u16 = 1000;

/// A source, and a sink whose memory has `None` for each byte that is not written yet.
struct Model {
    source: Stretch,
    sink: Stretch,
    memory: Vec<Option<u16>>,
}

impl Model {
    fn new(source: Stretch, sink: Stretch) -> Self {
        Self { source, sink, memory: vec![None; sink.size()] }
    }

    /// Returns the source's byte at `at`: its distance from the source's beginning, modulo 900.
    fn source_byte(&self, at: u64) -> u16 {
        at.wrapping_sub(self.source.position()) as u16 % 900
    }

    fn put(&mut self, at: u64, byte: u16) {
        let place = (at % self.sink.size() as u64) as usize;
        assert_eq!(self.memory[place].replace(byte), None, "written twice");
        assert!(at.wrapping_sub(self.sink.position()) < self.sink.length() as u64, "not ours");
    }
}

/// Cuts, moves byte by byte, and returns (bytes consumed, bytes produced, pieces).
fn run(rule: Rule, source: Stretch, sink: Stretch) -> (usize, usize, usize) {
    let mut model = Model::new(source, sink);
    let mut pieces = Pieces::new(rule, source, sink);
    let (mut read, mut written, mut count) = (source.position(), sink.position(), 0);
    while let Some(piece) = pieces.next() {
        assert_eq!((piece.source.position(), piece.sink.position()), (read, written), "in order");
        assert!(!piece.source.is_empty() && !piece.sink.is_empty());
        // Pieces that the executor cannot take are bounced, and no others.
        assert_eq!(piece.gather, rule.needs.source && piece.source.wraps());
        assert_eq!(piece.scatter, rule.needs.sink && piece.sink.wraps());
        let mut out: Vec<u16> = (0..piece.source.length())
            .map(|n| model.source_byte(read.wrapping_add(n as u64)))
            .collect();
        match rule.sizes {
            Sizes::Same => assert!(!piece.gather && !piece.scatter),
            Sizes::Record { most, overhead, exact } => {
                assert!(out.len() <= most);
                // Where sizes are not exact, every third record is shorter.
                let less = if exact || count % 3 != 0 { 0 } else { overhead.min(2) };
                out.splice(0..0, vec![MARK; overhead - less]);
            }
            Sizes::Whole { output, .. } => out.resize(output, MARK),
        }
        assert!(out.len() <= piece.sink.length());
        if rule.is_exact() {
            assert_eq!(out.len(), piece.sink.length());
        } else {
            assert!(pieces.next().is_none(), "nobody knows where the next begins");
        }
        for byte in &out {
            model.put(written, *byte);
            written = written.wrapping_add(1);
        }
        read = read.wrapping_add(piece.source.length() as u64);
        pieces.ended(out.len());
        count += 1;
    }
    let consumed = read.wrapping_sub(source.position()) as usize;
    let produced = written.wrapping_sub(sink.position()) as usize;
    check_stream(rule, &model, consumed, produced);
    (consumed, produced, count)
}

/// Checks that the sink has the source's bytes in order, with marks between.
fn check_stream(rule: Rule, model: &Model, consumed: usize, produced: usize) {
    let place = |n: usize| {
        (model.sink.position().wrapping_add(n as u64) % model.sink.size() as u64) as usize
    };
    let there: Vec<u16> = (0..produced).map(|n| model.memory[place(n)].expect("a hole")).collect();
    if matches!(rule.sizes, Sizes::Whole { .. }) {
        return;
    }
    let payload: Vec<u16> = there.into_iter().filter(|byte| *byte != MARK).collect();
    let expected: Vec<u16> = (0..consumed)
        .map(|n| model.source_byte(model.source.position().wrapping_add(n as u64)))
        .collect();
    assert_eq!(payload, expected);
}

fn needs() -> impl Iterator<Item = Needs> {
    [(false, false), (false, true), (true, false), (true, true)]
        .into_iter()
        .map(|(source, sink)| Needs { source, sink })
}

/// Returns every stretch of every ring of the given sizes.
fn stretches(sizes: &[u64]) -> Vec<Stretch> {
    let mut all = Vec::new();
    for &size in sizes {
        for position in 0..size {
            all.extend((0..=size).filter_map(|length| Stretch::new(position, length, size)));
        }
    }
    all
}

const SIZES: [u64; 5] = [1, 2, 4, 8, 16];

#[test]
fn the_size_stays_every_small_case() {
    let all = stretches(&SIZES);
    for needs in needs() {
        let rule = Rule { sizes: Sizes::Same, needs, least: 1 };
        for source in &all {
            for sink in &all {
                let (consumed, produced, pieces) = run(rule, *source, *sink);
                let length = source.length().min(sink.length());
                assert_eq!((consumed, produced), (length, length));
                // Each wrap costs at most one more piece.
                let wraps = usize::from(needs.source && source.first(length).wraps())
                    + usize::from(needs.sink && sink.first(length).wraps());
                assert!(pieces <= usize::from(length > 0) + wraps);
            }
        }
    }
}

#[test]
fn the_size_changes_every_small_case() {
    let all = stretches(&SIZES);
    for needs in needs() {
        for (most, overhead, least) in [(16, 1, 1), (5, 3, 2), (3, 0, 2), (7, 4, 4)] {
            for exact in [true, false] {
                let rule = Rule { sizes: Sizes::Record { most, overhead, exact }, needs, least };
                for source in &all {
                    for sink in &all {
                        let (consumed, produced, _) = run(rule, *source, *sink);
                        let (left, room) = (source.length() - consumed, sink.length() - produced);
                        assert!(
                            left == 0 || room <= overhead,
                            "it could go on: {source:?} {sink:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn whole_records_every_small_case() {
    let all = stretches(&SIZES);
    for needs in needs() {
        for (input, output) in [(1, 1), (5, 2), (4, 9), (16, 16), (3, 0)] {
            let rule = Rule { sizes: Sizes::Whole { input, output }, needs, least: 1 };
            for source in &all {
                for sink in &all {
                    let piece = rule.piece(*source, *sink);
                    let fits = source.length() >= input && sink.length() >= output;
                    assert_eq!(piece.is_some(), fits);
                    let Some(piece) = piece else { continue };
                    assert_eq!(
                        (piece.source, piece.sink),
                        (source.first(input), sink.first(output))
                    );
                    assert_eq!(piece.gather, needs.source && piece.source.wraps());
                    assert_eq!(piece.scatter, needs.sink && piece.sink.wraps());
                    if output > 0 {
                        run(rule, source.first(input), sink.first(output));
                    }
                }
            }
        }
    }
}

/// Records of less than `least` are made at the stream's end only, or where no room is left.
#[test]
fn large_rings_at_random() {
    let mut random = Random::new(1);
    for _ in 0..4000 {
        let mut stretch = || {
            let size = 1u64 << random.below(18);
            Stretch::new(random.next(), random.below(size as usize + 1) as u64, size).unwrap()
        };
        let (source, sink) = (stretch(), stretch());
        let needs = Needs { source: random.below(2) == 0, sink: random.below(2) == 0 };
        let (most, least) = (1 + random.below(20_000), 1 + random.below(2_000));
        let (overhead, exact) = (random.below(100), random.below(2) == 0);
        let sizes = [Sizes::Same, Sizes::Record { most, overhead, exact }][random.below(2)];
        let rule = Rule { sizes, needs, least };
        let (consumed, produced, _) = run(rule, source, sink);
        assert!(consumed == source.length() || sink.length() - produced <= overhead);
        let mut short = 0;
        let mut pieces = Pieces::new(rule, source, sink);
        while let Some(piece) = pieces.next() {
            short += usize::from(piece.source.length() < least.min(most));
            pieces.ended(piece.sink.length());
        }
        // One small record may come at the end of the source or of the room.
        assert!(sizes == Sizes::Same || short <= 1, "{short} small records");
    }
}
