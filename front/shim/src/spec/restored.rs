//! Sandboxes that begin with a checkpoint, which has the container's machine, image, process,
//! mounts and devices.

use slipway_sandbox_api::v1;

use super::sizes::{CPUS, LAYERS, MAX_CPUS, MAX_MEMORY};
use super::{NETWORK, Oci, hooks, namespaces, sizes};

/// Translates a container with a sandbox of its own that begins with a checkpoint. The caller adds
/// name, snapshot and labels.
///
/// # Errors
/// One line that names the namespace that a microVM cannot have, or a size that is none.
pub fn restored_spec(oci: &Oci) -> Result<v1::RunSpec, String> {
    namespaces::check(&oci.linux)?;
    hooks::check(oci)?;
    largest(oci)?;
    Ok(v1::RunSpec {
        hostname: oci.hostname.clone(),
        layers_bytes: sizes::annotated_memory(&oci.annotations, LAYERS)?.unwrap_or(0),
        network: oci.annotations.get(NETWORK).cloned().unwrap_or_default(),
        placement: sizes::placement(&oci.linux.resources),
        ..v1::RunSpec::default()
    })
}

/// Checks that the machine of a checkpoint is no larger than its container may be.
///
/// # Errors
/// One line that says which limit it exceeds; that of a size that is none.
pub fn check_restored(oci: &Oci, checkpoint: &v1::Snapshot) -> Result<(), String> {
    let (memory, cpus) = largest(oci)?;
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    // The host holds what was touched, whatever the description says is plugged.
    let has = checkpoint.memory_bytes.max(checkpoint.touched_bytes);
    let exceeds = if memory > 0 && has > memory {
        format!("{} MiB of memory, and {}", mib(has), mib(memory))
    } else if cpus > 0 && checkpoint.cpus > cpus {
        format!("{} CPUs, and {cpus}", checkpoint.cpus)
    } else {
        return Ok(());
    };
    Err(format!(
        "the checkpoint has {exceeds} are the container's limit: raise the limit, or leave it out"
    ))
}

/// Returns the most memory in bytes, and the most CPUs, that a container asks for; 0 stands for no
/// limit.
fn largest(oci: &Oci) -> Result<(u64, u32), String> {
    let cpus = match sizes::number(&oci.annotations, CPUS)? {
        Some(cpus) => cpus,
        None => sizes::cpus_of_limit(&oci.linux.resources),
    };
    // An update may have given the saved container these.
    let more = sizes::number(&oci.annotations, MAX_CPUS)?.unwrap_or(0);
    let cpus = if cpus == 0 { 0 } else { cpus.max(more) };
    let memory = sizes::memory(oci)?;
    let more = sizes::annotated_memory(&oci.annotations, MAX_MEMORY)?.unwrap_or(0);
    Ok((if memory == 0 { 0 } else { memory.max(more) }, cpus))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn oci(annotations: Value, resources: Value) -> Oci {
        let config = json!({
            "process": {"args": ["sleep"]}, "root": {"path": "rootfs"}, "annotations": annotations,
            "linux": {
                "resources": resources,
                "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "network"}]
            }
        });
        serde_json::from_value(config).unwrap()
    }

    #[test]
    fn a_checkpoint_is_no_larger_than_its_container_may_be() {
        let check = |annotations: Value, resources: Value| {
            let memory_bytes = 512 << 20;
            let checkpoint = v1::Snapshot { memory_bytes, cpus: 2, ..Default::default() };
            check_restored(&oci(annotations, resources), &checkpoint)
        };
        let (memory_bytes, touched_bytes) = (64 << 20, 512 << 20);
        let plugged = v1::Snapshot { memory_bytes, touched_bytes, ..Default::default() };
        let limit = |mib: u64| oci(json!({}), json!({"memory": {"limit": mib << 20}}));
        assert_eq!(check_restored(&limit(512), &plugged), Ok(()));
        assert!(check_restored(&limit(511), &plugged).unwrap_err().contains("512 MiB of memory"));
        let cpu = |quota: u32| json!({"cpu": {"quota": quota, "period": 100_000}});
        for (annotations, resources) in [
            (json!({}), json!({})),
            (json!({}), json!({"memory": {"limit": 512 << 20}})),
            (json!({"dev.slipway.memory": "1G"}), json!({"memory": {"limit": 1 << 20}})),
            (json!({"dev.slipway.memory": "256M", "dev.slipway.max-memory": "512M"}), json!({})),
            (json!({}), cpu(150_000)),
            (json!({"dev.slipway.cpus": "1", "dev.slipway.max-cpus": "2"}), json!({})),
        ] {
            assert_eq!(check(annotations, resources), Ok(()));
        }
        for (annotations, resources, why) in [
            (json!({}), json!({"memory": {"limit": 256 << 20}}), "512 MiB of memory, and 256 are"),
            (json!({"dev.slipway.memory": "128M"}), json!({}), "and 128 are"),
            (json!({}), cpu(100_000), "2 CPUs, and 1 are"),
            (json!({"dev.slipway.cpus": "1"}), json!({}), "2 CPUs, and 1 are"),
        ] {
            let error = check(annotations, resources).unwrap_err();
            assert!(error.contains(why) && error.contains("raise the limit"), "{error}");
        }
    }

    #[test]
    fn a_container_of_a_checkpoint_runs_where_it_may() {
        let run = restored_spec(&oci(json!({}), json!({"cpu": {"cpus": "1-2"}}))).unwrap();
        assert_eq!(run.placement.unwrap().cpus, "1-2");
        let wrong = oci(json!({"dev.slipway.memory": "much"}), json!({}));
        assert!(restored_spec(&wrong).unwrap_err().contains("is no size"));
    }
}
