//! Annotations that are "true" or "false".

use std::collections::BTreeMap;

/// The annotation that says whether a sandbox's guest reports free pages, which the host then has
/// back.
pub const FREE_PAGE_REPORTING: &str = "dev.slipway.free-page-reporting";

/// Returns what the annotation `key` says. Returns `None` if there is no such annotation.
///
/// # Errors
/// One line: the annotation is neither "true" nor "false".
pub fn flag(annotations: &BTreeMap<String, String>, key: &str) -> Result<Option<bool>, String> {
    match annotations.get(key).map(String::as_str) {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(other) => Err(format!("the annotation {key}={other:?} is neither true nor false")),
    }
}
