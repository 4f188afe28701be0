//! The namespaces of a controller: what the controller gets, and the control thread's record of it.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use slipway_block::{FileContent, OpenError, OverlayContent};
use slipway_nvme::Namespace;
use slipway_plane_api::v1;

use crate::disk::{Content, Opened};
use crate::disks::NamedDisk;

/// The control thread's record of an attached namespace. Dropping it may free the memory of an
/// overlay, which takes a while.
pub struct Listed {
    /// The status for the interface, without the counts of [`Listed::describe`].
    pub status: v1::NamespaceStatus,
    /// The content of an overlay or a regular file; `None` for another disk.
    pub source: Option<Source>,
}

impl Listed {
    /// Returns the status for the interface, with counts of this moment.
    pub fn describe(&self) -> v1::NamespaceStatus {
        let refused_writes = match &self.source {
            Some(Source::File(file)) => file.refused_writes(),
            _ => 0,
        };
        v1::NamespaceStatus { refused_writes, ..self.status.clone() }
    }
}

/// The content of a disk that can be copied.
#[derive(Clone)]
pub enum Source {
    /// That of an overlay.
    Overlay(Arc<OverlayContent>),
    /// That of a regular file.
    File(FileContent),
}

impl Source {
    /// Copies what the disk has at present to the new file `to` with this path. Returns the size of
    /// the disk in bytes, and the bytes of data that the file has.
    ///
    /// # Errors
    /// The errors of [`OverlayContent::copy_to`] and [`FileContent::copy_to`].
    pub fn copy_to(&self, to: &File, path: &Path) -> Result<(u64, u64), OpenError> {
        match self {
            Self::Overlay(overlay) => Ok((overlay.bytes(), overlay.copy_to(to, path)?)),
            Self::File(file) => file.copy_to(to, path),
        }
    }
}

/// Makes a namespace of `opened` with number `nsid`, and its record. Its UUID is that of the
/// endpoint `identity`, unless its disk is a named one.
pub fn make(identity: &str, nsid: u32, opened: Opened) -> (Listed, Namespace) {
    let shape = opened.disk.geometry();
    let named = opened.named;
    let status = v1::NamespaceStatus {
        nsid,
        size_bytes: shape.bytes(),
        read_only: shape.read_only,
        kind: opened.kind.to_owned(),
        disk: named.as_ref().map(|named| named.name.clone()).unwrap_or_default(),
        refused_writes: 0,
    };
    let overlay = opened.content.and_then(Content::into_overlay);
    let overlay = overlay.map(|content| Source::Overlay(Arc::new(content)));
    let source = overlay.or(opened.file.map(Source::File));
    let uuid = named.as_ref().map_or_else(|| crate::id::uuid(identity, nsid), NamedDisk::uuid);
    let namespace = Namespace::new(nsid, opened.disk, uuid);
    let (shared, lanes) = (named.is_some(), opened.lanes);
    (Listed { status, source }, Namespace { shared, lanes, ..namespace })
}
