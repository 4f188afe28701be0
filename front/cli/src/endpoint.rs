//! `slipway endpoint`: serves NVMe functions to programs other than sandboxes.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_plane_api::v1::nvme_controller::DoorbellMode;
use slipway_plane_api::{PlaneClient, v1};
use slipway_runtime::{Config, v1 as sandbox_v1};

use crate::args::{EndpointArgs, EndpointCommand, LimitArgs, NodeArgs};
use crate::client::{answer, connect, connect_plane, refused};
use crate::manage::named;
use crate::out::FAILURE;
use crate::size::show;
use crate::table;

/// Runs `slipway endpoint …`.
pub async fn command(node: &NodeArgs, config: &Config, command: &EndpointCommand) -> Result<i32> {
    let mut plane = connect_plane(node, config).await?;
    match command {
        EndpointCommand::Create(args) => {
            crate::say!("{}", answer(plane.create_endpoint(request(args)?).await)?.socket_path);
        }
        EndpointCommand::Ls { json } => {
            let reply = plane.list_endpoints(v1::ListEndpointsRequest {}).await;
            let endpoints = answer(reply)?.endpoints;
            let header = ["ID", "CLIENT", "REACTOR", "DMA", "ERRORS", "LIMITS", "DISKS", "SOCKET"];
            table::list(&endpoints, *json, as_json, header, row)?;
        }
        EndpointCommand::Attach { endpoint, disk, nsid } => {
            let request = v1::AttachDiskRequest {
                endpoint_id: find(node, config, &mut plane, endpoint).await?.id,
                disk: Some(disk.disk()),
                nsid: nsid.unwrap_or(0),
            };
            crate::say!("{}", answer(plane.attach_disk(request).await)?.nsid);
        }
        EndpointCommand::Limit { endpoint, limits } => {
            let limits = limits_of(limits)?.unwrap_or_default();
            let endpoint_id = find(node, config, &mut plane, endpoint).await?.id;
            let request = v1::LimitEndpointRequest { endpoint_id, limits: Some(limits) };
            plane.limit_endpoint(request).await.map_err(refused)?;
            crate::say!("{endpoint}");
        }
        EndpointCommand::Detach { endpoint, disk } => {
            let found = find(node, config, &mut plane, endpoint).await?;
            plane.detach_disk(detach(&found.id, disk)).await.map_err(refused)?;
            crate::say!("{disk}");
        }
        EndpointCommand::Rm { ids } => {
            let mut status = 0;
            for id in ids {
                match remove(node, config, &mut plane, id).await {
                    Ok(()) => crate::say!("{id}"),
                    Err(error) => {
                        crate::complain(&error);
                        status = FAILURE;
                    }
                }
            }
            return Ok(status);
        }
        EndpointCommand::Inspect { endpoints, .. } => {
            let mut all = Vec::new();
            for name in endpoints {
                all.push(as_json(&find(node, config, &mut plane, name).await?));
            }
            crate::out::json(&all)?;
        }
    }
    Ok(0)
}

/// Returns the endpoint with the id `name` or, if there is none, that of the sandbox which is named
/// so.
///
/// # Errors
/// There is neither, or the sandbox has no endpoint now.
async fn find(
    node: &NodeArgs,
    config: &Config,
    plane: &mut PlaneClient,
    name: &str,
) -> Result<v1::Endpoint> {
    if let Some(endpoint) = get(plane, name).await? {
        return Ok(endpoint);
    }
    let sandbox = sandbox(node, config, name).await?;
    let found = get(plane, &sandbox.id).await?;
    found.with_context(|| {
        let sandbox_v1::Sandbox { name, state, .. } = &sandbox;
        format!("sandbox {name} is {state} and has no endpoint now")
    })
}

/// Returns the endpoint with this id, or `None` if there is none.
async fn get(plane: &mut PlaneClient, id: &str) -> Result<Option<v1::Endpoint>> {
    match plane.get_endpoint(v1::GetEndpointRequest { id: id.to_owned() }).await {
        Ok(endpoint) => Ok(Some(endpoint.into_inner())),
        Err(status) if status.code() == tonic::Code::NotFound => Ok(None),
        Err(status) => Err(refused(status)),
    }
}

/// Returns the sandbox named `name`, which is no endpoint's id.
async fn sandbox(node: &NodeArgs, config: &Config, name: &str) -> Result<sandbox_v1::Sandbox> {
    let mut sandboxes = connect(node, config).await?;
    let reply = answer(sandboxes.inspect(named(name)).await);
    let reply = reply.with_context(|| {
        format!("there is no endpoint \"{name}\" (`slipway endpoint ls` lists them)")
    })?;
    Ok(reply.sandbox.unwrap_or_default())
}

