//! `slipway snoop`: shows where the time of an NVMe function's commands goes, layer by layer.

mod figures;
mod guest;
mod load;
mod overhead;
mod show;

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_plane_api::{PlaneClient, v1};
use slipway_runtime::v1 as sandbox_v1;
use slipway_runtime::{Config, SandboxClient};
use slipway_telemetry::monotonic_ns;
use tonic::Streaming;

use crate::args::{NodeArgs, SnoopArgs};
use crate::client::{answer, connect, connect_plane, refused};
use figures::Figures;
use guest::GuestFigures;
use show::ShownFigures;

/// Runs `slipway snoop`.
pub async fn snoop(node: &NodeArgs, config: &Config, args: &SnoopArgs) -> Result<i32> {
    if args.measure_overhead {
        return match args.target {
            Some(_) => load::measure(node, config, args).await,
            None => overhead::measure(args).await,
        };
    }
    let mut sandboxes = connect(node, config).await?;
    let mut plane = connect_plane(node, config).await?;
    let target = resolve(&mut sandboxes, &mut plane, args.target()).await?;
    let interval_ms = u32::try_from(args.interval.as_millis()).unwrap_or(u32::MAX);
    let request =
        v1::SnoopRequest { id: target.endpoint, interval_ms, every: args.every.unwrap_or(0) };
    let mut session = Session::new(args, answer(plane.snoop(request).await)?);
    if target.is_sandbox && !args.no_guest {
        let request = sandbox_v1::SnoopGuestRequest { name: args.target().to_owned(), interval_ms };
        match sandboxes.snoop_guest(request).await {
            Ok(reply) => session.guest = Some(GuestStream::new(reply.into_inner())),
            Err(status) => crate::complain(&refused(status).context("no layers of the guest")),
        }
    }
    session.run().await
}

/// The endpoint that is traced.
struct Target {
    endpoint: String,
    is_sandbox: bool,
}

/// Finds the endpoint of `name`. A sandbox's function is served under the sandbox's id; other
/// endpoints have ids of their own.
async fn resolve(
    sandboxes: &mut SandboxClient,
    plane: &mut PlaneClient,
    name: &str,
) -> Result<Target> {
    let named = sandbox_v1::Name { name: name.to_owned() };
    if let Ok(reply) = sandboxes.inspect(named).await
        && let Some(sandbox) = reply.into_inner().sandbox
    {
        return Ok(Target { endpoint: sandbox.id, is_sandbox: true });
    }
    let request = v1::GetEndpointRequest { id: name.to_owned() };
    match plane.get_endpoint(request).await {
        Ok(endpoint) => Ok(Target { endpoint: endpoint.into_inner().id, is_sandbox: false }),
        Err(status) if status.code() == tonic::Code::NotFound => {
            bail!(
                "there is no endpoint and no sandbox \"{name}\"; `slipway endpoint ls` and \
                 `slipway ps` list them"
            )
        }
        Err(status) => Err(refused(status)),
    }
}

/// The guest's reports, and their sums.
struct GuestStream {
    reports: Streaming<sandbox_v1::GuestReport>,
    /// The time when the last report came, ns.
    last_ns: Option<u64>,
    interval: GuestFigures,
    all: GuestFigures,
}

impl GuestStream {
    fn new(reports: Streaming<sandbox_v1::GuestReport>) -> Self {
        Self {
            reports,
            last_ns: None,
            interval: GuestFigures::default(),
            all: GuestFigures::default(),
        }
    }

    fn add(&mut self, report: &sandbox_v1::GuestReport) {
        let now = monotonic_ns();
        let host_ns = self.last_ns.replace(now).map(|last| now.saturating_sub(last));
        self.interval.add(report, host_ns);
        self.all.add(report, host_ns);
    }
}

/// Waits for a guest's next report, or for ever if no guest is traced.
async fn next(
    guest: &mut Option<GuestStream>,
) -> std::result::Result<Option<sandbox_v1::GuestReport>, tonic::Status> {
    match guest {
        Some(guest) => guest.reports.message().await,
        None => std::future::pending().await,
    }
}

struct Session<'a> {
    args: &'a SnoopArgs,
    reports: Streaming<v1::SnoopReport>,
    all: Figures,
    guest: Option<GuestStream>,
    /// The table is redrawn in place.
    refreshes: bool,
}

impl<'a> Session<'a> {
    fn new(args: &'a SnoopArgs, reports: Streaming<v1::SnoopReport>) -> Self {
        let refreshes = std::io::stdout().is_terminal();
        Self { args, reports, all: Figures::default(), guest: None, refreshes }
    }

    async fn run(mut self) -> Result<i32> {
        let gone = self.follow().await?;
        let guest = self.guest.as_ref().map(|guest| &guest.all);
        let shown = ShownFigures { figures: &self.all, guest, args: self.args };
        if self.args.json {
            crate::say!("{}", serde_json::to_string(&shown.json(true))?);
        } else {
            crate::out::print(format_args!("In all:\n{}", shown.text()));
        }
        if let Some(path) = &self.args.svg {
            write_picture(path, &shown)?;
        }
        gone.map_or(Ok(0), Err)
    }

    /// Shows each interval, until the time is over or the user interrupts. Returns the error if the
    /// endpoint's reports end before that.
    async fn follow(&mut self) -> Result<Option<anyhow::Error>> {
        let end = tokio::time::sleep(self.args.duration.unwrap_or(Duration::MAX));
        tokio::pin!(end);
        loop {
            tokio::select! {
                biased;
                () = &mut end => return Ok(None),
                interrupted = tokio::signal::ctrl_c() => {
                    interrupted?;
                    return Ok(None);
                }
                report = next(&mut self.guest) => match (report, &mut self.guest) {
                    (Ok(Some(report)), Some(guest)) => guest.add(&report),
                    // The sandbox is ending; the endpoint's stream reports that, too.
                    _ => self.guest = None,
                },
                report = self.reports.message() => match report {
                    Ok(Some(report)) => self.show(&report)?,
                    Ok(None) => return Ok(None),
                    Err(status) => return Ok(Some(refused(status))),
                },
            }
        }
    }

    fn show(&mut self, report: &v1::SnoopReport) -> Result<()> {
        let mut figures = Figures::default();
        figures.add(report);
        self.all.add(report);
        let guest = self.guest.as_mut().map(|guest| std::mem::take(&mut guest.interval));
        let shown = ShownFigures { figures: &figures, guest: guest.as_ref(), args: self.args };
        if self.args.json {
            crate::say!("{}", serde_json::to_string(&shown.json(false))?);
            return Ok(());
        }
        if self.refreshes {
            // Escape sequences: cursor home, clear the screen.
            crate::out::draw(format_args!("\x1b[H\x1b[2J"));
        }
        crate::out::print(format_args!("{}\n", shown.text()));
        Ok(())
    }
}

fn write_picture(path: &Path, shown: &ShownFigures<'_>) -> Result<()> {
    let title = format!("Mean latency of {} by layer", shown.args.target());
    let picture = slipway_bench::latency_svg(&shown.stacks(), &title)?;
    std::fs::write(path, picture).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("Picture written to {}", path.display());
    Ok(())
}
