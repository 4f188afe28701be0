//! Tests of every disk, on real files and real memory.

mod decorate;
mod file;
mod lazy;
mod memory;
mod overlay;
mod overlay_budget;
mod overlay_copy;
mod overlay_kept;
mod overlay_reads;
mod passthrough;
mod pinned;
mod shared;
mod thin;

use slipway_ram::Span;

use crate::model::{Choices, Model, noise, one};
use crate::{Disk, DiskError, Geometry, Operation, Request};

fn request(operation: Operation, lba: u64, blocks: u32, spans: Vec<Span>) -> Request {
    Request { tag: 1, operation, lba, blocks, spans, durable: false }
}

/// Runs pseudo-random batches on a disk that holds `bytes`, and compares it with its model.
fn against_model(disk: &mut dyn Disk, bytes: Vec<u8>, grain: u64, seed: u64) {
    Model::new(disk, bytes, grain).run(&mut Choices(&noise(seed, 20_000)));
}

fn write(disk: &mut dyn Disk, lba: u64, data: &[u8]) -> Result<(), DiskError> {
    let span = Span::heap(data.len());
    span.write(0, data).unwrap();
    let blocks = data.len() as u32 / disk.geometry().block_size;
    one(disk, request(Operation::Write, lba, blocks, vec![span]))
}

fn read(disk: &mut dyn Disk, lba: u64, blocks: u32) -> Result<Vec<u8>, DiskError> {
    let span = Span::heap((blocks * disk.geometry().block_size) as usize);
    one(disk, request(Operation::Read, lba, blocks, vec![span.clone()]))?;
    let mut data = vec![0; span.len()];
    span.read(0, &mut data).unwrap();
    Ok(data)
}

/// Checks that a disk refuses invalid requests.
fn refuses_the_impossible(disk: &mut dyn Disk) {
    let Geometry { block_size, blocks, .. } = disk.geometry();
    let span = || vec![Span::heap(block_size as usize)];
    for lba in [blocks, blocks + 1, u64::MAX] {
        let read = request(Operation::Read, lba, 1, span());
        assert_eq!(one(disk, read), Err(DiskError::OutOfRange));
        let discard = request(Operation::Discard, lba, u32::MAX, Vec::new());
        assert_eq!(one(disk, discard), Err(DiskError::OutOfRange));
    }
    for (lba, count) in [(blocks, 1), (u64::MAX, 1), (blocks - 1, 2)] {
        let spans = [Span::heap(count as usize * block_size as usize)];
        disk.expect(Operation::Read, lba, count);
        let refused = disk.transfer(Operation::Read, (lba, count), &spans);
        assert!(refused.is_none_or(|result| result == Err(DiskError::OutOfRange)));
    }
    let over = request(Operation::WriteZeroes, blocks - 1, 2, Vec::new());
    assert_eq!(one(disk, over), Err(DiskError::OutOfRange));
    let flush = request(Operation::Flush, u64::MAX, u32::MAX, Vec::new());
    assert_eq!(one(disk, flush), Ok(()), "a flush has no range");
    let nothing = request(Operation::Write, blocks, 0, Vec::new());
    assert_eq!(one(disk, nothing), Ok(()));
}
