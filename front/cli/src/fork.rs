//! `slipway fork`: sandboxes that begin as copies of one that runs.

use anyhow::{Context, Result, anyhow};
use slipway_runtime::{Config, v1};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::args::{ForkArgs, NodeArgs};
use crate::client::{Lost, connect, connect_snapshots, next_daemon, refused};
use crate::manage::named;
use crate::out::OWN_FAILURE;
use crate::{keeper, progress, run, snapshot, spec};

/// Runs `slipway fork`: saves a sandbox, begins others with the snapshot, and removes it whatever
/// becomes of them. Returns the exit status.
pub async fn fork(node: &NodeArgs, config: &Config, args: &ForkArgs) -> Result<i32> {
    run::check_ports(args.count, &args.publish)?;
    let mut spec = of_fork(args)?;
    let mut ends = EndSignals::catch()?;
    let client = connect(node, config).await?;
    let saved = save(node, config, args, &mut ends).await?;
    saved.name.clone_into(&mut spec.template);
    snapshot::keep_interface(&saved, &mut spec);
    let started = match ends.came {
        true => Err(anyhow!("interrupted; no sandbox has begun")),
        false => Ok(run::start_all(&client, config, args.count, &spec).await),
    };
    // Nothing is printed before: a reader that has left ends this command at once.
    let removed = remove(node, config, &saved.name).await;
    snapshot::tell_pause(&saved);
    if let Err(error) = &removed {
        crate::complain(error);
    }
    let (status, _) = run::tell(started?, true);
    Ok(if removed.is_err() && status == 0 { OWN_FAILURE } else { status })
}

/// Returns the specification of sandboxes that `slipway fork` asks for, without their snapshot.
fn of_fork(args: &ForkArgs) -> Result<v1::RunSpec> {
    Ok(v1::RunSpec {
        name: args.name.clone().unwrap_or_default(),
        network: args.network.clone().unwrap_or_default(),
        publish: args.publish.clone(),
        labels: spec::labels(&args.label)?,
        remove: args.rm,
        detach: true,
        ..v1::RunSpec::default()
    })
}

/// Saves the sandbox of a fork under a name of its own.
async fn save(
    node: &NodeArgs,
    config: &Config,
    args: &ForkArgs,
    ends: &mut EndSignals,
) -> Result<v1::Snapshot> {
    let name = format!("fork-{}", slipway_runtime::name::new_id());
    let request = v1::CreateSnapshotRequest { sandbox: args.sandbox.clone(), name: name.clone() };
    let saved = save_to_end(node, config, request, ends).await;
    if saved.as_ref().is_err_and(|error| error.is::<Lost>()) {
        // The daemon may have saved it before it went. If it has not, there is nothing to remove.
        let _ = remove(node, config, &name).await;
    }
    saved
}

/// Saves a sandbox as a snapshot. The daemon saves it to the end even if nobody waits, so a signal
/// does not end this.
///
/// # Errors
/// The daemon's, and [`Lost`] if it goes away.
pub async fn save_to_end(
    node: &NodeArgs,
    config: &Config,
    request: v1::CreateSnapshotRequest,
    ends: &mut EndSignals,
) -> Result<v1::Snapshot> {
    let mut client = connect_snapshots(node, config).await?;
    let spinner = progress::waiting("saving the sandbox");
    let saving = client.create(request);
    tokio::pin!(saving);
    let saved = loop {
        tokio::select! {
            saved = &mut saving => break saved,
            () = ends.next() => spinner.set_message("interrupted: waiting for the end of the save"),
        }
    };
    spinner.finish_and_clear();
    saved.map(tonic::Response::into_inner).map_err(refused)
}

/// Removes the snapshot of a fork. Where sandboxes outlive their daemon, it is removed by the next
/// daemon if need be.
async fn remove(node: &NodeArgs, config: &Config, name: &str) -> Result<()> {
    let removed = remove_now(node, config, name).await;
    removed.with_context(|| format!("snapshot {name} is left (`slipway snapshot rm {name}`)"))
}

async fn remove_now(node: &NodeArgs, config: &Config, name: &str) -> Result<()> {
    if keeper::waits(config) {
        next_daemon(config).await?;
    }
    let mut client = connect_snapshots(node, config).await?;
    client.remove(named(name)).await.map_err(refused)?;
    Ok(())
}

/// The signals that ask this command to end. From [`EndSignals::catch`] on they do not end it by
/// themselves.
pub struct EndSignals {
    signals: [Signal; 3],
    /// One has come.
    came: bool,
}

impl EndSignals {
    /// Has signals wait for [`EndSignals::next`].
    pub fn catch() -> Result<Self> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [interrupt, terminate, hangup] = kinds.map(signal);
        Ok(Self { signals: [interrupt?, terminate?, hangup?], came: false })
    }

    /// Returns when the next one comes.
    pub async fn next(&mut self) {
        let [interrupt, terminate, hangup] = &mut self.signals;
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
        self.came = true;
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn forks_are_detached_sandboxes() {
        let words = ["slipway", "fork", "web", "--count", "3", "--name", "x", "--rm", "-p", "80"];
        let all = words.into_iter().chain(["-l", "k=v", "--network", "n"]);
        let Command::Fork(args) = Cli::try_parse_from(all).unwrap().command else {
            panic!("{words:?}")
        };
        assert_eq!((args.sandbox.as_str(), args.count), ("web", 3));
        let spec = of_fork(&args).unwrap();
        assert_eq!((spec.name.as_str(), spec.network.as_str()), ("x", "n"));
        assert!(spec.detach && spec.remove && spec.image.is_empty());
        assert_eq!((spec.publish, spec.labels["k"].as_str()), (vec!["80".to_owned()], "v"));
        let bad = ForkArgs { label: vec!["=v".to_owned()], ..args };
        assert!(of_fork(&bad).unwrap_err().to_string().contains("is no label"));
    }
}
