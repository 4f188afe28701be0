//! Kubernetes' `emptyDir` volumes: directories of the pod's guest in place of the host's.
//!
//! Kubelet mounts `…/pods/UID/volumes/kubernetes.io~empty-dir/NAME`, which nobody on the host
//! writes to, and for a `subPath` a bind mount of a directory below it,
//! `…/pods/UID/volume-subpaths/NAME/CONTAINER/INDEX`. So the guest has a directory of its own by
//! that name, which begins with the mode and the owner of the host's, and no process serves it. In
//! memory it is if kubelet has mounted a tmpfs (`medium: Memory`), with the size of that, and in
//! huge pages of the guest if kubelet has mounted a hugetlbfs (`medium: HugePages`).
//!
//! A volume is the host's directory as before if that holds files when its first container comes,
//! if its mount is to get mounts of the host, or if it is of another pod. That is decided once for
//! all containers of a pod: a container that could then have the other kind only is refused.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::{fs, io};

use serde::{Deserialize, Serialize};
use slipway_mounts::{Mounted, seen_at};
use slipway_sandbox_api::v1;

use crate::spec::plain_parts;

/// The annotation that says whose directories `emptyDir` volumes are: `guest` or `shared`.
const ANNOTATION: &str = "dev.slipway.empty-dir";
/// The kind of volumes, as kubelet names their directory.
const KIND: &str = "kubernetes.io~empty-dir";
/// The longest name of a volume in Kubernetes (RFC 1123 label).
const LONGEST: usize = 63;
/// The most directories below a volume that are looked at. Kubelet makes those of `subPath`.
const MOST_DIRECTORIES: usize = 256;
/// The deepest directory below a volume that is looked at.
const DEEPEST: usize = 16;
/// The type of the file system of a volume of huge pages.
const HUGE_PAGES: &str = "hugetlbfs";
/// The option of that file system with the only size of pages that a guest's kernel makes.
const PAGE_SIZE: &str = "pagesize=2M";
/// The bits of a directory's mode.
const MODE: u32 = 0o7777;

/// Returns whether `emptyDir` volumes are to be directories of the guest.
///
/// # Errors
/// One line: the annotation has another value.
pub fn in_guest(annotations: &BTreeMap<String, String>) -> Result<bool, String> {
    match annotations.get(ANNOTATION).map(String::as_str) {
        None | Some("guest") => Ok(true),
        Some("shared") => Ok(false),
        Some(other) => Err(format!(
            "the annotation {ANNOTATION}={other:?} is neither \"guest\" nor \"shared\""
        )),
    }
}

/// The mount of a volume, or of a part of one, as kubelet names them.
#[derive(Debug, PartialEq, Eq)]
struct Named {
    /// The volume's name.
    name: String,
    /// The volume's directory on the host.
    directory: PathBuf,
    below: Below,
}

/// The part of a volume that is mounted.
#[derive(Debug, PartialEq, Eq)]
enum Below {
    /// The relative path of it; empty: all.
    Path(String),
    /// That which is mounted at the mount's source.
    Bind,
}

/// Returns whether a mount with this source may be one of an `emptyDir` volume. Reads nothing.
pub fn may_be_one(source: &str) -> bool {
    named(source).is_some()
}

/// Finds the volume that kubelet's name for a source stands for. One of `volume-subpaths` may be of
/// any kind.
fn named(source: &str) -> Option<Named> {
    let parts = plain_parts(source);
    let is_volume = |part: &[&str]| matches!(part, ["pods", _, "volumes", KIND, _]);
    if let Some(at) = parts.windows(5).position(is_volume) {
        let (volume, below) = parts.split_at(at + 5);
        return of_volume(volume, Below::Path(below.join("/")));
    }
    let [above @ .., "pods", pod, "volume-subpaths", name, _, _] = &parts[..] else { return None };
    let volume = [above, &["pods", *pod, "volumes", KIND, *name][..]].concat();
    of_volume(&volume, Below::Bind)
}

fn of_volume(parts: &[&str], below: Below) -> Option<Named> {
    let name = *parts.last()?;
    let ordinary = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    let is_label = name.bytes().all(ordinary) && !name.starts_with('-') && name.len() <= LONGEST;
    let directory = PathBuf::from(format!("/{}", parts.join("/")));
    is_label.then(|| Named { name: name.to_owned(), directory, below })
}

/// How a directory of the guest begins.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Beginning {
    in_memory: bool,
    size_bytes: u64,
    mode: u32,
    uid: u32,
    gid: u32,
    /// Set if it is of huge pages, in memory.
    #[serde(default)]
    huge_pages: bool,
}

impl Beginning {
    /// Reads how the guest's directory is to begin of the host's. Returns `None` if it cannot take
    /// the place of that.
    fn read(directory: &Path, mounts: &[Mounted]) -> io::Result<Option<Self>> {
        let status = fs::symlink_metadata(directory)?;
        let mounted = seen_at(directory, mounts);
        let is_of_kind = |kind: &str| mounted.is_some_and(|one| one.kind == kind);
        if !status.is_dir() || !holds_directories_only(directory)? {
            return Ok(None);
        }
        let (is_tmpfs, huge_pages) = (is_of_kind("tmpfs"), is_of_kind(HUGE_PAGES));
        let size_bytes = mounted.filter(|_| is_tmpfs).and_then(Mounted::size).unwrap_or(0);
        let (mode, uid, gid) = (status.mode() & MODE, status.uid(), status.gid());
        let in_memory = is_tmpfs || huge_pages;
        Ok(Some(Self { in_memory, size_bytes, mode, uid, gid, huge_pages }))
    }
}

