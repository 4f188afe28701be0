//! The entry of the fuzz target.

use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::{Rules, unpack};
use crate::place::{Source, place};

/// Unpacks `data` as an archive of a guest's and of the host's, which must neither panic nor run
/// away, nor make anything beside its place, whatever `data` is. Then repeats this with the
/// checksum of every header corrected, since a fuzzer that must guess checksums never gets past
/// the first header.
pub fn fuzz_unpack(data: &[u8]) {
    let mut repaired = data.to_vec();
    for block in repaired.as_chunks_mut::<512>().0 {
        if block[257..262] == *b"ustar" {
            let mut header = tar::Header::new_old();
            header.as_mut_bytes().copy_from_slice(block);
            header.set_cksum();
            block.copy_from_slice(header.as_bytes());
        }
    }
    for data in [data, &repaired] {
        let source = Source { is_directory: true, is_contents: false, name: "in".as_ref() };
        try_unpack(data, Some(source), Rules::of_guest(false));
        try_unpack(data, None, Rules::of_host(false));
    }
}

fn try_unpack(data: &[u8], source: Option<Source<'_>>, rules: Rules) {
    let Ok(above) = tempfile::tempdir() else { return };
    if std::fs::create_dir(above.path().join("place")).is_err() {
        return;
    }
    let Ok(root) = rustix::fs::open(above.path(), OFlags::PATH, Mode::empty()) else { return };
    let Ok(place) = place(root.as_fd(), Path::new("/place"), source) else { return };
    let _ = unpack(data, &place, rules);
    let there = std::fs::read_dir(above.path()).map_or(1, Iterator::count);
    assert_eq!(there, 1, "an archive has made something beside its place");
}
