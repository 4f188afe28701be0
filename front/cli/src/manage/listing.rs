//! `slipway ps`: sandboxes as a table and as JSON, each pod with its containers.

use anyhow::Result;
use slipway_runtime::{SandboxClient, v1};

use crate::args::PsArgs;
use crate::client::answer;
use crate::table::{ago, printable, table};

/// The columns of the table.
const COLUMNS: [&str; 9] =
    ["ID", "NAME", "IMAGE", "COMMAND", "CREATED", "CPUS", "ADDRESS", "PORTS", "STATE"];
/// The most characters of a command in the table.
const LONGEST_COMMAND: usize = 30;

/// A line of the table: a cell for each of [`COLUMNS`].
type Row = [String; COLUMNS.len()];

/// Returns all sandboxes, the oldest first.
///
/// # Errors
/// The daemon's refusal, or [`Lost`](crate::client::Lost).
pub async fn list(client: &mut SandboxClient) -> Result<Vec<v1::Sandbox>> {
    Ok(answer(client.list(v1::Empty {}).await)?.sandboxes)
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

/// Returns whether a sandbox's container runs, or is paused.
pub fn runs(sandbox: &v1::Sandbox) -> bool {
    matches!(&*sandbox.state, "running" | "paused")
}

/// Returns whether a state is one of a sandbox or container that has ended.
pub fn has_ended(state: &str) -> bool {
    matches!(state, "exited" | "failed" | "lost")
}

/// Prints sandboxes as JSON, or as a table in which each pod is followed by its containers.
///
/// # Errors
/// The sandboxes cannot be written as JSON.
pub fn print_list(sandboxes: &[v1::Sandbox], as_json: bool) -> Result<()> {
    if as_json {
        return crate::out::json(&sandboxes.iter().map(json).collect::<Vec<_>>());
    }
    crate::out::print(format_args!("{}", list_text(sandboxes)));
    Ok(())
}

/// Returns a sandbox as `ps --json` and `update --json` print it.
pub fn json(sandbox: &v1::Sandbox) -> serde_json::Value {
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

/// Returns a container of a pod as `ps --json` prints it.
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

/// Formats sandboxes as a table, each pod followed by its containers.
fn list_text(sandboxes: &[v1::Sandbox]) -> String {
    let rows: Vec<Row> = sandboxes.iter().flat_map(rows_of).collect();
    table(COLUMNS, &rows)
}

/// Returns the line of a sandbox and those of its containers.
fn rows_of(sandbox: &v1::Sandbox) -> impl Iterator<Item = Row> {
    let containers =
        sandbox.containers.iter().map(move |container| container_row(sandbox, container));
    std::iter::once(sandbox_row(sandbox)).chain(containers)
}

fn sandbox_row(sandbox: &v1::Sandbox) -> Row {
    let image = if sandbox.pod { "(pod)".to_owned() } else { printable(&sandbox.image) };
    let state = if sandbox.in_file {
        format!("{} (in a file)", sandbox.state)
    } else {
        state_text(&sandbox.state, sandbox.exit_status, &sandbox.reason)
    };
    [
        sandbox.id.clone(),
        sandbox.name.clone(),
        image,
        short(&sandbox.command),
        ago(sandbox.created_ns),
        cpus(sandbox.cpus, sandbox.max_cpus),
        sandbox.addresses.first().cloned().unwrap_or_default(),
        sandbox.published.join(", "),
        state,
    ]
}

/// Returns the line of a container. Its cells of CPUs, address and ports are empty: it has those of
/// its pod, whose line is above.
fn container_row(pod: &v1::Sandbox, container: &v1::Container) -> Row {
    [
        pod.id.clone(),
        format!("{}/{}", pod.name, container.name),
        printable(&container.image),
        short(&container.command),
        ago(container.created_ns),
        String::new(),
        String::new(),
        String::new(),
        state_text(&container.state, container.exit_status, &container.reason),
    ]
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

/// Returns a command on one line, without its end if it is longer than [`LONGEST_COMMAND`].
fn short(command: &str) -> String {
    let command = printable(command);
    if command.chars().count() > LONGEST_COMMAND {
        return command.chars().take(LONGEST_COMMAND - 1).collect::<String>() + "…";
    }
    command
}

/// Returns the number of CPUs that a sandbox has, with the most that it can have if that is more.
fn cpus(has: u32, most: u32) -> String {
    if most > has { format!("{has} of {most}") } else { has.to_string() }
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
}
