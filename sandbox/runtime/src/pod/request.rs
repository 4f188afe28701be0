//! The record of a new container of a pod, made of what a caller asks for.

use slipway_telemetry::realtime_ns;

use crate::record::{Added, Limits, MOST_ADDED, Placement, Record, Run, SandboxState, Settings};
use crate::v1::{Resources, RunSpec};
use crate::{Error, Result, copies, name, process};

/// Refuses settings of a machine: a container has the machine of its pod.
pub(super) fn refuse_machine(spec: &RunSpec) -> Result<()> {
    let asked = [
        (spec.memory_bytes != 0 || spec.max_memory_bytes != 0, "memory"),
        (spec.layers_bytes != 0, "a bound of root layers"),
        (spec.cpus != 0 || spec.max_cpus != 0, "CPUs"),
        (!spec.kernel.is_empty() || !spec.accelerator.is_empty(), "a kernel and an accelerator"),
        (!spec.network.is_empty() || !spec.mac.is_empty(), "a network"),
        (!spec.addresses.is_empty() || !spec.publish.is_empty(), "addresses and ports"),
        (spec.mac_at_port, "an address that is translated"),
        (spec.queues != 0, "queues"),
        (!spec.nic.is_empty(), "a kind of network interface"),
        (spec.interrupt_interval_ns != 0, "an interval between interrupts"),
        (!spec.network_namespace.is_empty(), "a network namespace"),
        (spec.security.as_ref().is_some_and(|one| !one.sysctls.is_empty()), "kernel settings"),
        (!spec.template.is_empty(), "a template"),
        (!spec.control_group.is_empty(), "a control group of the host"),
        (spec.makes_pod, "pods"),
        (spec.max_containers != 0, "containers"),
        (spec.bound_memory_bytes != 0, "memory for containers"),
        (spec.free_page_reporting.is_some(), "reports of free pages"),
    ];
    match asked.iter().find(|(is_asked, _)| *is_asked) {
        Some((_, what)) => {
            Err(Error::Invalid(format!("a container of a pod cannot have {what} of its own")))
        }
        None => Ok(()),
    }
}

/// Returns the most containers of a new pod that have not ended; 0: no bound but that of every pod.
///
/// # Errors
/// [`Error::Invalid`] for a bound that is above that of every pod, or of a sandbox that is no pod.
pub(crate) fn max_containers(spec: &RunSpec) -> Result<u32> {
    let most = spec.max_containers;
    if most != 0 && !spec.makes_pod {
        return Err(Error::Invalid("only a pod has a bound of containers".to_owned()));
    }
    if most as usize > MOST_ADDED {
        let what = format!("at most {most} containers: no pod has more than {MOST_ADDED}");
        return Err(Error::Invalid(what));
    }
    Ok(most)
}

/// Checks that a pod can have one more container.
///
/// # Errors
/// [`Error::Busy`], with the bound.
pub(super) fn check_count(record: &Record) -> Result<()> {
    let live = record.added.iter().filter(|added| added.state.is_live()).count();
    let most = record.max_containers as usize;
    let (what, most) = match most {
        _ if record.added.len() >= MOST_ADDED => ("containers", MOST_ADDED),
        1.. if live >= most => ("containers that have not ended", most),
        _ => return Ok(()),
    };
    Err(Error::Busy { name: record.name.clone(), what, most })
}

/// Returns what a new container runs.
pub(crate) fn settings(
    image: &slipway_image::Image,
    spec: &RunSpec,
    placement: Placement,
) -> Result<Settings> {
    let signal = &image.config.stop_signal;
    Ok(Settings {
        image: process::or(&spec.image, &image.digest.to_string()),
        image_digest: image.digest.to_string(),
        image_path: image.erofs_path.clone(),
        lazy: image.lazy,
        process: process::process(&image.config, spec)?,
        stop_signal: process::signal_number(signal).unwrap_or(libc::SIGTERM as u32),
        privileged: spec.privileged,
        read_only: spec.read_only,
        placement,
    })
}

/// Returns the record of a new container without its volumes, functions, shared directories and
/// part of the pod's kept output.
///
/// # Errors
/// [`Error::Invalid`] for a name, a path or a limit that no container can have.
pub(super) fn describe(spec: &RunSpec, settings: Settings) -> Result<Added> {
    let name = if spec.name.is_empty() { name::new_name() } else { spec.name.clone() };
    name::check_container(&name)?;
    Ok(Added {
        name,
        settings,
        hostname: spec.hostname.clone(),
        state: SandboxState::Created,
        created_ns: realtime_ns(),
        started_ns: None,
        run: Run::default(),
        message_path: copies::message_path(&spec.termination_message_path)?,
        message: String::new(),
        limits: limits_of_new(spec.resources.as_ref())?,
        disks: None,
        region: None,
        volumes: Vec::new(),
        functions: Vec::new(),
        sockets: None,
        shares: Vec::new(),
        empty_dirs: Vec::new(),
        log_bytes: 0,
        remove: spec.remove,
        shares_processes: spec.shares_processes,
        processes_of: spec.processes_of.clone(),
    })
}

