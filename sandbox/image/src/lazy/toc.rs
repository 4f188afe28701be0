//! The JSON document of an eStargz layer's index, read entry by entry: a small document may have
//! very many entries.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, BufReader, Read};

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};

use crate::root::merge::MergeError;

/// The most bytes of an entry in the document, and of what is before, between and after entries. A
/// file with the most attributes that an image can have takes less than half of it.
const MOST_ENTRY: usize = 1 << 20;

/// One entry: a file of the layer, or a further chunk of the file before it. Absent values are
/// zeros and empty texts.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct TocEntry {
    /// The path as in a tar archive.
    pub name: String,
    /// `dir`, `reg`, `symlink`, `hardlink`, `char`, `block`, `fifo` or `chunk`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The bytes of a regular file.
    pub size: u64,
    /// The modification time (RFC 3339, in UTC).
    pub modtime: String,
    /// The target of a symbolic or hard link.
    pub link_name: String,
    /// The mode as in a tar header: permissions, set-id and sticky bits, perhaps the file's type.
    pub mode: i64,
    pub uid: u32,
    pub gid: u32,
    pub dev_major: u32,
    pub dev_minor: u32,
    /// The extended attributes, in base64.
    pub xattrs: BTreeMap<String, String>,
    /// The offset of the chunk's gzip member in the layer.
    pub offset: u64,
    /// The offset of the chunk in the uncompressed bytes from its member on.
    pub inner_offset: u64,
    /// The offset of the chunk in its file.
    pub chunk_offset: u64,
    /// The bytes of the chunk; zero for the rest of its file.
    pub chunk_size: u64,
    /// The digest of the chunk.
    pub chunk_digest: String,
}

impl TocEntry {
    /// Returns the modification time in seconds since the epoch. Times before the epoch, and texts
    /// that are no times, become the epoch.
    pub(crate) fn mtime(&self) -> u64 {
        seconds(&self.modtime).and_then(|seconds| u64::try_from(seconds).ok()).unwrap_or(0)
    }
}

/// Parses a time in UTC by RFC 3339, and returns its whole seconds since the epoch.
fn seconds(text: &str) -> Option<i64> {
    let number = |from: usize, to: usize| -> Option<i64> {
        let digits = text.get(from..to)?;
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
    };
    let separators = [(4, b'-'), (7, b'-'), (10, b'T'), (13, b':'), (16, b':')];
    let is_there = |(at, byte): (usize, u8)| text.as_bytes().get(at) == Some(&byte);
    let fraction = text.get(19..)?.strip_suffix('Z')?;
    let mut digits = fraction.strip_prefix('.').unwrap_or(fraction).bytes();
    if !separators.into_iter().all(is_there) || !digits.all(|b| b.is_ascii_digit()) {
        return None;
    }
    let (year, month, day) = (number(0, 4)?, number(5, 7)?, number(8, 10)?);
    let time = number(11, 13)? * 3600 + number(14, 16)? * 60 + number(17, 19)?;
    if !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years begin in March here, so that a leap day is the last day of its year.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = year * 365 + leap_days + (153 * month + 2) / 5 + day - 1;
    // Days from the first of March of the year 0 to 1970.
    const EPOCH: i64 = 719_468;
    Some((days - EPOCH) * 86_400 + time)
}

/// A receiver of entries. Its error ends the reading.
type EntryReceiver<'a> = dyn FnMut(TocEntry) -> Result<(), MergeError> + 'a;

/// Reads the document `json`, and gives every entry to `take`.
pub(crate) fn read(json: impl Read, take: &mut EntryReceiver<'_>) -> Result<(), MergeError> {
    let (mut failed, left) = (None, Cell::new(MOST_ENTRY));
    let metered = Metered { json, left: &left };
    let mut reader = serde_json::Deserializer::from_reader(BufReader::new(metered));
    let document = Document { take, failed: &mut failed, left: &left };
    let read = document.deserialize(&mut reader).and_then(|()| reader.end());
    match (failed, read) {
        (Some(reason), _) => Err(reason),
        (None, Err(e)) => Err(MergeError::Bad(format!("its index: {e}"))),
        (None, Ok(())) => Ok(()),
    }
}

