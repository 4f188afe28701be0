//! Commands about existing sandboxes: ps, logs, wait, stop, kill, rm, inspect, update.

use std::io::Write;

use anyhow::{Result, anyhow, bail};
use slipway_runtime::process::signal_number;
use slipway_runtime::{Config, SandboxClient, v1};

use crate::args::{
    InspectArgs, KillArgs, LogsArgs, NamesArg, PauseArgs, PsArgs, RmArgs, StopArgs, UpdateArgs,
};
use crate::client::{Lost, next_daemon, refused};
use crate::table::{ago, printable, table};
use crate::{keeper, spec};

/// Returns the message that names a sandbox or a container.
pub fn named(name: &str) -> v1::Name {
    v1::Name { name: name.to_owned() }
}

/// Returns all sandboxes, the oldest first.
pub async fn list(client: &mut SandboxClient) -> Result<Vec<v1::Sandbox>> {
    let reply = client.list(v1::Empty {}).await.map_err(refused)?;
    Ok(reply.into_inner().sandboxes)
}

/// Runs `slipway ps`.
pub async fn ps(mut client: SandboxClient, args: &PsArgs) -> Result<i32> {
    let mut sandboxes = list(&mut client).await?;
    sandboxes.retain(|one| !args.running || runs(one));
    if args.quiet && !args.json {
        sandboxes.iter().for_each(|one| crate::say!("{}", one.name));
    } else {
        print_list(&sandboxes, args.json)?;
    }
    Ok(0)
}

/// Prints sandboxes, each pod followed by its containers.
///
/// # Errors
/// They cannot be written as JSON.
pub fn print_list(sandboxes: &[v1::Sandbox], as_json: bool) -> Result<()> {
    if as_json {
        crate::out::json(&sandboxes.iter().map(json).collect::<Vec<_>>())?;
        return Ok(());
    }
    crate::out::print(format_args!("{}", list_text(sandboxes)));
    Ok(())
}

/// Formats sandboxes as a table, each pod followed by its containers.
fn list_text(sandboxes: &[v1::Sandbox]) -> String {
    let mut rows = Vec::new();
    for sandbox in sandboxes {
        rows.push(sandbox_row(sandbox));
        rows.extend(sandbox.containers.iter().map(|container| container_row(sandbox, container)));
    }
    let header = ["ID", "NAME", "IMAGE", "COMMAND", "CREATED", "CPUS", "ADDRESS", "PORTS", "STATE"];
    table(header, &rows)
}

/// Returns whether a state is one of a sandbox or container that has ended.
fn has_ended(state: &str) -> bool {
    matches!(state, "exited" | "failed" | "lost")
}

fn json(sandbox: &v1::Sandbox) -> serde_json::Value {
    let ended = has_ended(&sandbox.state);
    serde_json::json!({
        "id": sandbox.id,
        "name": sandbox.name,
        "image": sandbox.image,
        "command": sandbox.command,
        "state": sandbox.state,
        "created_ns": sandbox.created_ns,
        "exit_status": ended.then_some(sandbox.exit_status),
        "reason": sandbox.reason,
        "vmm_pid": (sandbox.vmm_pid > 0).then_some(sandbox.vmm_pid),
        "network": (!sandbox.network.is_empty()).then_some(&sandbox.network),
        "mac": (!sandbox.mac.is_empty()).then_some(&sandbox.mac),
        "addresses": sandbox.addresses,
        "published": sandbox.published,
        "sockets": sandbox.sockets,
        "in_file": sandbox.in_file,
        "cpus": sandbox.cpus,
        "max_cpus": sandbox.max_cpus,
        "memory_bytes": sandbox.memory_bytes,
        "max_memory_bytes": sandbox.max_memory_bytes,
        "pod": sandbox.pod,
        "containers": sandbox.containers.iter().map(container_json).collect::<Vec<_>>(),
    })
}