/// Removes the endpoint with this id.
///
/// # Errors
/// There is none; the error says so if a sandbox has the name.
async fn remove(node: &NodeArgs, config: &Config, plane: &mut PlaneClient, id: &str) -> Result<()> {
    let request = v1::RemoveEndpointRequest { id: id.to_owned() };
    match plane.remove_endpoint(request).await {
        Err(status) if status.code() == tonic::Code::NotFound => {
            let name = sandbox(node, config, id).await?.name;
            bail!(
                "\"{id}\" is a sandbox and no endpoint's id: its endpoint goes with it (`slipway \
                 rm --force {name}`); `slipway endpoint detach {name} DISK` takes a disk away"
            )
        }
        removed => removed.map(drop).map_err(refused),
    }
}

fn request(args: &EndpointArgs) -> Result<v1::CreateEndpointRequest> {
    let socket = std::path::absolute(&args.socket)
        .with_context(|| format!("{} is no path", args.socket.display()))?;
    let doorbells =
        if args.mapped_doorbells { DoorbellMode::Mapped } else { DoorbellMode::Trapped };
    let namespaces = (1..).zip(&args.disk);
    Ok(v1::CreateEndpointRequest {
        virtio_net: None,
        memory: None,
        id: args.id.clone(),
        socket_path: socket.to_string_lossy().into_owned(),
        owner: args.owner.as_deref().map(owner).transpose()?,
        nvme: Some(v1::NvmeController {
            namespaces: namespaces
                .map(|(nsid, disk)| {
                    let block_size = args.block_size.unwrap_or(0);
                    let disk = Some(v1::Disk { block_size, ..disk.disk() });
                    v1::Namespace { nsid, disk, ..Default::default() }
                })
                .collect(),
            doorbells: doorbells.into(),
            sweep_period_us: args.sweep_period.map_or(Ok(0), sweep_period)?,
            limits: limits_of(&args.limits)?,
            lanes: args.lanes,
            ..Default::default()
        }),
    })
}

/// Returns the limits, or `None` if no limit is asked for.
fn limits_of(args: &LimitArgs) -> Result<Option<v1::Limits>> {
    anyhow::ensure!(args.bandwidth != Some(0), "a bandwidth is at least a byte per second");
    Ok((args.iops.is_some() || args.bandwidth.is_some()).then(|| v1::Limits {
        commands_per_second: args.iops.unwrap_or(0),
        command_burst: args.iops_burst.unwrap_or(0),
        bytes_per_second: args.bandwidth.unwrap_or(0),
        byte_burst: args.bandwidth_burst.unwrap_or(0),
    }))
}

/// Formats limits as `ls` shows them: "1000 IOPS, 100.0 MiB/s", "none".
fn show_limits(limits: Option<&v1::Limits>) -> String {
    let limits = limits.copied().unwrap_or_default();
    let commands = limits.commands_per_second;
    let commands = (commands > 0).then(|| format!("{commands} IOPS"));
    let bytes = limits.bytes_per_second;
    let bytes = (bytes > 0).then(|| format!("{}/s", show(bytes)));
    let shown: Vec<String> = [commands, bytes].into_iter().flatten().collect();
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
}

/// Makes a request to detach `disk`: a number is a namespace, anything else is a disk's name, since
/// names are not digits alone.
fn detach(endpoint: &str, disk: &str) -> v1::DetachDiskRequest {
    use v1::detach_disk_request::Namespace;
    let name = disk.strip_prefix("disk:").unwrap_or(disk);
    let namespace = match name.parse() {
        Ok(nsid) => Namespace::Nsid(nsid),
        Err(_) => Namespace::Disk(name.to_owned()),
    };
    v1::DetachDiskRequest { endpoint_id: endpoint.to_owned(), namespace: Some(namespace) }
}

fn sweep_period(period: Duration) -> Result<u32> {
    match u32::try_from(period.as_micros()) {
        Ok(micros) if micros > 0 => Ok(micros),
        _ => bail!("--sweep-period is from 1us to an hour"),
    }
}

pub fn owner(text: &str) -> Result<v1::Owner> {
    let (uid, gid) = text.split_once(':').unwrap_or((text, text));
    match (uid.parse(), gid.parse()) {
        (Ok(uid), Ok(gid)) => Ok(v1::Owner { uid, gid }),
        _ => bail!("\"{text}\" is no owner: UID or UID:GID, in numbers"),
    }
}

fn dma_bytes(endpoint: &v1::Endpoint) -> u64 {
    endpoint.dma_regions.iter().map(|region| region.size_bytes).sum()
}

/// Returns the numbers of the threads that serve an endpoint; the first is that of its control
/// messages. A client whose memory made one of them sleep is served by a thread of its own, which
/// has no number.
fn reactors(endpoint: &v1::Endpoint) -> String {
    let all = std::iter::once(endpoint.reactor).chain(endpoint.lane_reactors.iter().copied());
    let numbers: Vec<_> = all.map(|number| number.to_string()).collect();
    let stalls = endpoint.counters.map_or(0, |counters| counters.stalls);
    numbers.join(",") + if stalls > 0 { " (own thread)" } else { "" }
}

