//! Tests of the translation of pods: configurations as containerd 2.1 writes them for Kubernetes.

use serde_json::{Value, json};

use super::sizes::MEMORY;
use super::*;

const ID: &str = "35b34b891b3849e06ff0d2801568dbe808b8d0694cbcaa263fc29f649fafa267";
/// The process that stands for the pod.
const POD: u32 = 4711;
const CAPABILITIES: [&str; 3] = ["CAP_CHOWN", "CAP_KILL", "CAP_SETUID"];

fn process(program: &str) -> Value {
    json!({
        "user": {"uid": 65535, "gid": 65535, "additionalGids": [65535]},
        "args": [program],
        "env": ["PATH=/usr/bin:/bin", "HOSTNAME=web-0"],
        "cwd": "/",
        "capabilities": {"bounding": CAPABILITIES, "effective": CAPABILITIES},
        "oomScoreAdj": 1000
    })
}

fn bind(destination: &str, source: &str, options: [&str; 3]) -> Value {
    json!({"destination": destination, "type": "bind", "source": source, "options": options})
}

/// The configuration of a pod's sandbox.
fn pod() -> Value {
    json!({
        "ociVersion": "1.2.1",
        "process": process("/pause"),
        "root": {"path": "rootfs", "readonly": true},
        "hostname": "web-0",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"]},
            bind("/dev/shm", "/run/containerd/sandboxes/pod/shm", ["rbind", "ro", "nosuid"]),
            bind("/etc/resolv.conf", "/no/such/resolv.conf", ["rbind", "ro", "nosuid"])
        ],
        "annotations": {
            "io.kubernetes.cri.container-type": "sandbox",
            "io.kubernetes.cri.sandbox-id": "pod",
            "io.kubernetes.cri.sandbox-log-directory": ""
        },
        "linux": {
            "sysctl": {
                "net.ipv4.ip_unprivileged_port_start": "0",
                "net.ipv4.ping_group_range": "0 2147483647"
            },
            "resources": {"devices": [{"allow": false, "access": "rwm"}], "cpu": {"shares": 2}},
            "cgroupsPath": "/k8s.io/pod",
            "namespaces": [
                {"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                {"type": "network", "path": "/var/run/netns/cni-802c6dcc"}
            ],
            "maskedPaths": ["/proc/acpi"],
            "readonlyPaths": ["/proc/bus"]
        }
    })
}

/// The configuration of a container of that pod.
fn member() -> Value {
    let this = POD;
    let shared =
        |kind: &str, name: &str| json!({"type": kind, "path": format!("/proc/{this}/ns/{name}")});
    let (rw, files) = (["rbind", "rprivate", "rw"], "/no/such/sandboxes/pod");
    json!({
        "ociVersion": "1.2.1",
        "process": process("top"),
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"]},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
            {"destination": "/dev/mqueue", "type": "mqueue", "source": "mqueue"},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup"},
            bind("/etc/hostname", &format!("{files}/hostname"), rw),
            bind("/etc/hosts", "/var/lib/kubelet/pods/0-1/etc-hosts", rw),
            bind("/etc/resolv.conf", &format!("{files}/resolv.conf"), rw),
            bind("/dev/shm", "/run/containerd/sandboxes/pod/shm", rw),
            bind("/dev/termination-log", "/var/lib/kubelet/pods/0-1/containers/web/5e1c", rw),
            bind(
                "/var/run/secrets/kubernetes.io/serviceaccount",
                "/var/lib/kubelet/pods/0-1/volumes/kubernetes.io~projected/kube-api-access",
                ["rbind", "rprivate", "ro"]
            )
        ],
        "annotations": {
            "io.kubernetes.cri.container-name": "web",
            "io.kubernetes.cri.container-type": "container",
            "io.kubernetes.cri.sandbox-id": "pod"
        },
        "linux": {
            "resources": {
                "memory": {"limit": 134_217_728, "swap": 134_217_728},
                "cpu": {"shares": 512, "quota": 25_000, "period": 50_000},
                "pids": {"limit": 100}
            },
            "cgroupsPath": "/k8s.io/one",
            "namespaces": [
                {"type": "pid"}, shared("ipc", "ipc"), shared("uts", "uts"), {"type": "mount"},
                shared("network", "net"), {"type": "cgroup"}
            ]
        }
    })
}

fn pod_of(config: Value) -> Result<v1::RunSpec, String> {
    pod_on(config, true)
}

/// Translates a pod for a node whose pods have control groups of their own, or have not.
fn pod_on(config: Value, places_pods: bool) -> Result<v1::RunSpec, String> {
    let (memory_bytes, cpus) = (256 << 20, 2);
    let node = v1::StatusReply { memory_bytes, cpus, places_pods, ..Default::default() };
    pod_spec(&serde_json::from_value(config).unwrap(), &node, "/k8s.io/pod")
}

fn member_of(config: Value) -> Result<v1::RunSpec, String> {
    let container = Container { id: ID, in_pod: true, read_only: false, functions: "/f" };
    let pod = PodNamespaces { network: "/var/run/netns/cni-802c6dcc", processes: [POD, POD] };
    member_spec(&serde_json::from_value(config).unwrap(), container, pod)
}

