use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::*;

fn text(figures: Figures) -> String {
    let mut registry = Registry::with_prefix("slipway");
    registry.register_collector(Box::new(figures));
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    text
}

fn add() -> network_v1::Operation {
    let counts = vec![1, 2, 0];
    network_v1::Operation { command: "ADD".into(), failed: 3, counts, sum_ns: 8_000_000 }
}

fn vf_pool() -> vf_v1::Pool {
    let vf = |state: &str| vf_v1::Vf { state: state.into(), takes: 2, ..Default::default() };
    let vfs = ["ready", "taken", "being reset"].map(vf).to_vec();
    let (name, retries) = ("nics".into(), 3);
    vf_v1::Pool { name, vfs, resets: 4, refusals: 5, retries, ..Default::default() }
}

fn sockets() -> Report {
    let guest = |streams| slipway_sgiov::GuestReport {
        name: "g".into(),
        tenant: "t".into(),
        addresses: Vec::new(),
        running: true,
        listeners: Vec::new(),
        streams,
        sent: 10,
        received: 20,
    };
    let guests = vec![guest(2), guest(3)];
    Report { connections_in_all: 4, sent: 5, received: 6, guests, ..Report::default() }
}

fn served(name: &str, state: &str) -> Status {
    let mut status = Status { state: state.into(), waiting: 2, failed: 1, ..Status::default() };
    status.about.name = name.into();
    status
}

fn figures() -> Figures {
    let stage =
        v1::StageTimes { name: "total".into(), counts: vec![1, 2, 4], sum_ns: 2_500_000_000 };
    let starts = v1::FiguresReply {
        started: 7,
        failed: 1,
        bounds_ns: vec![1_000_000, 1_000_000_000],
        stages: vec![stage],
        control_groups: Some(v1::ControlGroups { ready: 16, ..Default::default() }),
        spare_vmms: Some(v1::SpareVmms { ready: 2, taken: 5, ..Default::default() }),
        traces: Some(v1::TraceFigures { sent_spans: 11, dropped_spans: 12 }),
        template_forks: 4,
        automatic_forks: 3,
        snapshot_forks: 2,
        saved: vec![v1::SavedMachines {
            kind: "snapshot".into(),
            count: 1,
            memory_bytes: 4096,
            disk_bytes: 512,
        }],
    };
    let port = plane_v1::SwitchPort {
        name: "a\"b\n".into(),
        frames_in: 5,
        dropped_out: [("full".to_owned(), 3)].into(),
        ..Default::default()
    };
    let overlays = plane_v1::OverlayMemory { held_bytes: 3, limit_bytes: 4, refused_writes: 5 };
    let endpoint =
        plane_v1::Endpoint { id: "e".into(), overlays: Some(overlays), ..Default::default() };
    let disk = |refused_writes| plane_v1::NamespaceStatus { refused_writes, ..Default::default() };
    let io = plane_v1::EndpointIo { reads: 2, read_bytes: 8192, ..Default::default() };
    let namespaces = vec![disk(4), disk(3)];
    let region = |size_bytes| plane_v1::DmaRegion { size_bytes, ..Default::default() };
    let dma_regions = vec![region(4096), region(8192)];
    let endpoint = plane_v1::Endpoint { client_pid: 7, dma_regions, ..endpoint };
    let endpoint = plane_v1::Endpoint { namespaces, io: Some(io), ..endpoint };
    let switch = plane_v1::Switch { name: "net".into(), ports: vec![port] };
    Figures {
        status: v1::StatusReply { version: "1.2".into(), ..Default::default() },
        starts,
        sandboxes: vec![v1::Sandbox { state: "running".into(), ..Default::default() }],
        endpoints: vec![endpoint],
        switches: vec![switch],
        pool: Some(plane_v1::Pool {
            lent_bytes: 9,
            faults: 8,
            dirty_bytes: 7,
            spare_forks: 3,
            spare_pages_bytes: 4096,
            spare_forks_given: 6,
            nodes: vec![plane_v1::PoolNode { node: 1, free_bytes: 2, lent_bytes: 3 }],
            ..Default::default()
        }),
        overlays: plane_v1::OverlayMemory { refused_writes: 6, ..overlays },
        functions: vec![vf_pool()],
        cni: network_v1::Operations {
            bounds_ns: vec![1_000_000, 5_000_000],
            operations: vec![add()],
        },
        reactors: vec![
            plane_v1::Reactor::default(),
            plane_v1::Reactor { busy_ns: 1_500_000_000, lanes: 2, ..Default::default() },
        ],
        sockets: Some(sockets()),
        served: vec![served("f", "serving"), served("h", "silent")],
    }
}

