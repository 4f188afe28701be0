//! OCI image layouts, in a folder or in an archive (OCI image specification, *Image Layout*).

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use oci_spec::image::{Descriptor, ImageIndex};

use super::beneath::{self, FolderPolicy};
use crate::manifest::{Layer, descriptor_digest};
use crate::{Digest, Error, Limits, Reference, Result};

/// The annotation with the tag, or sometimes the whole name.
const REF_NAME: &str = "org.opencontainers.image.ref.name";
/// The annotation with the whole name.
const FULL_NAME: &str = "io.containerd.image.name";

/// An image layout on this machine, from which blobs are read.
pub(crate) struct Local {
    pub store: Store,
    /// The paths of blobs that are not at `blobs/sha256/…`.
    pub paths: HashMap<Digest, String>,
    /// The path of the folder or archive, for messages.
    pub place: String,
}

/// A folder, or an archive of one.
pub(crate) enum Store {
    Folder(PathBuf),
    /// The archive, and the offset and length of each file in it.
    Archive(Arc<File>, HashMap<String, (u64, u64)>),
}

impl Store {
    /// Opens the file at `path` and returns it with its length. Returns `None` if there is none.
    pub(crate) fn open(&self, path: &str) -> io::Result<Option<(Box<dyn Read + Send>, u64)>> {
        match self {
            Self::Folder(dir) => match open_regular(&dir.join(path)) {
                Ok(file) => {
                    let len = file.metadata()?.len();
                    Ok(Some((Box::new(file), len)))
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(e) => Err(e),
            },
            Self::Archive(file, members) => Ok(members.get(path).map(|&(at, len)| {
                let range = FileRange { file: file.clone(), at, left: len };
                (Box::new(range) as Box<dyn Read + Send>, len)
            })),
        }
    }
}

impl Local {
    /// Opens a layout in a folder.
    pub(crate) fn folder(dir: PathBuf) -> Result<Self> {
        let place = dir.display().to_string();
        match beneath::find(&dir, FolderPolicy::Any) {
            Ok(found) if found.meta.is_dir() => {}
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                return Err(Error::io("open", &dir, e));
            }
            _ => return Err(Error::source(place, "there is no such folder")),
        }
        Ok(Self { store: Store::Folder(dir), paths: HashMap::new(), place })
    }

    /// Reads the whole file at `path`. Returns `None` if there is none, and an error if it is
    /// longer than `max`.
    pub(crate) fn read(&self, path: &str, max: u64) -> Result<Option<Vec<u8>>> {
        let Some((file, _)) = self.store.open(path).map_err(|e| self.error(path, e))? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        let read = file.take(max.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|e| self.error(path, e))?;
        match bytes.len() as u64 > max {
            true => Err(Error::too_large(path, format!("more than {max} bytes"))),
            false => Ok(Some(bytes)),
        }
    }

    /// Returns a blob of at most `size` bytes, whose digest is not checked yet.
    pub(crate) fn document(&self, digest: &Digest, size: u64) -> Result<Vec<u8>> {
        self.read(&self.blob_path(digest), size)?.ok_or_else(|| self.missing(digest))
    }

    /// Returns a reader of a layer's blob.
    pub(crate) fn open_layer(&self, layer: &Layer) -> Result<Box<dyn Read + Send>> {
        let path = self.blob_path(&layer.digest);
        let found = self.store.open(&path).map_err(|e| self.error(&path, e))?;
        found.map(|(file, _)| file).ok_or_else(|| self.missing(&layer.digest))
    }

    fn blob_path(&self, digest: &Digest) -> String {
        let own = self.paths.get(digest).cloned();
        own.unwrap_or_else(|| format!("blobs/sha256/{}", digest.hex()))
    }

    fn missing(&self, digest: &Digest) -> Error {
        Error::source(&self.place, format!("blob {digest} is missing"))
    }

    fn error(&self, path: &str, e: io::Error) -> Error {
        Error::io("read", &Path::new(&self.place).join(path), e)
    }

    /// Returns the document that `index.json` has for `tag`, or for its only image, and the image's
    /// name if it has one.
    pub(crate) fn choose(
        &self,
        tag: Option<&str>,
        limits: &Limits,
    ) -> Result<(Vec<u8>, Option<Reference>)> {
        let none = || Error::source(&self.place, "is no OCI image layout: index.json is missing");
        let index = self.read("index.json", limits.document_bytes)?.ok_or_else(none)?;
        let index: ImageIndex =
            serde_json::from_slice(&index).map_err(|e| Error::bad_document("index.json", e))?;
        let descriptor = pick(index.manifests(), tag).map_err(|e| Error::source(&self.place, e))?;
        let digest = descriptor_digest(descriptor)?;
        let bytes = self.document(&digest, descriptor.size().min(limits.document_bytes))?;
        let actual = Digest::of(&bytes);
        if actual != digest {
            let what = "the image's manifest".to_owned();
            return Err(Error::DigestMismatch { what, expected: digest, actual });
        }
        Ok((bytes, full_name(descriptor)))
    }
}

/// Returns the entry that `tag` names. Without a tag, returns the only entry, or the one tagged
/// `latest`.
fn pick<'a>(entries: &'a [Descriptor], tag: Option<&str>) -> Result<&'a Descriptor, String> {
    let names = |entry: &Descriptor| -> Vec<String> {
        [REF_NAME, FULL_NAME].iter().filter_map(|key| annotation(entry, key)).collect()
    };
    let named = |tag: &str| {
        let colon_tag = format!(":{tag}");
        entries.iter().find(|e| names(e).iter().any(|n| n == tag || n.ends_with(&colon_tag)))
    };
    let all = || entries.iter().flat_map(names).collect::<Vec<_>>().join(", ");
    match (tag, entries) {
        (_, []) => Err("has no image".into()),
        (Some(tag), _) => named(tag).ok_or_else(|| format!("has no image '{tag}', but: {}", all())),
        (None, [entry]) => Ok(entry),
        (None, _) => named("latest")
            .ok_or_else(|| format!("has {} images, say which: {}", entries.len(), all())),
    }
}

fn annotation(entry: &Descriptor, key: &str) -> Option<String> {
    entry.annotations().as_ref()?.get(key).cloned()
}

/// Returns the full name that an entry has. Returns `None` if the entry has only a tag.
fn full_name(entry: &Descriptor) -> Option<Reference> {
    let text = annotation(entry, FULL_NAME)
        .or_else(|| annotation(entry, REF_NAME).filter(|name| name.contains([':', '/'])))?;
    text.parse().ok()
}

/// Opens a regular file. Links of root and of the caller are followed, since build tools make
/// layouts of links; another user's link is refused, as it could lead to a file that only the
/// caller may read. Any other file (a FIFO, a device) is an error, without a wait.
pub(super) fn open_regular(path: &Path) -> io::Result<File> {
    let found = beneath::find(path, FolderPolicy::Any)?;
    match found.meta.is_file() {
        true => found.read(),
        false => Err(io::Error::other("it is no regular file")),
    }
}

/// A part of a file.
struct FileRange {
    file: Arc<File>,
    at: u64,
    left: u64,
}

impl Read for FileRange {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let max = buf.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let n = self.file.read_at(&mut buf[..max], self.at)?;
        self.at += n as u64;
        self.left -= n as u64;
        Ok(n)
    }
}
