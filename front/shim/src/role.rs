//! The role of a container, from the annotations of its configuration: alone in its sandbox, the
//! sandbox of a pod, or one of a pod's containers.
//!
//! All containers of a pod have one shim. containerd 1.6 runs `start` for each of them, and takes
//! the address of the shim that serves already; later versions take that address themselves.

use std::collections::BTreeMap;

use crate::args;

/// The annotations that tell a pod's sandbox from its containers: containerd's, and CRI-O's.
pub const KINDS: [&str; 2] =
    ["io.kubernetes.cri.container-type", "io.kubernetes.cri-o.ContainerType"];
/// The annotations with the id of the pod's sandbox.
pub const PODS: [&str; 2] = ["io.kubernetes.cri.sandbox-id", "io.kubernetes.cri-o.SandboxID"];
/// The annotation that names a group of containers with one shim, as for containerd's own shim.
const GROUP: &str = "io.containerd.runc.v2.group";

/// The role of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has a sandbox of its own.
    Alone,
    /// It is a pod's sandbox, in which other containers run.
    Pod,
    /// It runs in the pod whose sandbox has this id.
    Member(String),
}

impl Role {
    /// Finds the role.
    ///
    /// # Errors
    /// One line: an annotation is not understood.
    pub fn of(annotations: &BTreeMap<String, String>) -> Result<Self, String> {
        match find(annotations, &KINDS) {
            None => Ok(Self::Alone),
            Some((_, "sandbox")) => Ok(Self::Pod),
            Some((key, "container")) => match find(annotations, &PODS) {
                Some(found) => Ok(Self::Member(name(found)?)),
                None => Err(format!(
                    "the annotation {key}=container needs {}, which names the pod",
                    PODS[0]
                )),
            },
            Some((key, value)) => Err(format!(
                "the annotation {key}={value:?} is not understood: \"sandbox\" or \"container\""
            )),
        }
    }
}

/// Returns the name of the group of containers that one shim serves: that of the container `id`.
///
/// # Errors
/// One line: an annotation is no name.
pub fn group(id: &str, annotations: &BTreeMap<String, String>) -> Result<String, String> {
    let grouped = find(annotations, &[GROUP]).or_else(|| find(annotations, &PODS));
    grouped.map_or_else(|| Ok(id.to_owned()), name)
}

fn find<'a>(
    annotations: &'a BTreeMap<String, String>,
    keys: &[&'a str],
) -> Option<(&'a str, &'a str)> {
    keys.iter().find_map(|key| Some((*key, annotations.get(*key)?.as_str())))
}

fn name((key, value): (&str, &str)) -> Result<String, String> {
    if args::is_id(value) {
        return Ok(value.to_owned());
    }
    Err(format!("the annotation {key}={value:?} is no container's id"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn annotations(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect()
    }

    #[test]
    fn a_pod_and_its_containers_are_one_group() {
        let pod = annotations(&[(KINDS[0], "sandbox"), (PODS[0], "pod")]);
        let one = annotations(&[(KINDS[0], "container"), (PODS[0], "pod")]);
        assert_eq!(Role::of(&pod), Ok(Role::Pod));
        assert_eq!(Role::of(&one), Ok(Role::Member("pod".into())));
        assert_eq!((group("pod", &pod), group("one", &one)), (Ok("pod".into()), Ok("pod".into())));
        let crio = annotations(&[(KINDS[1], "container"), (PODS[1], "pod")]);
        assert_eq!(Role::of(&crio), Ok(Role::Member("pod".into())));
    }

    #[test]
    fn a_container_without_annotations_is_alone_and_a_group_shares_a_shim_only() {
        let plain = annotations(&[]);
        assert_eq!((Role::of(&plain), group("one", &plain)), (Ok(Role::Alone), Ok("one".into())));
        let grouped = annotations(&[(GROUP, "many"), (PODS[0], "pod")]);
        assert_eq!(Role::of(&grouped), Ok(Role::Alone));
        assert_eq!(group("one", &grouped), Ok("many".into()));
    }

    #[test]
    fn annotations_that_are_not_understood_are_named() {
        for bad in [
            &[(KINDS[0], "other")][..],
            &[(KINDS[0], "container")],
            &[(KINDS[0], "container"), (PODS[0], "../pod")],
            &[(KINDS[0], "container"), (PODS[0], "")],
        ] {
            let refused = Role::of(&annotations(bad)).unwrap_err();
            assert!(refused.contains(KINDS[0]) || refused.contains(PODS[0]), "{refused}");
        }
        assert!(group("one", &annotations(&[(GROUP, "a/b")])).is_err());
    }
}
