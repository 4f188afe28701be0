//! Entries of the fuzz targets.

use crate::model::{Choices, Model};
use crate::{Disk, OverlayDisk, RamDisk};

/// Runs the requests that `data` encodes on a disk in memory and on an overlay, and compares them
/// with a model.
///
/// # Panics
/// When they differ: that is the finding.
pub fn disks(data: &[u8]) {
    const BYTES: usize = 1 << 18;
    let Ok(mut ram) = RamDisk::new(BYTES as u64, 512) else { return };
    let run = |disk: &mut dyn Disk| Model::new(disk, vec![0; BYTES], 1).run(&mut Choices(data));
    if let Ok(mut overlay) = OverlayDisk::new(&mut ram, None) {
        run(&mut overlay);
    }
    run(&mut ram);
}
