//! Names of templates.

use core::fmt;

/// The most bytes of a name.
const MOST: usize = 64;
/// The number of words of a name in a message.
pub(crate) const WORDS: usize = MOST / 8;

/// The name of a template of memory within a pool: 1 to 64 visible characters of ASCII.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TemplateName {
    /// The characters, then zeros.
    bytes: [u8; MOST],
}

impl TemplateName {
    /// Returns the name `text`, or `None` if that is no name.
    pub fn new(text: &str) -> Option<Self> {
        let mut bytes = [0; MOST];
        bytes.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
        Self::of_bytes(bytes)
    }

    fn of_bytes(bytes: [u8; MOST]) -> Option<Self> {
        let len = bytes.iter().position(|byte| *byte == 0).unwrap_or(MOST);
        let (name, rest) = bytes.split_at_checked(len)?;
        let sound = !name.is_empty()
            && name.iter().all(u8::is_ascii_graphic)
            && rest.iter().all(|byte| *byte == 0);
        sound.then_some(Self { bytes })
    }

    /// Returns the characters.
    pub fn as_str(&self) -> &str {
        let len = self.bytes.iter().position(|byte| *byte == 0).unwrap_or(MOST);
        // ASCII, as `of_bytes` has seen.
        self.bytes.get(..len).and_then(|name| str::from_utf8(name).ok()).unwrap_or_default()
    }

    /// Returns the words of a message that stand for a name, or for none.
    pub(crate) fn words(name: Option<Self>) -> [u64; WORDS] {
        let bytes = name.map_or([0; MOST], |name| name.bytes);
        let mut words = [0; WORDS];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        words
    }

    /// Returns the name, or none, that words of a message stand for. Returns `None` if they stand
    /// for nothing.
    pub(crate) fn of_words(words: &[u64; WORDS]) -> Option<Option<Self>> {
        if words.iter().all(|word| *word == 0) {
            return Some(None);
        }
        let mut bytes = [0; MOST];
        for (bytes, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_ne_bytes();
        }
        Self::of_bytes(bytes).map(Some)
    }
}

impl fmt::Display for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for TemplateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TemplateName({})", self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn names_are_visible_characters_of_a_bounded_number() {
        for text in ["a", "web/1.2@sha256:00", &"x".repeat(MOST)] {
            let name = TemplateName::new(text).unwrap();
            assert_eq!(name.to_string(), text);
            assert_eq!(TemplateName::of_words(&TemplateName::words(Some(name))), Some(Some(name)));
        }
        for text in ["", " ", "a b", "a\0b", "\n", "ä", &"x".repeat(MOST + 1)] {
            assert_eq!(TemplateName::new(text), None, "{text:?}");
        }
        assert_eq!(TemplateName::of_words(&TemplateName::words(None)), Some(None));
        let bytes = |text: &[u8; 8]| u64::from_ne_bytes(*text);
        for odd in
            [[0, bytes(b"abcdefgh")], [bytes(b"ab\0defgh"), 0], [bytes(b"ab\x01\0\0\0\0\0"), 0]]
        {
            let mut words = [0; WORDS];
            words[..2].copy_from_slice(&odd);
            assert_eq!(TemplateName::of_words(&words), None, "{odd:x?}");
        }
    }
}
