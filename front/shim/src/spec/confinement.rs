//! Checks of AppArmor profiles and SELinux labels. On a host these limit which of its files and
//! services a container's processes reach. Here a microVM does that, and no policy is loaded in a
//! guest.
//!
//! So the profiles and types that runtimes give every container are accepted without an effect, and
//! so is less confinement. A profile or a type of another name is refused: somebody asked for it,
//! and it would not be applied.

use std::path::Path;

use super::oci::{Oci, Process};

/// The profiles that runtimes give every container, and the names for no profile.
const PROFILES: [&str; 6] = [
    "",
    "unconfined",
    "cri-containerd.apparmor.d",
    "docker-default",
    "nerdctl-default",
    "crio-default",
];
/// The types that SELinux policies have for processes of any container, and for those of privileged
/// ones.
const PROCESSES: [&str; 8] = [
    "container_t",
    "container_init_t",
    "container_kvm_t",
    "svirt_lxc_net_t",
    "svirt_qemu_net_t",
    "svirt_kvm_net_t",
    "spc_t",
    "unconfined_t",
];
/// The types that SELinux policies have for files of any container.
const FILES: [&str; 5] = [
    "container_file_t",
    "container_ro_file_t",
    "container_share_t",
    "svirt_sandbox_file_t",
    "svirt_lxc_file_t",
];

/// Checks the confinement that a container and its first process ask for.
///
/// # Errors
/// One line that names the profile or the label that would not be applied.
pub fn check(oci: &Oci) -> Result<(), String> {
    check_process(&oci.process)?;
    check_label("linux.mountLabel", &oci.linux.mount_label, &FILES)
}

/// Checks the confinement that a process asks for.
///
/// # Errors
/// One line that names the profile or the label that would not be applied.
pub fn check_process(process: &Process) -> Result<(), String> {
    let profile = process.apparmor_profile.as_str();
    if !PROFILES.contains(&profile) {
        return Err(format!(
            "the AppArmor profile {profile:?} would not be applied: a microVM confines the \
             container, and its guest loads no profiles; leave it out, or use RuntimeDefault"
        ));
    }
    check_label("process.selinuxLabel", &process.selinux_label, &PROCESSES)
}

/// Refuses a label of the configuration's `field` whose type is neither in `usual` nor one that the
/// node's policy gives containers. An empty label is accepted.
fn check_label(field: &str, label: &str, usual: &[&str]) -> Result<(), String> {
    let is_usual = |kind: &str| usual.contains(&kind) || is_in_policy(Path::new("/"), kind);
    if label.is_empty() || kind(label).is_some_and(is_usual) {
        return Ok(());
    }
    Err(format!(
        "the SELinux label {label:?} ({field}) would not be applied: a microVM confines the \
         container, and its guest has no policy; leave out the type that was asked for \
         (seLinuxOptions.type)"
    ))
}

/// Returns the type of a label: `container_t` for `system_u:system_r:container_t:s0:c1,c2`.
fn kind(label: &str) -> Option<&str> {
    label.split(':').nth(2)
}

/// Returns whether an SELinux policy of the node with the root directory `root` gives the type
/// `wanted` to containers. Container runtimes find these types in the same files.
fn is_in_policy(root: &Path, wanted: &str) -> bool {
    let policies = std::fs::read_dir(root.join("etc/selinux")).into_iter().flatten().flatten();
    let files = policies.map(|policy| policy.path().join("contexts/lxc_contexts"));
    let files = files.chain([root.join("usr/share/containers/selinux/contexts")]);
    let mut texts = files.filter_map(|file| std::fs::read_to_string(file).ok());
    texts.any(|text| {
        let mut labels = text.lines().filter_map(|line| line.split_once('='));
        labels.any(|(_, label)| kind(label.trim().trim_matches('"')) == Some(wanted))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of_process(process: Value) -> Result<(), String> {
        check(&serde_json::from_value(json!({ "process": process })).unwrap())
    }

    #[test]
    fn a_profile_that_was_asked_for_by_its_name_is_refused() {
        assert_eq!(check(&Oci::default()), Ok(()));
        for usual in ["", "unconfined", "cri-containerd.apparmor.d", "docker-default"] {
            assert_eq!(of_process(json!({"apparmorProfile": usual})), Ok(()), "{usual}");
        }
        for own in ["k8s-nginx", "cri-containerd.apparmor.d2", "a\nb", "localhost/x"] {
            let error = of_process(json!({ "apparmorProfile": own })).unwrap_err();
            let named = format!("the AppArmor profile {own:?} would not be applied");
            assert!(error.starts_with(&named) && !error.contains('\n'), "{error}");
            let process = Process { apparmor_profile: own.into(), ..Process::default() };
            assert_eq!(check_process(&process), Err(error));
        }
    }

    #[test]
    fn a_label_that_no_runtime_gives_every_container_is_refused() {
        for usual in [
            "",
            "system_u:system_r:container_t:s0:c1,c2",
            "system_u:system_r:container_init_t:s0:c1,c2",
            "system_u:system_r:svirt_lxc_net_t:s0",
            "unconfined_u:system_r:spc_t:s0-s0:c0.c1023",
            "system_u:system_r:container_t",
        ] {
            assert_eq!(of_process(json!({ "selinuxLabel": usual })), Ok(()), "{usual}");
        }
        for own in ["system_u:system_r:slipway_own_t:s0", "container_t", "a:b:\n", ":::"] {
            let error = of_process(json!({ "selinuxLabel": own })).unwrap_err();
            let named = format!("the SELinux label {own:?} (process.selinuxLabel) would not");
            assert!(error.starts_with(&named) && !error.contains('\n'), "{error}");
        }
        let mounts = |label: &str| {
            check(&serde_json::from_value(json!({"linux": {"mountLabel": label}})).unwrap())
        };
        assert_eq!(mounts("system_u:object_r:container_file_t:s0:c1,c2"), Ok(()));
        let error = mounts("system_u:object_r:slipway_own_t:s0").unwrap_err();
        assert!(error.contains("linux.mountLabel"), "{error}");
    }

    #[test]
    fn types_of_the_nodes_policy_are_those_of_its_containers() {
        let root = tempfile::tempdir().unwrap();
        assert!(!is_in_policy(root.path(), "pod_t"));
        let contexts = root.path().join("etc/selinux/own/contexts");
        std::fs::create_dir_all(&contexts).unwrap();
        std::fs::create_dir_all(root.path().join("etc/selinux/empty")).unwrap();
        let text = "# containers\nprocess = \"system_u:system_r:pod_t:s0\"\n\
                    file = \"system_u:object_r:data_t:s0\"\nnothing\n";
        std::fs::write(contexts.join("lxc_contexts"), text).unwrap();
        assert!(is_in_policy(root.path(), "pod_t") && is_in_policy(root.path(), "data_t"));
        assert!(!is_in_policy(root.path(), "pod") && !is_in_policy(root.path(), ""));
        let shared = root.path().join("usr/share/containers/selinux");
        std::fs::create_dir_all(&shared).unwrap();
        let text = "kvm_process = \"system_u:system_r:kvm_t:s0\"\n";
        std::fs::write(shared.join("contexts"), text).unwrap();
        assert!(is_in_policy(root.path(), "kvm_t"));
    }
}
