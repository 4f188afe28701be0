//! The files of attachments.
//!
//! Each attachment has a file, which is written before its interface is made or its function is
//! taken, and removed when nothing is left of either. The network is up by then, and published
//! ports are bound: neither needs the file. The file is not flushed: it survives a crash of the
//! daemon, and no namespace outlives a crash of the machine. A file that cannot be read was not
//! written to its end, so there is no interface and no function.
//!
//! The file of a removed attachment is renamed, and becomes that of a later one: with many
//! containers that come and go, ext4 spends a fifth of an attachment's time on a new file, since it
//! passes over inodes that were freed in the last five seconds (`recently_deleted`).
//!
//! A container that is removed while no daemon serves leaves a *note* beside the file, an empty
//! file that others than the daemon make (front/cni). The next daemon does what it asks for.

use std::collections::BTreeMap;
use std::fs;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use slipway_plane_api::attachments::{DIR, FILE, NOTE};

use super::Attachment;
use crate::ledger::make_private;
use crate::{Error, Result};

/// The directory of files without an attachment, in that of networks.
const SPARES: &str = "spare-attachments";
/// The most files without an attachment.
const MOST_SPARES: usize = 1024;

/// The directory of attachments' files.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    /// The files without an attachment.
    spares: Arc<Mutex<Spares>>,
}

#[derive(Debug)]
struct Spares {
    dir: PathBuf,
    free: Vec<PathBuf>,
    /// The number in the next file's name.
    next: u64,
}

impl Store {
    /// Opens the files in the directory of networks, and creates the directory if needed.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn open(networks_dir: &Path) -> Result<Self> {
        let dir = networks_dir.join(DIR);
        make_private(&dir)?;
        // An earlier daemon's: this one knows how many it has.
        let spare = networks_dir.join(SPARES);
        let _ = fs::remove_dir_all(&spare);
        make_private(&spare)?;
        let spares = Spares { dir: spare, free: Vec::new(), next: 0 };
        Ok(Self { dir, spares: Arc::new(Mutex::new(spares)) })
    }

    fn spares(&self) -> MutexGuard<'_, Spares> {
        // Changed in single calls: a panic leaves it consistent.
        self.spares.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads all attachments, by id. Files that were not written to their end are removed.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read.
    pub fn load(&self) -> Result<BTreeMap<String, Attachment>> {
        let mut all = BTreeMap::new();
        for path in self.files(FILE)? {
            match fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
                Ok(one) => {
                    let one: Attachment = one;
                    all.insert(one.key.id(), one);
                }
                Err(error) => {
                    tracing::warn!(path = %path.display(), %error, "an attachment is lost");
                    let _ = fs::remove_file(&path);
                }
            }
        }
        Ok(all)
    }

    /// Writes an attachment, which has no file yet; on return it survives a crash of the daemon.
    ///
    /// # Errors
    /// [`Error::File`]; there is no file then.
    pub fn save(&self, id: &str, attachment: &Attachment) -> Result<()> {
        let path = self.path(id, FILE);
        let spare = self.spares().free.pop();
        let written = spare.as_ref().unwrap_or(&path);
        let write = || -> std::io::Result<()> {
            let json = serde_json::to_vec(attachment)?;
            let mut options = fs::File::options();
            // Not emptied when it is opened: ext4 would write such a file out when it is closed.
            options.write(true).create(true).truncate(false).mode(0o600);
            let mut file = options.open(written)?;
            file.write_all(&json)?;
            file.set_len(json.len() as u64)?;
            spare.as_ref().map_or(Ok(()), |spare| fs::rename(spare, &path))
        };
        let saved = write();
        if saved.is_err() {
            // To the plugin, a file is an attachment with an address. An error: there is none.
            let _ = fs::remove_file(written);
        }
        saved.map_err(Error::file("cannot write", &path))
    }

    /// Removes an attachment with its note.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(&self, id: &str) -> Result<()> {
        // The note goes last: without the file it means nothing, and a crash between must not
        // bring the attachment back.
        let file = self.path(id, FILE);
        missing_or(self.set_aside(&file)).map_err(Error::file("cannot remove", file))?;
        let note = self.path(id, NOTE);
        missing_or(fs::remove_file(&note)).map_err(Error::file("cannot remove", note))
    }

    /// Makes the file of an attachment one without, or removes it if there are enough of those.
    fn set_aside(&self, file: &Path) -> std::io::Result<()> {
        let mut spares = self.spares();
        if spares.free.len() == MOST_SPARES {
            return fs::remove_file(file);
        }
        let spare = spares.dir.join(spares.next.to_string());
        fs::rename(file, &spare)?;
        spares.next += 1;
        spares.free.push(spare);
        Ok(())
    }

    /// Returns whether a note says that an attachment is to be removed.
    pub fn is_noted(&self, id: &str) -> bool {
        self.path(id, NOTE).exists()
    }

    /// Returns the ids of all notes.
    ///
    /// # Errors
    /// [`Error::File`] if the directory cannot be read.
    pub fn notes(&self) -> Result<Vec<String>> {
        let stem = |path: PathBuf| Some(path.file_stem()?.to_str()?.to_owned());
        Ok(self.files(NOTE)?.into_iter().filter_map(stem).collect())
    }

    fn files(&self, kind: &str) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(&self.dir).map_err(Error::file("cannot read", &self.dir))?;
        let mut files = Vec::new();
        for entry in entries {
            let path = entry.map_err(Error::file("cannot read", &self.dir))?.path();
            if path.extension().is_some_and(|extension| extension == kind) {
                files.push(path);
            }
        }
        Ok(files)
    }

    fn path(&self, id: &str, kind: &str) -> PathBuf {
        self.dir.join(format!("{id}.{kind}"))
    }
}

