//! Entries of the fuzz targets.

use slipway_ram::Span;

use crate::model::{Choices, Model, one};
use crate::{BaseIdentity, Disk, Operation, OverlayDisk, RamDisk, Request, overlay_file};

/// Runs the requests that `data` encodes on a disk in memory and on an overlay, and compares each
/// with a model.
///
/// # Panics
/// If they differ, which is the finding.
pub fn disks(data: &[u8]) {
    const BYTES: usize = 1 << 18;
    let Ok(mut ram) = RamDisk::new(BYTES as u64, 512) else { return };
    let run = |disk: &mut dyn Disk| Model::new(disk, vec![0; BYTES], 1).run(&mut Choices(data));
    if let Ok(mut overlay) = OverlayDisk::new(&mut ram, None) {
        run(&mut overlay);
    }
    run(&mut ram);
}

/// Adopts an overlay whose head and maps were changed as `data` says. The overlay must be refused,
/// or work like any other disk, also when it is adopted again.
///
/// # Panics
/// If it does neither, which is the finding.
pub fn adoption(data: &[u8]) {
    // Neither map fills its last word.
    const BYTES: usize = 11 * 4096;
    const IDENTITY: BaseIdentity = [1, 2, 3, 4];
    let Ok(mut ram) = RamDisk::new(BYTES as u64, 512) else { return };
    let Ok(file) = overlay_file(&ram.geometry(), &IDENTITY) else { return };
    let mut choices = Choices(data);
    for _ in 0..choices.byte() {
        // An offset in the head, or near the beginning of a map.
        let at = 4096 * choices.below(3) + choices.below(72);
        let written = rustix::io::pwrite(&file, &[choices.byte()], at);
        assert_eq!(written, Ok(1));
    }
    let Ok(mut disk) = OverlayDisk::of(&mut ram, None, &file, &IDENTITY) else { return };
    let content = content(&mut disk, BYTES);
    let run = |disk: &mut dyn Disk, content, choices: &mut Choices<'_>| {
        Model::new(disk, content, 1).run(choices);
    };
    run(&mut disk, content, &mut choices);
    let (after, used) = (self::content(&mut disk, BYTES), disk.used());
    drop(disk);
    let adopted = OverlayDisk::of(&mut ram, None, &file, &IDENTITY);
    let mut disk = adopted.unwrap_or_else(|error| panic!("its own file is refused: {error}"));
    assert_eq!(disk.used(), used);
    run(&mut disk, after, &mut Choices(&[]));
}

fn content(disk: &mut dyn Disk, bytes: usize) -> Vec<u8> {
    let (span, mut content) = (Span::heap(bytes), vec![0; bytes]);
    let blocks = bytes as u32 / disk.geometry().block_size;
    let (spans, operation) = (vec![span.clone()], Operation::Read);
    let all = Request { tag: 0, operation, lba: 0, blocks, spans, durable: false };
    assert_eq!(one(disk, all), Ok(()));
    assert_eq!(span.read(0, &mut content), Ok(()));
    content
}
