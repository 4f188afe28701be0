//! Views of everything that a plane has, through its interface.

use slipway_plane::Settings;
use slipway_plane::views::{EndpointView, LivePart, Stage};
use slipway_plane_api::v1;
use slipway_plane_api::v1::plane_server::Plane as Calls;
use tokio_stream::StreamExt;

use crate::common::*;

/// Returns the parts that the interface's call gives.
fn parts(rig: &Rig, ids: &[&str]) -> Result<Vec<LivePart>, tonic::Status> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let ids = ids.iter().map(|id| (*id).to_owned()).collect();
    let request = tonic::Request::new(v1::InspectLiveRequest { ids });
    let service = rig.plane.service();
    runtime.block_on(async {
        let mut stream = service.inspect_live(request).await?.into_inner();
        let mut parts = Vec::new();
        while let Some(part) = stream.next().await {
            parts.push(serde_json::from_str(&part?.json).unwrap());
        }
        Ok(parts)
    })
}

/// Returns the endpoint of this id.
fn endpoint(rig: &Rig, id: &str) -> EndpointView {
    let found = parts(rig, &[id]).unwrap().into_iter().find_map(|part| match part {
        LivePart::Endpoint(view) if view.id == id => Some(*view),
        _ => None,
    });
    found.unwrap()
}

#[test]
fn an_idle_endpoint_names_its_queues_and_commands_move_their_numbers() {
    let rig = Rig::new();
    rig.plane.create(&rig.request("one", vec![ram(1 << 20)])).unwrap();
    let idle = endpoint(&rig, "one");
    assert_eq!((idle.kind.as_str(), idle.reactor), ("nvme", Some(0)));
    assert_eq!((idle.server.stage, idle.server.client_pid), (Stage::Listening, None));
    let thread = idle.threads[0].view.as_ref().unwrap();
    assert_eq!(thread.controller.as_ref().unwrap().phase, "disabled");
    assert!(thread.submission.is_empty());

    let mut driver = rig.drive();
    driver.create_pair(1, 16, Some(1)).unwrap();
    let look = || {
        let view = endpoint(&rig, "one");
        assert_eq!((view.server.stage, view.server.maps), (Stage::Connected, 1));
        assert_eq!(view.server.mapped_bytes, MEMORY);
        assert_eq!(view.server.client_pid, Some(std::process::id()));
        let thread = view.threads[0].view.clone().unwrap();
        assert_eq!(thread.controller.unwrap().phase, "enabled");
        let submission = thread.submission.into_iter().find(|queue| queue.id == 1).unwrap();
        (submission, thread.completion.into_iter().find(|queue| queue.id == 1).unwrap())
    };
    let (submission, completion) = look();
    assert_eq!((submission.size, submission.fetched, completion.posted), (16, 0, 0));
    round_trip(&mut driver, 1, 0, 8);
    let (submission, completion) = look();
    assert_eq!((submission.fetched, submission.in_flight, completion.posted), (2, 0, 2));
    assert_eq!((submission.head, submission.tail, completion.tail), (2, 2, 2));
}

#[test]
fn a_lane_is_on_a_reactor_of_its_own() {
    let rig = Rig::with(Settings { reactors: 2, ..Settings::default() });
    let mut request =
        rig.request("wide", vec![v1::disk::Kind::Null(v1::NullDisk { size_bytes: 1 << 20 })]);
    request.nvme.as_mut().unwrap().lanes = 2;
    rig.plane.create(&request).unwrap();
    let view = endpoint(&rig, "wide");
    let [home, lane] = &view.threads[..] else { panic!("{view:?}") };
    assert_ne!(home.reactor, lane.reactor);
    assert!(home.view.as_ref().unwrap().controller.is_some());
    assert!(lane.view.as_ref().unwrap().controller.is_none());
    let all = parts(&rig, &[]).unwrap();
    let LivePart::Reactors(reactors) = &all[0] else { panic!("{all:?}") };
    assert_eq!(reactors.iter().map(|one| one.endpoints).sum::<usize>(), 1);
    assert_eq!(reactors[lane.reactor].lanes, 1);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let service = rig.plane.service();
    let request = tonic::Request::new(v1::ListReactorsRequest {});
    let listed = runtime.block_on(service.list_reactors(request)).unwrap().into_inner().reactors;
    assert_eq!((listed.len(), listed[lane.reactor].lanes), (2, 1));
    assert_eq!(listed.iter().map(|one| one.endpoints).sum::<u64>(), 1);
}

#[test]
fn a_switch_is_there_for_all_and_for_its_ports_and_nothing_for_strangers() {
    let rig = Rig::new();
    let switch = v1::CreateSwitchRequest { name: "red".to_owned(), ..Default::default() };
    rig.plane.fabric().create_switch(&switch).unwrap();
    rig.plane.create(&rig.request("one", vec![ram(1 << 20)])).unwrap();
    let mut request = rig.request("one.net", Vec::new());
    request.socket_path = rig.dir.path().join("net").to_string_lossy().into_owned();
    let (switch, mac) = ("red".to_owned(), "02:00:00:00:00:01".to_owned());
    request.nvme = None;
    request.virtio_net = Some(v1::VirtioNet { switch, mac, ..Default::default() });
    rig.plane.create(&request).unwrap();
    let switches = |ids: &[&str]| {
        let found = parts(&rig, ids).unwrap().into_iter().filter_map(|part| match part {
            LivePart::Switch(switch) => Some(switch),
            LivePart::Reactors(_) | LivePart::Endpoint(_) => None,
        });
        found.collect::<Vec<_>>()
    };
    let ports = &switches(&["one"])[0].view.clone().unwrap().ports;
    assert_eq!((ports.len(), ports[0].name.as_str(), ports[0].up), (1, "one.net", false));
    assert!(ports[0].queues.rings.is_empty(), "there is no driver");
    assert_eq!(switches(&[]).len(), 1);
    let refused = parts(&rig, &["two"]).unwrap_err();
    assert_eq!(refused.code(), tonic::Code::NotFound);
    rig.plane.remove("one.net").unwrap();
    assert!(switches(&["one"]).is_empty());
}
