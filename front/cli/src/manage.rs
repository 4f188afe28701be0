//! Commands about existing sandboxes: ps, logs, wait, stop, kill, pause, resume, rm, inspect and
//! update.

mod listing;
mod logs;

use anyhow::{Result, bail};
use slipway_runtime::process::signal_number;
use slipway_runtime::{Config, SandboxClient, v1};

use crate::args::{InspectArgs, KillArgs, NamesArg, PauseArgs, RmArgs, StopArgs, UpdateArgs};
use crate::client::{Lost, answer, next_daemon, refused};
use crate::size::CpuCount;
use crate::table::printable;
use crate::{keeper, spec};

pub use listing::{list, print_list, ps, runs};
pub use logs::logs;

/// Returns the message that names a sandbox or a container.
pub fn named(name: &str) -> v1::Name {
    v1::Name { name: name.to_owned() }
}

/// Runs `slipway wait`.
pub async fn wait(mut client: SandboxClient, config: &Config, args: &NamesArg) -> Result<i32> {
    for name in &args.names {
        let status = exit_status(&mut client, config, name).await?;
        crate::say!("{status}");
    }
    Ok(0)
}

/// Waits for the end of a sandbox, also across restarts of the daemon, and returns its exit status.
async fn exit_status(client: &mut SandboxClient, config: &Config, name: &str) -> Result<u32> {
    loop {
        match client.wait(named(name)).await.map_err(refused) {
            Err(error) if error.is::<Lost>() && keeper::waits(config) => {
                *client = next_daemon(config).await?;
            }
            exit => return Ok(exit?.into_inner().status),
        }
    }
}

/// Calls `action` for all names at once, and prints each success and each error. Returns the
/// command's exit status: 1 if an action failed.
async fn each<F>(
    client: SandboxClient,
    names: &[String],
    action: impl Fn(SandboxClient, String) -> F,
) -> Result<i32>
where
    F: Future<Output = Result<(), tonic::Status>>,
{
    let actions = names.iter().map(|name| action(client.clone(), name.clone()));
    let outcomes = futures_util::future::join_all(actions).await;
    let mut status = 0;
    for (name, outcome) in names.iter().zip(outcomes) {
        match outcome {
            Ok(()) => crate::say!("{name}"),
            Err(error) => {
                crate::complain(&refused(error));
                status = 1;
            }
        }
    }
    Ok(status)
}

/// Runs `slipway stop`.
pub async fn stop(client: SandboxClient, args: &StopArgs) -> Result<i32> {
    let timeout_s = args.time;
    each(client, &args.names.names, |mut client, name| async move {
        client.stop(v1::StopRequest { name, timeout_s }).await.map(drop)
    })
    .await
}

/// Runs `slipway kill`.
pub async fn kill(client: SandboxClient, args: &KillArgs) -> Result<i32> {
    let Some(signal) = signal_number(&args.signal) else {
        bail!("\"{}\" is no signal: a name as TERM, or a number from 1 to 64", args.signal);
    };
    each(client, &args.names.names, |mut client, name| async move {
        client.signal(v1::SignalRequest { name, signal }).await.map(drop)
    })
    .await
}

/// Runs `slipway pause`.
pub async fn pause(client: SandboxClient, args: &PauseArgs) -> Result<i32> {
    let to_file = args.to_file;
    each(client, &args.names.names, |mut client, name| async move {
        match to_file {
            true => client.pause_to_file(v1::Name { name }).await.map(drop),
            false => client.pause(v1::Name { name }).await.map(drop),
        }
    })
    .await
}

/// Runs `slipway resume`.
pub async fn resume(client: SandboxClient, args: &NamesArg) -> Result<i32> {
    each(client, &args.names, |mut client, name| async move {
        let resumed = client.resume(named(&name)).await;
        resumed.map(|moments| tell_moments(&name, moments.get_ref()))
    })
    .await
}

/// Says when a sandbox came back, if its memory was in a file.
fn tell_moments(name: &str, moments: &v1::ResumeReply) {
    if moments.ready_ns == 0 {
        return;
    }
    let named = [
        ("ready", moments.ready_ns),
        ("first exec", moments.answered_ns),
        ("last page", moments.last_page_ns),
    ];
    for (moment, ns) in named.into_iter().filter(|(_, ns)| *ns > 0) {
        eprintln!("slipway: {name}: {moment} after {} ms", ns / 1_000_000);
    }
}