/// Translates the pod with these annotations.
fn annotated(pairs: &[(&str, &str)]) -> Result<v1::RunSpec, String> {
    let mut config = pod();
    for (key, value) in pairs {
        config["annotations"][key] = json!(value);
    }
    pod_of(config)
}

#[test]
fn a_pod_has_a_name_a_network_and_kernel_settings_and_no_process() {
    let run = pod_of(pod()).unwrap();
    assert!(run.makes_pod && run.entrypoint.is_none() && run.command.is_empty());
    assert!(run.files.is_empty() && run.env.is_empty() && run.user.is_empty());
    assert_eq!(run.hostname, "web-0");
    assert_eq!(run.network_namespace, "/var/run/netns/cni-802c6dcc");
    assert_eq!((run.memory_bytes, run.cpus), (0, 0));
    assert_eq!(run.security.unwrap().sysctls["net.ipv4.ip_unprivileged_port_start"], "0");
}

#[test]
fn a_pods_memory_is_its_containers_and_its_kernels() {
    let memory = |pairs: &[_]| annotated(pairs).unwrap().memory_bytes;
    assert_eq!(memory(&[(POD_MEMORY, "536870912")]), (512 + 128) << 20);
    // At least the node's default, and that without any limit.
    assert_eq!(memory(&[(POD_MEMORY, "1048576")]), 256 << 20);
    for none in ["0", "-1"] {
        assert_eq!(memory(&[(POD_MEMORY, none)]), 0);
    }
    assert_eq!(memory(&[(POD_MEMORY, "536870912"), (MEMORY, "192M")]), 192 << 20);
    let mut config = pod();
    config["linux"]["resources"]["memory"] = json!({"limit": 1 << 30});
    assert_eq!(pod_of(config).unwrap().memory_bytes, (1024 + 128) << 20);
    let refused = annotated(&[(POD_MEMORY, "much")]).unwrap_err();
    assert!(refused.contains(POD_MEMORY), "{refused}");
}

#[test]
fn a_pod_with_a_control_group_has_no_more_memory_than_its_limits() {
    let on = |places_pods: bool, path: &str, limit: &str| {
        let mut config = pod();
        config["linux"]["cgroupsPath"] = json!(path);
        config["annotations"][POD_MEMORY] = json!(limit);
        let run = pod_on(config, places_pods).unwrap();
        (run.control_group, run.memory_bytes >> 20)
    };
    let asked = |path: &str, limit: &str| on(true, path, limit);
    assert_eq!(on(false, "/kubepods/pod1/pod", "1048576"), (String::new(), 256));
    assert_eq!(asked("/k8s.io/pod", "1048576"), (String::new(), 256));
    assert_eq!(asked("/kubepods/pod1/pod", "1048576"), ("/kubepods/pod1/pod".to_owned(), 129));
    assert_eq!(asked("a.slice:cri:pod", "0"), ("/a.slice/cri-pod.scope".to_owned(), 0));
}

#[test]
fn a_pod_that_qemu_takes_out_of_its_group_has_the_nodes_least_memory() {
    let least = |path: &str, annotation: &str, value: &str| {
        let mut config = pod();
        config["linux"]["cgroupsPath"] = json!(path);
        config["annotations"][annotation] = json!(value);
        pod_of(config).unwrap().least_memory_bytes >> 20
    };
    let path = "/kubepods/pod1/pod";
    assert_eq!(least(path, POD_MEMORY, "1048576"), 256);
    assert_eq!(least(path, POD_MEMORY, "536870912"), 512 + 128);
    // The annotation is the least, too. Without limits the memory is the node's, and without a
    // group `memory_bytes` has the node's least already.
    assert_eq!(least(path, MEMORY, "192M"), 192);
    assert_eq!(least(path, POD_MEMORY, "0"), 0);
    assert_eq!(least("/k8s.io/pod", POD_MEMORY, "1048576"), 0);
}

#[test]
fn a_pods_cpus_follow_from_quota_or_shares() {
    let cpus = |pairs: &[_]| annotated(pairs).unwrap().cpus;
    assert_eq!(cpus(&[(POD_QUOTA, "150000"), (POD_PERIOD, "100000"), (POD_SHARES, "9000")]), 2);
    assert_eq!(cpus(&[(POD_QUOTA, "10000"), (POD_PERIOD, "100000")]), 1);
    assert_eq!(cpus(&[(POD_QUOTA, "0"), (POD_PERIOD, "100000"), (POD_SHARES, "3000")]), 3);
    assert_eq!(cpus(&[(POD_QUOTA, "-1"), (POD_SHARES, "102")]), 2);
    assert_eq!(cpus(&[(POD_QUOTA, "900000"), (CPUS, "1")]), 1);
    assert!(annotated(&[(POD_SHARES, "some")]).is_err());
}

