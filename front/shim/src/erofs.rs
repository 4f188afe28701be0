//! Roots of containerd's EROFS snapshotter, whose layers are EROFS files.
//!
//! No such file is mounted on the host for a container: the importer reads them itself. containerd
//! gives them in these forms (`plugins/snapshots/erofs/erofs.go` of containerd):
//!
//! | from version | mounts |
//! |---|---|
//! | 2.1 | an overlay over directories `fs`, on which it has mounted the files `layer.erofs` beside them |
//! | 2.1 | one mount of the type `erofs`: a view of one layer |
//! | 2.2 | a mount of the type `erofs` for each layer, the uppermost first, and a `format/mkdir/overlay` over them by templates, `lowerdir={{ overlay 0 3 }}` or `{{ mount 0 }}` |
//! | 2.2, with `default_size` | the same, after a `mkfs/ext4` for the writable layer, `upperdir={{ mount 0 }}/upper` |
//! | 2.3 | among the layers one merged of several, `fsmeta.erofs`, with the files of those as `device=` options, the lowest first; a `format/bind` for a view of it alone |
//!
//! From 2.2 on containerd would mount the files, and give an overlay over its own mount points, but
//! for the annotation by which this runtime takes the mounts as they are
//! ([`MOUNT_TYPES`]). dm-verity (`X-containerd.dmverity`) is not looked at.

use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::containerd::Mount;
use crate::layers::{self, Content, Source};

/// The types of mounts that containerd from version 2.2 on leaves to this runtime, and does not
/// mount on the host (`docs/mounts.md` of containerd).
pub const MOUNT_TYPES: &str = "erofs,format/*,mkdir/*,mkfs/*";
/// The file of a layer, and of the metadata of several, in their snapshots' directories.
const LAYER: &str = "layer.erofs";
const MERGED: &str = "fsmeta.erofs";
/// Inodes of an ext4 that has no files yet: eleven of its own, and overlayfs's `upper`, `work` and
/// `work/work`.
const OWN_INODES: u32 = 14;
/// A feature of an ext4 with one more inode of its own, a file of orphans.
const ORPHAN_FILE: u32 = 0x1000;
/// The position of the superblock of ext4, and the number in it that says so.
const SUPERBLOCK: u64 = 1024;
const EXT4: u16 = 0xef53;
/// A feature of an ext4 that was not unmounted: its journal has to be replayed.
const NEEDS_RECOVERY: u32 = 4;

