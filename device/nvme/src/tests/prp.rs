//! The PRP walk against the shortest reading of section 4.3.

use slipway_nvme_spec::status::Status;
use slipway_ram::Memory;

use crate::prp::Walker;

const PAGE: u64 = 4096;
/// The address of lists. Data lies in other pages, in an order that joins some and not others.
const LISTS: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;

fn page_of_data(index: u64) -> u64 {
    // Pages 0 and 1 are neighbours, 2 and 3 are, and so on; the pairs go backwards.
    DATA + PAGE * (2 * (200 - index / 2) + index % 2)
}

/// Writes the PRP list for `pages` pages of data at offset `offset` of a page, with pointers to
/// further lists where it is full. Returns its address, and the places of all entries.
fn write_lists(memory: &Memory, pages: u64, offset: u64) -> (u64, Vec<u64>) {
    let (mut list, mut at, mut entries) = (LISTS, LISTS + offset, Vec::new());
    for index in 0..pages {
        let last_of_page = at % PAGE == PAGE - 8;
        if last_of_page && index + 1 < pages {
            list += 3 * PAGE;
            memory.write(at, &list.to_le_bytes()).unwrap();
            entries.push(at);
            at = list;
        }
        memory.write(at, &page_of_data(index).to_le_bytes()).unwrap();
        entries.push(at);
        at += 8;
    }
    (LISTS + offset, entries)
}

/// Returns the address of byte `index` of the data.
fn model(prp1: u64, index: u64) -> u64 {
    let first = PAGE - prp1 % PAGE;
    match index.checked_sub(first) {
        None => prp1 + index,
        Some(rest) => page_of_data(rest / PAGE) + rest % PAGE,
    }
}

/// Checks the result of the walk, at both ends of every page and every run.
fn check(walker: &Walker, prp1: u64, len: u64) {
    let mut at = 0;
    for run in &walker.runs {
        let ends = [0, run.len as u64 - 1].into_iter();
        let inside = (0..run.len as u64).step_by(2048);
        for byte in ends.chain(inside) {
            assert_eq!(run.address + byte, model(prp1, at + byte), "byte {}", at + byte);
        }
        at += run.len as u64;
    }
    assert_eq!(at, len);
}

#[test]
fn every_shape_of_pointers_gives_its_bytes_in_order() {
    let memory = Memory::heap(4 << 20);
    let mut walker = Walker::default();
    for offset in [0, 4, 512, 2048, 4092] {
        let prp1 = 0x5000 + offset;
        let first = PAGE - offset;
        for pages in 0..40 {
            for list_offset in [0, 8, 2048, 4080, 4088] {
                let (list, _) = write_lists(&memory, pages, list_offset);
                for len in
                    [1, PAGE - 1, PAGE].map(|last| first + last).map(|len| len + PAGE * pages)
                {
                    // `len` takes one page more than the first and `pages`, unless it is shorter.
                    let Some(len) = len.checked_sub(PAGE) else { continue };
                    let needed = len.saturating_sub(first).div_ceil(PAGE);
                    if len == 0 || needed != pages {
                        continue;
                    }
                    let prp2 = if pages == 1 { page_of_data(0) } else { list };
                    let walked = walker.walk(&memory, PAGE, (prp1, prp2), len as usize);
                    assert_eq!(walked, Ok(()), "{offset} {pages} {list_offset} {len}");
                    check(&walker, prp1, len);
                }
            }
        }
    }
}

#[test]
fn every_entry_that_has_an_offset_is_refused() {
    let memory = Memory::heap(4 << 20);
    let mut walker = Walker::default();
    for list_offset in [0, 2048, 4080] {
        let (list, entries) = write_lists(&memory, 30, list_offset);
        let mut walk = || walker.walk(&memory, PAGE, (0x5000, list), 31 * PAGE as usize);
        assert_eq!(walk(), Ok(()));
        for at in entries {
            let mut right = [0; 8];
            memory.read(at, &mut right).unwrap();
            for bit in [1, 4, 8, 512, 2048u64] {
                let wrong = u64::from_le_bytes(right) | bit;
                memory.write(at, &wrong.to_le_bytes()).unwrap();
                assert_eq!(walk(), Err(Status::PRP_OFFSET_INVALID.dnr()), "{at:#x} {bit}");
            }
            memory.write(at, &right).unwrap();
        }
        assert_eq!(walk(), Ok(()));
    }
}

#[test]
fn a_list_that_points_at_itself_ends() {
    // A list full of its own address is data and pointer at once; the walk takes what it needs.
    let memory = Memory::heap(1 << 20);
    for at in (0..PAGE).step_by(8) {
        memory.write(0x8000 + at, &0x8000u64.to_le_bytes()).unwrap();
    }
    let mut walker = Walker::default();
    assert_eq!(walker.walk(&memory, PAGE, (0x8000, 0x8000), 16 << 20), Ok(()));
    assert_eq!(walker.runs.iter().map(|run| run.len).sum::<usize>(), 16 << 20);
    assert_eq!(walker.walk(&memory, PAGE, (0x8000, 0x8ff8), 16 << 20), Ok(()));
}
