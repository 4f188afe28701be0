//! Entries of the list of sandboxes: `slipway ps`.
//!
//! A new field of a sandbox has a place in `Sandbox` (`sandbox/api`, `sandbox.proto`), in
//! [`summary_of`], and in `json` of `front/cli/src/manage/listing.rs`. A column of the table is
//! also, in that file, in `COLUMNS` and in both kinds of rows: `sandbox_row`, and `container_row`,
//! which leaves the column empty if containers have no such field. The tests of `list_text` are in
//! the same file. A field that containers of a pod have as well is also in `Container`, in
//! [`container`], and in `container_json`. What a later daemon must know is in the [`Record`].
//! End-to-end tests read it by `slipway ps --json`: `12-pods.sh`. `docs/observe.md`, "Lists", has
//! each field of that.

use crate::network::{function_of, further};
use crate::record::{Added, PAUSED, Record, SandboxState, Settings};
use crate::sandbox::Sandbox;
use crate::v1;

/// Returns the command line, cut to 512 characters, since a list has many of them in one message.
fn command(settings: &Settings) -> String {
    const MOST: usize = 512;
    let mut command = String::new();
    for (number, arg) in settings.process.args.iter().enumerate() {
        command.extend((number > 0).then_some(' ').into_iter().chain(arg.chars().take(MOST + 1)));
        if let Some((end, _)) = command.char_indices().nth(MOST) {
            command.truncate(end);
            command.push('…');
            break;
        }
    }
    command
}

/// Returns the word for the state of a container.
fn word(state: SandboxState, paused: bool) -> String {
    let word = if paused && state == SandboxState::Running { PAUSED } else { state.as_str() };
    word.to_owned()
}

/// Returns a sandbox's entry in the list. Its state and those of its containers are the announced
/// ones, which decide whether calls are allowed.
pub(super) fn summary(sandbox: &Sandbox) -> v1::Sandbox {
    let announced = sandbox.added();
    let state_of = |added: &Added| {
        let container = announced.iter().find(|container| container.name == added.name);
        container.map_or(added.state, |container| container.state())
    };
    sandbox.look(|record| summary_of(record, sandbox.state(), state_of))
}

/// Returns a container's entry. `with_pod` is set if its pod is paused as a whole.
fn container(added: &Added, state: SandboxState, with_pod: bool) -> v1::Container {
    v1::Container {
        name: added.name.clone(),
        image: added.settings.image.clone(),
        command: command(&added.settings),
        state: word(state, added.run.paused || with_pod),
        created_ns: added.created_ns,
        exit_status: added.run.exit_status.unwrap_or(0),
        reason: added.run.reason.clone(),
    }
}

fn further_interfaces(record: &Record) -> Vec<v1::FurtherInterface> {
    let all = further::of(record).iter().zip(further::ids(record));
    let listed = all.map(|(one, network_function)| v1::FurtherInterface {
        name: one.settings.interface.clone(),
        network_function,
    });
    listed.collect()
}

fn summary_of(
    record: &Record,
    state: SandboxState,
    state_of: impl Fn(&Added) -> SandboxState,
) -> v1::Sandbox {
    // A sandbox that has ended has released its addresses.
    let holds = state.is_live();
    let network = record.network.as_ref().filter(|_| holds);
    let paused = record.run.paused;
    let containers = record.added.iter().map(|added| container(added, state_of(added), paused));
    v1::Sandbox {
        id: record.id.clone(),
        name: record.name.clone(),
        image: record.settings.image.clone(),
        command: command(&record.settings),
        state: word(state, record.run.paused),
        created_ns: record.created_ns,
        exit_status: record.run.exit_status.unwrap_or(0),
        reason: record.run.reason.clone(),
        vmm_pid: record.vm.as_ref().map_or(0, |vm| vm.pid as u32),
        network: network.map(|one| one.name.clone()).unwrap_or_default(),
        mac: network.map(|one| one.mac.clone()).unwrap_or_default(),
        addresses: network.map(|one| one.addresses()).unwrap_or_default(),
        published: network.map(|one| one.published.clone()).unwrap_or_default(),
        network_function: network.map(|_| function_of(record)).unwrap_or_default(),
        further_interfaces: if holds { further_interfaces(record) } else { Vec::new() },
        sockets: record.sockets.is_some(),
        in_file: record.saving.in_file,
        cpus: record.cpus.count,
        max_cpus: record.cpus.max,
        memory_bytes: record.guest_bytes(),
        max_memory_bytes: record.memory.max_bytes.saturating_add(record.bound.room()),
        pod: record.pod,
        containers: containers.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of, sandbox_of};

    #[tokio::test]
    async fn containers_of_a_pod_that_is_paused_as_a_whole_are_paused() {
        let dir = tempfile::tempdir().unwrap();
        let mut record = Record { pod: true, ..record_of(SandboxState::Running) };
        let (runs, ended) = (SandboxState::Running, SandboxState::Exited);
        record.added = vec![added_of("a", runs), added_of("b", ended)];
        record.run.paused = true;
        let sandbox = sandbox_of(record, dir.path());
        let states = || summary(&sandbox).containers.into_iter().map(|one| one.state);
        assert_eq!(states().collect::<Vec<_>>(), [PAUSED, ended.as_str()]);
        sandbox.note(|record| record.run.paused = false);
        assert_eq!(states().collect::<Vec<_>>(), [runs.as_str(), ended.as_str()]);
    }
}
