//! Places in traces, as callers say them.

use std::fmt;

/// The length of a `traceparent` of version 00 in bytes.
const LENGTH: usize = 55;

/// A place in a trace: the ids of the trace and of a span, as a `traceparent` has them (W3C, *Trace
/// Context*, section 3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceContext {
    /// The trace's id, not all zeros.
    pub trace_id: [u8; 16],
    /// The span's id, not all zeros.
    pub span_id: [u8; 8],
    /// Set if the span may be recorded. Spans below one that is not are not recorded either.
    pub sampled: bool,
}

impl TraceContext {
    /// Parses the value of a `traceparent`. Of a later version, what version 00 has is read.
    /// Returns `None` if the value is invalid; a trace begins anew then.
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (known, rest) = value.split_at_checked(LENGTH)?;
        let mut fields = known.split(|byte| *byte == b'-');
        let [version] = hexadecimal::<1>(fields.next()?)?;
        let trace_id = hexadecimal::<16>(fields.next()?)?;
        let span_id = hexadecimal::<8>(fields.next()?)?;
        let [flags] = hexadecimal::<1>(fields.next()?)?;
        let ends = match version {
            0 => rest.is_empty(),
            0xff => false,
            _ => rest.first().is_none_or(|byte| *byte == b'-'),
        };
        let is_valid = ends && trace_id != [0; 16] && span_id != [0; 8];
        is_valid.then_some(Self { trace_id, span_id, sampled: flags & 1 != 0 })
    }

    /// Makes the place of the first span of a new trace.
    pub fn root() -> Self {
        Self { trace_id: random(), span_id: random(), sampled: true }
    }

    /// Makes the place of a new span in the same trace.
    pub fn child(self) -> Self {
        Self { span_id: random(), ..self }
    }
}

/// Writes the value of a `traceparent` of version 00.
impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (trace, span) = (u128::from_be_bytes(self.trace_id), u64::from_be_bytes(self.span_id));
        write!(f, "00-{trace:032x}-{span:016x}-{:02x}", u8::from(self.sampled))
    }
}

/// Returns the bytes of `2 * N` digits in lower case, as the specification demands. Returns `None`
/// if there are others, or more or fewer.
fn hexadecimal<const N: usize>(digits: &[u8]) -> Option<[u8; N]> {
    let value = |digit: u8| match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        _ => None,
    };
    if digits.len() != 2 * N {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = (value(pair[0])? << 4) | value(pair[1])?;
    }
    Some(bytes)
}

/// Returns a random id.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0_u8; N];
    // Fails only before the kernel has random bits, which it has when a program of a node runs.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    // Zeros stand for no id.
    if let Some(last) = bytes.last_mut() {
        *last |= 1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The example of the specification.
    const EXAMPLE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_context_is_read_and_written() {
        let context = TraceContext::parse(EXAMPLE.as_bytes()).unwrap();
        assert_eq!((context.trace_id[0], context.span_id[7]), (0x4b, 0xb7));
        assert!(context.sampled);
        assert_eq!(context.to_string(), EXAMPLE);
        let unsampled = EXAMPLE.replace("-01", "-00");
        assert!(!TraceContext::parse(unsampled.as_bytes()).unwrap().sampled);
        // Flags that are not known yet are not passed on.
        let flags = EXAMPLE.replace("-01", "-ff");
        assert_eq!(TraceContext::parse(flags.as_bytes()), Some(context));
    }

    #[test]
    fn invalid_values_are_none() {
        for bad in [
            String::new(),
            "00".to_owned(),
            "-".repeat(LENGTH),
            "\u{e9}".repeat(LENGTH),
            EXAMPLE.to_uppercase(),
            EXAMPLE.replace("4bf9", "4bF9"),
            EXAMPLE.replace("4bf9", "4bg9"),
            EXAMPLE.replace("4bf92f", "+bf92f"),
            EXAMPLE.replace("00-4b", "0-04b"),
            EXAMPLE.replace("00-4b", "ff-4b"),
            EXAMPLE.replace('-', "_"),
            EXAMPLE.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            EXAMPLE.replace("00f067aa0ba902b7", &"0".repeat(16)),
            format!("{EXAMPLE}-"),
            format!("{EXAMPLE}-00"),
            format!(" {EXAMPLE}"),
            format!("{EXAMPLE}\n"),
            EXAMPLE[..LENGTH - 1].to_owned(),
        ] {
            assert_eq!(TraceContext::parse(bad.as_bytes()), None, "{bad:?}");
        }
    }

    #[test]
    fn of_a_later_version_the_known_part_is_read() {
        let context = TraceContext::parse(EXAMPLE.as_bytes());
        let later = EXAMPLE.replace("00-4b", "01-4b");
        for value in [later.clone(), format!("{later}-"), format!("{later}-what-comes")] {
            assert_eq!(TraceContext::parse(value.as_bytes()), context, "{value:?}");
        }
        assert_eq!(TraceContext::parse(format!("{later}x").as_bytes()), None);
    }

    #[test]
    fn bytes_at_random_are_refused_or_read_back() {
        // A generator of 64 bits (Marsaglia, *Xorshift RNGs*): each run has the same values.
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = move |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            usize::try_from(state >> 33).unwrap_or_default() % below
        };
        for _ in 0..10_000 {
            let mut value = EXAMPLE.as_bytes().to_vec();
            let (at, by) = (next(LENGTH), next(256));
            value[at] = u8::try_from(by).unwrap();
            value.truncate(next(2 * LENGTH));
            if let Some(context) = TraceContext::parse(&value) {
                let written = context.to_string();
                assert_eq!(TraceContext::parse(written.as_bytes()), Some(context));
            }
        }
    }

    #[test]
    fn new_places_differ() {
        let root = TraceContext::root();
        let child = root.child();
        assert_eq!(child.trace_id, root.trace_id);
        assert_ne!(child.span_id, root.span_id);
        assert_ne!(TraceContext::root().trace_id, root.trace_id);
        assert_eq!(TraceContext::parse(child.to_string().as_bytes()), Some(child));
    }
}
