//! Netlink messages: a header, a fixed body, attributes (linux/netlink.h). All of it in the byte
//! order of the machine, each part padded to four bytes.

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
/// Nested attributes and such of other byte order are marked in the kind's upper bits.
const KIND: u16 = 0x3fff;

/// A request in the making.
pub struct Request {
    bytes: Vec<u8>,
}

impl Request {
    fn with(kind: u16, flags: u16) -> Self {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&(flags | NLM_F_REQUEST).to_ne_bytes());
        Self { bytes }
    }

    /// One that is answered by success or failure.
    pub fn new(kind: u16) -> Self {
        Self::with(kind, NLM_F_ACK)
    }

    /// One that makes something, or puts it in the place of what is there.
    pub fn replace(kind: u16) -> Self {
        Self::with(kind, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// One that is answered by a list.
    pub fn dump(kind: u16) -> Self {
        Self::with(kind, NLM_F_DUMP)
    }

    /// Appends to the fixed body; it must be whole before the first attribute.
    pub fn body(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// Appends an attribute of at most a few hundred bytes.
    pub fn attribute(&mut self, kind: u16, value: &[u8]) {
        let length = (4 + value.len()) as u16;
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    /// The message as it is sent.
    pub fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// A message of an answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The answer is complete; 0, or why not, as an errno.
    End(i32),
    /// Kind and body.
    Message(u16, &'a [u8]),
}

/// The messages of what was received, each with the sequence number of its request. What is cut or
/// makes no sense ends it.
pub fn answers(mut bytes: &[u8]) -> impl Iterator<Item = (u32, Answer<'_>)> {
    std::iter::from_fn(move || {
        let length = u32_at(bytes, 0)? as usize;
        let (kind, sequence) = (u16_at(bytes, 4)?, u32_at(bytes, 8)?);
        let body = bytes.get(HEADER..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        let answer = match kind {
            NLMSG_DONE => Answer::End(0),
            NLMSG_ERROR => Answer::End((u32_at(body, 0)? as i32).saturating_neg()),
            kind => Answer::Message(kind, body),
        };
        Some((sequence, answer))
    })
}

/// Kinds and values of attributes, up to the first that is cut.
pub fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let (length, kind) = (usize::from(u16_at(bytes, 0)?), u16_at(bytes, 2)?);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind & KIND, value))
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

/// The number at `at`, if it is all there.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_ends_the_walk() {
        let mut request = Request::new(16);
        request.body(&[1, 2, 3, 4]);
        request.attribute(3, b"lo\0");
        let bytes = request.finish(7);
        let whole: Vec<_> = answers(&bytes).collect();
        let [(7, Answer::Message(16, body))] = whole[..] else { panic!("{whole:?}") };
        assert_eq!(attributes(&body[4..]).collect::<Vec<_>>(), [(3, &b"lo\0"[..])]);
        for cut in 0..bytes.len() {
            assert_eq!(answers(&bytes[..cut]).count(), 0, "{cut}");
        }
        for cut in 0..7 {
            assert_eq!(attributes(&body[4..4 + cut]).count(), 0, "{cut}");
        }
        // Lengths that lie: none of its own header, none at all.
        assert_eq!(attributes(&[3, 0, 1, 0]).count(), 0);
        assert_eq!(answers(&[0; 64]).count(), 0);
    }

    #[test]
    fn an_error_is_an_errno() {
        let mut bytes = Request::new(NLMSG_ERROR);
        bytes.body(&(-17_i32).to_ne_bytes());
        let bytes = bytes.finish(1);
        assert_eq!(answers(&bytes).collect::<Vec<_>>(), [(1, Answer::End(17))]);
    }
}
