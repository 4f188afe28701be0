//! Where records are kept: a directory for each sandbox.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Cpus, MemoryBounds, Record};
use crate::{Error, Result};

/// The name of the file under the volatile layer of a sandbox that began with a snapshot.
pub const LAYER: &str = "layer";

/// Returns the name of the file under the volatile layer of container `name` of a pod that came
/// back from a file.
pub fn layer_of(name: &str) -> String {
    format!("saved-layer-{name}")
}

/// The most bytes of a record as its user requested it; the command line and environment of its
/// process are most of it.
pub const MOST_ASKED: usize = 1 << 20;
/// The most containers of a pod, those that have ended among them.
pub const MOST_ADDED: usize = 256;
/// The most bytes that a container of a pod adds to a record while it runs and ends: its message
/// and the reason of its end, and its disks and trees.
const ADDED_LATER: usize = 24 << 10;
/// The most bytes of a record on disk. The guest adds its stages and the reason of its end, and its
/// containers add theirs: all are bounded where they are received and fit between [`MOST_ASKED`]
/// and this limit.
const MOST_RECORD: usize = MOST_ASKED + (64 << 10) + MOST_ADDED * ADDED_LATER;

/// The directory of one sandbox's record, logs and scratch volumes. The methods wait for the disk,
/// so a daemon calls them in the sandbox's [lane](crate::files::Lane).
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

impl Store {
    /// Returns the store of sandbox `id` under `sandboxes_dir`.
    pub fn new(sandboxes_dir: &Path, id: &str) -> Self {
        Self { dir: sandboxes_dir.join(id) }
    }

    /// Returns the sandbox's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the path of the container's kept output.
    pub fn log(&self) -> PathBuf {
        self.dir.join("output.log")
    }

    /// Returns the path of the kept output of container `name` of a pod.
    pub fn added_log(&self, name: &str) -> PathBuf {
        self.dir.join(format!("output-{name}.log"))
    }

    /// Returns the path of the file under the volatile layer of a sandbox that began with a
    /// snapshot.
    pub fn layer(&self) -> PathBuf {
        self.dir.join(LAYER)
    }

    /// Returns the path of the file under the volatile layer of container `name`, if it was
    /// formatted for that container alone.
    pub fn own_layer(&self, name: &str) -> PathBuf {
        self.dir.join(format!("layer-{name}.ext4"))
    }

    /// Returns the path of the file under the volatile layer of container `name` of a pod that came
    /// back from a file.
    pub fn saved_layer(&self, name: &str) -> PathBuf {
        self.dir.join(layer_of(name))
    }

    /// Returns the path of the file behind the disk of a pod's [`EmptyDirs`](super::EmptyDirs).
    pub fn empty_dirs(&self) -> PathBuf {
        self.dir.join("empty-dirs.img")
    }

    /// Returns the path of the console log: the output of the guest kernel and the agent.
    pub fn console(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    /// Creates the directory.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn create(&self) -> Result<()> {
        fs::create_dir_all(&self.dir).map_err(Error::file("cannot create", &self.dir))
    }

    /// Writes the record atomically: after a crash of the daemon, either the old or the new one is
    /// there.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::TooLarge`] if the record takes more than `MOST_RECORD` bytes.
    pub fn save(&self, record: &Record) -> Result<()> {
        let path = self.dir.join("record.json");
        let json = encode(record)?;
        if json.len() > MOST_RECORD {
            return Err(Error::TooLarge(MOST_RECORD));
        }
        slipway_replace::replace(&path, &json, false).map_err(Error::file("cannot write", &path))
    }

    /// Reads the record. Returns `None` if none was written.
    ///
    /// # Errors
    /// [`Error::File`] if the record cannot be read or parsed, for example because another version
    /// wrote it. The caller must not remove such a sandbox: its volumes are a user's.
    pub fn load(&self) -> Result<Option<Record>> {
        let path = self.dir.join("record.json");
        let json = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(Error::file("cannot read", &path))?,
        };
        let record = serde_json::from_slice(&json).map_err(std::io::Error::from);
        let mut record: Record = record.map_err(Error::file("cannot understand", &path))?;
        if record.cpus.max == 0 {
            // An earlier version wrote it, whose sandboxes keep their CPUs.
            record.cpus = Cpus::of_new(record.cpus.count, record.cpus.count);
        }
        if record.memory.max_bytes == 0 {
            record.memory = MemoryBounds::new(record.memory_bytes, record.memory_bytes);
        }
        Ok(Some(record))
    }

    /// Removes the sandbox's directory with everything in it.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(&self) -> Result<()> {
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::file("cannot remove", &self.dir)(error))
            }
            _ => Ok(()),
        }
    }
}

fn encode(record: &Record) -> Result<Vec<u8>> {
    let json = serde_json::to_vec_pretty(record).map_err(std::io::Error::from);
    json.map_err(Error::file("cannot encode the record of", record.name.clone()))
}

/// Refuses a record that is larger than [`MOST_ASKED`] because its user asked for too much.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn check_size(record: &Record) -> Result<()> {
    if encode(record)?.len() > MOST_ASKED {
        return Err(Error::TooLarge(MOST_ASKED));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::SandboxState;

    #[test]
    fn a_record_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "0123456789ab");
        store.create().unwrap();
        let mut record = crate::adopt::tests::record_of(SandboxState::Running);
        check_size(&record).unwrap();
        store.save(&record).unwrap();
        record.settings.process.env = vec!["x".repeat(MOST_ASKED)];
        assert!(matches!(check_size(&record), Err(Error::TooLarge(_))));
        store.save(&record).unwrap();
        record.settings.process.env = vec!["x".repeat(MOST_RECORD)];
        assert!(matches!(store.save(&record), Err(Error::TooLarge(_))));
        // The last record that was small enough to be saved is still there.
        assert_eq!(store.load().unwrap().unwrap().settings.process.env[0].len(), MOST_ASKED);
    }

    #[test]
    fn a_sandbox_of_an_earlier_version_keeps_its_size() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "0123456789ab");
        store.create().unwrap();
        // This one is made of JSON without the fields.
        let mut record = crate::adopt::tests::record_of(SandboxState::Running);
        record.cpus.count = 3;
        store.save(&record).unwrap();
        let record = store.load().unwrap().unwrap();
        assert_eq!(record.cpus, Cpus::of_new(3, 3));
        assert_eq!(record.memory, MemoryBounds::new(1, 1));
    }

    #[test]
    fn a_record_that_is_not_understood_is_not_one_that_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "0123456789ab");
        assert!(store.load().unwrap().is_none());
        store.create().unwrap();
        assert!(store.load().unwrap().is_none());
        fs::write(store.dir().join("record.json"), "{\"of\": \"a later version\"}").unwrap();
        let message = store.load().unwrap_err().to_string();
        assert!(message.contains("record.json"), "{message}");
    }
}