/// A reader of a document that fails before an entry takes much memory.
struct Metered<'a, R> {
    json: R,
    /// The bytes that may be read until the next entry begins.
    left: &'a Cell<usize>,
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.left.get();
        if left == 0 {
            return Err(io::Error::other(format!("an entry of more than {MOST_ENTRY} bytes")));
        }
        let most = buffer.len().min(left);
        let read = self.json.read(&mut buffer[..most])?;
        self.left.set(left - read);
        Ok(read)
    }
}

struct Document<'a, 'b> {
    take: &'a mut EntryReceiver<'b>,
    /// The error of `take`, which serde's errors cannot carry.
    failed: &'a mut Option<MergeError>,
    /// The bytes that [`Metered`] may read, set anew by each entry.
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Document<'_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Document<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a version and entries")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let (mut version, mut has_entries) = (None, false);
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "version" => version = Some(map.next_value::<u64>()?),
                "entries" if has_entries => return Err(A::Error::duplicate_field("entries")),
                "entries" => {
                    map.next_value_seed(Entries(&mut self))?;
                    has_entries = true;
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        match (version, has_entries) {
            (Some(1), true) => Ok(()),
            (Some(1), false) => Err(A::Error::missing_field("entries")),
            (Some(other), _) => Err(A::Error::custom(format!("version {other} is not known here"))),
            (None, _) => Err(A::Error::missing_field("version")),
        }
    }
}

struct Entries<'a, 'b, 'c>(&'a mut Document<'b, 'c>);

impl<'de> DeserializeSeed<'de> for Entries<'_, '_, '_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for Entries<'_, '_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
        while let Some(entry) = seq.next_element::<TocEntry>()? {
            self.0.left.set(MOST_ENTRY);
            if let Err(reason) = (self.0.take)(entry) {
                *self.0.failed = Some(reason);
                return Err(A::Error::custom("refused"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_takes_a_bounded_part_of_its_document() {
        let entries = |name: usize, count: usize| {
            let one = format!(r#"{{"name":"{}"}}"#, "x".repeat(name));
            let all = vec![one; count].join(",");
            let json = format!(r#"{{"version":1,"entries":[{all}]}}"#);
            let mut found = 0;
            let outcome = read(json.as_bytes(), &mut |_| {
                found += 1;
                Ok(())
            });
            outcome.map(|()| found)
        };
        assert_eq!(entries(MOST_ENTRY / 2, 10), Ok(10));
        let Err(MergeError::Bad(reason)) = entries(2 * MOST_ENTRY, 1) else { panic!("it is read") };
        assert!(reason.contains("an entry of more than 1048576 bytes"), "{reason}");
        assert!(entries(2, 2 * MOST_ENTRY / 12).is_ok());
    }

    #[test]
    fn times() {
        for (text, time) in [
            ("1970-01-01T00:00:00Z", 0),
            ("1970-01-01T00:00:01.75Z", 1),
            ("2000-02-29T23:59:59Z", 951_868_799),
            ("2000-03-01T00:00:00Z", 951_868_800),
            ("2019-08-20T10:30:43Z", 1_566_297_043),
            ("2100-03-01T00:00:00Z", 4_107_542_400),
            ("1969-12-31T23:59:59Z", -1),
            ("0001-01-01T00:00:00Z", -62_135_596_800),
        ] {
            assert_eq!(seconds(text), Some(time), "{text}");
        }
        for text in [
            "",
            "Z",
            "2019-08-20",
            "2019-08-20T10:30:43",
            "2019-08-20T10:30:43+01:00",
            "+019-08-20T10:30:43Z",
            "2019-13-20T10:30:43Z",
            "2019-08-20 10:30:43Z",
            "2019-08-20T10:30:4\u{e9}Z",
            "2019-08-20T10:30:43xZ",
        ] {
            assert_eq!(seconds(text), None, "{text}");
        }
        let entry = TocEntry { modtime: "1969-12-31T23:59:59Z".into(), ..TocEntry::default() };
        assert_eq!(entry.mtime(), 0);
    }
}
