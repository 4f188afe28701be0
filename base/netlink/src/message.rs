//! Netlink messages: a header, a fixed body, attributes (linux/netlink.h). All of it in the byte
//! order of the machine, each part padded to four bytes.

use std::io;

const HEADER: usize = 16;
const NLMSG_ERROR: u16 = 2;
const NLMSG_DONE: u16 = 3;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
/// A list changed while it was sent: entries may be missing.
const NLM_F_DUMP_INTR: u16 = 0x10;
const NLM_F_DUMP: u16 = 0x300;
const NLM_F_REPLACE: u16 = 0x100;
const NLM_F_CREATE: u16 = 0x400;
/// The bits of an attribute's kind. The others mark nested attributes and those in network order.
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

    /// Makes a request that is answered by success or failure.
    pub fn new(kind: u16) -> Self {
        Self::with(kind, NLM_F_ACK)
    }

    /// Makes a request that creates an object or replaces the existing one.
    pub fn replace(kind: u16) -> Self {
        Self::with(kind, NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Makes a request that is answered by a list.
    pub fn dump(kind: u16) -> Self {
        Self::with(kind, NLM_F_DUMP)
    }

    /// Makes the request one that is answered by its failure only, or by a message.
    pub fn only_failure(mut self) -> Self {
        let flags = u16::from_ne_bytes([self.bytes[6], self.bytes[7]]) & !NLM_F_ACK;
        self.bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        self
    }

    /// Appends bytes to the fixed body. The caller appends the whole body before the first
    /// attribute.
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

    /// Returns the message as it is sent, with the sequence number `sequence`.
    pub fn finish(mut self, sequence: u32) -> Vec<u8> {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// The contents of a message that the kernel sends.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The end of the answer: 0, or the errno of the failure.
    End(i32),
    /// Kind and body of another message.
    Message(u16, &'a [u8]),
}

/// A message that the kernel sends.
#[derive(Debug, PartialEq, Eq)]
pub struct Reply<'a> {
    /// The sequence number of the request.
    pub sequence: u32,
    /// `true` if the list that the message belongs to changed while the kernel sent it.
    pub interrupted: bool,
    /// The message's contents.
    pub answer: Answer<'a>,
}

/// Returns the messages in `bytes`, which were received at once. A message that is cut, or has an
/// impossible length, is an error ([`io::ErrorKind::InvalidData`]) and the last item.
pub fn replies(mut bytes: &[u8]) -> impl Iterator<Item = io::Result<Reply<'_>>> {
    std::iter::from_fn(move || {
        if bytes.is_empty() {
            return None;
        }
        let Some((reply, rest)) = first_reply(bytes) else {
            bytes = &[];
            let error = "a netlink message is cut";
            return Some(Err(io::Error::new(io::ErrorKind::InvalidData, error)));
        };
        bytes = rest;
        Some(Ok(reply))
    })
}

/// Returns the first message of `bytes` and the bytes that follow it. Returns `None` if the message
/// is cut.
fn first_reply(bytes: &[u8]) -> Option<(Reply<'_>, &[u8])> {
    let length = u32_at(bytes, 0)? as usize;
    let (kind, flags, sequence) = (u16_at(bytes, 4)?, u16_at(bytes, 6)?, u32_at(bytes, 8)?);
    let body = bytes.get(HEADER..length)?;
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    let answer = match kind {
        // Both begin with a negative errno, or 0.
        NLMSG_DONE | NLMSG_ERROR => Answer::End((u32_at(body, 0)? as i32).saturating_neg()),
        kind => Answer::Message(kind, body),
    };
    let interrupted = flags & NLM_F_DUMP_INTR != 0;
    Some((Reply { sequence, interrupted, answer }, rest))
}

/// Returns kinds and values of the attributes in `bytes`, up to the first one that is cut.
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

/// Returns the number at byte `at`. Returns `None` if `bytes` ends before the number does.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the messages that are whole, and whether the last item is an error.
    fn read(bytes: &[u8]) -> (Vec<Reply<'_>>, bool) {
        let (mut whole, mut cut) = (Vec::new(), false);
        for reply in replies(bytes) {
            assert!(!cut, "an error is the last item");
            match reply {
                Ok(reply) => whole.push(reply),
                Err(_) => cut = true,
            }
        }
        (whole, cut)
    }

    #[test]
    fn a_message_that_is_cut_is_an_error_and_an_attribute_that_is_cut_the_end() {
        let mut request = Request::new(16);
        request.body(&[1, 2, 3, 4]);
        request.attribute(3, b"lo\0");
        let bytes = request.finish(7);
        let (whole, cut) = read(&bytes);
        let [Reply { sequence: 7, interrupted: false, answer: Answer::Message(16, body) }] =
            whole[..]
        else {
            panic!("{whole:?}")
        };
        assert!(!cut);
        assert_eq!(attributes(&body[4..]).collect::<Vec<_>>(), [(3, &b"lo\0"[..])]);
        assert_eq!(read(&[]), (vec![], false));
        for end in 1..bytes.len() {
            assert_eq!(read(&bytes[..end]), (vec![], true), "{end}");
            let (before, cut) = (read(&bytes).0, [&bytes[..], &bytes[..end]].concat());
            assert_eq!(read(&cut), (before, true), "{end}");
        }
        for cut in 0..7 {
            assert_eq!(attributes(&body[4..4 + cut]).count(), 0, "{cut}");
        }
        // Lengths that lie: none of its own header, none at all.
        assert_eq!(attributes(&[3, 0, 1, 0]).count(), 0);
        assert_eq!(read(&[0; 64]), (vec![], true));
    }

    #[test]
    fn an_error_is_an_errno_also_at_the_end_of_a_list() {
        for kind in [NLMSG_ERROR, NLMSG_DONE] {
            for errno in [0_i32, 17] {
                let mut bytes = Request::new(kind);
                bytes.body(&(-errno).to_ne_bytes());
                let bytes = bytes.finish(1);
                assert_eq!(read(&bytes).0[0].answer, Answer::End(errno));
            }
        }
    }

    #[test]
    fn a_request_without_an_answer_to_its_success_is_otherwise_the_same() {
        let flags = |request: Request| {
            let bytes = request.finish(1);
            u16::from_ne_bytes([bytes[6], bytes[7]])
        };
        let all = NLM_F_REQUEST | NLM_F_CREATE | NLM_F_REPLACE;
        assert_eq!(flags(Request::replace(20)), all | NLM_F_ACK);
        assert_eq!(flags(Request::replace(20).only_failure()), all);
        assert_eq!(flags(Request::new(20).only_failure()), NLM_F_REQUEST);
    }

    #[test]
    fn a_list_that_changed_meanwhile_is_marked() {
        let mut bytes = Request::with(NLMSG_DONE, NLM_F_DUMP_INTR);
        bytes.body(&[0; 4]);
        let bytes = bytes.finish(1);
        assert!(read(&bytes).0[0].interrupted);
    }
}