#[test]
fn metrics_have_base_units_and_labels() {
    let text = text(figures());
    for line in [
        "slipway_build_info{version=\"1.2\"} 1",
        "slipway_sandboxes{state=\"running\"} 1",
        "slipway_sandboxes{state=\"lost\"} 0",
        "slipway_sandbox_starts_total{outcome=\"running\"} 7",
        "slipway_sandbox_start_seconds_bucket{le=\"0.001\",stage=\"total\"} 1",
        "slipway_sandbox_start_seconds_bucket{le=\"1.0\",stage=\"total\"} 3",
        "slipway_sandbox_start_seconds_bucket{le=\"+Inf\",stage=\"total\"} 7",
        "slipway_sandbox_start_seconds_sum{stage=\"total\"} 2.5",
        "slipway_cni_operations_total{command=\"ADD\",outcome=\"succeeded\"} 3",
        "slipway_cni_operations_total{command=\"ADD\",outcome=\"failed\"} 3",
        "# TYPE slipway_cni_operation_seconds histogram",
        "slipway_cni_operation_seconds_bucket{le=\"0.005\",command=\"ADD\"} 3",
        "slipway_cni_operation_seconds_sum{command=\"ADD\"} 0.008",
        "slipway_control_groups{state=\"ready\"} 16",
        "slipway_spare_vmms 2",
        "slipway_spare_vmm_events_total{event=\"taken\"} 5",
        "slipway_spare_vmm_events_total{event=\"missed\"} 0",
        "slipway_trace_spans_total{outcome=\"sent\"} 11",
        "slipway_trace_spans_total{outcome=\"dropped\"} 12",
        "slipway_port_sent_frames_total{switch=\"net\",port=\"a\\\"b\\n\"} 5",
        "slipway_endpoint_reads_total{endpoint=\"e\"} 2",
        "slipway_endpoint_read_bytes_total{endpoint=\"e\"} 8192",
        "slipway_endpoint_written_bytes_total{endpoint=\"e\"} 0",
        "slipway_endpoint_overlays_bytes{endpoint=\"e\"} 3",
        "slipway_endpoint_overlays_refused_writes_total{endpoint=\"e\"} 5",
        "slipway_endpoint_disks_refused_writes_total{endpoint=\"e\"} 7",
        "slipway_overlays_bytes 3",
        "slipway_overlays_limit_bytes 4",
        "slipway_overlays_refused_writes_total 6",
        "slipway_memory_pool_bytes{owner=\"lent\"} 9",
        "slipway_memory_pool_faults_total 8",
        "slipway_memory_pool_pages_bytes{state=\"dirty\"} 7",
        "slipway_memory_pool_node_bytes{node=\"1\",owner=\"lent\"} 3",
        "slipway_memory_pool_spare_forks 3",
        "slipway_memory_pool_spare_pages_bytes 4096",
        "slipway_memory_pool_spare_forks_given_total 6",
        "slipway_sandbox_forks_total{kind=\"template\"} 1",
        "slipway_sandbox_forks_total{kind=\"automatic\"} 3",
        "slipway_sandbox_forks_total{kind=\"snapshot\"} 2",
        "slipway_saved_machines{kind=\"snapshot\"} 1",
        "slipway_saved_machines_memory_bytes{kind=\"snapshot\"} 4096",
        "slipway_endpoint_connected{endpoint=\"e\"} 1",
        "slipway_endpoint_dma_mapped_bytes{endpoint=\"e\"} 12288",
        "# TYPE slipway_reactor_busy_seconds counter",
        "slipway_reactor_busy_seconds_total{reactor=\"1\"} 1.5",
        "slipway_reactor_lanes{reactor=\"1\"} 2",
        "slipway_socket_engine_up 1",
        "slipway_socket_connections 4",
        "slipway_socket_sent_bytes_total 5",
        "slipway_socket_guest_streams{guest=\"g\"} 5",
        "slipway_socket_guest_received_bytes_total{guest=\"g\"} 40",
        "slipway_function_up{function=\"f\"} 1",
        "slipway_function_up{function=\"h\"} 0",
        "slipway_function_waiting_invocations{function=\"f\"} 2",
        "slipway_function_failed_invocations_total{function=\"f\"} 1",
        "# TYPE slipway_vf_pool_functions gauge",
        "slipway_vf_pool_functions{pool=\"nics\",state=\"ready\"} 1",
        "slipway_vf_pool_functions{pool=\"nics\",state=\"being_reset\"} 1",
        "slipway_vf_pool_functions{pool=\"nics\",state=\"failed\"} 0",
        "slipway_vf_pool_takes_total{pool=\"nics\"} 6",
        "slipway_vf_pool_refusals_total{pool=\"nics\"} 5",
        "slipway_vf_pool_resets_total{pool=\"nics\"} 4",
        "slipway_vf_pool_failures_total{pool=\"nics\"} 0",
        "slipway_vf_pool_retries_total{pool=\"nics\"} 3",
    ] {
        assert!(text.lines().any(|one| one == line), "{line} is not in\n{text}");
    }
    assert!(text.contains("direction=\"received\",cause=\"full\"} 3"), "{text}");
    assert!(!text.contains("waiting_invocations{function=\"h\"}"), "unknown: {text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
}

#[test]
fn without_a_socket_engine_nothing_is_known_of_sockets() {
    let text = text(Figures { sockets: None, ..figures() });
    let lines: Vec<_> = text.lines().filter(|line| line.starts_with("slipway_socket_")).collect();
    assert_eq!(lines, ["slipway_socket_engine_up 0"]);
}
