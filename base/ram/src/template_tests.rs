use super::*;

const PAGE: usize = Template::GRANULE;

/// Returns a memfd of these bytes, each the first of a page.
pub(crate) fn pages(bytes: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create("source", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, (bytes.len() * PAGE) as u64).unwrap();
    for (number, byte) in bytes.iter().enumerate().filter(|(_, byte)| **byte != 0) {
        rustix::io::pwrite(&file, &[*byte], (number * PAGE) as u64).unwrap();
    }
    file
}

fn firsts(template: &Template) -> Vec<u8> {
    let first = |at| {
        let mut byte = [9];
        rustix::io::pread(template.file(), &mut byte, at as u64).unwrap();
        byte[0]
    };
    (0..template.len()).step_by(PAGE).map(first).collect()
}

#[test]
fn it_has_pages_where_there_are_bytes_and_cannot_be_changed() {
    let source = pages(&[0, 7, 8, 0, 0, 9]);
    // A page that is there and zeros.
    rustix::io::pwrite(&source, &[0], 3 * PAGE as u64).unwrap();
    let template = Template::copy_of(source.as_fd()).unwrap();
    assert_eq!(template.data(), [PAGE..3 * PAGE, 5 * PAGE..6 * PAGE]);
    assert_eq!((template.len(), template.held()), (6 * PAGE, 3 * PAGE));
    assert_eq!(firsts(&template), [0, 7, 8, 0, 0, 9]);
    let file = template.file();
    assert!(rustix::io::pwrite(file, &[1], 0).is_err());
    assert!(
        rustix::fs::ftruncate(file, 0).is_err() && rustix::fs::ftruncate(file, 1 << 20).is_err()
    );
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert!(rustix::fs::fallocate(file, hole, PAGE as u64, PAGE as u64).is_err());
    let again = Template::new(template.file().try_clone_to_owned().unwrap()).unwrap();
    assert_eq!(again.data(), template.data());
}

#[test]
fn pages_with_bytes_that_follow_each_other_are_one_run() {
    let page = |value| vec![value; PAGE];
    let chunk = [page(0), page(1), page(2), page(0), page(3), vec![4u8; 10]].concat();
    assert_eq!(data_runs(&chunk), [PAGE..3 * PAGE, 4 * PAGE..5 * PAGE + 10]);
    assert!(data_runs(&page(0)).is_empty() && data_runs(&[]).is_empty());
}

#[test]
fn a_file_on_disk_brings_it_back() {
    let template = Template::copy_of(pages(&[1, 0, 0, 2]).as_fd()).unwrap();
    let file = tempfile::tempfile().unwrap();
    template.write(file.as_fd()).unwrap();
    let again = Template::copy_of(file.as_fd()).unwrap();
    assert_eq!((firsts(&again), again.data()), (vec![1, 0, 0, 2], template.data()));
    // A file system without holes says that all is data.
    let whole = [vec![0; 2 * PAGE], vec![5; PAGE]].concat();
    rustix::io::pwrite(&file, &whole, 0).unwrap();
    let again = Template::copy_of(file.as_fd()).unwrap();
    assert_eq!((firsts(&again), again.held()), (vec![0, 0, 5, 2], 2 * PAGE));
}

#[test]
fn files_of_another_size_or_that_can_change_are_none() {
    for size in [0, 1, PAGE + 1] {
        let file = pages(&[]);
        rustix::fs::ftruncate(&file, size as u64).unwrap();
        let refused = Template::copy_of(file.as_fd()).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{size}");
    }
    assert_eq!(Template::new(pages(&[1])).unwrap_err().kind(), io::ErrorKind::InvalidData);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    for missing in [SealFlags::WRITE, SealFlags::SHRINK, SealFlags::GROW] {
        let file = rustix::fs::memfd_create("half", flags).unwrap();
        rustix::fs::ftruncate(&file, PAGE as u64).unwrap();
        rustix::fs::fcntl_add_seals(&file, SEALS - missing).unwrap();
        assert_eq!(Template::new(file).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}

#[test]
fn parts_come_from_the_file_that_has_them() {
    let (one, two) = (pages(&[1, 2, 3, 4]), pages(&[5, 6, 7, 8]));
    let from = [Some(&one), None, Some(&two), Some(&two)];
    let parts = from
        .iter()
        .enumerate()
        .map(|(at, file)| (at * PAGE..(at + 1) * PAGE, file.map(|file| file.as_fd())));
    assert_eq!(firsts(&Template::of_parts(4 * PAGE, parts).unwrap()), [1, 0, 7, 8]);
}
