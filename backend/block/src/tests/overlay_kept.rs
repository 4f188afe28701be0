//! Overlays whose process is killed before or after each store that a successor could see.

use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::overlay::testing::{Killed, kill_after};
use crate::{BaseIdentity, OpenError, OverlayDisk, RamDisk, overlay_file};

const SIZE: usize = 1 << 16;
const IDENTITY: BaseIdentity = [1, 2, 3, 4];

fn base_bytes() -> Vec<u8> {
    noise(21, SIZE)
}

fn base(block_size: u32) -> RamDisk {
    let mut base = RamDisk::new(SIZE as u64, block_size).unwrap();
    write(&mut base, 0, &base_bytes()).unwrap();
    base
}

pub(super) fn file(block_size: u32) -> OwnedFd {
    overlay_file(&base(block_size).geometry(), &IDENTITY).unwrap()
}

pub(super) fn adopt(file: &OwnedFd, block_size: u32) -> OverlayDisk<RamDisk> {
    OverlayDisk::of(base(block_size), None, file, &IDENTITY).unwrap()
}

/// Returns the bytes that the file takes.
pub(super) fn taken(file: &OwnedFd) -> u64 {
    rustix::fs::fstat(file).unwrap().st_blocks as u64 * 512
}

/// One operation on a disk, and on its model.
struct Step {
    operation: Operation,
    lba: u64,
    data: Vec<u8>,
    blocks: u32,
}

impl Step {
    fn random(choices: &mut Choices<'_>, block_size: u32) -> Self {
        let end = SIZE as u64 / u64::from(block_size);
        let lba = choices.below(end);
        let blocks = (1 + choices.below(40)).min(end - lba) as u32;
        let operation = match choices.below(5) {
            0..=2 => Operation::Write,
            3 => Operation::WriteZeroes,
            _ => Operation::Discard,
        };
        let data = noise(1 + choices.below(1 << 20), (blocks * block_size) as usize);
        Self { operation, lba, data, blocks }
    }

    /// Returns the request; a write's data is in two spans, cut at a third.
    fn request(&self) -> Request {
        if self.operation != Operation::Write {
            return request(self.operation, self.lba, self.blocks, Vec::new());
        }
        let (first, second) = self.data.split_at(self.data.len() / 3);
        let spans = [first, second].map(|bytes| {
            let span = Span::heap(bytes.len());
            span.write(0, bytes).unwrap();
            span
        });
        request(self.operation, self.lba, self.blocks, spans.to_vec())
    }

    fn range(&self, block_size: u32) -> std::ops::Range<usize> {
        let start = self.lba as usize * block_size as usize;
        start..start + self.data.len()
    }

    fn apply(&self, model: &mut [u8], block_size: u32) {
        let to = &mut model[self.range(block_size)];
        match self.operation {
            Operation::Write => to.copy_from_slice(&self.data),
            _ => to.fill(0),
        }
    }
}

/// A disk that is killed now and then, its expected content, and the blocks that were written.
struct Life {
    file: OwnedFd,
    disk: OverlayDisk<RamDisk>,
    block_size: u32,
    model: Vec<u8>,
    written: Vec<bool>,
    kills: u32,
}

impl Life {
    fn new(block_size: u32) -> Self {
        let file = file(block_size);
        let disk = adopt(&file, block_size);
        let written = vec![false; SIZE / block_size as usize];
        Self { file, disk, block_size, model: base_bytes(), written, kills: 0 }
    }

    /// Carries out `step` as a device would: again if its disk was killed before it ended. With
    /// `once` the client is gone as well, and the content after a kill stays as it is.
    fn run(&mut self, step: &Step, once: bool, mut next: impl FnMut() -> Option<u64>) {
        let blocks = step.lba as usize..step.lba as usize + step.blocks as usize;
        loop {
            kill_after(next());
            let done = catch_unwind(AssertUnwindSafe(|| one(&mut self.disk, step.request())));
            kill_after(None);
            match done {
                Ok(result) => break assert_eq!(result, Ok(())),
                Err(reason) if reason.is::<Killed>() => {
                    let found = self.succeed(step);
                    if once {
                        self.model = found;
                        self.written[blocks].fill(true);
                        return;
                    }
                }
                Err(reason) => resume_unwind(reason),
            }
        }
        step.apply(&mut self.model, self.block_size);
        self.written[blocks].fill(true);
    }

    /// Adopts the overlay after a kill and returns its content, after checking each block.
    fn succeed(&mut self, step: &Step) -> Vec<u8> {
        self.kills += 1;
        self.disk = adopt(&self.file, self.block_size);
        let found = read(&mut self.disk, 0, (SIZE / self.block_size as usize) as u32).unwrap();
        let mut after = self.model.clone();
        step.apply(&mut after, self.block_size);
        let size = self.block_size as usize;
        for (block, written) in self.written.iter().enumerate() {
            let bytes = block * size..(block + 1) * size;
            let (found, old, new) =
                (&found[bytes.clone()], &self.model[bytes.clone()], &after[bytes]);
            let whole = found == old || found == new;
            let mixed =
                || found.iter().zip(old.iter().zip(new)).all(|(f, (o, n))| f == o || f == n);
            let what = (step.operation, step.lba, step.blocks);
            assert!(whole || (*written && mixed()), "block {block} in {what:?}");
        }
        found
    }

    fn compare(&mut self) {
        let blocks = (SIZE / self.block_size as usize) as u32;
        assert!(read(&mut self.disk, 0, blocks).unwrap() == self.model);
        let used = self.disk.used();
        self.disk = adopt(&self.file, self.block_size);
        assert!(read(&mut self.disk, 0, blocks).unwrap() == self.model);
        assert_eq!(self.disk.used(), used);
        assert!(used + 3 * 4096 >= taken(&self.file), "{used} bytes used");
    }
}

