//! The owner of a VF.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Longest kind and longest id of an owner, in bytes.
const KIND: usize = 32;
const ID: usize = 256;

/// The owner of a VF: a sandbox, a container's interface, a user of the command line. One owner has
/// at most one VF of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "Written")]
pub struct Owner {
    kind: String,
    id: String,
}

/// Error: the text is no owner.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "an owner is KIND:ID: a kind of letters, digits and '-' (at most {KIND}), and an id of \
     printable ASCII without spaces (at most {ID})"
)]
pub struct BadOwner;

#[derive(Deserialize)]
struct Written {
    kind: String,
    id: String,
}

impl TryFrom<Written> for Owner {
    type Error = BadOwner;

    fn try_from(Written { kind, id }: Written) -> Result<Self, BadOwner> {
        Self::new(kind, id)
    }
}

impl Owner {
    /// Makes an owner of a kind ("sandbox") and an id that is unique among owners of the kind.
    ///
    /// # Errors
    /// [`BadOwner`].
    pub fn new(kind: impl Into<String>, id: impl Into<String>) -> Result<Self, BadOwner> {
        let (kind, id) = (kind.into(), id.into());
        let word = |c: u8| c.is_ascii_alphanumeric() || c == b'-';
        let fits = |text: &str, most| (1..=most).contains(&text.len());
        let is_good = fits(&kind, KIND) && kind.bytes().all(word);
        let is_good = is_good && fits(&id, ID) && id.bytes().all(|c| c.is_ascii_graphic());
        if is_good { Ok(Self { kind, id }) } else { Err(BadOwner) }
    }

    /// Returns the kind.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Returns the id.
    pub fn id(&self) -> &str {
        &self.id
    }
}

impl std::str::FromStr for Owner {
    type Err = BadOwner;

    fn from_str(text: &str) -> Result<Self, BadOwner> {
        let (kind, id) = text.split_once(':').ok_or(BadOwner)?;
        Self::new(kind, id)
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_reads_as_it_prints() {
        for text in ["sandbox:4f1c", "cni:a/eth0", "user:a:b"] {
            assert_eq!(text.parse::<Owner>().unwrap().to_string(), text);
        }
        let (long_kind, long_id) =
            (format!("{}:a", "k".repeat(33)), format!("k:{}", "i".repeat(257)));
        for text in
            ["", ":", "a:", ":a", "a b:c", "a:b c", "a:\u{1b}[", "a:é", &long_kind, &long_id]
        {
            assert_eq!(text.parse::<Owner>(), Err(BadOwner), "{text}");
        }
        assert!(serde_json::from_str::<Owner>(r#"{"kind":"a","id":"b\u001b"}"#).is_err());
    }
}
