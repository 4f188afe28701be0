//! Control groups, as containerd names them: a path, or a unit of systemd's as `SLICE:PREFIX:NAME`.
//!
//! A pod's VMM is in the group that its pause container would have. The groups of containers are in
//! the guest: the name that containerd gives is checked, and not used.

use std::path::Path;

use super::is_plain_path;

/// The end of the name of a slice.
const SLICE: &str = ".slice";
/// The slice of units that name none.
const DEFAULT_SLICE: &str = "system.slice";
/// The slice that is the root of the hierarchy.
const ROOT_SLICE: &str = "-.slice";

/// Checks the control group of a container.
///
/// # Errors
/// One line: no container can have it, so it is a mistake of whoever asks for the container.
pub fn check(path: &str) -> Result<(), String> {
    resolve(path).map(drop)
}

/// Returns the path of a pod's group in each hierarchy. An empty one stands for a group of the
/// node's: none is asked for, or `default`, which containerd names where the pod has no parent.
///
/// # Errors
/// One line: no pod can have the group.
pub fn of_pod(path: &str, default: &str) -> Result<String, String> {
    let resolved = resolve(path)?;
    Ok(if path == default { String::new() } else { resolved })
}

/// Returns the path in each hierarchy of the group that `path` names; an empty one for "".
fn resolve(path: &str) -> Result<String, String> {
    let resolved = match path.split(':').collect::<Vec<_>>()[..] {
        [""] => Some(String::new()),
        [slice, prefix, name] => unit(slice, prefix, name),
        _ => None,
    };
    let is_group = |path: &Path| is_plain_path(path) && path.file_name().is_some();
    let plain = || is_group(Path::new(path)).then(|| path.to_owned());
    resolved.or_else(plain).ok_or_else(|| {
        format!(
            "the control group {path:?} is wrong: it is an absolute path, as /kubepods/pod1/one, \
             or a unit of systemd's, as kubepods-pod1.slice:cri:one"
        )
    })
}

/// Returns the path of a unit as systemd lays units out (systemd.slice(5)): a scope, or a slice if
/// `name` is one.
fn unit(slice: &str, prefix: &str, name: &str) -> Option<String> {
    let slice = directory(if slice.is_empty() { DEFAULT_SLICE } else { slice })?;
    let is_name = |part: &str| !part.contains('/');
    if name.is_empty() || !is_name(name) || !is_name(prefix) {
        return None;
    }
    if name.ends_with(SLICE) {
        return directory(name);
    }
    let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}-") };
    Some(format!("{slice}/{prefix}{name}.scope"))
}

/// Returns the directory of a slice: "a-b.slice" is in "a.slice".
fn directory(slice: &str) -> Option<String> {
    if slice == ROOT_SLICE {
        return Some(String::new());
    }
    let parts: Vec<_> = slice.strip_suffix(SLICE)?.split('-').collect();
    if parts.iter().any(|part| part.is_empty() || part.contains('/')) {
        return None;
    }
    let names = (1..=parts.len()).map(|count| format!("/{}{SLICE}", parts[..count].join("-")));
    Some(names.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_where_systemd_has_it() {
        let pod = "kubepods-burstable-pod0_1.slice:cri-containerd:one";
        let path = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0_1.slice/\
                    cri-containerd-one.scope";
        for (unit, path) in [
            (pod, path),
            (":cri:one", "/system.slice/cri-one.scope"),
            ("a.slice::one", "/a.slice/one.scope"),
            ("-.slice:cri:one", "/cri-one.scope"),
            ("a.slice::a-b.slice", "/a.slice/a-b.slice"),
            ("/kubepods/pod1/one", "/kubepods/pod1/one"),
            ("", ""),
        ] {
            assert_eq!(of_pod(unit, "/k8s.io/one").as_deref(), Ok(path), "{unit}");
        }
    }

    #[test]
    fn the_group_that_containerd_names_by_default_is_no_parent() {
        assert_eq!(of_pod("/k8s.io/one", "/k8s.io/one"), Ok(String::new()));
        assert_eq!(of_pod("/k8s.io/one", "/k8s.io/two").as_deref(), Ok("/k8s.io/one"));
    }

    #[test]
    fn a_group_that_cannot_be_is_refused() {
        for path in [
            "pod1/one",
            "/",
            "/a/../one",
            "a.slice:cri:",
            "pod1:cri:one",
            "a--b.slice:cri:one",
            "-a.slice:cri:one",
            "a/b.slice:cri:one",
            "a.slice:cri:../one",
            "a.slice:../cri:one",
            "a.slice:one",
            ".slice:cri:one",
        ] {
            let refused = check(path).unwrap_err();
            assert!(refused.contains("the control group") && !refused.contains('\n'), "{refused}");
        }
    }
}
