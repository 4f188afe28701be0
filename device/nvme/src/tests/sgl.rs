//! SGLs: valid lists against a model, and a status for every invalid one (section 4.4).

use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::sgl::{DescriptorType, SglDescriptor};
use slipway_nvme_spec::status::Status;
use slipway_ram::Memory;
use zerocopy::IntoBytes;

use super::rig::{MEMORY, Random, Rig, Setup};
use crate::driver::io;
use crate::prp::{Run, Walker};
use crate::sgl::MOST_DESCRIPTORS;

const DATA: DescriptorType = DescriptorType::DataBlock;
const SEGMENT: DescriptorType = DescriptorType::Segment;
const LAST: DescriptorType = DescriptorType::LastSegment;

fn d(kind: DescriptorType, address: u64, length: u32) -> SglDescriptor {
    SglDescriptor::new(kind, address, length)
}

fn put(memory: &Memory, at: u64, descriptors: &[SglDescriptor]) {
    memory.write(at, descriptors.as_bytes()).unwrap();
}

/// Returns the expected result of a walk: every byte's address, by the shortest reading of section
/// 4.4.
fn model(segments: &[(u64, Vec<SglDescriptor>)], len: usize) -> Vec<u64> {
    let data = segments.iter().flat_map(|(_, all)| all).filter(|one| one.kind() == DATA);
    let bytes =
        data.flat_map(|one| (0..u64::from(one.length.get())).map(|b| one.address.get() + b));
    bytes.take(len).collect()
}

fn addresses(runs: &[Run]) -> Vec<u64> {
    runs.iter().flat_map(|run| (0..run.len as u64).map(|at| run.address + at)).collect()
}

/// Runs every split of up to five data blocks over up to three segments, including blocks without
/// data.
#[test]
fn every_small_list_gives_its_bytes_in_order() {
    let memory = Memory::heap(1 << 16);
    let mut walker = Walker::default();
    let lengths = [0u32, 4, 8];
    for blocks in 1..=5usize {
        for shape in 0..3usize.pow(blocks as u32) {
            for (first, second) in cuts(blocks) {
                let block = |at: usize| {
                    let length = lengths[shape / 3usize.pow(at as u32) % 3];
                    // Some are neighbours, so that runs join.
                    d(DATA, 0x8000 + 8 * at as u64, length)
                };
                let all: Vec<_> = (0..blocks).map(block).collect();
                let parts = [&all[..first], &all[first..second], &all[second..]];
                let segments = chain(&memory, &parts);
                let entry = segments[0].1[0];
                let have: usize = all.iter().map(|one| one.length.get() as usize).sum();
                for len in 1..=have + 1 {
                    let walked = walker.walk_sgl(&memory, entry, len);
                    if len > have {
                        assert_eq!(walked, Err(Status::SGL_LENGTH_INVALID.dnr()));
                    } else {
                        assert_eq!(walked, Ok(()));
                        assert_eq!(addresses(&walker.runs), model(&segments[1..], len));
                    }
                }
            }
        }
    }
}

/// Returns the ways to cut `blocks` blocks into three parts, of which the last two may be empty.
fn cuts(blocks: usize) -> impl Iterator<Item = (usize, usize)> {
    (1..=blocks).flat_map(move |first| (first..=blocks).map(move |second| (first, second)))
}

/// Writes the parts as segments that follow one another. The first element of the result is the
/// descriptor of the command.
fn chain(memory: &Memory, parts: &[&[SglDescriptor]]) -> Vec<(u64, Vec<SglDescriptor>)> {
    let parts: Vec<_> = parts.iter().filter(|part| !part.is_empty()).collect();
    let at = |index: usize| 0x100 * (1 + index as u64);
    let points = |index: usize| {
        let last = index + 1 == parts.len();
        let count = parts[index].len() + usize::from(!last);
        d(if last { LAST } else { SEGMENT }, at(index), 16 * count as u32)
    };
    let mut segments = vec![(0, vec![points(0)])];
    for (index, part) in parts.iter().enumerate() {
        let mut all = part.to_vec();
        if index + 1 < parts.len() {
            all.push(points(index + 1));
        }
        put(memory, at(index), &all);
        segments.push((at(index), all));
    }
    segments
}

