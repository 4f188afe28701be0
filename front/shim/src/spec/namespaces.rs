//! A container's namespaces. A microVM has its own of all kinds; what is checked is that nobody
//! asks for the host's, or for somebody else's.

use super::oci::{Linux, Namespace};

/// Checks the namespaces of a container with a sandbox of its own.
///
/// # Errors
/// One line that names the namespace that a microVM cannot have.
pub fn check(linux: &Linux) -> Result<(), String> {
    check_kinds(linux)?;
    match linux.namespaces.iter().find(|one| !one.path.is_empty()) {
        Some(named) => Err(cannot_join(named)),
        None => Ok(()),
    }
}

/// Checks the namespaces of a pod's sandbox. Returns the path of the network namespace that was
/// made for it, or an empty one.
///
/// # Errors
/// One line that names the namespace that a pod cannot have.
pub fn of_pod(linux: &Linux) -> Result<String, String> {
    check_kinds(linux)?;
    let other = |one: &&Namespace| !one.path.is_empty() && one.kind != "network";
    if let Some(named) = linux.namespaces.iter().find(other) {
        return Err(cannot_join(named));
    }
    Ok(find(linux, "network").map(|one| one.path.clone()).unwrap_or_default())
}

/// The namespaces of a pod, as containerd names them in the configuration of its containers.
#[derive(Clone, Copy, Debug)]
pub struct PodNamespaces<'a> {
    /// The path of the network namespace that was made for the pod; empty if there is none.
    pub network: &'a str,
    /// The processes that stand for the pod, since its start and before: the others are named by
    /// one of them.
    pub processes: [u32; 2],
}

impl PodNamespaces<'_> {
    /// Returns whether a namespace with a path is one of the pod's.
    fn has(&self, named: &Namespace) -> bool {
        let file = match named.kind.as_str() {
            "network" if named.path == self.network => return true,
            "network" => "net",
            kind @ ("ipc" | "uts" | "pid") => kind,
            _ => return false,
        };
        self.processes.iter().any(|process| named.path == format!("/proc/{process}/ns/{file}"))
    }
}

/// Checks the namespaces of a container of a pod. Returns whether the container shares processes
/// with others of the pod.
///
/// # Errors
/// One line that names the namespace that the container cannot have.
pub fn of_member(linux: &Linux, pod: PodNamespaces<'_>) -> Result<bool, String> {
    check_kinds(linux)?;
    match linux.namespaces.iter().find(|one| !one.path.is_empty() && !pod.has(one)) {
        None => Ok(find(linux, "pid").is_some_and(|one| !one.path.is_empty())),
        Some(named) => Err(cannot_join(named)),
    }
}

fn find<'a>(linux: &'a Linux, kind: &str) -> Option<&'a Namespace> {
    linux.namespaces.iter().find(|one| one.kind == kind)
}

fn check_kinds(linux: &Linux) -> Result<(), String> {
    if find(linux, "network").is_none() {
        return Err(
            "the host's network cannot be a microVM's: leave out host networking (`--net-host`, \
             `hostNetwork`); the annotation dev.slipway.network names a network"
                .to_owned(),
        );
    }
    for kind in ["pid", "ipc"] {
        if find(linux, kind).is_none() {
            return Err(format!("the host's {kind} namespace cannot be a microVM's: leave it out"));
        }
    }
    if find(linux, "user").is_some() {
        return Err("user namespaces are not supported: a microVM has a kernel of its own, so \
                    leave out the mapping of ids"
            .to_owned());
    }
    Ok(())
}

fn cannot_join(named: &Namespace) -> String {
    let hint = match named.kind.as_str() {
        "network" => "; the annotation dev.slipway.network names a network of Slipway's",
        _ => "",
    };
    let Namespace { kind, path } = named;
    format!("a microVM cannot join the {kind} namespace {path}: leave it out{hint}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn linux(namespaces: Value) -> Linux {
        serde_json::from_value(json!({ "namespaces": namespaces })).unwrap()
    }

    /// The namespaces of a container of a pod as containerd names them, whose sandbox has the
    /// process `pid`.
    fn of(pid: u32, processes: Value) -> Linux {
        let path = |name: &str| format!("/proc/{pid}/ns/{name}");
        linux(json!([
            processes, {"type": "mount"}, {"type": "cgroup"}, {"type": "ipc", "path": path("ipc")},
            {"type": "uts", "path": path("uts")}, {"type": "network", "path": path("net")}
        ]))
    }

    #[test]
    fn a_pod_takes_its_network_namespace_and_no_other() {
        let plain = [json!({"type": "pid"}), json!({"type": "ipc"})];
        let with = |more: Value| linux(json!([plain[0], plain[1], more]));
        let path = "/var/run/netns/cni-1";
        let network = json!({"type": "network", "path": path});
        assert_eq!(of_pod(&with(network.clone())).unwrap(), path);
        assert_eq!(of_pod(&with(json!({"type": "network"}))).unwrap(), "");
        assert!(check(&with(network)).unwrap_err().contains(path));
        assert!(of_pod(&with(json!({"type": "uts", "path": path}))).is_err());
    }

    #[test]
    fn a_member_shares_those_of_its_own_pod() {
        let (own, processes) = (json!({"type": "pid"}), [71, 70]);
        let member =
            |linux: &Linux, network| of_member(linux, PodNamespaces { network, processes });
        assert_eq!(member(&of(70, own.clone()), ""), Ok(false));
        assert_eq!(member(&of(71, own.clone()), ""), Ok(false));
        assert!(member(&of(72, own.clone()), "").unwrap_err().contains("ipc"));
        let processes = |pid| json!({"type": "pid", "path": format!("/proc/{pid}/ns/pid")});
        assert_eq!(member(&of(71, processes(71)), ""), Ok(true));
        assert!(member(&of(71, processes(72)), "").unwrap_err().contains("pid"));
        let named = |path: &str| {
            linux(json!([{"type": "pid"}, {"type": "ipc"}, {"type": "network", "path": path}]))
        };
        assert_eq!(member(&named("/run/netns/x"), "/run/netns/x"), Ok(false));
        assert_eq!(member(&named(""), "/run/netns/x"), Ok(false));
        assert!(member(&named("/run/netns/y"), "/run/netns/x").is_err());
    }
}
