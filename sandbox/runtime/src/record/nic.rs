//! Kinds of a sandbox's interface.

use serde::{Deserialize, Serialize};

/// The kind of a sandbox's interface: the device that its guest finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nic {
    /// A virtio network device.
    #[default]
    Virtio,
    /// Intel's 82540EM.
    E1000,
    /// The same with a communication status block.
    E1000Csb,
}

impl Nic {
    /// Returns the word of the command line for the kind.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Virtio => "virtio",
            Self::E1000 => "e1000",
            Self::E1000Csb => "e1000-csb",
        }
    }
}

impl std::str::FromStr for Nic {
    type Err = String;

    /// Parses a kind; the empty text is the default.
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "" | "virtio" => Ok(Self::Virtio),
            "e1000" => Ok(Self::E1000),
            "e1000-csb" => Ok(Self::E1000Csb),
            other => Err(format!(
                "\"{other}\" is no kind of network interface: choose virtio, e1000 or e1000-csb"
            )),
        }
    }
}
