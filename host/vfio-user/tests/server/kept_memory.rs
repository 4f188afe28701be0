//! The files of mapped memory that lie with the keeper.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::Arc;

use slipway_keeper::{Keeper, Shelf};
use slipway_ram::Lasting;
use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::{EndpointParts, KEPT_LEN, KEPT_SLOTS, Kept};

use crate::common::*;

fn keeper(directory: &tempfile::TempDir) -> Arc<Keeper> {
    let path = directory.path().join("keeper");
    let at = path.clone();
    std::thread::spawn(move || slipway_keeper::serve(&at));
    let mut connected = None;
    eventually("a keeper", || {
        connected = Keeper::connect(&path).ok();
        connected.is_some()
    });
    Arc::new(connected.unwrap())
}

/// Returns the slots that hold a descriptor.
fn slots(keeper: &Keeper) -> Vec<u32> {
    keeper.take(PATIENCE).unwrap().into_iter().map(|(slot, _)| slot).collect()
}

#[test]
fn the_keeper_has_the_files_of_mapped_memory_and_none_of_refused_maps() {
    let directory = tempfile::tempdir().unwrap();
    let keeper = keeper(&directory);
    let served = serve_parts(
        Arc::new(Reactor::spawn(Settings::default()).unwrap()),
        |_| {},
        |config| {
            let shelf = Shelf::new(keeper.clone(), 0..KEPT_SLOTS);
            let memory = Lasting::new("kept", KEPT_LEN).unwrap();
            EndpointParts::kept(config, Kept { shelf, memory, found: BTreeMap::new() }).unwrap()
        },
    );
    let mut raw = served.client();
    let before = slots(&keeper);
    let guest = memory(0x4000);
    raw.map(0, 0x4000, guest.as_fd()).ok();
    let mapped = slots(&keeper);
    assert_eq!(mapped.len(), before.len() + 1);
    assert_eq!(raw.map(0x1000, 0x1000, guest.as_fd()).err(), Errno::EXIST);
    assert_eq!(slots(&keeper), mapped);
    // Nor has the refusal taken the file of the memory that is mapped.
    raw.map(0x4000, 0x1000, guest.as_fd()).ok();
    assert_eq!(slots(&keeper).len(), mapped.len() + 1);
    raw.call(Command::DmaUnmap, dma_unmap(0x4000, 0x1000).as_bytes()).ok();
    assert_eq!(slots(&keeper), mapped);
}