/// Returns the status of a read of 4096 bytes.
fn read(rig: &mut Rig, first: SglDescriptor) -> Status {
    let command = io(NvmOpcode::Read, 1, 0, 8).with_sgl(first);
    rig.status(1, command)
}

#[test]
fn every_bad_descriptor_has_its_status() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    let list = rig.buffer(4096);
    let out = MEMORY as u64;
    let good = d(DATA, page, 4096);
    let half = d(DATA, page, 2048);
    let segment = |rig: &Rig, kind, descriptors: &[SglDescriptor]| {
        put(rig.driver.arena.memory(), list, descriptors);
        d(kind, list, 16 * descriptors.len() as u32)
    };
    assert_eq!(read(&mut rig, good), Status::SUCCESS);
    let kind = Status::SGL_TYPE_INVALID.dnr();
    for identifier in [0x10, 0x40, 0x50, 0x60, 0xf0, 0x01, 0x21, 0x3f] {
        let (mut first, mut bad) = (good, half);
        (first.identifier, bad.identifier) = (identifier, identifier);
        assert_eq!(read(&mut rig, first), kind, "{identifier:#x}");
        let first = segment(&rig, LAST, &[half, bad]);
        assert_eq!(read(&mut rig, first), kind, "{identifier:#x} in a segment");
    }
    let bad_segment = Status::SGL_SEGMENT_INVALID.dnr();
    let count = Status::SGL_COUNT_INVALID.dnr();
    let cases: [(&str, DescriptorType, &[SglDescriptor], Status); 9] = [
        ("data", LAST, &[half, half], Status::SUCCESS),
        ("longer than the data", LAST, &[half, half, half], Status::SUCCESS),
        ("shorter than the data", LAST, &[half], Status::SGL_LENGTH_INVALID.dnr()),
        ("a segment in the last one", LAST, &[half, d(SEGMENT, list, 16)], bad_segment),
        ("a last one in the last one", LAST, &[half, d(LAST, list, 16)], bad_segment),
        ("nothing after one that is not last", SEGMENT, &[half], bad_segment),
        ("a segment in the middle", SEGMENT, &[half, d(SEGMENT, list, 16), half], count),
        ("a last one in the middle", SEGMENT, &[half, d(LAST, list, 16), half], count),
        ("no data at all", LAST, &[d(DATA, page, 0)], Status::SGL_LENGTH_INVALID.dnr()),
    ];
    for (name, kind, descriptors, status) in cases {
        let first = segment(&rig, kind, descriptors);
        assert_eq!(read(&mut rig, first), status, "{name}");
    }
    let granularity = Status::SGL_GRANULARITY_INVALID.dnr();
    let single = [
        ("short block", half, Status::SGL_LENGTH_INVALID.dnr()),
        ("longer block", d(DATA, page, 8192), Status::SUCCESS),
        ("no length", d(LAST, list, 0), bad_segment),
        ("half a descriptor", d(SEGMENT, list, 24), bad_segment),
        ("4 GiB of descriptors", d(LAST, list, 0xffff_fff0), count),
        ("one too many", d(LAST, 0, 16 * (MOST_DESCRIPTORS + 1)), count),
        ("a segment nowhere", d(LAST, out, 16), Status::DATA_TRANSFER_ERROR),
        ("a segment at the top", d(LAST, u64::MAX - 7, 16), Status::DATA_TRANSFER_ERROR),
        ("data nowhere", d(DATA, out, 4096), Status::DATA_TRANSFER_ERROR),
        ("data at the top", d(DATA, !3, 4096), Status::DATA_TRANSFER_ERROR),
        ("odd address", d(DATA, page + 2, 4096), granularity),
        ("odd length", d(DATA, page, 4098), granularity),
    ];
    for (name, first, status) in single {
        assert_eq!(read(&mut rig, first), status, "{name}");
    }
    rig.driver.identify_controller().unwrap();
}