/// Returns whether nothing but directories is below `directory`.
fn holds_directories_only(directory: &Path) -> io::Result<bool> {
    let (mut left, mut looked_at) = (vec![(directory.to_owned(), 0)], 0);
    while let Some((directory, depth)) = left.pop() {
        for entry in fs::read_dir(directory)? {
            let entry = entry?;
            looked_at += 1;
            if !entry.file_type()?.is_dir() || looked_at > MOST_DIRECTORIES || depth >= DEEPEST {
                return Ok(false);
            }
            left.push((entry.path(), depth + 1));
        }
    }
    Ok(true)
}

/// The `emptyDir` volumes that the containers of a pod have had so far, by name.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Volumes(Mutex<BTreeMap<String, Volume>>);

/// A volume with the decision for all containers of its pod: its files are the host's or the
/// guest's.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Volume {
    /// The directory on the host.
    directory: PathBuf,
    /// The beginning of the guest's directory, or `None` if the volume is the host's directory.
    guest: Option<Beginning>,
}

impl Volumes {
    /// Returns the decision for a volume. The first call for it decides, for all containers of the
    /// pod.
    fn decide(&self, named: &Named, guest: Option<Beginning>) -> Volume {
        let mut volumes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || Volume { directory: named.directory.clone(), guest };
        volumes.entry(named.name.clone()).or_insert_with(new).clone()
    }
}

/// Parts what a container of a pod would share with the host into directories of the guest and
/// shares. Reads the host's directories, which may take long.
///
/// # Errors
/// One line that names a mount: its volume is the guest's, and the mount is of another kind.
pub fn part(
    shares: Vec<v1::Share>,
    volumes: &Volumes,
) -> Result<(Vec<v1::EmptyDir>, Vec<v1::Share>), String> {
    let mounts = slipway_mounts::read().map_err(|error| format!("the host's mounts: {error}"))?;
    part_with(shares, volumes, &mounts)
}

fn part_with(
    shares: Vec<v1::Share>,
    volumes: &Volumes,
    mounts: &[Mounted],
) -> Result<(Vec<v1::EmptyDir>, Vec<v1::Share>), String> {
    let (mut dirs, mut rest) = (Vec::new(), Vec::new());
    for share in shares {
        match of_guest(&share, volumes, mounts)? {
            Some(dir) => dirs.push(dir),
            None => rest.push(share),
        }
    }
    Ok((dirs, rest))
}

/// Returns a path as the host's mounts have it: kubelet's directory may be behind a link.
pub fn without_links(path: &Path) -> PathBuf {
    fs::canonicalize(path).unwrap_or_else(|_| path.to_owned())
}

/// Refuses a volume of huge pages of another size than 2 MiB.
fn check_page_size(share: &v1::Share, directory: &Path, mounts: &[Mounted]) -> Result<(), String> {
    let mounted = seen_at(directory, mounts);
    let is_wrong = |one: &Mounted| one.kind == HUGE_PAGES && !one.has_option(PAGE_SIZE);
    if !mounted.is_some_and(is_wrong) {
        return Ok(());
    }
    Err(format!(
        "the volume {} cannot be mounted at {}: its huge pages are not of 2 MiB, the only ones \
         that a guest's kernel makes while it runs (medium: HugePages-2Mi)",
        share.source, share.path
    ))
}

/// Returns the directory of the guest that takes the place of a share, or `None` if it stays one.
fn of_guest(
    share: &v1::Share,
    volumes: &Volumes,
    mounts: &[Mounted],
) -> Result<Option<v1::EmptyDir>, String> {
    let Some(named) = named(&share.source).filter(|named| named.directory.is_dir()) else {
        return Ok(None);
    };
    let directory = without_links(&named.directory);
    let sub_path = sub_path(share, &named, &directory, mounts);
    check_page_size(share, &directory, mounts)?;
    let beginning = match sub_path {
        // A directory that cannot be read is the share's trouble.
        Some(_) => Beginning::read(&directory, mounts).unwrap_or_default(),
        None => None,
    };
    let volume = volumes.decide(&named, beginning);
    // Another pod's directory of the same name.
    let is_other = volume.directory != named.directory;
    let Some(beginning) = volume.guest.filter(|_| !is_other) else { return Ok(None) };
    match sub_path {
        Some(sub_path) => Ok(Some(beginning.directory(share, named.name, sub_path))),
        None => Err(format!(
            "the host's {} cannot be mounted at {}: the emptyDir volume {} is the guest's, which \
             has no mounts of the host; the pod's annotation {ANNOTATION}=shared makes it the \
             host's",
            share.source, share.path, named.name
        )),
    }
}

/// Returns the path that a share has of the volume `named`, which is at `directory` of the host.
/// Returns `None` if the guest cannot have it: it leads elsewhere, or comes later.
fn sub_path(
    share: &v1::Share,
    named: &Named,
    directory: &Path,
    mounts: &[Mounted],
) -> Option<String> {
    if share.later {
        return None;
    }
    match &named.below {
        Below::Path(path) => Some(path.clone()),
        Below::Bind => {
            slipway_mounts::below(&without_links(Path::new(&share.source)), directory, mounts)
        }
    }
}

impl Beginning {
    /// Returns the directory of the guest that begins so, in place of a share: `sub_path` of the
    /// volume `name`.
    fn directory(self, share: &v1::Share, name: String, sub_path: String) -> v1::EmptyDir {
        let Self { in_memory, size_bytes, mode, uid, gid, huge_pages } = self;
        v1::EmptyDir {
            name,
            path: share.path.clone(),
            sub_path,
            read_only: share.read_only,
            in_memory,
            size_bytes,
            mode,
            uid,
            gid,
            source: share.source.clone(),
            huge_pages,
        }
    }
}

#[cfg(test)]
#[path = "tests/empty_dirs.rs"]
mod tests;
