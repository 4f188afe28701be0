//! The node's figures as metrics. Names have base units; sums end with `_total`.
//!
//! A new metric comes from what `Figures::ask` asks for: `FiguresReply` (`sandbox.proto`) has the
//! sums of sandboxes since the daemon began, which `Service::figures` (`sandbox/runtime`,
//! `service`) fills in; figures of endpoints, switches, the pool and overlays are those of the
//! plane's calls, and pools of virtual functions and operations of CNI have calls of their own. It
//! is encoded in one of the functions that `encode` calls: those of pools of virtual functions are
//! in `functions`, all others here. The test `metrics_have_base_units_and_labels` and its figures
//! have it, and `docs/observe.md` a row; `tests/e2e/96-metrics.sh` reads the metrics of a daemon.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;
use slipway_plane_api::{NetworkClient, PlaneClient, VfClient, network_v1, v1 as plane_v1, vf_v1};
use slipway_runtime::{SandboxClient, v1};
use tonic::Code;
use tonic::transport::Channel;

use super::encoding::{Sum, counters, gauges, histograms};
use super::functions;

/// The states of sandboxes.
const STATES: [&str; 8] =
    ["created", "starting", "running", "paused", "stopping", "exited", "failed", "lost"];

/// All figures of one moment.
#[derive(Debug)]
pub struct Figures {
    status: v1::StatusReply,
    starts: v1::FiguresReply,
    sandboxes: Vec<v1::Sandbox>,
    endpoints: Vec<plane_v1::Endpoint>,
    switches: Vec<plane_v1::Switch>,
    pool: Option<plane_v1::Pool>,
    overlays: plane_v1::OverlayMemory,
    functions: Vec<vf_v1::Pool>,
    cni: network_v1::Operations,
}

impl Figures {
    /// Asks the daemon.
    ///
    /// # Errors
    /// If a request fails.
    pub async fn ask(channel: Channel) -> Result<Self> {
        let mut sandboxes = SandboxClient::new(channel.clone()).max_decoding_message_size(16 << 20);
        let mut plane = PlaneClient::new(channel.clone()).max_decoding_message_size(16 << 20);
        let mut functions = VfClient::new(channel.clone()).max_decoding_message_size(16 << 20);
        let mut networks = NetworkClient::new(channel);
        let context = "the daemon does not answer";
        let empty = v1::Empty {};
        let endpoints = plane.list_endpoints(plane_v1::ListEndpointsRequest {});
        let endpoints = endpoints.await.context(context)?.into_inner().endpoints;
        let switches = plane.list_switches(plane_v1::ListSwitchesRequest {});
        let switches = switches.await.context(context)?.into_inner().switches;
        let pool = plane.get_pool(plane_v1::GetPoolRequest {}).await;
        let overlays = plane.get_overlay_memory(plane_v1::GetOverlayMemoryRequest {}).await;
        let functions = match functions.list_pools(vf_v1::ListPoolsRequest {}).await {
            Ok(reply) => reply.into_inner().pools,
            // The ledger is damaged, so there are no pools. Other figures are there.
            Err(status) if status.code() == Code::FailedPrecondition => Vec::new(),
            Err(status) => return Err(status).context(context),
        };
        let cni = networks.get_operations(network_v1::GetOperationsRequest {}).await;
        Ok(Self {
            status: sandboxes.status(empty).await.context(context)?.into_inner(),
            starts: sandboxes.figures(empty).await.context(context)?.into_inner(),
            sandboxes: sandboxes.list(empty).await.context(context)?.into_inner().sandboxes,
            endpoints,
            switches,
            pool: pool.context(context)?.into_inner().pool,
            overlays: overlays.context(context)?.into_inner(),
            functions,
            cni: cni.context(context)?.into_inner(),
        })
    }

    fn encode_starts(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Starts of sandboxes since the daemon began, by outcome";
        let outcomes = [("running", self.starts.started), ("failed", self.starts.failed)];
        counters(to, ("sandbox_starts", help), outcomes.map(|(one, n)| ([("outcome", one)], n)))?;
        let help = "Time of the stages of starts that succeeded; total: from the first to the last";
        let stages = &self.starts.stages;
        let stages = stages.iter().map(|one| (("stage", &*one.name), &*one.counts, one.sum_ns));
        histograms(to, ("sandbox_start", help), &self.starts.bounds_ns, stages)
    }

    fn encode_cni(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let operations = &self.cni.operations;
        let help = "Operations of CNI plugins that reached the daemon, by outcome";
        let outcomes = operations.iter().flat_map(|one| {
            let labels = |outcome| [("command", &*one.command), ("outcome", outcome)];
            [(labels("succeeded"), one.counts.iter().sum()), (labels("failed"), one.failed)]
        });
        counters(to, ("cni_operations", help), outcomes)?;
        let help = "Time that the daemon took for operations of CNI plugins that succeeded";
        let times =
            operations.iter().map(|one| (("command", &*one.command), &*one.counts, one.sum_ns));
        histograms(to, ("cni_operation", help), &self.cni.bounds_ns, times)
    }

