//! The messages by which a sandbox gets memory of a pool of recycled pages: packets on a
//! `SOCK_SEQPACKET` socket, in the byte order of the machine.
//!
//! | message | from | to | descriptors |
//! |---|---|---|---|
//! | [`Request`] | launcher | pool | |
//! | [`Answer`] | pool | launcher | the memory's file, unless refused |
//! | [`Traits`] as a [`TOKEN`] | pool | VMM | a token of the file, the device that makes userfaultfds |
//! | [`Range`]s ([`faults`]) | VMM | pool | a userfaultfd |
//! | [`SERVED`] | pool | VMM | |
//! | [`Completion`], in place of a request | launcher | pool | |
//! | [`Answer`] | pool | launcher | the memory's file, unless refused |
//!
//! A token of the memory's file is a descriptor by which the file can be neither read, nor written,
//! nor mapped. The VMM passes it to devices, which find the memory by it.
//!
//! `slipway-pool-wire` says what each party does with the messages.
//!
//! Dependency: `slipway-numa` for the numbers of nodes.
#![no_std]

extern crate alloc;

mod template;

use alloc::vec::Vec;

use slipway_numa::NumaNode;
pub use template::TemplateName;
use template::WORDS;

/// First word of a request: the protocol and its version.
const ASK: u64 = u64::from_be_bytes(*b"slippool") ^ 3;
/// First word of a request for the file of a fork's memory: the protocol and its version.
const COMPLETE: u64 = u64::from_be_bytes(*b"slipcopy") ^ 1;
/// First bytes of the pool's messages.
const GIVEN: u8 = 1;
const REFUSED: u8 = 2;
/// The first byte of the pool's message with a token.
pub const TOKEN: u8 = 3;
/// The pool's message that faults are served.
pub const SERVED: [u8; 1] = [4];
/// First word of the VMM's message.
const FAULTS: u64 = 5;
/// The number in a message that stands for no NUMA node.
const NOWHERE: u16 = u16::MAX;

/// Most bytes of a message: a refusal's text.
pub const MOST: usize = 512;
/// Most ranges of addresses that a VMM may send in its message ([`faults`]): two parts of RAM, and
/// two mappings of each of eight regions of hot-plug memory.
const RANGES: usize = 18;

/// The size of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Page {
    /// Pages of the machine's base size.
    Base,
    /// Huge pages of 2 MiB (hugetlbfs).
    Huge,
}

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The size in bytes.
    pub bytes: u64,
    /// The size of its pages.
    pub page: Page,
    /// The NUMA node that the memory should be on; `None` leaves the choice to the pool. The pool
    /// gives memory of another one where this one has none, or where the pool does not know it.
    pub near: Option<NumaNode>,
    /// The template with whose bytes the memory begins, of the same size; `None` for zeros. Such
    /// memory has pages of the base size.
    pub template: Option<TemplateName>,
}

impl Request {
    /// Returns the message.
    pub fn encode(&self) -> Vec<u8> {
        let huge = u64::from(self.page == Page::Huge);
        let words = [ASK, self.bytes, huge, number(self.near).into()];
        bytes(&[&words[..], &TemplateName::words(self.template)].concat())
    }

    /// Returns the request in a message. Returns `None` if the message is of another form or
    /// version.
    pub fn decode(message: &[u8]) -> Option<Self> {
        let words = words(message)?;
        let (&[ASK, bytes, huge @ (0 | 1), near], name) = words.split_first_chunk()? else {
            return None;
        };
        let name: &[u64; WORDS] = name.try_into().ok()?;
        let page = if huge == 1 { Page::Huge } else { Page::Base };
        Some(Self { bytes, page, near: node(near)?, template: TemplateName::of_words(name)? })
    }
}

/// A request to complete a fork's memory: all pages that are still the template's are copied into
/// its file, and the answer has the file. The launcher sends it before another process that serves
/// the guest gets the file, since that process's faults do not reach the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The device number of the memory's file.
    pub device: u64,
    /// Its inode number.
    pub inode: u64,
}

impl Completion {
    /// Returns the message.
    pub fn encode(&self) -> Vec<u8> {
        bytes(&[COMPLETE, self.device, self.inode])
    }

    /// Returns the request in a message. Returns `None` if it is another message.
    pub fn decode(message: &[u8]) -> Option<Self> {
        let words = words(message)?;
        let &[COMPLETE, device, inode] = words.as_slice() else { return None };
        Some(Self { device, inode })
    }
}