#[test]
fn a_container_has_the_limits_that_the_guests_kernel_keeps() {
    let run = member_of(member()).unwrap();
    assert_eq!(run.entrypoint.as_deref(), Some("top"));
    // The pod has them.
    assert_eq!((run.memory_bytes, run.cpus), (0, 0));
    assert!(run.hostname.is_empty() && run.network.is_empty() && !run.makes_pod);
    assert!(!run.shares_processes);
    assert_eq!(run.oom_score_adj, Some(1000));
    let expected = v1::Resources {
        memory_bytes: 128 << 20,
        cpu_quota_us: 50_000,
        cpu_weight: 20,
        pids: 100,
        ..v1::Resources::default()
    };
    assert_eq!(run.resources, Some(expected));
    let mut config = member();
    config["linux"]["resources"] = json!({"devices": [{"allow": false, "access": "rwm"}]});
    let path = format!("/proc/{POD}/ns/pid");
    config["linux"]["namespaces"][0]["path"] = json!(path);
    let run = member_of(config).unwrap();
    assert_eq!(run.resources, Some(v1::Resources::default()));
    assert!(run.shares_processes);
}

#[test]
fn an_update_names_what_changes() {
    let both = |json: Value| member_update(&serde_json::to_vec(&json).unwrap()).unwrap();
    let update = |json: Value| both(json).0;
    let none = v1::Resources::default();
    let grown = update(json!({"memory": {"limit": 1 << 28, "swap": 1 << 28}}));
    assert_eq!(grown, v1::Resources { memory_bytes: 1 << 28, ..none });
    let faster = update(json!({"cpu": {"shares": 1024, "quota": 20_000, "period": 100_000}}));
    assert_eq!(faster, v1::Resources { cpu_quota_us: 20_000, cpu_weight: 39, ..none });
    let lifted = update(json!({
        "memory": {"limit": -1}, "cpu": {"quota": -1, "shares": 0}, "pids": {"limit": -1}
    }));
    let (memory_bytes, cpu_quota_us, pids) = (u64::MAX, u64::MAX, u32::MAX);
    assert_eq!(lifted, v1::Resources { memory_bytes, cpu_quota_us, pids, ..none });
    let (limits, placement) = both(json!({"cpu": {"cpus": "0-1"}}));
    assert_eq!((limits, placement.unwrap().cpus.as_str()), (none, "0-1"));
    assert_eq!(both(json!({"cpu": {"shares": 2}})).1, None);
    assert!(member_update(b"[").is_err());
}

#[test]
fn an_update_of_a_pod_leaves_its_guest_the_memory_that_it_needs() {
    let update = |json: &[u8]| crate::spec::pod_update(json).unwrap();
    assert_eq!(update(br#"{"memory": {"limit": 335544320}}"#).memory_bytes, 448 << 20);
    let faster = update(br#"{"cpu": {"quota": 200000, "period": 100000}}"#);
    assert_eq!((faster.memory_bytes, faster.cpus), (0, 2));
    assert!(crate::spec::pod_update(b"{}").is_err());
}

#[test]
fn what_a_pod_cannot_have_is_named() {
    let host = json!([{"type": "pid"}, {"type": "ipc"}, {"type": "mount"}]);
    for (of, mut config) in [(pod_of as fn(_) -> _, pod()), (member_of, member())] {
        config["linux"]["namespaces"] = host.clone();
        let refused = of(config).unwrap_err();
        assert!(refused.contains("hostNetwork"), "{refused}");
    }
    let reports = |value| annotated(&[(FREE_PAGE_REPORTING, value)]);
    assert_eq!(reports("true").unwrap().free_page_reporting, Some(true));
    assert!(reports("1").unwrap_err().contains(FREE_PAGE_REPORTING));
    let both = annotated(&[(NETWORK, "default")]).unwrap_err();
    assert!(both.contains("cni-802c6dcc") && both.contains(NETWORK), "{both}");
    let mut hooked = pod();
    hooked["hooks"] = json!({"createRuntime": [{"path": "/bin/x"}]});
    assert!(pod_of(hooked).unwrap_err().contains("createRuntime"));
    let volume = "/var/lib/kubelet/pods/0-1/volumes/kubernetes.io~empty-dir/cache";
    let refused = with_volume(volume, ["rbind", "rshared", "rw"]).unwrap_err();
    assert!(refused.contains(volume) && refused.contains("/cache"), "{refused}");
}

/// Translates a container with a volume at /cache.
fn with_volume(volume: &str, options: [&str; 3]) -> Result<v1::RunSpec, String> {
    let mut config = member();
    config["mounts"].as_array_mut().unwrap().push(bind("/cache", volume, options));
    member_of(config)
}

#[test]
fn a_volume_is_shared_with_the_pod() {
    let volume = "/var/lib/kubelet/pods/0-1/volumes/kubernetes.io~empty-dir/cache";
    let shares = with_volume(volume, ["rbind", "rprivate", "rw"]).unwrap().shares;
    let share = shares.iter().find(|share| share.path == "/cache").unwrap();
    assert_eq!((share.source.as_str(), share.read_only, share.below), (volume, false, true));
}
