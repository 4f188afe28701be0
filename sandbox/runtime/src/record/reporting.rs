//! Free page reporting, as a sandbox's record has it.

use serde::{Deserialize, Serialize};

/// The reports of pages that a guest does not use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreePageReporting {
    /// The user's choice of whether the guest reports. `None`: as the node's settings say.
    #[serde(default, rename = "free_page_reporting_asked")]
    pub asked: Option<bool>,
    /// Set if the guest reports, and the host has the pages back.
    #[serde(default, rename = "free_page_reporting")]
    pub is_on: bool,
    /// Why the host has none of the guest's free pages back, known when it starts; empty: it has.
    #[serde(default, rename = "free_page_reporting_why_not")]
    pub why_not: String,
}

impl FreePageReporting {
    /// Returns the part of a new sandbox's record, whose user has chosen so.
    pub fn of_new(asked: Option<bool>) -> Self {
        Self { asked, ..Self::default() }
    }

    /// Notes why the host has no free pages of the guest back; empty: it has.
    pub fn note(&mut self, why_not: String) {
        self.is_on = why_not.is_empty();
        self.why_not = why_not;
    }
}
