//! The disks of a sandbox that is being saved.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use slipway_plane_api::v1 as plane_v1;

use crate::node::Node;
use crate::record::{LAYER, Record, Volume, layer_of};
use crate::templates::pages::{copy_pages, measure_pages};
use crate::templates::{DiskFile, Unfinished, create_file};
use crate::{Error, Result, function};

/// The disks of which a save has copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Copied {
    /// All that can be written to: forks begin with the copies.
    Written,
    /// Disks whose content is in the host's memory: the sandbox goes on with its other disks.
    InMemory,
}

impl Copied {
    /// Returns whether a volume stays as it is, without a copy.
    fn leaves(self, volume: &Volume) -> bool {
        !volume.overlay && (volume.read_only || self == Self::InMemory)
    }
}

/// Returns the name of the file of a volume's content.
pub(super) fn file_of(volume: &str) -> String {
    format!("volume-{volume}")
}

/// Waits for the copies of the disks of a sandbox, at most until the deadline. The plane ends a
/// copy that is given up once its file is removed.
///
/// # Errors
/// The errors of the copies; [`Error::WrongState`] after the deadline.
pub(super) async fn within<T>(
    deadline: Duration,
    record: &Record,
    copies: impl Future<Output = Result<T>>,
) -> Result<T> {
    let copied = tokio::time::timeout(deadline, copies).await;
    copied.unwrap_or_else(|_| {
        let (name, state) = (record.name.clone(), record.state.as_str().to_owned());
        let late = format!("its disks were not copied within {} s", deadline.as_secs());
        let advice =
            format!("{late}, so no snapshot is made; check that its volumes' disks answer");
        Err(Error::WrongState { name, state, advice })
    })
}

/// Copies the content of the disks of a sandbox that stands still: of its volatile layer, and of
/// the volumes that `copied` names. The plane copies them from what it has open: no path is opened
/// here, which may lead to another file by now, or to none that can be opened. Returns the volumes
/// of those that begin with the snapshot: with an overlay over the copy, by the name of its file,
/// or as they are if they have no copy. Those of a pod's containers are files of the host, which
/// stay as they are.
///
/// # Errors
/// [`Error::Plane`], [`Error::File`].
pub(super) async fn copy(
    node: &Node,
    record: &Record,
    unfinished: &Unfinished,
    copied: Copied,
) -> Result<Vec<Volume>> {
    for (name, nsid) in layers(record) {
        copy_disk(node, record, nsid, unfinished.file(&name)).await?;
    }
    if record.pod {
        return Ok(record.added_with_disks().flat_map(|(one, _)| one.volumes.clone()).collect());
    }
    let mut volumes = Vec::new();
    for (nsid, volume) in (function::FIRST_VOLUME_NSID..).zip(&record.volumes) {
        if copied.leaves(volume) {
            volumes.push(volume.clone());
            continue;
        }
        let name = file_of(&volume.name);
        copy_disk(node, record, nsid, unfinished.file(&name)).await?;
        let path = PathBuf::from(name);
        let copy = Volume { path, scratch_bytes: None, file: None, ..volume.clone() };
        volumes.push(Volume { overlay: true, ..copy });
    }
    Ok(volumes)
}

/// Returns the volatile layers of a sandbox: for each the name of its file, and its namespace.
fn layers(record: &Record) -> Vec<(String, u32)> {
    if !record.pod {
        return vec![(LAYER.to_owned(), function::VOLATILE_NSID)];
    }
    let added = record.added_with_disks();
    added.map(|(one, disks)| (layer_of(&one.name), disks.volatile)).collect()
}

async fn copy_disk(node: &Node, record: &Record, nsid: u32, path: PathBuf) -> Result<()> {
    let (endpoint_id, path) = (record.id.clone(), path.to_string_lossy().into_owned());
    let request = plane_v1::CopyDiskRequest { endpoint_id, nsid, path };
    let copied = node.plane.clone().copy_disk(request).await;
    copied.map(drop).map_err(Error::plane)
}

/// Copies a file of the node's own directories with its holes. May take a while.
///
/// # Errors
/// [`Error::File`].
pub(super) fn copy_now(from: PathBuf, to: PathBuf) -> Result<()> {
    let opened = File::open(&from).and_then(|file| Ok((file.metadata()?.len(), file)));
    let (len, file) = opened.map_err(Error::file("cannot read", from))?;
    let copied = create_file(&to).and_then(|to| {
        to.set_len(len)?;
        copy_pages(&file, len, &to)
    });
    copied.map(drop).map_err(Error::file("cannot write", to))
}

/// Returns the names of the files of a snapshot whose volumes these are, in their order.
pub(super) fn names(volumes: &[Volume]) -> impl Iterator<Item = String> {
    std::iter::once(LAYER.to_owned()).chain(copies(volumes))
}

/// Returns the names of the files of those volumes that are overlays.
fn copies(volumes: &[Volume]) -> impl Iterator<Item = String> {
    volumes.iter().filter(|volume| volume.overlay).map(|volume| file_of(&volume.name))
}

