//! The files of a template, which are checked before anything begins with it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use slipway_hypervisor::{MAX_STATE_BYTES, TemplateName, checked_state};

use super::manifest::MOST_MANIFEST;
use super::memories::memory_name;
use super::pages::{digest, digest_pages};
use super::threads::Waited;
use super::{DiskFile, Manifest};
use crate::{Error, Result};

/// The name of the file with the machine's state.
pub(crate) const MACHINE: &str = "machine";
/// The name of the file with the memory.
pub(crate) const MEMORY: &str = "memory";
/// The name of the file with the description.
pub(crate) const MANIFEST: &str = "template.json";
/// The letters of a digest, SHA-256 in hexadecimal digits.
const DIGITS: usize = 64;

/// A template that forks begin with.
pub(crate) struct Template {
    /// Its description.
    pub manifest: Manifest,
    /// A file in memory with the machine's state, as it was checked.
    pub machine: Arc<File>,
    /// The name by which the plane's pool gives memory that begins as the template's
    /// ([`memory_name`]).
    pub memory: TemplateName,
    /// Set once the pool copies ahead what forks need ([`working_set`](super::working_set)).
    pub learnt: AtomicBool,
}

/// Returns the path of the file with the machine's state in a directory.
pub(super) fn machine(dir: &Path) -> PathBuf {
    dir.join(MACHINE)
}

/// Returns the path of the file with the memory in a directory.
pub(super) fn memory(dir: &Path) -> PathBuf {
    dir.join(MEMORY)
}

/// Returns the path of the file with the description in a directory.
pub(super) fn manifest_path(dir: &Path) -> PathBuf {
    dir.join(MANIFEST)
}

/// Reads the description of the template `name` in its directory `dir`.
///
/// # Errors
/// [`Error::NoTemplate`], [`Error::Template`], [`Error::File`].
pub(crate) fn read_manifest(dir: &Path, name: &str) -> Result<Manifest> {
    let path = manifest_path(dir);
    let file = match File::open(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(Error::NoTemplate(name.to_owned()));
        }
        opened => opened.map_err(Error::file("cannot read", &path))?,
    };
    let mut json = Vec::new();
    let read = file.take(MOST_MANIFEST).read_to_end(&mut json);
    read.map_err(Error::file("cannot read", &path))?;
    Manifest::parse(&json, name)
}

/// Opens the template `name` in its directory `dir`, whose memory has a name in the pool that
/// begins with `prefix`. Checks all but the content of its memory and disks.
///
/// # Errors
/// The errors of [`read_manifest`]; [`Error::Template`] for files that are not as they were
/// written; [`Error::File`].
pub(super) fn open(dir: &Path, name: &str, prefix: &str) -> Result<Template> {
    let manifest = read_manifest(dir, name)?;
    let no = |why: &str| Error::Template { name: name.to_owned(), why: why.to_owned() };
    let (machine, path) = (machine(dir), memory(dir));
    let state = File::open(&machine).map_err(Error::file("cannot read", &machine))?;
    let mut bytes = Vec::new();
    let read = (&state).take(MAX_STATE_BYTES as u64).read_to_end(&mut bytes);
    read.map_err(Error::file("cannot read", &machine))?;
    if digest(&bytes) != manifest.machine_sha256 {
        return Err(no("its file \"machine\" was changed"));
    }
    let machine = Arc::new(checked_state(&bytes)?);
    let found = std::fs::metadata(&path).map_err(Error::file("cannot read", &path))?;
    if found.len() != manifest.shape.memory_file_bytes() {
        return Err(no("its file \"memory\" has another length"));
    }
    // The pool has the memory by this name before its content is checked: nothing but a digest is
    // such a name, so that it is that of no other memory.
    let sha256 = Some(&manifest.memory_sha256).filter(|text| is_digest(text));
    let memory = sha256.and_then(|sha256| memory_name(prefix, sha256));
    let memory = memory.ok_or_else(|| no("the digest of its file \"memory\" is none"))?;
    Ok(Template { manifest, machine, memory, learnt: AtomicBool::new(false) })
}

/// Reads the memory and the disks of the template in the directory `dir` as a whole, and checks
/// that they are as the description says. May take a while, and ends early with an error once
/// nobody waits for it.
///
/// # Errors
/// [`Error::Template`] if they are not; [`Error::File`].
pub(super) fn read_whole(dir: &Path, manifest: &Manifest, waited: &Waited) -> Result<()> {
    let no = |why: String| Error::Template { name: manifest.name.clone(), why };
    let path = memory(dir);
    let bytes = manifest.shape.memory_file_bytes();
    let read = File::open(&path).and_then(|file| digest_pages(&file, bytes, &|| waited.check()));
    if read.map_err(Error::file("cannot read", &path))? != manifest.memory_sha256 {
        return Err(no("its file \"memory\" was changed".to_owned()));
    }
    for disk in manifest.snapshot.iter().flat_map(|snapshot| &snapshot.files) {
        check_disk(dir, disk, waited)?.map_err(no)?;
    }
    Ok(())
}

/// Returns whether a text can be the digest of a file.
fn is_digest(text: &str) -> bool {
    text.len() == DIGITS && text.bytes().all(|one| matches!(one, b'0'..=b'9' | b'a'..=b'f'))
}

/// Checks the file of a disk. Returns the reason if it is not as it was written.
fn check_disk(
    dir: &Path,
    disk: &DiskFile,
    waited: &Waited,
) -> Result<std::result::Result<(), String>> {
    if disk.name.contains('/') || disk.name.starts_with('.') {
        return Ok(Err(format!("{:?} is no name of a file of its", disk.name)));
    }
    let path = dir.join(&disk.name);
    let failed = |error| Error::file("cannot read", &path)(error);
    let file = File::open(&path).map_err(failed)?;
    if file.metadata().map_err(failed)?.len() != disk.bytes {
        return Ok(Err(format!("its file {:?} has another length", disk.name)));
    }
    let found = digest_pages(&file, disk.bytes, &|| waited.check()).map_err(failed)?;
    let sound = found == disk.sha256;
    Ok(if sound { Ok(()) } else { Err(format!("its file {:?} was changed", disk.name)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_has_64_digits_and_nothing_else() {
        assert!(is_digest(&digest(b"memory")));
        for other in ["", "b", &"A".repeat(64), &"0".repeat(65), &format!("{:051}-{:012}", 0, 0)] {
            assert!(!is_digest(other), "{other}");
        }
    }
}
