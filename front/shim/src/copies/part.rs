//! Shares that are parts of Kubernetes' small volumes (`subPath`).

use std::fs;
use std::path::Path;

use slipway_mounts::Mounted;
use slipway_sandbox_api::copies::Copies;
use slipway_sandbox_api::v1;

use super::file_dir;
use crate::empty_dirs::without_links;
use crate::spec;

/// Returns whether a share may be one. Reads nothing.
pub fn is_among(shares: &[v1::Share]) -> bool {
    shares.iter().any(|share| !spec::volumes_of_part(&share.source).is_empty())
}

/// Reads the files of a share that is one. Returns `None` for another one, and for one that cannot
/// be copied.
pub fn read(share: &v1::Share, mounted: &[Mounted]) -> Option<(v1::FileDir, Vec<v1::File>)> {
    let point = without_links(Path::new(&share.source));
    let mut volumes = spec::volumes_of_part(&share.source).into_iter().filter(|one| one.is_dir());
    volumes.find(|one| slipway_mounts::below(&point, &without_links(one), mounted).is_some())?;
    let dir = file_dir(share, &fs::metadata(&point).ok()?);
    let mut copies = Copies::of_volume();
    copies.add_part(&point, &dir.path).ok()?;
    Some((dir, copies.into_files()))
}