    fn encode_sandboxes(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let help = "Version of the daemon";
        let version = [([("version", self.status.version.as_str())], 1)];
        gauges(to, ("build", help, Some(&Unit::Other("info".to_owned()))), version)?;
        // States without a sandbox have a zero, so that no time series ends.
        let mut counts: BTreeMap<&str, u64> = STATES.map(|state| (state, 0)).into();
        for sandbox in &self.sandboxes {
            *counts.entry(sandbox.state.as_str()).or_default() += 1;
        }
        let counts = counts.into_iter().map(|(state, count)| ([("state", state)], count));
        gauges(to, ("sandboxes", "Sandboxes by state", None), counts)
    }

    fn encode_control_groups(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(groups) = self.starts.control_groups else { return Ok(()) };
        let now = [("ready", groups.ready), ("returning", groups.returning)];
        let help = "Control groups of the pool, by state";
        gauges(to, ("control_groups", help, None), now.map(|(one, n)| ([("state", one)], n)))?;
        let sums = [
            ("taken", groups.taken),
            ("missed", groups.missed),
            ("made", groups.made),
            ("reused", groups.reused),
            ("removed", groups.removed),
        ];
        let help = "Events of the pool of control groups; missed: a sandbox found none ready";
        counters(to, ("control_group_events", help), sums.map(|(one, n)| ([("event", one)], n)))
    }

    fn encode_traces(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(traces) = self.starts.traces else { return Ok(()) };
        let outcomes = [("sent", traces.sent_spans), ("dropped", traces.dropped_spans)];
        let help = "Spans of traces; dropped: the queue was full, or no collector took them";
        counters(to, ("trace_spans", help), outcomes.map(|(one, n)| ([("outcome", one)], n)))
    }

    fn encode_endpoints(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let sums: [Sum<plane_v1::EndpointCounters>; 5] = [
            ("endpoint_messages", "Messages of vfio-user clients", |one| one.messages),
            ("endpoint_errors", "Messages that were answered with an error", |one| one.errors),
            ("endpoint_clients", "Clients that connected", |one| one.clients),
            ("endpoint_refused_files", "Descriptors of clients that were refused", |one| {
                one.refused_files
            }),
            ("endpoint_stalls", "Times that a thread slept because of a client's memory", |one| {
                one.stalls
            }),
        ];
        for (name, help, value) in sums {
            let all = self.endpoints.iter().filter_map(|one| {
                Some(([("endpoint", one.id.as_str())], value(one.counters.as_ref()?)))
            });
            counters(to, (name, help), all)?;
        }
        let held = self
            .endpoints
            .iter()
            .filter_map(|one| Some(([("endpoint", one.id.as_str())], one.counters.as_ref()?.held)));
        let help = "Descriptors, connections and mappings of clients that are still to be closed";
        gauges(to, ("endpoint_held", help, None), held)
    }

    /// Encodes what the I/O commands of NVMe controllers have moved.
    fn encode_io(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let sums: [Sum<plane_v1::EndpointIo>; 5] = [
            ("endpoint_reads", "Commands that read an endpoint's disks", |io| io.reads),
            ("endpoint_read_bytes", "Bytes that were read from them", |io| io.read_bytes),
            ("endpoint_writes", "Commands that wrote to an endpoint's disks", |io| io.writes),
            ("endpoint_written_bytes", "Bytes that were written to them", |io| io.written_bytes),
            ("endpoint_media_errors", "Commands that failed by a disk's error", |io| {
                io.media_errors
            }),
        ];
        for (name, help, value) in sums {
            let all = self
                .endpoints
                .iter()
                .filter_map(|one| Some(([("endpoint", one.id.as_str())], value(one.io.as_ref()?))));
            counters(to, (name, help), all)?;
        }
        Ok(())
    }

    /// Encodes the memory of overlays, root layers among them: of each endpoint, and of all.
    fn encode_overlays(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let of_endpoints = |value: fn(&plane_v1::OverlayMemory) -> u64| {
            self.endpoints.iter().filter_map(move |one| {
                Some(([("endpoint", one.id.as_str())], value(one.overlays.as_ref()?)))
            })
        };
        let bytes = Some(&Unit::Bytes);
        let help = "Memory that an endpoint's overlays hold";
        gauges(to, ("endpoint_overlays", help, bytes), of_endpoints(|one| one.held_bytes))?;
        let help = "Writes to an endpoint's overlays that failed for want of memory";
        let refused = of_endpoints(|one| one.refused_writes);
        counters(to, ("endpoint_overlays_refused_writes", help), refused)?;
        let help = "Writes to disks in files that failed to leave space of their file system free";
        let refused = self.endpoints.iter().map(|one| {
            let all = one.namespaces.iter().map(|namespace| namespace.refused_writes);
            ([("endpoint", one.id.as_str())], all.sum::<u64>())
        });
        counters(to, ("endpoint_disks_refused_writes", help), refused)?;
        let all = |value: u64| [([], value)];
        let plane_v1::OverlayMemory { held_bytes, limit_bytes, refused_writes } = self.overlays;
        gauges(to, ("overlays", "Memory that all overlays hold", bytes), all(held_bytes))?;
        let help = "The most memory that all overlays may hold";
        gauges(to, ("overlays_limit", help, bytes), all(limit_bytes))?;
        let help = "Writes that failed because all overlays together had reached their limit";
        counters(to, ("overlays_refused_writes", help), all(refused_writes))
    }

