//! Checks of the description of a snapshot that is moved, which anybody may have written: of what
//! it names, and of the sizes that a node gives its own sandboxes.

use std::collections::BTreeSet;
use std::path::Path;

use crate::memory::{fits, of_host};
use crate::record::{Device, Volume};
use crate::snapshot::disks::{file_of, names};
use crate::templates::{Manifest, Shape, Snapshot};
use crate::{Error, Result, name, resize, volume};

/// The bytes of a page of memory.
pub(super) const PAGE: u64 = 4096;
/// The most volumes of a snapshot that is moved.
const MOST_VOLUMES: usize = 32;
/// The most functions that can be added to the machine: that of directories of the host. A pod has
/// more, and is not saved.
const MOST_SLOTS: usize = 1;
/// The largest file system of a root layer, bytes. Its blocks that are zeros take no space.
const MOST_LAYER: u64 = 1 << 40;
/// The adjustments of the score by which the host ends processes when its memory is short that a
/// snapshot from elsewhere can have. One below 0 would protect its forks better than others.
const ADJUSTMENTS: std::ops::RangeInclusive<i32> = 0..=1000;

/// Checks that a snapshot is whole with the files that are its own.
///
/// # Errors
/// The reason why it cannot be moved.
pub(super) fn check(manifest: &Manifest) -> Result<(), String> {
    let Some(snapshot) = &manifest.snapshot else {
        return Err("it is a template, without a container".to_owned());
    };
    check_machine(&manifest.shape, snapshot)?;
    check_container(snapshot)?;
    check_disks(snapshot)
}

fn check_machine(shape: &Shape, snapshot: &Snapshot) -> Result<(), String> {
    let wrong = |what: &str| Err(format!("{what} is wrong"));
    if snapshot.kernel.is_some() {
        return Err("its guest has a kernel of its own (--kernel), which is not in it".to_owned());
    }
    let (memory, room) = (shape.memory_bytes, shape.room_bytes);
    if memory == 0 || !memory.is_multiple_of(PAGE) || !resize::is_room(room) {
        return wrong("the size of its memory");
    }
    // Only pods have regions, and no pod is saved.
    if shape.region_bytes > 0 {
        return wrong("its memory of containers");
    }
    if snapshot.plugged_bytes > room {
        return wrong("the size of its plugged memory");
    }
    if ![1, shape.cpus, snapshot.cpus, shape.max_cpus].is_sorted() {
        return wrong("the number of its CPUs");
    }
    let disks = &snapshot.origin.disks;
    if disks.len() != 12 || !disks.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return wrong("the identity of its disks");
    }
    if snapshot.origin.slots > MOST_SLOTS {
        return wrong("the number of its slots");
    }
    Ok(())
}

fn check_container(snapshot: &Snapshot) -> Result<(), String> {
    let settings = &snapshot.settings;
    name::check(&snapshot.sandbox).map_err(|error| error.to_string())?;
    let digest = settings.image_digest.parse::<slipway_image::Digest>();
    if digest.is_err() || settings.image.chars().any(char::is_control) {
        return Err("the name of its image is wrong".to_owned());
    }
    Ok(())
}

fn check_disks(snapshot: &Snapshot) -> Result<(), String> {
    let count = snapshot.volumes.len();
    if count > MOST_VOLUMES {
        return Err(format!("its {count} volumes are too many: at most {MOST_VOLUMES}"));
    }
    for volume in &snapshot.volumes {
        check_volume(volume)?;
    }
    let wanted: Vec<_> = names(&snapshot.volumes).collect();
    let has: Vec<_> = snapshot.files.iter().map(|file| file.name.clone()).collect();
    let differ = wanted.iter().collect::<BTreeSet<_>>().len() == wanted.len();
    if has != wanted || !differ {
        return Err("its files are not those of its disks".to_owned());
    }
    Ok(())
}

fn check_volume(volume: &Volume) -> Result<(), String> {
    let Volume { name, path, scratch_bytes, device, host_device, overlay, .. } = volume;
    name::check(name).map_err(|error| error.to_string())?;
    if !overlay {
        return Err(format!("its volume {name} is {path:?} of a host, which is not in it"));
    }
    let is_own = *path == Path::new(&file_of(name));
    if !is_own || scratch_bytes.is_some() || host_device.is_some() || *device != Device::Namespace {
        return Err(format!("its volume {name} is none of a snapshot's"));
    }
    Ok(())
}

/// Checks that a snapshot has the image `wanted`, a digest. Any will do if that is empty.
///
/// # Errors
/// [`Error::Invalid`] if it has another.
pub(super) fn check_image(manifest: &Manifest, wanted: &str) -> Result<()> {
    let Some(snapshot) = &manifest.snapshot else { return Ok(()) };
    let has = &snapshot.settings.image_digest;
    if wanted.is_empty() || has == wanted {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "the snapshot was saved with the image {has}, and the image here is {wanted:?}: begin with \
         the image of the sandbox that was saved"
    )))
}

/// Limits a snapshot to what a new sandbox of this node could have: its root layers hold at most
/// `layers_bytes` of memory unless its user asks for more, and the host does not protect them from
/// being ended when its memory is short. Its data is compared with the free space when it is
/// copied. Waits for the disk with the directory `place`, where the snapshot is to be.
///
/// # Errors
/// [`Error::Invalid`] if its memory or a disk is too large for this node; [`Error::File`].
pub(super) fn clamp_to_node(
    manifest: &mut Manifest,
    layers_bytes: u64,
    place: &Path,
) -> Result<()> {
    let Some(snapshot) = &mut manifest.snapshot else { return Ok(()) };
    snapshot.layers_bytes = snapshot.layers_bytes.min(layers_bytes);
    // A fork has the snapshot's own: who begins it cannot choose another.
    let adjustment = &mut snapshot.settings.process.oom_score_adj;
    *adjustment = adjustment.map(|one| one.clamp(*ADJUSTMENTS.start(), *ADJUSTMENTS.end()));
    let too_large = |what: &str, bytes: u64, bound: &str, most: u64| {
        let (size, most) = (bytes >> 20, most >> 20);
        Err(Error::Invalid(format!("{what} of {size} MiB is more than {bound}, {most} MiB")))
    };
    let (shape, host) = (&manifest.shape, of_host());
    if !fits(shape.memory_bytes, shape.room_bytes, host) {
        let memory = shape.memory_file_bytes();
        return too_large("the snapshot's memory", memory, "this host has", host);
    }
    // The files are those of the layer and of the volumes, in this order.
    let Some((layer, files)) = snapshot.files.split_first() else { return Ok(()) };
    if layer.bytes > MOST_LAYER {
        return too_large("its root layer", layer.bytes, "a root layer may have", MOST_LAYER);
    }
    snapshot
        .volumes
        .iter()
        .zip(files)
        .try_for_each(|(its, file)| volume::check_fits(&its.name, file.bytes, place))
}
