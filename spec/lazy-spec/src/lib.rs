//! The messages between a disk of a lazily pulled image and the process that fetches the image's
//! blocks: packets on a `SOCK_SEQPACKET` socket, as 64-bit words in the byte order of the machine.
//!
//! | message | from | to |
//! |---|---|---|
//! | [`Hello`] | disk | fetcher, first |
//! | [`Answer::Open`], [`Answer::Whole`] or [`Answer::Refused`] | fetcher | disk, first |
//! | [`Want`] | disk | fetcher |
//! | [`Answer::Have`], [`Answer::Failed`] or [`Answer::Whole`] | fetcher | disk |
//!
//! The fetcher answers a [`Want`] once, in any order, with a range that holds all of what was
//! wanted, or with [`Answer::Failed`] and the range that was wanted. It may send [`Answer::Have`]
//! and [`Answer::Whole`] unasked. A range that the fetcher has is in the image's file: whoever
//! reads the file after the message finds it there.
//!
//! No dependencies.
#![no_std]

extern crate alloc;

use alloc::vec::Vec;

/// First word of a [`Hello`]: the protocol and its version.
const HELLO: u64 = u64::from_be_bytes(*b"sliplazy") ^ 2;
/// First words of the other messages.
const WANT: u64 = 1;
const OPEN: u64 = 2;
const HAVE: u64 = 3;
const WHOLE: u64 = 4;
const FAILED: u64 = 5;
const REFUSED: u64 = 6;

/// Most bytes of a message.
pub const MOST: usize = 512;
/// Most bytes of the text of [`Answer::Refused`].
const MOST_TEXT: usize = MOST - 8;
/// Most [`Want`]s of one connection that may be unanswered. The fetcher ends a connection with
/// more.
pub const MOST_WANTED: usize = 256;
/// Most bytes of one [`Want`].
pub const MOST_BYTES: u64 = 16 << 20;

/// A range of bytes of an image's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The offset of the first byte.
    pub offset: u64,
    /// The number of bytes, at least 1.
    pub bytes: u64,
}

impl Extent {
    /// Returns the offset after the last byte. [`Extent`]s of decoded messages end within 64 bits.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.bytes)
    }

    fn decode(offset: u64, bytes: u64) -> Option<Self> {
        (bytes > 0 && offset.checked_add(bytes).is_some()).then_some(Self { offset, bytes })
    }
}

/// The first message of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The SHA-256 digest of the image's manifest, which names the image.
    pub digest: [u8; 32],
    /// The device of the file that the disk reads (`st_dev`). The image may have another file in
    /// another cache, or after it was removed and pulled again.
    pub device: u64,
    /// The inode of that file (`st_ino`).
    pub inode: u64,
}

impl Hello {
    /// Returns the message.
    pub fn encode(&self) -> Vec<u8> {
        let [hello, device, inode] = [HELLO, self.device, self.inode].map(u64::to_ne_bytes);
        [&hello[..], &device, &inode, &self.digest].concat()
    }

    /// Returns the greeting in a message. Returns `None` if the message is of another form or
    /// version.
    pub fn decode(message: &[u8]) -> Option<Self> {
        let (head, digest) = message.split_at_checked(24)?;
        let [hello, device, inode] = words(head)?;
        let digest = digest.try_into().ok()?;
        (hello == HELLO).then_some(Self { digest, device, inode })
    }
}

/// A request for bytes of the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want(pub Extent);

impl Want {
    /// Returns the message.
    pub fn encode(&self) -> Vec<u8> {
        message([WANT, self.0.offset, self.0.bytes])
    }

    /// Returns the request in a message. Returns `None` if the message is of another form or wants
    /// no bytes, or more than [`MOST_BYTES`].
    pub fn decode(message: &[u8]) -> Option<Self> {
        let [WANT, offset, bytes] = words(message)? else { return None };
        Extent::decode(offset, bytes).filter(|extent| extent.bytes <= MOST_BYTES).map(Self)
    }
}

