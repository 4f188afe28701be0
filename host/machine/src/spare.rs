//! The agreement between a spare VMM and the process that starts it.
//!
//! A spare is a `slipway-vmm` that makes an empty virtual machine ahead of its use. It sends
//! [`READY`] over a socket of the type SOCK_SEQPACKET, and waits there for one message: the command
//! line of an ordinary start ([`encode`], [`decode`]), with the descriptors that it names. The
//! first [`STREAMS`] descriptors become standard output and standard error; the others get the
//! numbers from [`FIRST_FILE`] on, in their order, and `fd:N` in the command line names these. The
//! end of the socket ends a spare that has no machine.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

/// The byte that a spare sends once its virtual machine is made.
pub const READY: u8 = b'r';
/// The number of descriptors at the beginning of the message that become standard streams.
pub const STREAMS: usize = 2;
/// The number that the first descriptor behind the standard streams gets. A spare that waits has
/// fewer open than that, with those of the message.
pub const FIRST_FILE: i32 = 128;
/// The most descriptors behind the standard streams.
pub const MAX_FILES: usize = 64;
/// The most bytes of a message. The socket of an unprivileged process takes as many at once.
pub const MAX_BYTES: usize = 64 << 10;

/// The version of the message.
const VERSION: u32 = 1;

/// Returns the message with a command line, without the program's name. It has the version and the
/// bytes of what follows, 4 bytes each, least significant first; then the words, each with a zero
/// behind it. Returns `None` if a word has a zero, or all are more than [`MAX_BYTES`].
pub fn encode(words: &[OsString]) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    for word in words {
        text.extend_from_slice(word.as_bytes());
        text.push(0);
    }
    let zeros = text.iter().filter(|byte| **byte == 0).count();
    let length = u32::try_from(text.len()).ok()?;
    let message = [&VERSION.to_le_bytes()[..], &length.to_le_bytes(), &text].concat();
    (zeros == words.len() && message.len() <= MAX_BYTES).then_some(message)
}

/// Returns the command line of a message. Returns `None` for a message that is cut, has no words,
/// or is of another version.
pub fn decode(message: &[u8]) -> Option<Vec<OsString>> {
    let (version, rest) = message.split_first_chunk()?;
    let (length, text) = rest.split_first_chunk()?;
    let whole = u32::from_le_bytes(*length) as usize == text.len();
    if u32::from_le_bytes(*version) != VERSION || !whole {
        return None;
    }
    let words = text.strip_suffix(&[0])?.split(|byte| *byte == 0);
    Some(words.map(|word| OsStr::from_bytes(word).to_owned()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Vec<OsString> {
        words.iter().map(OsString::from).collect()
    }

    #[test]
    fn a_command_line_comes_as_it_was_sent() {
        for one in [&["--paused"][..], &["--cmdline", "", "--name", "a b\n"][..], &[""][..]] {
            assert_eq!(decode(&encode(&words(one)).unwrap()), Some(words(one)));
        }
    }

    #[test]
    fn a_message_that_is_not_whole_is_refused() {
        let message = encode(&words(&["--cpus", "2"])).unwrap();
        for end in 0..message.len() {
            assert_eq!(decode(&message[..end]), None, "{end} bytes");
        }
        let other = |at: usize, byte: u8| {
            let mut other = message.clone();
            other[at] = byte;
            decode(&other)
        };
        assert_eq!(other(0, 2), None, "of another version");
        assert_eq!(other(4, 1), None, "of another length");
        assert_eq!(other(message.len() - 1, b'x'), None, "without a last zero");
        assert_eq!(decode(&[message, vec![0]].concat()), None, "with more behind it");
        assert_eq!(decode(&encode(&[]).unwrap()), None, "without a word");
    }

    #[test]
    fn what_does_not_fit_is_not_sent() {
        assert_eq!(encode(&words(&["a\0b"])), None);
        let room = MAX_BYTES - 8 - 1;
        assert_eq!(encode(&words(&[&"x".repeat(room)])).unwrap().len(), MAX_BYTES);
        assert_eq!(encode(&words(&[&"x".repeat(room + 1)])), None);
    }
}