/// Returns the outcome of a removal, for which a file that is missing is no error.
fn missing_or(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::attachment::{AttachmentKey, Rates};
    use crate::ledger::Lease;

    #[test]
    fn an_attachment_is_its_users_alone_whichever_build_made_it() {
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let place = tempfile::tempdir().unwrap();
        let dir = place.path().join(DIR);
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
        let old = dir.join(format!("old.{FILE}"));
        fs::write(&old, "{}").unwrap();
        fs::set_permissions(&old, PermissionsExt::from_mode(0o644)).unwrap();
        let store = Store::open(place.path()).unwrap();
        assert_eq!((mode(&dir), mode(&old)), (0o700, 0o600));
        assert_eq!(store.files(FILE).unwrap(), [old]);
    }

    #[test]
    fn the_file_of_a_removed_attachment_becomes_that_of_a_later_one() {
        use std::os::unix::fs::MetadataExt;
        let place = tempfile::tempdir().unwrap();
        let store = Store::open(place.path()).unwrap();
        let attachment = |container: &str| Attachment {
            key: AttachmentKey::new("net", container, "eth0").unwrap(),
            network: "blue".to_owned(),
            namespace: PathBuf::from("/run/netns/x"),
            device: 4,
            inode: 5,
            lease: Lease {
                name: container.to_owned(),
                mac: crate::mac::Mac::derived([10, 1, 2, 2].into()),
                ipv4: [10, 1, 2, 2].into(),
                ipv6: "fd00:1::2".parse().unwrap(),
                published: Vec::new(),
                attached: false,
                sequence: 1,
            },
            routes: Vec::new(),
            function: false,
            pool: String::new(),
            hardware: None,
            rates: Rates::default(),
            trace: None,
        };
        let (long, short) = (attachment("a-container-with-a-long-name"), attachment("b"));
        store.save(&long.key.id(), &long).unwrap();
        let inode = |one: &Attachment| fs::metadata(store.path(&one.key.id(), FILE)).unwrap().ino();
        let first = inode(&long);
        store.remove(&long.key.id()).unwrap();
        store.remove(&long.key.id()).unwrap();
        assert!(store.load().unwrap().is_empty());
        store.save(&short.key.id(), &short).unwrap();
        assert_eq!(inode(&short), first);
        assert_eq!(store.load().unwrap(), BTreeMap::from([(short.key.id(), short.clone())]));
        store.remove(&short.key.id()).unwrap();
        // The next daemon removes the files that the last one set aside.
        let next = Store::open(place.path()).unwrap();
        let dir = next.spares().dir.clone();
        assert!(fs::read_dir(dir).unwrap().next().is_none());
        // Nothing is left of a file that cannot be written: to the plugin it has an address.
        store.save(&short.key.id(), &short).unwrap();
        store.remove(&short.key.id()).unwrap();
        fs::create_dir(store.path(&short.key.id(), FILE)).unwrap();
        assert!(store.save(&short.key.id(), &short).is_err());
        let left = store.spares().dir.clone();
        assert_eq!((fs::read_dir(left).unwrap().count(), store.spares().free.len()), (0, 0));
    }
}
