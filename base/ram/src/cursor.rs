//! Parts of a list of spans, taken one after the other.

use crate::Span;

/// A place in a list of spans, which moves forward as parts of the list are taken. Taking all of a
/// list costs a step for each span and a step for each part, however small both are.
#[derive(Clone, Copy, Debug, Default)]
pub struct SpanCursor {
    /// The index of the span that the next part begins in.
    index: usize,
    /// The offset of the next part in that span, in bytes.
    offset: usize,
}

impl SpanCursor {
    /// Appends the next `len` bytes of `spans` to `into`, or fewer if the list ends before. The
    /// list is the one that earlier calls were given.
    pub fn take(&mut self, spans: &[Span], len: usize, into: &mut Vec<Span>) {
        let mut left = len;
        while left > 0
            && let Some(span) = spans.get(self.index)
        {
            let part = span.len().saturating_sub(self.offset).min(left);
            if part > 0 {
                into.push(span.slice(self.offset, part));
            }
            left -= part;
            self.offset += part;
            if self.offset >= span.len() {
                (self.index, self.offset) = (self.index + 1, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spans(lengths: &[usize]) -> Vec<Span> {
        lengths.iter().map(|len| Span::heap(*len)).collect()
    }

    fn lengths(spans: &[Span]) -> Vec<usize> {
        spans.iter().map(Span::len).collect()
    }

    #[test]
    fn parts_follow_one_another_and_end_with_the_list() {
        let list = spans(&[4, 0, 10, 2]);
        for (at, span) in list.iter().enumerate() {
            span.write(0, &vec![at as u8; span.len()]).unwrap();
        }
        let mut cursor = SpanCursor::default();
        let mut take = |len| {
            let mut part = Vec::new();
            cursor.take(&list, len, &mut part);
            let first = |span: &Span| {
                let mut byte = [0];
                span.read(0, &mut byte).unwrap();
                (byte[0], span.len())
            };
            part.iter().map(first).collect::<Vec<_>>()
        };
        assert_eq!(take(3), [(0, 3)]);
        assert_eq!(take(3), [(0, 1), (2, 2)]);
        assert_eq!(take(0), []);
        assert_eq!(take(8), [(2, 8)]);
        assert_eq!(take(9), [(3, 2)], "less is left");
        assert_eq!(take(1), []);
    }

    #[test]
    fn spans_that_were_taken_are_not_looked_at_again() {
        let mut cursor = SpanCursor::default();
        let mut part = Vec::new();
        cursor.take(&spans(&[4, 4, 4, 6]), 14, &mut part);
        part.clear();
        // A walk from the first span would end within the first span.
        cursor.take(&spans(&[1000, 1000, 1000, 6]), 100, &mut part);
        assert_eq!(lengths(&part), [4]);
    }
}
