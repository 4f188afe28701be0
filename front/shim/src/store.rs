//! Records that outlive the shim's serving process: small files in a directory of the shim's own
//! beside its socket, which is in memory (`/run` is a tmpfs).
//!
//! The next serving process begins with these files after the last one was killed. A file is
//! replaced as a whole, so a process that is killed leaves the old content or the new one. The
//! directory is the user's alone, since requests may have secrets.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};

use crate::hold::Holder;

/// The parts of a shim that outlive its serving process; without them nothing does.
#[derive(Clone, Default)]
pub struct Keep {
    /// The files.
    pub store: Store,
    /// The process that has copies of descriptors.
    pub holder: Option<Arc<Holder>>,
}

/// The directory of the files. One that is nowhere keeps nothing. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Store(Option<Arc<Path>>);

impl Store {
    /// Makes an empty store. What an earlier shim left there is removed.
    ///
    /// # Errors
    /// The directory cannot be made.
    pub fn make(dir: &Path) -> io::Result<Self> {
        match fs::remove_dir_all(dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        Ok(Self::open(dir))
    }

    /// Returns the store that an earlier process has made.
    pub fn open(dir: &Path) -> Self {
        Self(Some(dir.into()))
    }

    /// Returns whether anything is kept.
    pub fn is_somewhere(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the number of the directory's inode, which another shim's directory by the same name
    /// does not have; `None` if there is no directory.
    pub fn inode(&self) -> Option<u64> {
        fs::metadata(self.0.as_ref()?).ok().map(|dir| dir.ino())
    }

    /// Returns the path of a file, if anything is kept.
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.0.as_ref().map(|dir| dir.join(name))
    }

    /// Writes a file, in place of the one by this name. A failure is logged: the shim goes on, and
    /// its next process lacks the file.
    pub fn put(&self, name: &str, content: &[u8]) {
        let Some(path) = self.path(name) else { return };
        // Left by a process that was killed, it has no name that is looked for.
        let new = path.with_file_name(format!(".{name}"));
        let written = fs::write(&new, content).and_then(|()| fs::rename(&new, &path));
        if written.is_err() {
            // A part of it would take memory that the file system lacks.
            let _ = fs::remove_file(&new);
        }
        warn(name, written);
    }

    /// Writes a value as JSON, as [`put`](Self::put) does.
    pub fn put_json(&self, name: &str, value: &impl Serialize) {
        if !self.is_somewhere() {
            return;
        }
        match serde_json::to_vec(value) {
            Ok(json) => self.put(name, &json),
            Err(error) => warn(name, Err(error.into())),
        }
    }

    /// Writes `piece` to the end of a file, or to the beginning of a new one. A process that is
    /// killed may leave a part of it.
    pub fn append(&self, name: &str, piece: &[u8], is_first: bool) {
        let Some(path) = self.path(name) else { return };
        let mut options = OpenOptions::new();
        options.create(true).write(true).append(!is_first).truncate(is_first);
        warn(name, options.open(path).and_then(|mut file| file.write_all(piece)));
    }

    /// Gives a file another name.
    pub fn rename(&self, from: &str, to: &str) {
        if let (Some(from), Some(new)) = (self.path(from), self.path(to)) {
            warn(to, fs::rename(from, new));
        }
    }

    /// Reads a file, if there is one.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        fs::read(self.path(name)?).ok()
    }

    /// Reads a value that was written as JSON. One that cannot be read is logged.
    pub fn get_json<T: DeserializeOwned>(&self, name: &str) -> Option<T> {
        let read = serde_json::from_slice(&self.get(name)?);
        read.map_err(|error| warn(name, Err(error.into()))).ok()
    }

    /// Removes a file. That there is none is no error.
    pub fn remove(&self, name: &str) {
        if let Some(path) = self.path(name) {
            let _ = fs::remove_file(path);
        }
    }

    /// Returns the names of the files whose names begin with `prefix`, in order.
    pub fn names(&self, prefix: &str) -> Vec<String> {
        let Some(dir) = &self.0 else { return Vec::new() };
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<_> = names.filter(|name| name.starts_with(prefix)).collect();
        names.sort();
        names
    }

    /// Removes the directory with all files.
    pub fn delete(&self) {
        if let Some(dir) = &self.0 {
            let _ = fs::remove_dir_all(dir);
        }
    }
}

/// Returns the name of a file of this kind for what these parts name, which may be any text.
pub fn name(kind: &str, parts: &[&str]) -> String {
    format!("{kind}-{}", &hex::encode(Sha256::digest(parts.join("/")))[..32])
}

fn warn(name: &str, outcome: io::Result<()>) {
    if let Err(error) = outcome {
        crate::log::warn(&format!("{name} would not outlive the shim's process: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_not_written_to_its_end_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::make(&dir.path().join("state")).unwrap();
        store.put("task-1", b"old");
        // A process that is killed before the rename leaves this.
        fs::write(store.path(".task-1").unwrap(), b"ne").unwrap();
        fs::write(store.path(".task-2").unwrap(), b"").unwrap();
        let next = Store::open(&dir.path().join("state"));
        assert_eq!(next.names("task-"), ["task-1"]);
        assert_eq!(next.get("task-1").unwrap(), b"old");
        next.put("task-1", b"new");
        assert_eq!(next.get("task-1").unwrap(), b"new");
        next.remove("task-1");
        assert!(next.get("task-1").is_none());
        let empty = Store::make(&dir.path().join("state")).unwrap();
        assert!(empty.names("").is_empty());
        empty.delete();
        assert!(!dir.path().join("state").exists());
    }

    #[test]
    fn the_store_of_another_shim_has_another_inode() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let store = Store::make(&path).unwrap();
        let inode = store.inode();
        assert!(inode.is_some() && Store::open(&path).inode() == inode);
        fs::rename(&path, dir.path().join("old")).unwrap();
        assert_eq!(store.inode(), None);
        Store::make(&path).unwrap();
        assert_ne!(store.inode(), inode);
    }

    #[test]
    fn a_file_that_cannot_be_written_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::make(&dir.path().join("state")).unwrap();
        // No file can take its place.
        fs::create_dir(store.path("task-1").unwrap()).unwrap();
        store.put("task-1", b"new");
        assert_eq!(store.names(""), ["task-1"]);
    }

    #[test]
    fn names_of_files_follow_from_any_names() {
        let long = "x".repeat(300);
        let of = |parts: &[&str]| name("process", parts);
        let names = [of(&["a", "b"]), of(&["a", "../b"]), of(&[&long])];
        assert!(names.iter().all(|name| name.len() < 64 && !name.contains('/')), "{names:?}");
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn a_value_of_another_version_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::make(dir.path()).unwrap();
        store.put_json("one", &[1, 2]);
        assert_eq!(store.get_json::<Vec<u32>>("one"), Some(vec![1, 2]));
        assert_eq!(store.get_json::<String>("one"), None);
        let nowhere = Store::default();
        nowhere.put("one", b"");
        assert!(nowhere.get("one").is_none() && nowhere.names("").is_empty());
    }
}