/// The traits of memory of the pool that its users must know, beside its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traits {
    /// The NUMA node on which the kernel makes its pages; `None` if it is that of the thread that
    /// touches a page first, as on a host with one node.
    pub home: Option<NumaNode>,
    /// Set if it begins as a template. Then a page that its file lacks is not zeros, and the faults
    /// of missing pages are handed over, too.
    pub fork: bool,
}

impl Traits {
    /// Returns the message with a token.
    pub fn encode_token(&self) -> [u8; 4] {
        self.encode(TOKEN)
    }

    /// Returns the traits in a message with a token. Returns `None` if it is another message.
    pub fn decode_token(message: &[u8]) -> Option<Self> {
        Self::decode(TOKEN, message)
    }

    fn encode(&self, kind: u8) -> [u8; 4] {
        let [low, high] = number(self.home).to_le_bytes();
        [kind, low, high, u8::from(self.fork)]
    }

    fn decode(kind: u8, message: &[u8]) -> Option<Self> {
        let [first, low, high, fork @ (0 | 1)] = *message else { return None };
        let home = node(u16::from_le_bytes([low, high]).into())?;
        (first == kind).then_some(Self { home, fork: fork == 1 })
    }
}

/// The pool's answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// The memory, whose file comes with the message.
    Given(Traits),
    /// The reason for which there is none. Of a long text, the first bytes are sent.
    Refused(&'a [u8]),
}

impl<'a> Answer<'a> {
    /// Returns the message.
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Given(traits) => traits.encode(GIVEN).into(),
            Self::Refused(text) => [&[REFUSED], &text[..text.len().min(MOST - 1)]].concat(),
        }
    }

    /// Returns the answer in a message. Returns `None` if it is another message.
    pub fn decode(message: &'a [u8]) -> Option<Self> {
        match message.split_first()? {
            (&REFUSED, text) => Some(Self::Refused(text)),
            _ => Traits::decode(GIVEN, message).map(Self::Given),
        }
    }
}

/// A part of the memory in the address space of the VMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The address of the first byte.
    pub address: u64,
    /// The number of bytes.
    pub len: u64,
    /// The offset of the first byte in the file.
    pub offset: u64,
}

impl Range {
    /// Returns whether the range has bytes, and ends within 64 bits.
    fn is_sound(&self) -> bool {
        let ends = |start: u64| start.checked_add(self.len).is_some();
        self.len > 0 && ends(self.address) && ends(self.offset)
    }
}

/// The VMM's message about the ranges whose faults it hands over.
pub mod faults {
    use super::{FAULTS, RANGES, Range, Vec, bytes, words};

    /// Returns the message.
    pub fn encode(ranges: &[Range]) -> Vec<u8> {
        let parts = ranges.iter().flat_map(|range| [range.address, range.len, range.offset]);
        bytes(&[FAULTS].into_iter().chain(parts).collect::<Vec<_>>())
    }

    /// Returns the ranges in a message: 1 to 18, none of which overflows. Returns `None` if it is
    /// another message.
    pub fn decode(message: &[u8]) -> Option<Vec<Range>> {
        let words = words(message)?;
        let (&[FAULTS], parts) = words.split_first_chunk()? else { return None };
        let (parts, rest) = parts.as_chunks::<3>();
        let ranges = parts.iter().map(|&[address, len, offset]| Range { address, len, offset });
        let ranges: Vec<Range> = ranges.collect();
        let sound = rest.is_empty() && (1..=RANGES).contains(&ranges.len());
        (sound && ranges.iter().all(Range::is_sound)).then_some(ranges)
    }
}

