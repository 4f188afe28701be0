//! Files of an image that are found by their paths.

use std::fs::File;

use super::support::{Tar, merge_with};
use crate::Limits;
use crate::root::erofs::pick::{Bounds, pick};
use crate::root::layout::Layout;

const BOUNDS: Bounds = Bounds { entries: 100, bytes: 1 << 20, names: 1 << 20 };

/// Returns a file system with a folder of 2,000 names of more than 64 bytes.
fn file_system() -> File {
    let mut tar = Tar::new().file("x", "1").dir("many/").dir("many/sub/").file("many/sub/y", "2");
    for number in 0..2000 {
        tar = tar.file(&format!("many/{number:064}"), "");
    }
    let (tree, layers) = merge_with(&Limits::default(), &[tar.end()]).unwrap();
    let layout = Layout::of(&tree, [0; 16]).unwrap();
    let file = tempfile::tempfile().unwrap();
    layout.write_image(&tree, &layers, &file, &mut |_| {}).unwrap();
    file
}

#[test]
fn a_large_folder_is_read_a_few_times() {
    let file = file_system();
    let pick = |path: &str, count: usize| {
        let paths = vec![path.as_bytes().to_vec(); count];
        pick(&file, &paths, BOUNDS).map(|picked| picked.len())
    };
    assert_eq!(pick("many/sub/y", 3), Ok(3), "two folders and the file");
    let refused = |picked: Result<usize, String>| {
        let why = picked.unwrap_err();
        assert!(why.contains("folders of more than 1048576 bytes"), "{why}");
    };
    refused(pick("many/sub/y", 10));
    // One path is enough.
    refused(pick(&format!("{}many/sub/y", "many/sub/../../".repeat(10)), 1));
}

#[test]
fn each_folder_counts_with_a_block() {
    let file = file_system();
    let bounds = Bounds { names: 10 * 4096, ..BOUNDS };
    let paths = |count| vec![b"x".to_vec(); count];
    assert_eq!(pick(&file, &paths(10), bounds).unwrap().len(), 1);
    assert!(pick(&file, &paths(11), bounds).is_err());
}