/// Returns the limits of a new container; 0 is none.
///
/// # Errors
/// Those of [`limits`].
pub(crate) fn limits_of_new(asked: Option<&Resources>) -> Result<Limits> {
    Ok(Limits::default().changed_by(limits(asked)?))
}

/// Returns the limits that are asked for. 0 is none for a new container, and no change for others.
///
/// # Errors
/// [`Error::Invalid`] for a CPU weight over 10,000, or an `oom_group` that does not exist.
pub(crate) fn limits(asked: Option<&Resources>) -> Result<Limits> {
    /// The smallest quota that the kernel takes, microseconds.
    const LEAST_QUOTA: u64 = 1000;
    let asked = asked.copied().unwrap_or_default();
    let (cpu_quota_us, cpu_weight) = (asked.cpu_quota_us, asked.cpu_weight);
    if cpu_weight > 10_000 {
        return Err(Error::Invalid(format!("a CPU weight of {cpu_weight}: at most 10000")));
    }
    if asked.oom_group > 2 {
        return Err(Error::Invalid(format!("oom_group = {}: at most 2", asked.oom_group)));
    }
    Ok(Limits {
        memory_bytes: asked.memory_bytes,
        cpu_quota_us: if cpu_quota_us == 0 { 0 } else { cpu_quota_us.max(LEAST_QUOTA) },
        cpu_weight,
        pids: asked.pids,
        memory_high_bytes: asked.memory_high_bytes,
        memory_low_bytes: asked.memory_low_bytes,
        memory_min_bytes: asked.memory_min_bytes,
        oom_group: asked.oom_group,
        huge_page_bytes: asked.huge_page_bytes,
    })
}

/// Refuses a change of the huge pages that a container has: its guest has made them for it.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn check_huge_pages(has: Limits, asked: Limits) -> Result<()> {
    let (has, wanted) = (has.huge_bytes(), asked.huge_bytes());
    // Updates of Kubernetes name what a container has.
    if asked.huge_page_bytes == 0 || wanted == has {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "the huge pages of a container that runs cannot be changed: it has {} MiB of them; make a \
         new container for another number",
        has >> 20
    )))
}

/// Refuses a limit of memory above the most that the pod's microVM can have, so that nobody counts
/// on it.
pub(super) fn fits(Limits { memory_bytes, .. }: Limits, most: u64) -> Result<()> {
    // The greatest number takes a limit away.
    if memory_bytes <= most || memory_bytes == u64::MAX {
        return Ok(());
    }
    Err(Error::Invalid(format!(
        "a limit of {} MiB is more than the {} MiB that the pod's microVM can have; begin such a \
         pod with more, or a larger --max-memory",
        memory_bytes >> 20,
        most >> 20
    )))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::{added_of, record_of};

    #[test]
    fn a_container_more_than_a_pod_may_have_is_refused_with_the_bound() {
        let refused = |max_containers: u32, live: usize, ended: usize| {
            let states = [SandboxState::Running, SandboxState::Exited].into_iter();
            let states = states.zip([live, ended]).flat_map(|(state, n)| vec![state; n]);
            let added = states.map(|state| added_of("c", state)).collect();
            let record = Record { max_containers, added, ..record_of(SandboxState::Running) };
            check_count(&record).err().map(|error| error.to_string()).unwrap_or_default()
        };
        assert_eq!(refused(8, 7, 9), "");
        let ninth = refused(8, 8, 0);
        assert!(ninth.contains("has 8 containers that have not ended, the most"), "{ninth}");
        assert_eq!(refused(0, MOST_ADDED - 1, 0), "");
        let most = refused(8, 1, MOST_ADDED);
        assert!(most.contains("has 256 containers, the most"), "{most}");
    }

    #[test]
    fn a_bound_of_containers_is_a_pods_and_within_that_of_every_pod() {
        let of = |makes_pod, max_containers| {
            let spec = RunSpec { makes_pod, max_containers, ..RunSpec::default() };
            super::max_containers(&spec).map_err(|error| error.to_string())
        };
        assert_eq!((of(true, 0), of(true, 256), of(false, 0)), (Ok(0), Ok(256), Ok(0)));
        assert!(of(true, 257).unwrap_err().contains("no pod has more than 256"));
        assert!(of(false, 8).unwrap_err().contains("only a pod"));
    }
}
