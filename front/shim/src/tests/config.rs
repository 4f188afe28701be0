//! Tests of the translation of sandboxes: the configurations of pods as containerd 2.x gives them.

use slipway_sandbox_api::v1;

use super::*;
use crate::spec::{ALLOWED, TEMPLATE, pod_spec};

fn request(config: &cd::PodSandboxConfig) -> cd::CreateSandboxRequest {
    let options = cd::Any { type_url: CONFIG.to_owned(), value: config.encode_to_vec() };
    cd::CreateSandboxRequest {
        sandbox_id: "pod".to_owned(),
        netns_path: "/run/netns/cni-1".to_owned(),
        options: Some(options),
        ..Default::default()
    }
}

fn with_linux(linux: cd::LinuxPodSandboxConfig) -> cd::PodSandboxConfig {
    cd::PodSandboxConfig { linux: Some(linux), ..Default::default() }
}

fn made(config: &cd::PodSandboxConfig) -> SandboxPod {
    pod_of_sandbox(&request(config), TEMPLATE).unwrap()
}

/// Translates a pod with these modes of the network, the processes, IPC and, if there is one, the
/// user namespace.
fn run_with(modes: [NamespaceMode; 3], user: Option<NamespaceMode>) -> Result<(), String> {
    let [network, pid, ipc] = modes.map(i32::from);
    let userns_options = user.map(|mode| cd::UserNamespace { mode: mode.into() });
    let options = cd::NamespaceOption { network, pid, ipc, userns_options };
    let security = cd::LinuxSandboxSecurityContext { namespace_options: Some(options) };
    let linux =
        cd::LinuxPodSandboxConfig { security_context: Some(security), ..Default::default() };
    pod_spec(&made(&with_linux(linux)).oci, &Default::default(), "").map(drop)
}

#[test]
fn a_sandbox_is_the_pod_that_a_pause_container_would_be() {
    let resources = cd::LinuxContainerResources {
        cpu_period: 100_000,
        cpu_quota: 150_000,
        cpu_shares: 1024,
        memory_limit_in_bytes: 512 << 20,
    };
    let linux = cd::LinuxPodSandboxConfig {
        cgroup_parent: "/kubepods/pod1".to_owned(),
        sysctls: [("net.ipv4.ping_group_range".to_owned(), "0 9".to_owned())].into(),
        resources: Some(resources),
        ..Default::default()
    };
    let (name, namespace) = ("web-0".to_owned(), "shop".to_owned());
    let metadata = Some(cd::PodSandboxMetadata { name, namespace });
    let hostname = "web".to_owned();
    let config = cd::PodSandboxConfig { metadata, hostname, ..with_linux(linux) };
    let oci = made(&config).oci;
    assert_eq!(oci.linux.cgroups_path, "/kubepods/pod1/pod");
    let node = v1::StatusReply { places_pods: true, ..Default::default() };
    let run = pod_spec(&oci, &node, "").unwrap();
    assert!(run.makes_pod && run.hostname == "web");
    assert_eq!(run.control_group, "/kubepods/pod1/pod");
    assert_eq!((run.memory_bytes, run.cpus), ((512 + 128) << 20, 2));
    assert_eq!(run.network_namespace, "/run/netns/cni-1");
    let sysctls = run.security.unwrap().sysctls;
    assert_eq!(sysctls["net.ipv4.ping_group_range"], "0 9");
    assert_eq!(sysctls["net.ipv4.ip_unprivileged_port_start"], "0");
    let labels = crate::spec::labels("k8s.io", "pod", &oci.annotations);
    assert_eq!(labels["io.kubernetes.pod.name"], "web-0");
    assert_eq!(labels["io.kubernetes.pod.namespace"], "shop");
    // Without limits, as without resources, the node's defaults count.
    let run = pod_spec(&made(&Default::default()).oci, &Default::default(), "").unwrap();
    assert_eq!((run.memory_bytes, run.cpus), (0, 0));
}

