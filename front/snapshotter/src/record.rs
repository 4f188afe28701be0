//! Records of snapshots, and requests for them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The kind of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SnapshotKind {
    /// A snapshot that is only read.
    View,
    /// A snapshot that can be written to, and committed.
    Active,
    /// A layer, which never changes and can be a parent.
    Committed,
}

/// The space that a snapshot takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Bytes on the disk.
    pub bytes: u64,
    /// Files, directories and links.
    pub inodes: u64,
}

/// The image of which a remote snapshot is a layer: its content is not in the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteImage {
    /// The image, as `name@digest`.
    pub reference: String,
    /// The digest of the image's manifest for this platform.
    pub digest: String,
    /// The digests of the image's layers up to this one, the lowest first.
    pub layers: Vec<String>,
    /// Set if no layer of the image is above this one.
    #[serde(rename = "whole")]
    pub is_top: bool,
}

/// The record of one snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The name of its directory. Never used twice.
    pub id: u64,
    /// The kind.
    pub kind: SnapshotKind,
    /// The name of its parent, or empty.
    #[serde(default)]
    pub parent: String,
    /// The number of snapshots whose parent it is.
    #[serde(default)]
    pub children: u64,
    /// The time when it was made or committed, in nanoseconds since the epoch.
    pub created_ns: u64,
    /// The time of the last change of its labels, in nanoseconds since the epoch.
    pub updated_ns: u64,
    /// The labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// The space that it takes; of a committed one.
    #[serde(default)]
    pub usage: Usage,
    /// The image of a remote snapshot.
    #[serde(default)]
    pub remote: Option<RemoteImage>,
}

/// A snapshot that is wanted.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// The key or name.
    pub key: String,
    /// The kind; a committed one is remote.
    pub kind: SnapshotKind,
    /// The name of its parent, or empty.
    pub parent: String,
    /// The labels.
    pub labels: BTreeMap<String, String>,
    /// The space that it takes.
    pub usage: Usage,
    /// The image of a remote snapshot.
    pub remote: Option<RemoteImage>,
}

/// An active snapshot that becomes a layer.
#[derive(Clone, Debug, Default)]
pub struct Commit {
    /// The key of the active snapshot.
    pub key: String,
    /// The name of the layer.
    pub name: String,
    /// The name of the parent of a snapshot that was made without one; or empty.
    pub parent: String,
    /// The labels of the layer, instead of the snapshot's.
    pub labels: BTreeMap<String, String>,
    /// The space that it takes.
    pub usage: Usage,
}

/// A snapshot with its chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chain {
    /// The snapshot's id.
    pub id: u64,
    /// The snapshot's kind.
    pub kind: SnapshotKind,
    /// The ids of its parents, the nearest first.
    pub parents: Vec<u64>,
}