    /// Encodes the counters of ports from the peer's point of view, as `slipway port stats` prints
    /// them: frames that came in were sent by the peer.
    fn encode_ports(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let sums: [Sum<plane_v1::SwitchPort>; 4] = [
            ("port_sent_frames", "Frames that a port's peer sent", |port| port.frames_in),
            ("port_sent_bytes", "Bytes that a port's peer sent", |port| port.bytes_in),
            ("port_received_frames", "Frames that a port's peer got", |port| port.frames_out),
            ("port_received_bytes", "Bytes that a port's peer got", |port| port.bytes_out),
        ];
        for (name, help, value) in sums {
            let all = self.ports().map(|(labels, port)| (labels, value(port)));
            counters(to, (name, help), all)?;
        }
        let causes = self.ports().flat_map(|(labels, port)| {
            let sent = port.dropped_in.iter().map(|cause| ("sent", cause));
            let received = port.dropped_out.iter().map(|cause| ("received", cause));
            sent.chain(received).map(move |(direction, (cause, count))| {
                let [switch, port] = labels;
                ([switch, port, ("direction", direction), ("cause", cause.as_str())], *count)
            })
        });
        counters(to, ("port_dropped_frames", "Frames that were dropped, by cause"), causes)
    }

    fn ports(&self) -> impl Iterator<Item = ([(&str, &str); 2], &plane_v1::SwitchPort)> {
        self.switches.iter().flat_map(|switch| {
            let labels = |port| [("switch", switch.name.as_str()), ("port", port)];
            switch.ports.iter().map(move |port| (labels(port.name.as_str()), port))
        })
    }

    fn encode_pool(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(pool) = &self.pool else { return Ok(()) };
        let owners = [("free", pool.free_bytes), ("lent", pool.lent_bytes)];
        let owners = owners.map(|(owner, bytes)| ([("owner", owner)], bytes));
        let help = "Memory of the pool, by owner";
        gauges(to, ("memory_pool", help, Some(&Unit::Bytes)), owners)?;
        let faults: [([(&str, &str); 0], u64); 1] = [([], pool.faults)];
        counters(to, ("memory_pool_faults", "Page faults that the pool served"), faults)
    }
}

impl Collector for Figures {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode_sandboxes(&mut to)?;
        self.encode_starts(&mut to)?;
        self.encode_cni(&mut to)?;
        self.encode_control_groups(&mut to)?;
        self.encode_traces(&mut to)?;
        self.encode_endpoints(&mut to)?;
        self.encode_io(&mut to)?;
        self.encode_overlays(&mut to)?;
        self.encode_ports(&mut to)?;
        self.encode_pool(&mut to)?;
        functions::encode(&mut to, &self.functions)
    }
}

#[cfg(test)]
mod tests {
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

    fn figures() -> Figures {
        let stage =
            v1::StageTimes { name: "total".into(), counts: vec![1, 2, 4], sum_ns: 2_500_000_000 };
        let starts = v1::FiguresReply {
            started: 7,
            failed: 1,
            bounds_ns: vec![1_000_000, 1_000_000_000],
            stages: vec![stage],
            control_groups: Some(v1::ControlGroups { ready: 16, ..Default::default() }),
            traces: Some(v1::TraceFigures { sent_spans: 11, dropped_spans: 12 }),
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
        let disk =
            |refused_writes| plane_v1::NamespaceStatus { refused_writes, ..Default::default() };
        let io = plane_v1::EndpointIo { reads: 2, read_bytes: 8192, ..Default::default() };
        let namespaces = vec![disk(4), disk(3)];
        let endpoint = plane_v1::Endpoint { namespaces, io: Some(io), ..endpoint };
        let switch = plane_v1::Switch { name: "net".into(), ports: vec![port] };
        Figures {
            status: v1::StatusReply { version: "1.2".into(), ..Default::default() },
            starts,
            sandboxes: vec![v1::Sandbox { state: "running".into(), ..Default::default() }],
            endpoints: vec![endpoint],
            switches: vec![switch],
            pool: Some(plane_v1::Pool { lent_bytes: 9, faults: 8, ..Default::default() }),
            overlays: plane_v1::OverlayMemory { refused_writes: 6, ..overlays },
            functions: vec![vf_pool()],
            cni: network_v1::Operations {
                bounds_ns: vec![1_000_000, 5_000_000],
                operations: vec![add()],
            },
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
        assert!(text.ends_with("# EOF\n"), "{text}");
    }
}
