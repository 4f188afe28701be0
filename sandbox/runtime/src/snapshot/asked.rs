//! The parts of a request that a sandbox which begins with a snapshot cannot have, since its
//! machine and its container are the snapshot's.
//!
//! A new field of `RunSpec` goes to the first group of [`first_refused`] if the sandbox may have a
//! value of its own, and otherwise to the second group and to the table, which names it for users.

use crate::v1::RunSpec;

/// Returns what users call the first part of a request that a sandbox which begins with a snapshot
/// cannot have. Returns `None` if the sandbox can be as asked. Every field is named here: it is
/// used, or refused if it is set.
pub(super) fn first_refused(asked: &RunSpec) -> Option<&'static str> {
    let RunSpec {
        // The sandbox has these.
        template: _,
        name: _,
        hostname: _,
        detach: _,
        remove: _,
        labels: _,
        network: _,
        mac: _,
        addresses: _,
        publish: _,
        wait_network: _,
        network_namespace: _,
        layers_bytes: _,
        placement: _,
        control_group: _,
        least_memory_bytes: _,
        // How many there are says nothing of one of them.
        at_once: _,
        // With the name of a snapshot it means nothing.
        boots: _,
        // A size alone asks for no terminal: clients always tell theirs.
        rows: _,
        columns: _,
        // Without standard input it means nothing.
        keeps_input: _,
        // The snapshot has the others.
        pod,
        makes_pod,
        max_containers,
        bound_memory_bytes,
        shares_processes,
        processes_of,
        termination_message_path,
        resources,
        image,
        image_digest,
        command,
        entrypoint,
        env,
        cwd,
        user,
        limits,
        oom_score_adj,
        security,
        terminal,
        stdin,
        privileged,
        read_only,
        memory_bytes,
        max_memory_bytes,
        cpus,
        max_cpus,
        kernel,
        accelerator,
        nic,
        queues,
        interrupt_interval_ns,
        mac_at_port,
        emulated_nic,
        assigned_function,
        vf_pool,
        vf_addresses,
        socket_engine,
        volumes,
        shares,
        files,
        file_dirs,
        functions,
        empty_dirs,
        free_page_reporting,
    } = asked;
    let joins = *shares_processes || !processes_of.is_empty();
    let has_environment = !env.is_empty() || !cwd.is_empty() || !user.is_empty();
    let has_bounds = !limits.is_empty() || security.is_some() || oom_score_adj.is_some();
    let has_memory = *memory_bytes > 0 || *max_memory_bytes > 0;
    let has_cpus = *cpus > 0 || *max_cpus > 0;
    let has_nic = !nic.is_empty() || *queues > 0 || *interrupt_interval_ns > 0;
    let parts = [
        (*makes_pod || *max_containers > 0 || !pod.is_empty(), "the pod"),
        (*bound_memory_bytes > 0, "bound memory"),
        (
            joins || !termination_message_path.is_empty() || !empty_dirs.is_empty(),
            "what only containers of pods have",
        ),
        (!image.is_empty() || !image_digest.is_empty(), "the image"),
        (!command.is_empty() || entrypoint.is_some(), "the command"),
        (has_environment || has_bounds, "the settings of its process"),
        (resources.is_some(), "its limits"),
        (*terminal || *stdin, "the terminal and standard input"),
        (*privileged || *read_only, "--privileged and --read-only"),
        (has_memory || has_cpus || !kernel.is_empty(), "memory, CPUs and kernel"),
        (!accelerator.is_empty(), "the accelerator"),
        (has_nic || emulated_nic.is_some(), "the kind of its interface"),
        (*mac_at_port, "--mac-at-port"),
        (free_page_reporting.is_some(), "--free-page-reporting"),
        (!volumes.is_empty(), "volumes"),
        (!shares.is_empty(), "directories of the host"),
        (!files.is_empty() || !file_dirs.is_empty(), "files"),
        (!functions.is_empty(), "functions of pools"),
        (assigned_function.is_some(), "a function of the host"),
        (!socket_engine.is_empty(), "--sockets"),
        (!vf_pool.is_empty() || !vf_addresses.is_empty(), "the pool of functions"),
    ];
    parts.into_iter().find(|(is_set, _)| *is_set).map(|(_, what)| what)
}
