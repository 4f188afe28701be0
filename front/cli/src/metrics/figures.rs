//! The node's figures as metrics. Names have base units; sums end with `_total`.
//!
//! A new metric comes from what `Figures::ask` asks for: `FiguresReply` (`sandbox.proto`) has the
//! sums of sandboxes since the daemon began, which `Service::figures` (`sandbox/runtime`,
//! `service`) fills in; the sizes of templates and snapshots in it arise in
//! `sandbox/runtime/src/templates/sizes.rs`; figures of endpoints, switches, the pool and overlays
//! are those of the plane's calls, and pools of virtual functions and operations of CNI have calls
//! of their own. The socket engine and servers of functions are asked at their own sockets
//! (`sockets`, `served`). It is encoded in one of the functions that `encode` calls: those of pools
//! of virtual functions are in `functions`, of reactors in `reactors`, of the pool of memory in
//! `memory`, all others here. A label has as many values as the node has objects of its kind at
//! most, and none that an unprivileged program or a guest chooses. The test
//! `metrics_have_base_units_and_labels` and its figures have it, and `docs/observe.md` a row;
//! `tests/e2e/96-metrics.sh` reads the metrics of a daemon.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::{Context, Result};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;
use slipway_plane_api::{NetworkClient, PlaneClient, VfClient, network_v1, v1 as plane_v1, vf_v1};
use slipway_runtime::{Config, SandboxClient, v1};
use slipway_sgiov::Report;
use tonic::Code;
use tonic::transport::Channel;

use super::encoding::{Sum, counters, gauges, histograms, single};
use super::{functions, memory, reactors, served, sockets};
use crate::function::Status;

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
    reactors: Vec<plane_v1::Reactor>,
    /// The socket engine's report, or `None` if no engine answers.
    sockets: Option<Report>,
    served: Vec<Status>,
}

impl Figures {
    /// Asks the daemon, the socket engine and servers of functions.
    ///
    /// # Errors
    /// If a request to the daemon fails.
    pub async fn ask(channel: Channel, config: &Config) -> Result<Self> {
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
        let reactors = match plane.list_reactors(plane_v1::ListReactorsRequest {}).await {
            Ok(reply) => reply.into_inner().reactors,
            // A daemon of an earlier version.
            Err(status) if status.code() == Code::Unimplemented => Vec::new(),
            Err(status) => return Err(status).context(context),
        };
        let (sockets, served) = tokio::join!(sockets::ask(config), served::ask(config));
        Ok(Self {
            reactors,
            sockets,
            served,
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

    /// Encodes forks among the starts, and the machines that sandboxes can begin with.
    fn encode_saved(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let v1::FiguresReply { template_forks, automatic_forks, snapshot_forks, .. } = self.starts;
        let forks = [
            ("template", template_forks.saturating_sub(automatic_forks)),
            ("automatic", automatic_forks),
            ("snapshot", snapshot_forks),
        ];
        let help = "Starts that succeeded with the machine of a template or snapshot, by its kind";
        counters(to, ("sandbox_forks", help), forks.map(|(one, n)| ([("kind", one)], n)))?;
        let each = |value: fn(&v1::SavedMachines) -> u64| {
            let all = self.starts.saved.iter();
            all.map(move |one| ([("kind", one.kind.as_str())], value(one)))
        };
        let help = "Templates and snapshots, by kind";
        gauges(to, ("saved_machines", help, None), each(|one| one.count))?;
        let bytes = Some(&Unit::Bytes);
        let help = "Memory of saved machines on disk";
        gauges(to, ("saved_machines_memory", help, bytes), each(|one| one.memory_bytes))?;
        let help = "Content of the disks of saved machines, on disk";
        gauges(to, ("saved_machines_disks", help, bytes), each(|one| one.disk_bytes))
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

    fn encode_spare_vmms(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(spares) = self.starts.spare_vmms else { return Ok(()) };
        let help = "VMMs that were started ahead and that no sandbox has";
        gauges(to, ("spare_vmms", help, None), single(spares.ready))?;
        let sums = [
            ("started", spares.started),
            ("taken", spares.taken),
            ("unfit", spares.unfit),
            ("missed", spares.missed),
            ("failed", spares.failed),
        ];
        let help = "Events of VMMs that are started ahead; unfit: taken, and not used after all; \
                    missed: a sandbox found none ready";
        counters(to, ("spare_vmm_events", help), sums.map(|(one, n)| ([("event", one)], n)))
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
        gauges(to, ("endpoint_held", help, None), held)?;
        let each = |value: fn(&plane_v1::Endpoint) -> u64| {
            let all = self.endpoints.iter();
            all.map(move |one| ([("endpoint", one.id.as_str())], value(one)))
        };
        let help = "Whether a client is connected";
        let connected = each(|one| u64::from(one.client_pid != 0));
        gauges(to, ("endpoint_connected", help, None), connected)?;
        let help = "Memory of the client that the function may reach";
        let mapped = each(|one| one.dma_regions.iter().map(|region| region.size_bytes).sum());
        gauges(to, ("endpoint_dma_mapped", help, Some(&Unit::Bytes)), mapped)
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
        let plane_v1::OverlayMemory { held_bytes, limit_bytes, refused_writes } = self.overlays;
        gauges(to, ("overlays", "Memory that all overlays hold", bytes), single(held_bytes))?;
        let help = "The most memory that all overlays may hold";
        gauges(to, ("overlays_limit", help, bytes), single(limit_bytes))?;
        let help = "Writes that failed because all overlays together had reached their limit";
        counters(to, ("overlays_refused_writes", help), single(refused_writes))
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
        let up = self.ports().map(|(labels, port)| (labels, u64::from(port.up)));
        gauges(to, ("port_up", "Whether a port's peer takes frames", None), up)?;
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
}

impl Collector for Figures {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        self.encode_sandboxes(&mut to)?;
        self.encode_starts(&mut to)?;
        self.encode_saved(&mut to)?;
        self.encode_cni(&mut to)?;
        self.encode_control_groups(&mut to)?;
        self.encode_spare_vmms(&mut to)?;
        self.encode_traces(&mut to)?;
        self.encode_endpoints(&mut to)?;
        self.encode_io(&mut to)?;
        self.encode_overlays(&mut to)?;
        self.encode_ports(&mut to)?;
        if let Some(pool) = &self.pool {
            memory::encode(&mut to, pool)?;
        }
        functions::encode(&mut to, &self.functions)?;
        reactors::encode(&mut to, &self.reactors)?;
        sockets::encode(&mut to, self.sockets.as_ref())?;
        served::encode(&mut to, &self.served)
    }
}

#[cfg(test)]
mod tests;