fn container_json(container: &v1::Container) -> serde_json::Value {
    serde_json::json!({
        "name": container.name,
        "image": container.image,
        "command": container.command,
        "state": container.state,
        "created_ns": container.created_ns,
        "exit_status": has_ended(&container.state).then_some(container.exit_status),
        "reason": container.reason,
    })
}

/// Returns the state of a sandbox or a container as tables show it, with its exit status and the
/// reason of its end.
fn state_text(state: &str, exit_status: u32, reason: &str) -> String {
    match (state, reason) {
        ("exited", "") => format!("exited ({exit_status})"),
        ("exited", why) => format!("exited ({exit_status}): {}", printable(why)),
        ("failed" | "lost", why) => format!("{state}: {}", printable(why)),
        (state, _) => state.to_owned(),
    }
}

fn short(command: &str) -> String {
    let command = printable(command);
    if command.chars().count() > 30 {
        return command.chars().take(29).collect::<String>() + "…";
    }
    command
}

fn container_row(pod: &v1::Sandbox, container: &v1::Container) -> [String; 9] {
    let name = format!("{}/{}", pod.name, container.name);
    let (image, command) = (printable(&container.image), short(&container.command));
    let (cpus, address, ports) = (String::new(), String::new(), String::new());
    let state = state_text(&container.state, container.exit_status, &container.reason);
    let created = ago(container.created_ns);
    [pod.id.clone(), name, image, command, created, cpus, address, ports, state]
}

/// Returns the line of `slipway ps` for a sandbox: its id, name, image, command, age, CPUs, first
/// address, published ports and state.
fn sandbox_row(sandbox: &v1::Sandbox) -> [String; 9] {
    let state = match sandbox.in_file {
        true => format!("{} (in a file)", sandbox.state),
        false => state_text(&sandbox.state, sandbox.exit_status, &sandbox.reason),
    };
    let command = short(&sandbox.command);
    let image = if sandbox.pod { "(pod)".to_owned() } else { printable(&sandbox.image) };
    let address = sandbox.addresses.first().cloned().unwrap_or_default();
    let (id, name) = (sandbox.id.clone(), sandbox.name.clone());
    let created = ago(sandbox.created_ns);
    let (cpus, ports) = (cpus(sandbox.cpus, sandbox.max_cpus), sandbox.published.join(", "));
    [id, name, image, command, created, cpus, address, ports, state]
}

/// Returns the number of CPUs that a sandbox has, with the most that it can have if that is more.
fn cpus(has: u32, most: u32) -> String {
    if most > has { format!("{has} of {most}") } else { has.to_string() }
}

/// Runs `slipway logs`.
pub async fn logs(mut client: SandboxClient, config: &Config, args: &LogsArgs) -> Result<i32> {
    let (name, follow) = (args.name.clone(), args.follow);
    let mut request = v1::LogsRequest { name, follow, tail: args.tail, position: 0 };
    let mut fresh_line = [true; 2];
    loop {
        match print_logs(client.clone(), &mut request, args.timestamps, &mut fresh_line).await {
            // Continues with the next daemon, from the position that this one reached.
            Err(error) if error.is::<Lost>() && args.follow && keeper::waits(config) => {
                client = next_daemon(config).await?;
                request.tail = request.tail.filter(|_| request.position == 0);
            }
            outcome => {
                outcome?;
                return tell_failure(client, &args.name).await.map(|()| 0);
            }
        }
    }
}

/// Prints why a sandbox failed, which its output cannot say.
async fn tell_failure(mut client: SandboxClient, name: &str) -> Result<()> {
    let reply = client.inspect(named(name)).await.map_err(refused)?;
    let Some(sandbox) = reply.into_inner().sandbox else { return Ok(()) };
    let (state, reason) = match name.split_once('/') {
        None => (&sandbox.state, &sandbox.reason),
        Some((_, name)) => match sandbox.containers.iter().find(|one| one.name == name) {
            Some(container) => (&container.state, &container.reason),
            None => return Ok(()),
        },
    };
    if state == "failed" {
        crate::complain(&anyhow!("{name} failed: {}", printable(reason)));
    }
    Ok(())
}

