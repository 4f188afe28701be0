//! Notes of what outlives the daemon at a VF: the settings to which its physical function may hold
//! it, and its driver from before vfio-pci.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use slipway_vf_pool::Fault;

use super::limits::Limits;

/// The most bytes of a note that are read.
const LONGEST: u64 = 4096;

/// A file about a VF, which outlives the daemon as the settings and the binding in it do.
pub(super) struct Note(PathBuf);

impl Note {
    /// Returns the note in the file at `path`, which need not be there.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }

    /// Returns the path of the note's file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Writes a text of at most 4096 bytes. The caller does so before it changes anything: a daemon
    /// that is killed leaves no change without a note.
    ///
    /// # Errors
    /// The file cannot be written. The note stays as it was.
    pub fn write(&self, text: &str) -> Result<(), Fault> {
        // Whole or not at all: a note that is cut would tell of less than there is.
        slipway_replace::replace(&self.0, text.as_bytes(), false)
            .map_err(|error| Fault(format!("cannot write {}: {error}", self.0.display())))
    }

    /// Reads the first 4096 bytes of the note. Returns `None` if there is no note.
    ///
    /// # Errors
    /// The file cannot be read, or is no text.
    pub fn read(&self) -> io::Result<Option<String>> {
        let file = match File::open(&self.0) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let mut text = String::new();
        file.take(LONGEST).read_to_string(&mut text)?;
        Ok(Some(text))
    }

    /// Notes settings, without their values.
    ///
    /// # Errors
    /// The errors of [`Note::write`].
    pub fn keep(&self, settings: Limits) -> Result<(), Fault> {
        self.write(&settings.words())
    }

    /// Returns the settings that the note names, or `None` if it names none.
    pub fn recall(&self) -> Option<Limits> {
        let noted = self.read().ok().flatten().unwrap_or_default();
        Some(Limits::from_words(&noted)).filter(|settings| !settings.is_none())
    }

    /// Removes the note of something that has ended.
    pub fn forget(&self) {
        // An error leaves the note, and the opening of the VF ends the noted settings once more.
        let _ = slipway_replace::remove(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_of_one_function_are_written_apart() {
        let dir = tempfile::tempdir().unwrap();
        let [driver, settings] =
            ["driver", "settings"].map(|kind| Note::new(dir.path().join(format!("a.0.{kind}"))));
        assert_eq!(driver.read().unwrap(), None);
        driver.write("igbvf").unwrap();
        driver.write("nvme").unwrap();
        // A note that a killed daemon has written in part does not get into the other one.
        settings.write("vlan").unwrap();
        assert_eq!(driver.read().unwrap().as_deref(), Some("nvme"));
        assert_eq!(settings.read().unwrap().as_deref(), Some("vlan"));
        std::fs::create_dir(dir.path().join("a.0.settings.new")).unwrap();
        let Fault(why) = settings.write("rate").unwrap_err();
        assert!(why.contains("a.0.settings"), "{why}");
        assert_eq!(settings.read().unwrap().as_deref(), Some("vlan"));
        driver.write("igbvf").unwrap();
        std::fs::remove_dir(dir.path().join("a.0.settings.new")).unwrap();
        driver.forget();
        settings.forget();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
