//! The daemon's files of attachments, as the plugin uses them: notes for the next daemon that a
//! container was removed while none served.
//!
//! A note is an empty file, whose creation is atomic. The daemon looks for notes when it starts,
//! and once more when it can be called. Whoever leaves a note calls the daemon once more after
//! that: so one of the two finds the other.

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use slipway_plane_api::attachments::{FILE, NOTE};

/// Leaves a note in the directory of attachments that the attachment `id` is to be removed. Returns
/// `false` if the daemon's ledger has no such attachment, so that none is needed.
///
/// # Errors
/// The file cannot be made.
pub fn leave(dir: &Path, id: &str) -> std::io::Result<bool> {
    match File::open(dir.join(format!("{id}.{FILE}"))) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        opened => drop(opened?),
    }
    let note = dir.join(format!("{id}.{NOTE}"));
    OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(note)?;
    Ok(true)
}

/// Returns whether the daemon's ledger has the attachment `id`, and no note says that it is to be
/// removed. An attachment whose file cannot be looked at counts as one that is there.
pub fn is_attached(dir: &Path, id: &str) -> bool {
    let has = |kind: &str| !matches!(dir.join(format!("{id}.{kind}")).try_exists(), Ok(false));
    has(FILE) && !has(NOTE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_left_for_what_is_in_the_ledger() {
        let dir = tempfile::tempdir().unwrap();
        assert!(!leave(dir.path(), "a,b,eth0").unwrap());
        assert!(!leave(&dir.path().join("missing"), "a,b,eth0").unwrap());
        assert!(!is_attached(dir.path(), "a,b,eth0"));
        std::fs::write(dir.path().join("a,b,eth0.json"), "{}").unwrap();
        assert!(is_attached(dir.path(), "a,b,eth0"));
        for _ in 0..2 {
            assert!(leave(dir.path(), "a,b,eth0").unwrap());
        }
        assert!(dir.path().join("a,b,eth0.gone").exists());
        assert!(!is_attached(dir.path(), "a,b,eth0"));
    }
}
