//! Measures what tracing costs our own driver at depth 1 on a RAM disk, over the socket: with and
//! without tracing, in turn. The plane is in this process, on a processor of its own. The node's
//! plane may run on any processor, and is left alone.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use slipway_bench::block::native::{Cpus, Session};
use slipway_bench::block::{Measured, Subject, Workload};
use slipway_bench::human;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1::disk::Kind;
use slipway_plane_api::v1::nvme_controller::DoorbellMode;
use slipway_plane_api::{PlaneClient, v1};

use super::figures::{Figures, Key, LAYERS};
use crate::args::{Grouping, SnoopArgs};
use crate::bench::scratch::Scratch;
use crate::client::refused;
use crate::table::table;

/// The id of the endpoint.
const ID: &str = "overhead";
/// The number of turns with tracing, and as many without.
const ROUNDS: usize = 9;
const WARM_UP: Duration = Duration::from_millis(50);
const TURN: Duration = Duration::from_millis(250);
const DISK: u64 = 64 << 20;
const LOADS: [&str; 2] = ["randread-4k-d1", "randwrite-4k-d1"];

/// Measures the overheads and prints them.
pub async fn measure(args: &SnoopArgs) -> Result<i32> {
    let cpus = Cpus::split(1)?;
    let dir = Scratch::make_in(&std::env::temp_dir())?;
    let measured = in_dir(dir.path(), cpus, args.every.unwrap_or(0)).await?;
    show(&measured, args)?;
    Ok(0)
}

async fn in_dir(dir: &Path, cpus: Cpus, every: u32) -> Result<Vec<Load>> {
    let plane = plane(&cpus)?;
    let mut client = PlaneClient::new(plane.connect().await?);
    let socket = dir.join("cntrl");
    let created = client.create_endpoint(request(&socket)).await;
    created.map_err(refused)?;
    let measured = rounds(&mut client, socket, cpus, every).await;
    let removed = client.remove_endpoint(v1::RemoveEndpointRequest { id: ID.into() }).await;
    let loads = measured?;
    removed.map_err(refused)?;
    Ok(loads)
}

/// Starts a plane whose reactor stays on the target's processors: a new thread inherits the
/// affinity.
fn plane(cpus: &Cpus) -> Result<Plane> {
    let before = sched_getaffinity(None)?;
    let mut target = CpuSet::new();
    cpus.target.iter().for_each(|cpu| target.set(*cpu));
    sched_setaffinity(None, &target).context("keeping to a processor")?;
    let plane = Plane::new(Settings::default());
    sched_setaffinity(None, &before)?;
    plane.context("starting a plane")
}

fn show(loads: &[Load], args: &SnoopArgs) -> Result<()> {
    if args.json {
        let loads: Vec<_> = loads.iter().map(Load::json).collect();
        crate::say!("{}", serde_json::to_string(&loads)?);
        return Ok(());
    }
    let rows: Vec<_> = loads.iter().flat_map(Load::rows).collect();
    let header = ["LOAD", "SNOOP", "MEAN", "P50", "P99", "LAYERS"];
    crate::out::print(format_args!("{}", table(header, &rows)));
    for load in loads {
        crate::say!("{}: overhead {}", load.name, load.overhead());
    }
    Ok(())
}

fn request(socket: &Path) -> v1::CreateEndpointRequest {
    let disk = v1::Disk { kind: Some(Kind::Ram(v1::RamDisk { size_bytes: DISK })), block_size: 0 };
    v1::CreateEndpointRequest {
        virtio_net: None,
        id: ID.to_owned(),
        socket_path: socket.to_string_lossy().into_owned(),
        nvme: Some(v1::NvmeController {
            namespaces: vec![v1::Namespace { nsid: 1, disk: Some(disk), ..Default::default() }],
            doorbells: DoorbellMode::Mapped.into(),
            ..Default::default()
        }),
        ..Default::default()
    }
}

/// The turns of one load.
struct Load {
    name: &'static str,
    without: Vec<Measured>,
    with: Vec<Measured>,
    /// The controller's reports during the turns with tracing.
    figures: Figures,
}

async fn rounds(
    plane: &mut PlaneClient,
    socket: PathBuf,
    cpus: Cpus,
    every: u32,
) -> Result<Vec<Load>> {
    let workloads = LOADS.map(|name| name.parse::<Workload>().map_err(anyhow::Error::msg));
    let workloads: Vec<Workload> = workloads.into_iter().collect::<Result<_>>()?;
    let mut session = connect(socket, cpus, workloads.clone()).await?;
    let mut loads = Vec::new();
    for (name, workload) in LOADS.into_iter().zip(workloads) {
        let figures = Figures::default();
        let mut load = Load { name, without: Vec::new(), with: Vec::new(), figures };
        for _ in 0..ROUNDS {
            let (next, measured) = turn(session, workload).await?;
            load.without.push(measured);
            let (next, measured) =
                traced_turn(plane, next, workload, every, &mut load.figures).await?;
            load.with.push(measured);
            session = next;
        }
        loads.push(load);
    }
    Ok(loads)
}

