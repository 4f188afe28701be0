//! `slipway snoop`: where the time of an NVMe function's commands goes, layer by layer.

mod figures;
mod show;

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_plane_api::{PlaneClient, v1};
use slipway_runtime::Config;
use slipway_runtime::v1 as sandbox_v1;

use crate::args::{NodeArgs, SnoopArgs};
use crate::client::{connect, connect_plane, refused};
use figures::Figures;

/// Runs `slipway snoop`.
pub async fn snoop(node: &NodeArgs, config: &Config, args: &SnoopArgs) -> Result<i32> {
    let mut plane = connect_plane(node, config).await?;
    let target = resolve(node, config, &mut plane, &args.target).await?;
    let interval_ms = u32::try_from(args.interval.as_millis()).unwrap_or(u32::MAX);
    let request = v1::SnoopRequest { id: target, interval_ms, every: args.every };
    let reply = plane.snoop(request).await.map_err(|status| refused(&status))?;
    let mut reports = reply.into_inner();
    let view = View::new(args);
    let mut all = Figures::default();
    let end = tokio::time::sleep(args.duration.unwrap_or(Duration::MAX));
    tokio::pin!(end);
    let mut gone = None;
    loop {
        let report = tokio::select! {
            biased;
            () = &mut end => break,
            interrupted = tokio::signal::ctrl_c() => {
                interrupted?;
                break;
            }
            report = reports.message() => report,
        };
        match report {
            Ok(Some(report)) => {
                let mut figures = Figures::default();
                figures.add(&report);
                all.add(&report);
                view.interval(&figures)?;
            }
            Ok(None) => break,
            Err(status) => {
                gone = Some(refused(&status));
                break;
            }
        }
    }
    drop(reports);
    view.total(&all)?;
    if let Some(path) = &args.svg {
        write_picture(path, &all, args)?;
    }
    gone.map_or(Ok(0), Err)
}

/// The endpoint that is meant: one with this id, or a sandbox's.
async fn resolve(
    node: &NodeArgs,
    config: &Config,
    plane: &mut PlaneClient,
    name: &str,
) -> Result<String> {
    let request = v1::GetEndpointRequest { id: name.to_owned() };
    match plane.get_endpoint(request).await {
        Ok(endpoint) => return Ok(endpoint.into_inner().id),
        Err(status) if status.code() != tonic::Code::NotFound => return Err(refused(&status)),
        Err(_) => {}
    }
    let mut sandboxes = connect(node, config).await?;
    let named = sandbox_v1::Name { name: name.to_owned() };
    match sandboxes.inspect(named).await {
        Ok(reply) => match reply.into_inner().sandbox {
            // A sandbox's function is served under the sandbox's id.
            Some(sandbox) => Ok(sandbox.id),
            None => bail!("the daemon says nothing of sandbox \"{name}\""),
        },
        Err(status) if status.code() == tonic::Code::NotFound => {
            bail!("there is no endpoint and no sandbox \"{name}\"")
        }
        Err(status) => Err(refused(&status)),
    }
}

/// How figures reach standard output.
struct View<'a> {
    args: &'a SnoopArgs,
    /// The table stands still and is drawn anew.
    refreshes: bool,
}

impl<'a> View<'a> {
    fn new(args: &'a SnoopArgs) -> Self {
        Self { args, refreshes: std::io::stdout().is_terminal() }
    }

    fn interval(&self, figures: &Figures) -> Result<()> {
        if self.args.json {
            crate::say!("{}", serde_json::to_string(&show::json(figures, self.args.by, false))?);
            return Ok(());
        }
        if self.refreshes {
            // Home and clear.
            crate::out::print(format_args!("\x1b[H\x1b[2J"));
        }
        crate::out::print(format_args!("{}\n", show::text(figures, self.args)));
        Ok(())
    }

    /// The end: all intervals together.
    fn total(&self, figures: &Figures) -> Result<()> {
        if self.args.json {
            crate::say!("{}", serde_json::to_string(&show::json(figures, self.args.by, true))?);
            return Ok(());
        }
        crate::out::print(format_args!("In all:\n{}", show::text(figures, self.args)));
        Ok(())
    }
}

fn write_picture(path: &Path, figures: &Figures, args: &SnoopArgs) -> Result<()> {
    let title = format!("Mean latency of {} by layer", args.target);
    let picture = slipway_bench::latency_svg(&show::stacks(figures, args.by), &title)?;
    std::fs::write(path, picture).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("Picture written to {}", path.display());
    Ok(())
}
