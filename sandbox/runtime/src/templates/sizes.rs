//! The sizes of templates and snapshots on disk, for monitoring.

use super::Manifest;
use super::automatic::is_automatic;
use crate::v1;

/// Returns the number and the sizes of the machines by kind: `template`, `automatic` and
/// `snapshot`, in this order. A kind without any has zeros.
pub(super) fn by_kind(all: impl IntoIterator<Item = Manifest>) -> Vec<v1::SavedMachines> {
    let mut kinds = ["template", "automatic", "snapshot"]
        .map(|kind| v1::SavedMachines { kind: kind.to_owned(), ..Default::default() });
    let [named, automatic, snapshots] = &mut kinds;
    for one in all {
        let (kind, disk_bytes) = match &one.snapshot {
            Some(snapshot) => {
                let files = snapshot.files.iter().map(|file| file.data_bytes);
                (&mut *snapshots, files.fold(0, u64::saturating_add))
            }
            None if is_automatic(&one.name) => (&mut *automatic, 0),
            None => (&mut *named, 0),
        };
        kind.count += 1;
        kind.memory_bytes = kind.memory_bytes.saturating_add(one.touched_bytes);
        kind.disk_bytes = kind.disk_bytes.saturating_add(disk_bytes);
    }
    kinds.into()
}