/// Returns the words of a message, or `None` if it is not one of words.
fn words(bytes: &[u8]) -> Option<Vec<u64>> {
    let (words, rest) = bytes.as_chunks::<8>();
    rest.is_empty().then(|| words.iter().map(|word| u64::from_ne_bytes(*word)).collect())
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Returns the number that stands for a NUMA node, or for none.
fn number(node: Option<NumaNode>) -> u16 {
    node.map_or(NOWHERE, NumaNode::number)
}

/// Returns the NUMA node, or none, that a number stands for. Returns `None` if Linux has no node
/// with this number.
fn node(number: u64) -> Option<Option<NumaNode>> {
    if number == u64::from(NOWHERE) { Some(None) } else { NumaNode::new(number).map(Some) }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn nodes() -> [Option<NumaNode>; 4] {
        [None, NumaNode::new(0), NumaNode::new(255), NumaNode::new(1023)]
    }

    #[test]
    fn requests_and_answers_name_any_node_or_none() {
        for (home, fork) in nodes().into_iter().zip([false, true].into_iter().cycle()) {
            let template = TemplateName::new("web").filter(|_| fork);
            let request = Request { bytes: 1 << 20, page: Page::Huge, near: home, template };
            assert_eq!(Request::decode(&request.encode()), Some(request));
            let traits = Traits { home, fork };
            let answer = Answer::Given(traits);
            assert_eq!(Answer::decode(&answer.encode()), Some(answer));
            assert_eq!(Traits::decode_token(&traits.encode_token()), Some(traits));
        }
    }

    #[test]
    fn a_refusal_has_its_reason_as_far_as_there_is_room() {
        let answer = Answer::Refused(b"the pool is empty");
        assert_eq!(Answer::decode(&answer.encode()), Some(answer));
        let long = [b'x'; 2 * MOST];
        let message = Answer::Refused(&long).encode();
        assert_eq!(Answer::decode(&message), Some(Answer::Refused(&long[..MOST - 1])));
    }

    #[test]
    fn requests_of_another_form_or_version_are_refused() {
        let nowhere = u64::from(NOWHERE);
        let none = [0; WORDS];
        let with = |first: &[u64], name: &[u64]| [first, name].concat();
        for words in &[
            // Version 1 named no node, and version 2 no template.
            vec![ASK ^ 2, 1 << 20, 0],
            vec![ASK ^ 1, 1 << 20, 0, 0],
            vec![ASK, 1 << 20, 0, 0],
            with(&[ASK ^ 1, 1 << 20, 0, 0], &none),
            with(&[ASK, 1 << 20, 0], &none),
            with(&[ASK, 1 << 20, 2, 0], &none),
            with(&[ASK, 1 << 20, 0, 1024], &none),
            with(&[ASK, 1 << 20, 0, nowhere - 1], &none),
            with(&[ASK, 1 << 20, 0, nowhere + 1], &none),
            with(&[ASK, 1 << 20, 0, u64::MAX], &none),
            with(&[ASK, 1 << 20, 0, 0, 0], &none),
            with(&[ASK, 1 << 20, 0, 0], &[u64::MAX; WORDS]),
            with(&[ASK, 1 << 20, 0, 0], &[0, 0x61, 0, 0, 0, 0, 0, 0]),
        ] {
            assert_eq!(Request::decode(&bytes(words)), None, "{words:x?}");
        }
    }

    #[test]
    fn a_completion_names_a_file_and_is_no_other_request() {
        let completion = Completion { device: 7, inode: u64::MAX };
        let message = completion.encode();
        assert_eq!(Completion::decode(&message), Some(completion));
        assert_eq!(Request::decode(&message), None);
        for words in [&[COMPLETE, 7][..], &[COMPLETE, 7, 8, 9], &[COMPLETE ^ 3, 7, 8], &[]] {
            assert_eq!(Completion::decode(&bytes(words)), None, "{words:x?}");
        }
        assert_eq!(Completion::decode(&message[1..]), None);
    }

    #[test]
    fn messages_of_a_pool_of_another_form_are_refused() {
        for message in [
            &[][..],
            &[GIVEN],
            &[GIVEN, 0],
            &[GIVEN, 0, 0],
            &[GIVEN, 0, 4, 0],
            &[GIVEN, 0, 0, 2],
            &[GIVEN, 0, 0, 0, 0],
            &[TOKEN, 0, 0, 0],
        ] {
            assert_eq!(Answer::decode(message), None, "{message:?}");
        }
        for message in
            [&[TOKEN][..], &[TOKEN, 0, 0], &[TOKEN, 0, 4, 0], &[TOKEN, 0, 0, 2], &[GIVEN, 0, 0, 0]]
        {
            assert_eq!(Traits::decode_token(message), None, "{message:?}");
        }
    }

    #[test]
    fn ranges_are_few_and_end_within_64_bits() {
        let range = Range { address: 1 << 40, len: 1 << 20, offset: 4096 };
        for ranges in [vec![range], vec![range; RANGES]] {
            assert_eq!(faults::decode(&faults::encode(&ranges)), Some(ranges));
        }
        for ranges in [
            vec![],
            vec![range; RANGES + 1],
            vec![Range { len: 0, ..range }],
            vec![range, Range { address: u64::MAX, ..range }],
            vec![Range { offset: u64::MAX, ..range }],
        ] {
            assert_eq!(faults::decode(&faults::encode(&ranges)), None, "{ranges:?}");
        }
        let whole = faults::encode(&[range]);
        assert_eq!(faults::decode(&whole[..whole.len() - 8]), None);
        assert_eq!(faults::decode(&whole[1..]), None);
    }
}
