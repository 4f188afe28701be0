//! Updates of a sandbox of containerd's Sandbox API. Once kubelet has changed the limits of a pod
//! as a whole, the CRI plugin tells them so: as an extension of what containerd keeps of the
//! sandbox.

use serde::Deserialize;
use slipway_sandbox_api::v1;

use super::limits;
use super::oci::{Cpu, Memory, Resources};
use crate::containerd as cd;

/// The path of the extensions in a sandbox of containerd's.
const EXTENSIONS: &str = "extensions";
/// The name of the extension with a pod's resources.
const RESOURCES: &str = "updated-resources";

/// A pod's resources. Its overhead, which is there too, is not the containers'.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Updated {
    #[serde(rename = "Resources")]
    resources: Option<Sums>,
}

/// The fields that count of the CRI's `LinuxContainerResources`. 0 stands for no limit.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Sums {
    /// Microseconds.
    cpu_period: i64,
    cpu_quota: i64,
    memory_limit_in_bytes: i64,
}

/// Returns the limits of memory and CPU time that an update gives to a pod as a whole, or `None` if
/// it gives none.
///
/// # Errors
/// One line: the resources are not understood.
pub fn updated_limits(request: &cd::UpdateSandboxRequest) -> Result<Option<v1::Resources>, String> {
    let is_extension = |path: &String| path.split('.').next() == Some(EXTENSIONS);
    if !request.fields.is_empty() && !request.fields.iter().any(is_extension) {
        return Ok(None);
    }
    let extension = request.sandbox.as_ref().and_then(|one| one.extensions.get(RESOURCES));
    let Some(extension) = extension else { return Ok(None) };
    let updated: Updated = serde_json::from_slice(&extension.value)
        .map_err(|error| format!("the extension {RESOURCES} of the sandbox: {error}"))?;
    let Some(sums) = updated.resources else { return Ok(None) };
    let memory = Memory { limit: Some(sums.memory_limit_in_bytes), ..Memory::default() };
    let period = u64::try_from(sums.cpu_period).unwrap_or(0);
    let cpu = Cpu { quota: Some(sums.cpu_quota), period: Some(period), ..Cpu::default() };
    let asked = Resources { memory: Some(memory), cpu: Some(cpu), ..Resources::default() };
    Ok(Some(limits::of_member(&asked)?).filter(|limits| *limits != v1::Resources::default()))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn request(fields: &[&str], extension: &Value) -> cd::UpdateSandboxRequest {
        let any = cd::Any {
            type_url: "io.containerd.cri.v1/UpdatedResources".into(),
            value: extension.to_string().into_bytes(),
        };
        let extensions = [(RESOURCES.to_owned(), any)].into();
        cd::UpdateSandboxRequest {
            sandbox_id: "pod".into(),
            sandbox: Some(cd::StoredSandbox { extensions }),
            fields: fields.iter().map(|&field| field.to_owned()).collect(),
        }
    }

    /// As containerd 2.4 writes it.
    fn updated() -> Value {
        json!({
            "Overhead": {"memory_limit_in_bytes": 167_772_160},
            "Resources": {
                "cpu_period": 100_000, "cpu_quota": 150_000, "cpu_shares": 1024,
                "memory_limit_in_bytes": 1 << 30
            }
        })
    }

    #[test]
    fn the_limits_of_a_pod_are_those_of_its_extension() {
        let expected = v1::Resources {
            memory_bytes: 1 << 30,
            cpu_quota_us: 150_000,
            ..v1::Resources::default()
        };
        for fields in [&["extensions"][..], &[], &["labels", "extensions.updated-resources"]] {
            let limits = updated_limits(&request(fields, &updated()));
            assert_eq!(limits, Ok(Some(expected)), "{fields:?}");
        }
    }

    #[test]
    fn an_update_of_anything_else_gives_no_limits() {
        assert_eq!(updated_limits(&cd::UpdateSandboxRequest::default()), Ok(None));
        for extension in [
            json!({}),
            json!({"Overhead": null, "Resources": null}),
            json!({"Resources": {"cpu_shares": 2, "cpu_period": 100_000}}),
        ] {
            assert_eq!(updated_limits(&request(&["extensions"], &extension)), Ok(None));
        }
        assert_eq!(updated_limits(&request(&["labels"], &updated())), Ok(None));
    }

    #[test]
    fn an_extension_that_is_not_understood_is_named() {
        for wrong in [json!("many"), json!({"Resources": {"cpu_quota": "many"}})] {
            let refused = updated_limits(&request(&["extensions"], &wrong)).unwrap_err();
            assert!(refused.contains(RESOURCES) && !refused.contains('\n'), "{refused}");
        }
    }
}
