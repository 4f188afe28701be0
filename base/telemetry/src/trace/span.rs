//! A span that is complete.

use super::TraceContext;

/// The most bytes of a text in a span. A longer text is cut.
const MOST_TEXT: usize = 512;

/// A part of a trace with a beginning and an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The place of the span.
    pub context: TraceContext,
    /// The id of the span above it. `None` if it is the first one of its trace.
    pub parent: Option<[u8; 8]>,
    /// The name, which is one of few.
    pub name: String,
    /// The kind.
    pub kind: SpanKind,
    /// The beginning, nanoseconds since the epoch.
    pub start_ns: u64,
    /// The end, nanoseconds since the epoch; not before `start_ns`.
    pub end_ns: u64,
    /// Attributes with names of OpenTelemetry's semantic conventions.
    pub attributes: Vec<(&'static str, String)>,
    /// The error with which it ended. `None` if it succeeded.
    pub error: Option<String>,
}

/// The kinds of spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// A call that is served for somebody else.
    Server,
    /// A part of a call.
    Internal,
}

/// Returns a text for a span: the first 512 bytes at most.
pub(super) fn text(text: &str) -> String {
    text[..text.floor_char_boundary(MOST_TEXT)].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_texts_are_cut_between_letters() {
        assert_eq!(text("short"), "short");
        let cut = text(&"\u{20ac}".repeat(1000));
        assert_eq!(cut.len(), MOST_TEXT / 3 * 3);
    }
}