#[test]
fn one_kill_at_every_point() {
    for block_size in [512, 4096] {
        let noise = noise(31, 4000);
        let mut choices = Choices(&noise);
        let steps: Vec<Step> = (0..40).map(|_| Step::random(&mut choices, block_size)).collect();
        let mut points = 0;
        for last in 0..steps.len() {
            // Run the steps before it undisturbed, then kill at each point of the next step.
            for at in 0.. {
                let mut life = Life::new(block_size);
                steps[..last].iter().for_each(|step| life.run(step, false, || None));
                let mut plan = Some(at).into_iter();
                life.run(&steps[last], false, || plan.next());
                life.compare();
                if life.kills == 0 {
                    break;
                }
                points += 1;
            }
        }
        assert!(points > 100, "only {points} points");
    }
}

#[test]
fn any_sequence_with_kills_anywhere_equals_its_model() {
    let mut kills = 0;
    for seed in 0..60 {
        let (steps, plans) = (noise(100 + seed, 4000), noise(200 + seed, 40_000));
        let (mut steps, mut plans) = (Choices(&steps), Choices(&plans));
        let mut life = Life::new(if seed % 2 == 0 { 512 } else { 4096 });
        for _ in 0..80 {
            let step = Step::random(&mut steps, life.block_size);
            let once = plans.below(4) == 0;
            // Sometimes there is no kill, so that each step ends.
            life.run(&step, once, || (plans.below(4) > 0).then(|| plans.below(8)));
        }
        life.compare();
        kills += life.kills;
    }
    assert!(kills > 1500, "only {kills} kills");
}

#[test]
fn a_kept_overlay_equals_its_model_and_costs_what_was_written() {
    for (seed, block_size) in [(41, 512), (42, 4096)] {
        let file = file(block_size);
        assert!(taken(&file) <= 4096, "{} bytes for nothing", taken(&file));
        let mut disk = adopt(&file, block_size);
        refuses_the_impossible(&mut disk);
        read(&mut disk, 0, (SIZE / block_size as usize) as u32).unwrap();
        assert!(taken(&file) <= 4096, "{} bytes for reads", taken(&file));
        against_model(&mut disk, base_bytes(), 1, seed);
        let blocks = SIZE as u32 / block_size;
        one(&mut disk, request(Operation::Discard, 0, blocks, Vec::new())).unwrap();
        assert_eq!(disk.used(), 0);
        assert!(taken(&file) <= 3 * 4096, "{} bytes after a discard", taken(&file));
        assert!(read(&mut adopt(&file, block_size), 0, blocks).unwrap() == [0; SIZE]);
        assert!(taken(&file) <= 3 * 4096, "{} bytes after reading zeros", taken(&file));
    }
}

#[test]
fn a_limit_holds_for_successors() {
    let file = file(512);
    let limited = || OverlayDisk::of(base(512), Some(2 * 4096), &file, &IDENTITY).unwrap();
    write(&mut limited(), 0, &[1; 2 * 4096]).unwrap();
    assert_eq!(limited().used(), 2 * 4096);
    assert_eq!(write(&mut limited(), 16, &[2; 512]), Err(DiskError::NoSpace));
    // A successor may have a smaller limit than the overlay has used.
    let mut less = OverlayDisk::of(base(512), Some(4096), &file, &IDENTITY).unwrap();
    assert_eq!(write(&mut less, 16, &[2; 512]), Err(DiskError::NoSpace));
    write(&mut less, 3, &[3; 512]).unwrap();
}

/// Returns the reason why an overlay's file is refused after `change`.
fn refused(change: impl FnOnce(&OwnedFd)) -> String {
    let file = file(512);
    change(&file);
    match OverlayDisk::of(base(512), None, &file, &IDENTITY) {
        Err(error @ OpenError::Kept(_)) => error.to_string(),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was taken"),
    }
}

#[test]
fn what_is_no_overlay_of_this_base_is_refused() {
    let store = |at: u64, bytes: &'static [u8]| {
        move |file: &OwnedFd| assert_eq!(rustix::io::pwrite(file, bytes, at), Ok(bytes.len()))
    };
    assert!(refused(store(0, b"x")).contains("no overlay"));
    assert!(refused(store(12, &[9])).contains("another version"));
    assert!(refused(store(16, &[0, 16])).contains("another shape"));
    assert!(refused(store(24, &[1])).contains("another shape"));
    assert!(refused(store(32, &[9])).contains("another base"));
    assert!(refused(store(56, &[9])).contains("another base"));
    // The map has 16 pages.
    assert!(refused(store(8192 + 2, &[1])).contains("beyond the disk"));
}

#[test]
fn a_file_of_another_kind_is_refused() {
    let geometry = base(512).geometry();
    let of = |file: &OwnedFd| OverlayDisk::of(base(512), None, file, &IDENTITY).map(drop);
    let larger = Geometry { blocks: geometry.blocks + 8, ..geometry };
    let longer = overlay_file(&larger, &IDENTITY).unwrap();
    assert!(matches!(of(&longer), Err(OpenError::Kept(_))));
    let bare = rustix::fs::memfd_create("x", MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&bare, rustix::fs::fstat(file(512)).unwrap().st_size as u64).unwrap();
    assert!(matches!(of(&bare), Err(OpenError::Memory { .. })), "it could be cut");
    rustix::fs::fcntl_add_seals(&bare, SealFlags::SHRINK).unwrap();
    assert!(matches!(of(&bare), Err(OpenError::Kept(_))));
    let impossible = Geometry { blocks: u64::MAX / 512, ..geometry };
    assert!(matches!(overlay_file(&impossible, &IDENTITY), Err(OpenError::Memory { .. })));
}