/// Prints the logs that `request` asks for. On an error, `request` asks for the rest.
async fn print_logs(
    mut client: SandboxClient,
    request: &mut v1::LogsRequest,
    timestamps: bool,
    fresh_line: &mut [bool; 2],
) -> Result<()> {
    let reply = client.logs(request.clone()).await.map_err(refused)?;
    let mut records = reply.into_inner();
    while let Some(record) = records.message().await.map_err(refused)? {
        let error = record.stream == 2;
        request.position = record.position + record.data.len() as u64;
        let data = if timestamps {
            stamp(&record, &mut fresh_line[usize::from(error)])
        } else {
            record.data
        };
        let written = if error {
            std::io::stderr().write_all(&data)
        } else {
            std::io::stdout().write_all(&data).and_then(|()| std::io::stdout().flush())
        };
        if written.is_err() {
            // The reader of our output has left.
            return Ok(());
        }
    }
    Ok(())
}

/// Puts the time before each line that begins in this record.
fn stamp(record: &v1::LogRecord, fresh_line: &mut bool) -> Vec<u8> {
    let time = utc(record.time_ns);
    let mut text = Vec::with_capacity(record.data.len() + 64);
    for line in record.data.split_inclusive(|byte| *byte == b'\n') {
        if *fresh_line {
            text.extend(time.as_bytes());
            text.push(b' ');
        }
        text.extend(line);
        *fresh_line = line.ends_with(b"\n");
    }
    text
}