/// Runs `slipway rm`.
pub async fn rm(mut client: SandboxClient, args: &RmArgs) -> Result<i32> {
    let force = args.force;
    let names = match args.all {
        true => removable(list(&mut client).await?, force),
        false => args.names.clone(),
    };
    each(client, &names, |mut client, name| async move {
        client.remove(v1::RemoveRequest { name, force, ..Default::default() }).await.map(drop)
    })
    .await
}

/// Returns the names of the sandboxes that `slipway rm --all` removes: all with `force`, otherwise
/// those that have ended.
fn removable(all: Vec<v1::Sandbox>, force: bool) -> Vec<String> {
    let ended = all.into_iter().filter(|one| force || listing::has_ended(&one.state));
    ended.map(|one| one.name).collect()
}

/// Runs `slipway inspect`.
pub async fn inspect(mut client: SandboxClient, args: &InspectArgs) -> Result<i32> {
    let mut all = Vec::new();
    for name in &args.names {
        let reply = answer(client.inspect(named(name)).await)?;
        all.push(serde_json::from_str::<serde_json::Value>(&reply.json)?);
    }
    crate::out::json(&all)?;
    Ok(0)
}

/// Runs `slipway update`.
pub async fn update(mut client: SandboxClient, args: &UpdateArgs) -> Result<i32> {
    let reply = answer(client.update(update_request(args)?).await)?;
    let v1::UpdateReply { sandbox, given_back_bytes, kept } = reply;
    let sandbox = sandbox.unwrap_or_default();
    if given_back_bytes > 0 {
        eprintln!("slipway: {} gave back {} MiB of memory", sandbox.name, given_back_bytes >> 20);
    }
    if !kept.is_empty() {
        let kept = printable(&kept);
        eprintln!("slipway: more than the limits need stays for now: {kept}");
    }
    if args.json {
        crate::out::json(&listing::json(&sandbox))?;
    } else {
        // A container of a pod was changed if the name is POD/CONTAINER, and not the sandbox.
        crate::say!("{}", args.name);
    }
    Ok(0)
}

/// Returns the request for a sandbox's CPUs and memory, or for a container's limits if the name is
/// POD/CONTAINER.
///
/// # Errors
/// A part of a CPU for a sandbox.
fn update_request(args: &UpdateArgs) -> Result<v1::UpdateRequest> {
    let name = args.name.clone();
    if !name.contains('/') {
        let cpus = args.cpus.map(CpuCount::whole).transpose()?.unwrap_or(0);
        // 0 stands for "no change", so an explicit 0 becomes 1, which is refused.
        let memory_bytes = args.memory.map_or(0, |bytes| bytes.max(1));
        return Ok(v1::UpdateRequest { name, cpus, memory_bytes, ..Default::default() });
    }
    let resources = Some(spec::resources(args.memory, args.cpus));
    Ok(v1::UpdateRequest { name, resources, ..Default::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_ended_is_removed_without_force() {
        let states =
            ["created", "starting", "running", "paused", "stopping", "exited", "failed", "lost"];
        let sandbox = |state: &str| v1::Sandbox {
            name: format!("is-{state}"),
            state: state.to_owned(),
            ..Default::default()
        };
        let all = || Vec::from(states.map(sandbox));
        assert_eq!(removable(all(), false), ["is-exited", "is-failed", "is-lost"]);
        assert_eq!(removable(all(), true).len(), states.len());
    }

    #[test]
    fn a_container_of_a_pod_is_given_a_part_of_a_cpu_and_a_sandbox_is_not() {
        let request = |name: &str, cpus: &str| {
            update_request(&UpdateArgs {
                cpus: crate::size::parse_cpus(cpus).ok(),
                memory: None,
                json: false,
                name: name.to_owned(),
            })
        };
        assert_eq!(request("web", "2").unwrap().cpus, 2);
        let container = request("web/one", "0.5").unwrap();
        assert_eq!(container.resources.map(|limits| limits.cpu_quota_us), Some(50_000));
        assert!(request("web", "0.5").unwrap_err().to_string().contains("has whole CPUs"));
    }
}