fn row(endpoint: &v1::Endpoint) -> [String; 8] {
    let disks = endpoint.namespaces.iter().map(|namespace| {
        let read_only = if namespace.read_only { ", read-only" } else { "" };
        let name = match namespace.disk.as_str() {
            "" => String::new(),
            name => format!("{name}: "),
        };
        let (kind, size) = (&namespace.kind, show(namespace.size_bytes));
        format!("{name}{kind} {size}{read_only}")
    });
    let client = match endpoint.client_pid {
        0 => "none".to_owned(),
        pid => format!("process {pid}"),
    };
    [
        endpoint.id.clone(),
        client,
        reactors(endpoint),
        show(dma_bytes(endpoint)),
        endpoint.counters.map_or(0, |counters| counters.errors).to_string(),
        show_limits(endpoint.limits.as_ref()),
        disks.collect::<Vec<_>>().join("; "),
        endpoint.socket_path.clone(),
    ]
}

fn as_json(endpoint: &v1::Endpoint) -> serde_json::Value {
    let regions = endpoint.dma_regions.iter().map(|region| {
        serde_json::json!({
            "iova": region.iova,
            "size_bytes": region.size_bytes,
            "message_only": region.message_only,
            "guarded": region.guarded,
        })
    });
    let namespaces = endpoint.namespaces.iter().map(|namespace| {
        serde_json::json!({
            "nsid": namespace.nsid,
            "kind": namespace.kind,
            "size_bytes": namespace.size_bytes,
            "read_only": namespace.read_only,
            "disk": (!namespace.disk.is_empty()).then_some(&namespace.disk),
            "path": (!namespace.path.is_empty()).then_some(&namespace.path),
            "refused_writes": namespace.refused_writes,
        })
    });
    let counters = endpoint.counters.unwrap_or_default();
    let (limits, times) = (endpoint.limits.unwrap_or_default(), endpoint.times.unwrap_or_default());
    let set = |value: u64| (value > 0).then_some(value);
    serde_json::json!({
        "id": endpoint.id,
        "socket": endpoint.socket_path,
        "client_pid": (endpoint.client_pid > 0).then_some(endpoint.client_pid),
        "clients": counters.clients,
        "reactor": endpoint.reactor,
        "lane_reactors": endpoint.lane_reactors,
        "messages": counters.messages,
        "errors": counters.errors,
        "refused_files": counters.refused_files,
        "held": counters.held,
        "stalls": counters.stalls,
        "dma_map_ns": times.dma_map_total_ns,
        "zeroed_for_hardware_bytes": counters.zeroed_for_hardware_bytes,
        "doorbells": match endpoint.doorbells() {
            DoorbellMode::Trapped => "trapped",
            DoorbellMode::Mapped => "mapped",
            DoorbellMode::Rung => "rung",
        },
        "sweep_period_us": (endpoint.sweep_period_us > 0).then_some(endpoint.sweep_period_us),
        "limits": {
            "iops": set(limits.commands_per_second),
            "iops_burst": set(limits.command_burst),
            "bandwidth": set(limits.bytes_per_second),
            "bandwidth_burst": set(limits.byte_burst),
        },
        "dma_regions": regions.collect::<Vec<_>>(),
        "namespaces": namespaces.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits() {
        let none =
            LimitArgs { iops: None, iops_burst: None, bandwidth: None, bandwidth_burst: None };
        assert_eq!(limits_of(&none).unwrap(), None);
        assert_eq!(show_limits(None), "none");
        let some = LimitArgs { iops: Some(7), bandwidth: Some(3 << 20), ..none };
        let limits = limits_of(&some).unwrap();
        assert_eq!(show_limits(limits.as_ref()), "7 IOPS, 3.0 MiB/s");
        assert!(limits_of(&LimitArgs { bandwidth: Some(0), ..some }).is_err());
    }

    #[test]
    fn what_is_detached() {
        use v1::detach_disk_request::Namespace;
        let chosen = |disk: &str| detach("e", disk).namespace.unwrap();
        assert_eq!(chosen("7"), Namespace::Nsid(7));
        assert_eq!(chosen("7a"), Namespace::Disk("7a".into()));
        assert_eq!(chosen("disk:data"), Namespace::Disk("data".into()));
        assert_eq!(chosen("99999999999"), Namespace::Disk("99999999999".into()));
    }

    #[test]
    fn owners() {
        assert_eq!(owner("7").unwrap(), v1::Owner { uid: 7, gid: 7 });
        assert_eq!(owner("7:8").unwrap(), v1::Owner { uid: 7, gid: 8 });
        assert!(owner("root").is_err());
    }
}