/// A message of the fetcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The image is there, and parts of its file are missing.
    Open,
    /// The file has these bytes.
    Have(Extent),
    /// The file has all bytes.
    Whole,
    /// These bytes, which the disk wanted, cannot be fetched now. Wanted again, they are tried
    /// again.
    Failed(Extent),
    /// There is no such image, or its file is another one; the text says why. Of a long text, the
    /// first bytes are sent. The connection ends.
    Refused(&'a [u8]),
}

impl<'a> Answer<'a> {
    /// Returns the message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Open => message([OPEN, 0, 0]),
            Self::Have(extent) => message([HAVE, extent.offset, extent.bytes]),
            Self::Whole => message([WHOLE, 0, 0]),
            Self::Failed(extent) => message([FAILED, extent.offset, extent.bytes]),
            Self::Refused(text) => {
                [&REFUSED.to_ne_bytes()[..], &text[..text.len().min(MOST_TEXT)]].concat()
            }
        }
    }

    /// Returns the answer in a message. Returns `None` if it is another message.
    pub fn decode(message: &'a [u8]) -> Option<Self> {
        let (first, rest) = message.split_first_chunk()?;
        if u64::from_ne_bytes(*first) == REFUSED {
            return Some(Self::Refused(rest));
        }
        match words(message)? {
            [OPEN, 0, 0] => Some(Self::Open),
            [WHOLE, 0, 0] => Some(Self::Whole),
            [HAVE, offset, bytes] => Extent::decode(offset, bytes).map(Self::Have),
            [FAILED, offset, bytes] => Extent::decode(offset, bytes).map(Self::Failed),
            _ => None,
        }
    }
}

fn message(words: [u64; 3]) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_ne_bytes).collect()
}

/// Returns the three words of a message. Returns `None` if it has another length.
fn words(message: &[u8]) -> Option<[u64; 3]> {
    let (words, rest) = message.as_chunks();
    let words: &[[u8; 8]; 3] = words.try_into().ok()?;
    rest.is_empty().then(|| words.map(u64::from_ne_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: Extent = Extent { offset: 4096, bytes: 8192 };

    #[test]
    fn messages_are_read_as_they_were_written() {
        let hello = Hello { digest: [7; 32], device: 8, inode: 9 };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        assert_eq!(Want::decode(&Want(EXTENT).encode()), Some(Want(EXTENT)));
        let answers = [
            Answer::Open,
            Answer::Have(EXTENT),
            Answer::Whole,
            Answer::Failed(EXTENT),
            Answer::Refused(b"no such image"),
        ];
        for answer in answers {
            let message = answer.encode();
            assert!(message.len() <= MOST);
            assert_eq!(Answer::decode(&message), Some(answer));
        }
        assert!(Answer::Refused(&[b'a'; 1000]).encode().len() <= MOST);
    }

    #[test]
    fn messages_of_another_form_are_refused() {
        let hello = Hello { digest: [7; 32], device: 8, inode: 9 }.encode();
        assert_eq!(Hello::decode(&hello[1..]), None);
        assert_eq!(Hello::decode(&[0; 56]), None);
        assert_eq!(Hello::decode(&[&hello[..], &[0]].concat()), None);
        assert_eq!(Hello::decode(b""), None);
        let bad = [
            Want(Extent { offset: 0, bytes: 0 }),
            Want(Extent { offset: 0, bytes: MOST_BYTES + 1 }),
            Want(Extent { offset: u64::MAX, bytes: 1 }),
        ];
        for want in bad {
            assert_eq!(Want::decode(&want.encode()), None, "{want:?}");
        }
        assert_eq!(Answer::decode(&Want(EXTENT).encode()), None);
        let endless = Answer::Have(Extent { offset: u64::MAX, bytes: 2 });
        assert_eq!(Answer::decode(&endless.encode()), None);
        assert_eq!(Answer::decode(b"short"), None);
    }
}
