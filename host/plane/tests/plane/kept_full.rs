//! An endpoint whose description is as long as a keeper's memory for it allows.

use std::path::Path;

use slipway_keeper::Keeper;
use slipway_plane::{Error, Plane, Settings};
use slipway_plane_api::v1;

/// More than the longest description that is kept, bytes.
const TOO_LONG: usize = 128 << 10;

/// Makes a plane with a keeper, which is a thread.
fn plane(dir: &Path) -> Plane {
    let path = dir.join("keeper");
    let served = path.clone();
    std::thread::spawn(move || slipway_keeper::serve(&served).unwrap());
    let keeper = loop {
        match Keeper::connect(&path) {
            Ok(keeper) => break keeper,
            Err(_) => std::thread::yield_now(),
        }
    };
    Plane::with_keeper(Settings::default(), keeper, &dir.join("witness")).unwrap()
}

#[test]
fn limits_that_cannot_be_kept_are_not_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let plane = plane(dir.path());
    let request = |len| v1::CreateEndpointRequest {
        id: "one".to_owned(),
        socket_path: dir.path().join("cntrl").to_string_lossy().into_owned(),
        nvme: Some(v1::NvmeController { serial: "x".repeat(len), ..Default::default() }),
        ..Default::default()
    };
    let mut len = TOO_LONG;
    while plane.create(&request(len)).is_err() {
        len -= 8;
    }
    // More than 8 bytes.
    let (commands_per_second, bytes_per_second) = (u64::MAX, u64::MAX);
    let limits = v1::Limits { commands_per_second, bytes_per_second, ..Default::default() };
    let limits = v1::LimitEndpointRequest { endpoint_id: "one".to_owned(), limits: Some(limits) };
    assert!(matches!(plane.limit(&limits), Err(Error::Invalid(_))));
    assert_eq!(plane.get("one").unwrap().limits, None);
    plane.remove("one").unwrap();
}
