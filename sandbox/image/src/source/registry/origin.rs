//! The place of an image in a registry.

use serde::{Deserialize, Serialize};

use crate::Reference;

/// A repository that has the layers of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    /// A name of the image there.
    pub reference: Reference,
    /// Set if the registry is used without TLS.
    pub plain_http: bool,
}

impl Origin {
    /// Returns the name of the repository, with its registry.
    pub(crate) fn place(&self) -> String {
        format!("{}/{}", self.reference.registry(), self.reference.repository())
    }
}