/// Returns the bytes of those of a sandbox's volumes that are overlays, whose `files` were copied.
pub(super) fn overlays(volumes: &[Volume], files: &[DiskFile]) -> u64 {
    let names: Vec<_> =
        volumes.iter().filter(|one| one.overlay).map(|one| file_of(&one.name)).collect();
    files.iter().filter(|file| names.contains(&file.name)).map(|file| file.bytes).sum()
}

/// Describes the files of the save of a sandbox: of its volatile layers, and of these volumes. May
/// take a while.
///
/// # Errors
/// [`Error::File`].
pub(super) fn measure(
    record: &Record,
    volumes: &[Volume],
    unfinished: &Unfinished,
) -> Result<Vec<DiskFile>> {
    let layers = layers(record).into_iter().map(|(name, _)| name);
    let described = layers.chain(copies(volumes)).map(|name| {
        let path = unfinished.file(&name);
        let measured = File::open(&path).and_then(|file| {
            let bytes = file.metadata()?.len();
            let (data_bytes, sha256) = measure_pages(&file, bytes)?;
            Ok(DiskFile { name, bytes, data_bytes, sha256 })
        });
        measured.map_err(Error::file("cannot read", path))
    });
    described.collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;
    use crate::adopt::tests::{added_of, record_of};
    use crate::record::{Disks, SandboxState};
    use crate::snapshot::begin::tests::snapshot;

    #[tokio::test]
    async fn copies_are_given_up_at_the_deadline() {
        let record = record_of(SandboxState::Running);
        let done = within(Duration::from_secs(60), &record, async { Ok(7) }).await;
        assert_eq!(done.unwrap(), 7);
        let never = std::future::pending::<Result<()>>();
        let late = within(Duration::ZERO, &record, never).await.unwrap_err().to_string();
        assert!(late.contains(&record.name) && late.contains("not copied within"), "{late}");
        assert!(!late.contains('\n'), "{late}");
    }

    #[test]
    fn a_sandbox_that_is_saved_for_itself_keeps_its_files() {
        let [own, shared] = <[Volume; 2]>::try_from(snapshot().volumes).unwrap();
        let scratch = Volume { overlay: false, scratch_bytes: Some(1 << 20), ..own.clone() };
        for (volume, leaves) in [(&own, false), (&shared, true), (&scratch, true)] {
            assert_eq!(Copied::InMemory.leaves(volume), leaves, "{}", volume.name);
        }
        assert!(!Copied::Written.leaves(&scratch) && Copied::Written.leaves(&shared));
    }

    #[test]
    fn a_pod_has_a_layer_for_each_container_that_has_disks() {
        let mut pod = Record { pod: true, ..record_of(SandboxState::Running) };
        let disks = |image| Disks { image, volatile: image + 1, volumes: Vec::new() };
        pod.added = ["a", "b", "c"].map(|name| added_of(name, SandboxState::Running)).into();
        (pod.added[0].disks, pod.added[2].disks) = (Some(disks(3)), Some(disks(1)));
        let expected = [("saved-layer-a".to_owned(), 4), ("saved-layer-c".to_owned(), 2)];
        assert_eq!(layers(&pod), expected);
        let alone = record_of(SandboxState::Running);
        assert_eq!(layers(&alone), [(LAYER.to_owned(), function::VOLATILE_NSID)]);
        // No other file of a sandbox has the name of such a layer.
        let store = crate::record::Store::new(std::path::Path::new("/s"), "0123456789ab");
        assert_eq!(store.saved_layer("a.ext4"), store.dir().join("saved-layer-a.ext4"));
        assert_ne!(store.saved_layer("a.ext4"), store.own_layer("a"));
    }

    #[test]
    fn a_file_is_copied_with_its_holes_and_never_over_another() {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
        let file = create_file(&from).unwrap();
        file.set_len(64 << 20).unwrap();
        file.write_all_at(b"bytes", 33 << 20).unwrap();
        copy_now(from.clone(), to.clone()).unwrap();
        let copy = File::open(&to).unwrap();
        let status = copy.metadata().unwrap();
        assert_eq!((status.len(), status.mode() & 0o777), (64 << 20, 0o600));
        assert!(status.blocks() * 512 < 1 << 20);
        let mut bytes = [0; 5];
        copy.read_exact_at(&mut bytes, 33 << 20).unwrap();
        assert_eq!(&bytes, b"bytes");
        assert!(copy_now(from, to).unwrap_err().to_string().contains("cannot write"));
    }

    #[test]
    fn volumes_that_are_overlays_count_once_however_often_they_are_forked() {
        let file = |name: &str, bytes| DiskFile {
            name: name.to_owned(),
            bytes,
            data_bytes: 0,
            sha256: String::new(),
        };
        let files = [file(LAYER, 1), file("volume-a", 20), file("volume-b", 300)];
        let [own, _] = <[Volume; 2]>::try_from(snapshot().volumes).unwrap();
        let volume = |name: &str, overlay| Volume { name: name.to_owned(), overlay, ..own.clone() };
        assert_eq!(overlays(&[volume("a", true), volume("b", false)], &files), 20);
        assert_eq!(overlays(&[volume("a", false), volume("b", false)], &files), 0);
    }
}
