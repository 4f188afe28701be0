//! The namespaces of a controller: what the controller gets, and the control thread's record of it.

use slipway_block::Budget;
use slipway_disks::{Disks, Lasts, NamedDisk, Opened, Source};
use slipway_nvme::Namespace;
use slipway_plane_api::v1;

use crate::Error;
use crate::id::RecordId;

/// The control thread's record of an attached namespace. Dropping it may free the memory of an
/// overlay, which takes a while.
pub struct Listed {
    /// The identity of this record.
    pub record: RecordId,
    /// The status for the interface, without the counts of [`Listed::describe`].
    pub status: v1::NamespaceStatus,
    /// The content of an overlay or a regular file; `None` for another disk.
    pub source: Option<Source>,
}

impl Listed {
    /// Returns the status for the interface, with counts of this moment.
    pub fn describe(&self) -> v1::NamespaceStatus {
        let refused_writes = self.source.as_ref().map_or(0, Source::refused_writes);
        v1::NamespaceStatus { refused_writes, ..self.status.clone() }
    }
}

/// Opens the disk of the namespace `wanted`, and once more for each of the `lanes` lanes besides
/// the home. A named disk is one of `disks`. The memory of an overlay counts in `overlays`.
///
/// # Errors
/// [`Error::Invalid`] if the namespace has no disk; [`Error::Disk`].
pub fn open(
    wanted: &v1::Namespace,
    (disks, overlays): (&Disks, &Budget),
    lasts: Option<Lasts>,
    lanes: usize,
) -> Result<Opened, Error> {
    let missing = || Error::Invalid(format!("namespace {} has no disk", wanted.nsid));
    let disk = wanted.disk.as_ref().filter(|disk| disk.kind.is_some()).ok_or_else(missing)?;
    Ok(slipway_disks::open(disk, (disks, overlays), lasts, lanes)?)
}

/// Makes the namespace `wanted` of its `opened` disk, and its record. Its UUID is that of the
/// endpoint `identity`, unless its disk is a named one.
pub fn make(wanted: &v1::Namespace, identity: &str, opened: Opened) -> (Listed, Namespace) {
    let nsid = wanted.nsid;
    let shape = opened.disk.geometry();
    let named = opened.named;
    let status = v1::NamespaceStatus {
        nsid,
        size_bytes: shape.bytes(),
        read_only: shape.read_only,
        kind: opened.kind.to_owned(),
        disk: named.as_ref().map(|named| named.name.clone()).unwrap_or_default(),
        refused_writes: 0,
        path: path(wanted),
    };
    let source = Source::of(opened.content, opened.file);
    let own = || slipway_disks::uuid(identity, nsid);
    let uuid = named.as_ref().map_or_else(own, NamedDisk::uuid);
    let namespace = Namespace::new(nsid, opened.disk, uuid);
    let (shared, lanes) = (named.is_some(), opened.lanes);
    (Listed { record: RecordId::new(), status, source }, Namespace { shared, lanes, ..namespace })
}

/// Returns the path of the file or the block device that a namespace is, or an empty text if it is
/// no such disk.
fn path(wanted: &v1::Namespace) -> String {
    match wanted.disk.as_ref().and_then(|disk| disk.kind.as_ref()) {
        Some(v1::disk::Kind::File(file)) => file.path.clone(),
        _ => String::new(),
    }
}