#[test]
fn a_list_that_points_at_itself_ends() {
    let mut rig = Setup::new().rig();
    let page = rig.buffer(4096);
    let list = rig.buffer(4096);
    let itself = d(SEGMENT, list, 16);
    put(rig.driver.arena.memory(), list, &[itself]);
    assert_eq!(read(&mut rig, itself), Status::SGL_COUNT_INVALID.dnr());
    let itself = d(SEGMENT, list, 32);
    put(rig.driver.arena.memory(), list, &[d(DATA, page, 0), itself]);
    assert_eq!(read(&mut rig, itself), Status::SGL_COUNT_INVALID.dnr());
    // With data in it, the list names the same place again and again.
    put(rig.driver.arena.memory(), list, &[d(DATA, page, 512), itself]);
    assert_eq!(read(&mut rig, itself), Status::SUCCESS);
}

#[test]
fn data_moves_through_lists_of_all_shapes() {
    let mut rig = Setup::new().rig();
    let buffer = rig.buffer(1 << 20);
    let lists = rig.buffer(64 << 10);
    let mut random = Random(5);
    for _ in 0..200 {
        let blocks = random.below(64) + 1;
        let len = blocks as usize * 512;
        // The places are in order, with gaps, so that none is named twice.
        let (mut pieces, mut left, mut at) = (Vec::new(), len as u64, buffer);
        while left > 0 {
            let size = (4 * (random.below(700) + 1)).min(left);
            at += 4 * random.below(3);
            pieces.push(d(DATA, at, size as u32));
            (at, left) = (at + size, left - size);
        }
        let first = scatter(&rig, lists, &pieces, random.below(9) as usize + 1);
        let data = random.bytes(len);
        let mut done = 0;
        for piece in &pieces {
            let part = &data[done..done + piece.length.get() as usize];
            rig.fill(piece.address.get(), part);
            done += part.len();
        }
        let write = io(NvmOpcode::Write, 1, 100, blocks as u32).with_sgl(first);
        assert_eq!(rig.status(1, write), Status::SUCCESS);
        rig.fill(buffer, &vec![0xa5; 1 << 19]);
        let read = io(NvmOpcode::Read, 1, 100, blocks as u32).with_sgl(first);
        assert_eq!(rig.status(1, read), Status::SUCCESS);
        let place =
            |piece: &SglDescriptor| rig.bytes(piece.address.get(), piece.length.get() as usize);
        let got: Vec<u8> = pieces.iter().flat_map(place).collect();
        assert!(got == data);
        let kept = rig.bytes(buffer, 1 << 19);
        let outside = kept.iter().zip(buffer..).filter(|(_, at)| {
            let end = |p: &SglDescriptor| p.address.get() + u64::from(p.length.get());
            !pieces.iter().any(|p| (p.address.get()..end(p)).contains(at))
        });
        assert!(outside.into_iter().all(|(byte, _)| *byte == 0xa5));
    }
}

/// Writes `pieces` as segments of at most `most` pieces at `lists`, and returns the command's
/// descriptor.
fn scatter(rig: &Rig, lists: u64, pieces: &[SglDescriptor], most: usize) -> SglDescriptor {
    let memory = rig.driver.arena.memory();
    let segments = pieces.len().div_ceil(most);
    let at = |index: usize| lists + 16 * (index * (most + 1)) as u64;
    let points = |index: usize| {
        let rest = pieces.len() - index * most;
        let last = index + 1 == segments;
        let count = if last { rest } else { most + 1 };
        d(if last { LAST } else { SEGMENT }, at(index), 16 * count as u32)
    };
    for (index, part) in pieces.chunks(most).enumerate() {
        let mut all = part.to_vec();
        if index + 1 < segments {
            all.push(points(index + 1));
        }
        put(memory, at(index), &all);
    }
    points(0)
}

#[test]
fn ranges_of_dataset_management_may_come_by_a_list() {
    let mut rig = Setup::new().rig();
    let list = rig.buffer(4096);
    rig.fill(list, &[0, 0, 0, 0, 8, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
    let discard = SubmissionEntry::new(9, 1).with_dword(11, 4).with_sgl(d(DATA, list, 16));
    assert_eq!(rig.status(1, discard), Status::SUCCESS);
    // Linux names room for 256 ranges, however many there are.
    let discard = SubmissionEntry::new(9, 1).with_dword(11, 4).with_sgl(d(DATA, list, 4096));
    assert_eq!(rig.status(1, discard), Status::SUCCESS);
}
