//! Notes of the settings to which a physical function may hold a VF.

use std::path::PathBuf;

use slipway_vf_pool::Fault;

use super::limits::Limits;

/// A file that names settings, without their values. It outlives the daemon, as the settings do.
pub(super) struct Note(PathBuf);

impl Note {
    /// Returns the note in the file at `path`, which need not be there.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Writes the note. The caller does so before it sets anything: a daemon that is killed leaves
    /// no setting without a note.
    ///
    /// # Errors
    /// The file cannot be written. The note stays as it was.
    pub fn keep(&self, settings: Limits) -> Result<(), Fault> {
        // Whole or not at all: a note that is cut would name fewer settings than there are.
        let part = self.part();
        let written = std::fs::write(&part, settings.words());
        written.and_then(|()| std::fs::rename(&part, &self.0)).map_err(|error| {
            let _ = std::fs::remove_file(&part);
            Fault(format!("cannot write {}: {error}", self.0.display()))
        })
    }

    /// Returns the settings that the note names, or `None` if it names none.
    pub fn recall(&self) -> Option<Limits> {
        let noted = std::fs::read_to_string(&self.0).unwrap_or_default();
        Some(Limits::from_words(&noted)).filter(|settings| !settings.is_none())
    }

    /// Removes the note of settings that have ended.
    pub fn forget(&self) {
        // An error: no settings were set, or they are ended once more when the VF is opened.
        let _ = std::fs::remove_file(&self.0);
        let _ = std::fs::remove_file(self.part());
    }

    /// Returns the file of a note that is being written.
    fn part(&self) -> PathBuf {
        self.0.with_extension("part")
    }
}
