//! The names of CPU templates.

use alloc::format;
use alloc::string::String;
use core::fmt;
use core::str::FromStr;

/// The processor that a guest sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Template {
    /// Everything that the host's KVM offers, on the host's own processor.
    #[default]
    Host,
    /// A level of the x86-64 psABI, the same on all hosts of a kind.
    Level(Level),
}

/// A level of the x86-64 psABI (*x86-64 Application Binary Interface*, table 3.1). A higher one has
/// the features of those below.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// x86-64-v2: up to SSE4.2.
    V2,
    /// x86-64-v3: up to AVX2.
    V3,
    /// x86-64-v4: with AVX-512.
    V4,
}

impl Level {
    /// Returns the name of the level.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::V2 => "x86-64-v2",
            Self::V3 => "x86-64-v3",
            Self::V4 => "x86-64-v4",
        }
    }
}

impl Template {
    /// All templates.
    pub const ALL: [Self; 4] =
        [Self::Host, Self::Level(Level::V2), Self::Level(Level::V3), Self::Level(Level::V4)];

    /// Returns the name of the template.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Level(level) => level.as_str(),
        }
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Template {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|template| template.as_str() == word);
        found.ok_or_else(|| {
            let names = Self::ALL.map(Self::as_str).join(", ");
            format!("\"{}\" is no CPU template: {names}", word.escape_debug())
        })
    }
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for template in Template::ALL {
            assert_eq!(template.to_string().parse(), Ok(template));
        }
        for word in ["", "v2", "x86-64-v5", "Host", "x\n"] {
            let refused = word.parse::<Template>().unwrap_err();
            assert!(refused.ends_with("host, x86-64-v2, x86-64-v3, x86-64-v4"), "{refused}");
            assert!(!refused.contains('\n'), "{refused}");
        }
    }
}