/// Returns whether mounts are of the EROFS snapshotter, and not mounted by containerd.
pub fn is_of_snapshotter(mounts: &[Mount]) -> bool {
    mounts.iter().any(|mount| mount.r#type == "erofs" || mount.r#type.starts_with("mkfs/"))
}

/// Returns the files of layers that containerd 2.1 has mounted at these directories, if all are
/// there.
pub fn files_of(layers: &[PathBuf]) -> Option<Vec<PathBuf>> {
    let file = |layer: &PathBuf| {
        let file = layer.parent().filter(|_| layer.ends_with("fs"))?.join(LAYER);
        file.is_file().then_some(file)
    };
    layers.iter().map(file).collect()
}

/// Returns the content of layers' files, the uppermost first, below a writable layer that is not
/// empty, if there is one.
///
/// # Errors
/// One line: a file is not there.
pub fn chain(mut files: Vec<PathBuf>, changed: Option<PathBuf>) -> Result<Content, String> {
    let key = layers::key_of(&files)?;
    let key = if changed.is_some() { None } else { Some(key) };
    if let Some(upper) = changed {
        files.insert(0, upper);
    }
    Ok(Content { source: Source::Erofs(files), key })
}

/// Finds the layers for which the snapshotter's mounts stand.
///
/// # Errors
/// One line: the mounts are in a form that is not known, or a file of theirs is not there.
pub fn content(mounts: &[Mount]) -> Result<Content, String> {
    let unknown = |kind: &str| {
        format!("the root ends in a mount of the type {kind:?} over EROFS layers, which is unknown")
    };
    let Some((last, below)) = mounts.split_last() else { return Err(unknown("")) };
    let kind = last.r#type.rsplit('/').next().unwrap_or_default();
    match kind {
        "erofs" if below.is_empty() => chain(files(last)?, None),
        "bind" => chain(named_files(&last.source, below)?, None),
        "overlay" => {
            let overlay = layers::options(last)?;
            let files = named_files(overlay.lower, below)?;
            chain(files, changed(overlay.upper, below)?)
        }
        _ => Err(unknown(&last.r#type)),
    }
}

/// Returns the files of the layers that a template names, the uppermost first.
fn named_files(template: &str, mounts: &[Mount]) -> Result<Vec<PathBuf>, String> {
    let indexes = named(template, mounts.len()).ok_or_else(|| {
        format!("the root's layers are given as {template:?}, which is not supported")
    })?;
    let mut found = Vec::new();
    for mount in indexes.into_iter().filter_map(|index| mounts.get(index)) {
        found.extend(files(mount)?);
    }
    Ok(found)
}

/// Returns the indexes of mounts in a template of containerd's, `{{ mount 1 }}` or
/// `{{ overlay 1 3 }}`. Returns `None` for another text, or an index from `count` on.
fn named(template: &str, count: usize) -> Option<Vec<usize>> {
    let words = template.trim().strip_prefix("{{")?.strip_suffix("}}")?;
    let words: Vec<_> = words.split_whitespace().collect();
    let index = |word: &str| word.parse::<usize>().ok().filter(|index| *index < count);
    match words.as_slice() {
        ["mount", only] => Some(vec![index(only)?]),
        ["overlay", first, last] => {
            let (first, last) = (index(first)?, index(last)?);
            Some(match first <= last {
                true => (first..=last).collect(),
                false => (last..=first).rev().collect(),
            })
        }
        _ => None,
    }
}

/// Returns the files of the layers in one mount, the uppermost first.
fn files(mount: &Mount) -> Result<Vec<PathBuf>, String> {
    if mount.r#type != "erofs" {
        return Err(format!(
            "a layer of the root is a mount of the type {:?}, which is not supported",
            mount.r#type
        ));
    }
    let devices = mount.options.iter().filter_map(|option| option.strip_prefix("device="));
    let devices: Vec<_> = devices.map(PathBuf::from).collect();
    if devices.is_empty() {
        return Ok(vec![PathBuf::from(&mount.source)]);
    }
    // Metadata that containerd has merged says nothing that the layers themselves do not.
    match Path::new(&mount.source).ends_with(MERGED) {
        true => Ok(devices.into_iter().rev().collect()),
        false => {
            Err(format!("the EROFS {} is on further devices, which is not supported", mount.source))
        }
    }
}

/// Returns the writable layer if something is in it. One in a file system of its own cannot be
/// read: if something is in that, it is an error.
fn changed(upper: Option<&str>, mounts: &[Mount]) -> Result<Option<PathBuf>, String> {
    let Some(template) = upper.and_then(|upper| upper.strip_suffix("/upper")) else {
        return layers::changed(upper);
    };
    let indexes = named(template, mounts.len()).unwrap_or_default();
    let block = indexes.first().and_then(|&index| mounts.get(index));
    let Some(block) = block.filter(|mount| mount.r#type.starts_with("mkfs/")) else {
        return layers::changed(upper);
    };
    match has_files(Path::new(&block.source))? {
        false => Ok(None),
        true => Err(format!(
            "the snapshot has changes of its own in {}, which is not supported: begin with a new \
             snapshot, or without default_size",
            block.source
        )),
    }
}

/// Returns whether an ext4 has files. An ext4 that is not there yet has none.
fn has_files(image: &Path) -> Result<bool, String> {
    let failed = |error| format!("{}: {error}", image.display());
    let file = match File::open(image) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        file => file.map_err(failed)?,
    };
    let mut block = [0; 128];
    file.read_exact_at(&mut block, SUPERBLOCK).map_err(failed)?;
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|index| block[at + index]));
    let is_ext4 = u16::from_le_bytes([block[56], block[57]]) == EXT4;
    let (inodes, free) = (number(0), number(16));
    let (compatible, incompatible) = (number(92), number(96));
    let own = OWN_INODES + u32::from(compatible & ORPHAN_FILE != 0);
    let needs_recovery = incompatible & NEEDS_RECOVERY != 0;
    Ok(!is_ext4 || needs_recovery || inodes.saturating_sub(free) > own)
}

#[cfg(test)]
#[path = "tests/erofs.rs"]
mod tests;
