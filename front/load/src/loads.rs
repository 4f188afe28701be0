//! Loads in saved reports: each is a string there, as it is typed.

use crate::Workload;
use crate::nic::NicLoad;

/// Converts loads from strings and to them by their `FromStr` and `Display`. Serde reads and writes
/// a load by these conversions, if its type says so (`#[serde(try_from = "String", into =
/// "String")]`).
#[macro_export]
macro_rules! saved_as_typed {
    ($($load:ident),+) => {$(
        impl TryFrom<String> for $load {
            type Error = String;

            fn try_from(text: String) -> Result<Self, String> {
                text.parse()
            }
        }

        impl From<$load> for String {
            fn from(load: $load) -> Self {
                load.to_string()
            }
        }
    )+};
}

saved_as_typed! { NicLoad, Workload }