#[test]
fn of_the_authors_annotations_only_those_count_that_the_node_allows() {
    let all = [
        ("dev.slipway.template", "warm"),
        ("dev.slipway.memory", "64G"),
        ("dev.slipway.empty-dir", "shared"),
        ("io.kubernetes.cri.sandbox-memory", "68719476736"),
        ("io.kubernetes.cri.sandbox-id", "another"),
        ("app", "web"),
    ];
    let annotations = all.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let config = cd::PodSandboxConfig { annotations, ..Default::default() };
    let counts = |allowed: &str| {
        let oci = pod_of_sandbox(&request(&config), allowed).unwrap().oci;
        assert_eq!(oci.annotations["io.kubernetes.cri.sandbox-id"], "pod");
        let names = ["template", "memory", "empty-dir"].map(|name| format!("dev.slipway.{name}"));
        let found = names.map(|key| oci.annotations.contains_key(&key));
        assert!(![POD_MEMORY, "app"].iter().any(|key| oci.annotations.contains_key(*key)));
        found
    };
    assert_eq!(counts(ALLOWED), [true, false, true]);
    assert_eq!(counts(TEMPLATE), [true, false, false]);
    assert_eq!(counts("dev.slipway.*"), [true; 3]);
    assert_eq!(counts("dev.slipway.cpus, dev.slipway.mem*"), [false, true, false]);
    assert_eq!(counts("*"), [true; 3]);
    assert_eq!(counts(""), [false; 3]);
}

#[test]
fn the_hosts_namespaces_are_refused_as_those_of_a_pause_container() {
    let (own, node) = (NamespaceMode::Pod, NamespaceMode::Node);
    assert_eq!(run_with([own, own, own], None), Ok(()));
    assert_eq!(run_with([own, NamespaceMode::Container, own], Some(node)), Ok(()));
    for (modes, user, why) in [
        ([node, own, own], None, "hostNetwork"),
        ([own, node, own], None, "pid namespace"),
        ([own, own, node], None, "ipc namespace"),
        ([own, own, own], Some(own), "user namespaces"),
    ] {
        let refused = run_with(modes, user).unwrap_err();
        assert!(refused.contains(why) && !refused.contains('\n'), "{refused}");
    }
}

#[test]
fn control_groups_are_named_as_a_pause_containers() {
    for (parent, path) in [
        ("", ""),
        ("/", "/pod"),
        ("/kubepods", "/kubepods/pod"),
        ("/a.slice/b.slice", "b.slice:cri-containerd:pod"),
    ] {
        assert_eq!(cgroup_path(parent, "pod"), path);
    }
}

#[test]
fn the_resolver_has_the_pods_settings() {
    let list = |all: &[&str]| all.iter().map(|&one| one.to_owned()).collect();
    let dns = cd::DnsConfig {
        servers: list(&["10.96.0.10", "10.96.0.11"]),
        searches: list(&["shop.svc.cluster.local", "svc.cluster.local"]),
        options: list(&["ndots:5", "edns0"]),
    };
    let config = cd::PodSandboxConfig { dns_config: Some(dns), ..Default::default() };
    let expected = "search shop.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\n\
                    nameserver 10.96.0.11\noptions ndots:5 edns0\n";
    assert_eq!(made(&config).resolver.as_deref(), Some(expected));
    let empty = cd::PodSandboxConfig { dns_config: Some(Default::default()), ..config.clone() };
    assert_eq!(made(&empty).resolver.as_deref(), Some(""));
    assert_eq!(made(&Default::default()).resolver, None);
    let servers = vec!["1".repeat(MOST_RESOLVER)];
    let dns_config = Some(cd::DnsConfig { servers, ..Default::default() });
    let large = cd::PodSandboxConfig { dns_config, ..Default::default() };
    assert!(pod_of_sandbox(&request(&large), TEMPLATE).unwrap_err().contains("64 KiB"));
}

#[test]
fn requests_of_other_kinds_are_refused_in_one_line() {
    let config = cd::PodSandboxConfig::default();
    let plain = || request(&config);
    let any = |type_url: &str, value: &[u8]| {
        Some(cd::Any { type_url: type_url.to_owned(), value: value.to_vec() })
    };
    for (request, why) in [
        (cd::CreateSandboxRequest { options: None, ..plain() }, CONFIG),
        (cd::CreateSandboxRequest { options: any("a.b/Other", b""), ..plain() }, "\"Other\""),
        (cd::CreateSandboxRequest { options: any(CONFIG, b"\xff"), ..plain() }, "are no"),
        (cd::CreateSandboxRequest { rootfs: vec![cd::Mount::default()], ..plain() }, "no root"),
    ] {
        let refused = pod_of_sandbox(&request, TEMPLATE).unwrap_err();
        assert!(refused.contains(why) && !refused.contains('\n'), "{refused}");
    }
    let prefixed = any("types.containerd.io/runtime.v1.PodSandboxConfig", b"");
    let request = cd::CreateSandboxRequest { options: prefixed, ..plain() };
    assert!(pod_of_sandbox(&request, TEMPLATE).is_ok());
}