/// Connects the driver, and fills the disk.
async fn connect(socket: PathBuf, cpus: Cpus, workloads: Vec<Workload>) -> Result<Session> {
    blocking(move || {
        let mut session = Session::connect("overhead", &socket, cpus, &workloads)?;
        session.fill()?;
        Ok(session)
    })
    .await
}

/// Takes a turn with tracing. Adds the controller's reports to `figures`.
async fn traced_turn(
    plane: &mut PlaneClient,
    session: Session,
    workload: Workload,
    every: u32,
    figures: &mut Figures,
) -> Result<(Session, Measured)> {
    let request = v1::SnoopRequest { id: ID.to_owned(), interval_ms: 100, every };
    let mut reports = start(plane, request).await?;
    let running = turn(session, workload);
    tokio::pin!(running);
    loop {
        tokio::select! {
            done = &mut running => return done,
            report = reports.message() => {
                let report = report.map_err(refused)?;
                figures.add(&report.context("the daemon stopped reporting")?);
            }
        }
    }
}

/// Starts tracing, and retries until the last turn's tracing has ended.
pub async fn start(
    plane: &mut PlaneClient,
    request: v1::SnoopRequest,
) -> Result<tonic::Streaming<v1::SnoopReport>> {
    let mut patience = 500;
    loop {
        match plane.snoop(request.clone()).await {
            Ok(reply) => return Ok(reply.into_inner()),
            Err(status) if status.code() == tonic::Code::FailedPrecondition && patience > 0 => {
                patience -= 1;
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            Err(status) => return Err(refused(status)),
        }
    }
}

async fn turn(mut session: Session, workload: Workload) -> Result<(Session, Measured)> {
    blocking(move || {
        let measured = session.run(&workload, WARM_UP, TURN)?;
        Ok((session, measured))
    })
    .await
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await.context("the load")?
}

/// Returns the median of `of` over the turns, ns.
fn median(turns: &[Measured], of: fn(&Measured) -> f64) -> f64 {
    let mut values: Vec<f64> = turns.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

fn mean(turn: &Measured) -> f64 {
    turn.latency.mean()
}

fn p50(turn: &Measured) -> f64 {
    turn.latency.percentile(50.0) as f64
}

fn p99(turn: &Measured) -> f64 {
    turn.latency.percentile(99.0) as f64
}

impl Load {
    fn rows(&self) -> [[String; 6]; 2] {
        let cells = |snoop: &str, turns: &[Measured], layers: String| {
            let show = |of| human(median(turns, of).round() as u64);
            [self.name.into(), snoop.into(), show(mean), show(p50), show(p99), layers]
        };
        let layers = self.layers().map(|(name, nanos)| format!("{name} {}", human(nanos as u64)));
        let layers = layers.collect::<Vec<_>>().join(", ");
        [cells("off", &self.without, String::new()), cells("on", &self.with, layers)]
    }

    /// Returns the means of the controller's layers, and of the driver, which is the rest of the
    /// latency that the client measured.
    fn layers(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let groups = self.figures.by(Some(Grouping::Queue));
        let key = Key { queue: Some(1), class: None };
        let means = groups.get(&key).map(|layers| layers.each_ref().map(|one| one.mean()));
        let means = means.unwrap_or_default();
        let whole = means[LAYERS.len() - 1];
        let driver = ("driver and way", median(&self.with, mean) - whole);
        let parts = LAYERS.into_iter().zip(means).take(LAYERS.len() - 1);
        std::iter::once(driver).chain(parts.map(|((_, name), mean)| (name, mean)))
    }

    /// Returns the overhead in percent of the untraced time: of the mean, and of the median
    /// command.
    fn overheads(&self) -> [f64; 2] {
        [mean, p50].map(|of: fn(&Measured) -> f64| {
            let (without, with) = (median(&self.without, of), median(&self.with, of));
            if without > 0.0 { (with / without - 1.0) * 100.0 } else { 0.0 }
        })
    }

    fn overhead(&self) -> String {
        let [mean, p50] = self.overheads();
        format!("{mean:+.1} % of the mean, {p50:+.1} % of p50 ({ROUNDS} turns of each)")
    }

    fn json(&self) -> serde_json::Value {
        let turns = |turns: &[Measured]| {
            serde_json::json!({
                "mean_ns": median(turns, mean),
                "p50_ns": median(turns, p50),
                "p99_ns": median(turns, p99),
                "means_ns": turns.iter().map(mean).collect::<Vec<_>>(),
            })
        };
        let [mean, p50] = self.overheads();
        serde_json::json!({
            "load": self.name,
            "off": turns(&self.without),
            "on": turns(&self.with),
            "layers_ns": self.layers().collect::<Vec<_>>(),
            "overhead_percent": { "mean": mean, "p50": p50 },
        })
    }
}