/// Formats a time by RFC 3339 in UTC, to the microsecond.
fn utc(time_ns: u64) -> String {
    let (seconds, micros) = (time_ns / 1_000_000_000, time_ns % 1_000_000_000 / 1000);
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Civil date from days since the epoch, by whole 400-year cycles counted from a March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

/// Runs `slipway wait`.
pub async fn wait(mut client: SandboxClient, config: &Config, args: &NamesArg) -> Result<i32> {
    for name in &args.names {
        let exit = loop {
            match client.wait(named(name)).await.map_err(refused) {
                Err(error) if error.is::<Lost>() && keeper::waits(config) => {
                    client = next_daemon(config).await?;
                }
                outcome => break outcome?,
            }
        };
        crate::say!("{}", exit.into_inner().status);
    }
    Ok(0)
}

/// Returns whether a sandbox's container runs, or is paused.
pub fn runs(sandbox: &v1::Sandbox) -> bool {
    ["running", "paused"].contains(&&*sandbox.state)
}

/// Calls `action` for each name, and prints each success and each error.
async fn each<F>(names: &[String], action: impl Fn(String) -> F) -> Result<i32>
where
    F: Future<Output = Result<(), tonic::Status>>,
{
    let outcomes = futures_util::future::join_all(names.iter().cloned().map(&action)).await;
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
    each(&args.names.names, |name| {
        let mut client = client.clone();
        async move {
            let request = v1::StopRequest { name, timeout_s: args.time };
            client.stop(request).await.map(drop)
        }
    })
    .await
}

/// Runs `slipway kill`.
pub async fn kill(client: SandboxClient, args: &KillArgs) -> Result<i32> {
    let Some(signal) = signal_number(&args.signal) else {
        bail!("\"{}\" is no signal: a name as TERM, or a number from 1 to 64", args.signal);
    };
    each(&args.names.names, |name| {
        let mut client = client.clone();
        async move { client.signal(v1::SignalRequest { name, signal }).await.map(drop) }
    })
    .await
}

/// Runs `slipway pause`.
pub async fn pause(client: SandboxClient, args: &PauseArgs) -> Result<i32> {
    each(&args.names.names, |name| {
        let mut client = client.clone();
        async move {
            match args.to_file {
                true => client.pause_to_file(v1::Name { name }).await.map(drop),
                false => client.pause(v1::Name { name }).await.map(drop),
            }
        }
    })
    .await
}

/// Runs `slipway resume`.
pub async fn resume(client: SandboxClient, args: &NamesArg) -> Result<i32> {
    each(&args.names, |name| {
        let mut client = client.clone();
        async move {
            let resumed = client.resume(v1::Name { name: name.clone() }).await;
            resumed.map(|moments| tell_moments(&name, moments.get_ref()))
        }
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
    let names = if args.all {
        let all = list(&mut client).await?;
        let live = |state: &str| matches!(state, "starting" | "running" | "paused" | "stopping");
        all.into_iter().filter(|s| args.force || !live(&s.state)).map(|s| s.name).collect()
    } else {
        args.names.clone()
    };
    each(&names, |name| {
        let mut client = client.clone();
        let request = v1::RemoveRequest { name, force: args.force, ..Default::default() };
        async move { client.remove(request).await.map(drop) }
    })
    .await
}

/// Runs `slipway inspect`.
pub async fn inspect(mut client: SandboxClient, args: &InspectArgs) -> Result<i32> {
    let mut all = Vec::new();
    for name in &args.names {
        let reply = client.inspect(named(name)).await.map_err(refused)?;
        all.push(serde_json::from_str::<serde_json::Value>(&reply.into_inner().json)?);
    }
    crate::out::json(&all)?;
    Ok(0)
}

/// Runs `slipway update`.
pub async fn update(mut client: SandboxClient, args: &UpdateArgs) -> Result<i32> {
    let request = update_request(args)?;
    let reply = client.update(request).await.map_err(refused)?;
    let v1::UpdateReply { sandbox, given_back_bytes, kept } = reply.into_inner();
    let sandbox = sandbox.unwrap_or_default();
    if given_back_bytes > 0 {
        eprintln!("slipway: {} gave back {} MiB of memory", sandbox.name, given_back_bytes >> 20);
    }
    if !kept.is_empty() {
        let kept = crate::table::printable(&kept);
        eprintln!("slipway: more than the limits need stays for now: {kept}");
    }
    if args.json {
        crate::out::json(&json(&sandbox))?;
    } else {
        crate::say!("{}", sandbox.name);
    }
    Ok(0)
}

fn update_request(args: &UpdateArgs) -> Result<v1::UpdateRequest> {
    let (name, cpus) = (args.name.clone(), args.cpus.unwrap_or(0));
    if !name.contains('/') {
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
    fn a_sandbox_is_one_line_whatever_its_command_and_its_reason_hold() {
        let (command, reason) = ("sh -c a\nb\tc".to_owned(), "no file\r\nx\x1b[2J".to_owned());
        let container = v1::Container {
            command: command.clone(),
            state: "failed".into(),
            reason: reason.clone(),
            ..Default::default()
        };
        let sandbox = v1::Sandbox {
            name: "web".into(),
            command,
            state: "failed".into(),
            reason,
            containers: vec![container],
            ..Default::default()
        };
        let text = list_text(&[sandbox]);
        assert_eq!(text.lines().count(), 3, "{text:?}");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control()), "{text:?}");
    }

    #[test]
    fn cpus_are_shown_with_the_room_for_more() {
        assert_eq!(
            [(2, 2), (1, 4), (4, 4)].map(|(has, most)| cpus(has, most)),
            ["2", "1 of 4", "4"]
        );
    }

    #[test]
    fn dates() {
        assert_eq!(utc(0), "1970-01-01T00:00:00.000000Z");
        assert_eq!(utc(951_782_400_000_000_000), "2000-02-29T00:00:00.000000Z");
        assert_eq!(utc(1_767_225_599_123_456_000), "2025-12-31T23:59:59.123456Z");
    }

    #[test]
    fn stamps_begin_lines_only() {
        let record =
            |data: &[u8]| v1::LogRecord { stream: 1, time_ns: 0, data: data.to_vec(), position: 0 };
        let mut fresh = true;
        assert!(stamp(&record(b"a"), &mut fresh).starts_with(b"1970"));
        assert_eq!(stamp(&record(b"b"), &mut fresh), b"b");
        assert_eq!(stamp(&record(b"\n"), &mut fresh), b"\n");
        assert!(fresh);
    }
}
