//! Tests of the translation: a configuration, and what becomes of it.

use serde_json::{Value, json};
use slipway_sandbox_api::capabilities::{ALL, USUAL};

use super::sizes::{LAYERS, LEAST_MEMORY, MAX_MEMORY, MEMORY};
use super::*;

/// A configuration as `ctr run` makes one.
fn plain() -> Value {
    json!({
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": 0, "gid": 0, "additionalGids": [0, 10]},
            "args": ["/bin/sh", "-c", "true"],
            "env": ["PATH=/bin"],
            "cwd": "/",
            "capabilities": {"bounding": USUAL, "effective": USUAL},
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 1024, "soft": 512}],
            "noNewPrivileges": true
        },
        "root": {"path": "rootfs"},
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
            {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs"}
        ],
        "linux": {
            "resources": {"devices": [{"allow": false, "access": "rwm"}], "cpu": {"shares": 1024}},
            "cgroupsPath": "/default/one",
            "namespaces": [{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"},
                           {"type": "network"}],
            "maskedPaths": ["/proc/kcore"],
            "readonlyPaths": ["/proc/sys"]
        }
    })
}

/// Translates the plain configuration with the value at `pointer` replaced.
fn with(pointer: &str, value: Value) -> Result<v1::RunSpec, String> {
    let mut config = plain();
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    config.pointer_mut(parent).unwrap()[key] = value;
    translated(config)
}

fn translated(config: Value) -> Result<v1::RunSpec, String> {
    let container = Container { id: "one", in_pod: false, read_only: false, functions: "/f" };
    run_spec(&serde_json::from_value(config).unwrap(), container)
}

#[test]
fn a_plain_container() {
    let spec = with("/hostname", json!("host")).unwrap();
    assert_eq!(spec.entrypoint.as_deref(), Some("/bin/sh"));
    assert_eq!(spec.command, ["-c", "true"]);
    assert_eq!((spec.user.as_str(), spec.cwd.as_str()), ("0:0", "/"));
    assert_eq!(spec.hostname, "host");
    assert_eq!((spec.memory_bytes, spec.cpus, spec.max_cpus), (0, 0, 0));
    assert!(!spec.privileged && !spec.read_only && spec.network.is_empty());
    let limit = &spec.limits[0];
    assert_eq!((limit.name.as_str(), limit.soft, limit.hard), ("nofile", 512, 1024));
}

#[test]
fn memory_and_cpus() {
    let memory = |limit: i64| with("/linux/resources/memory", json!({"limit": limit}));
    assert_eq!(memory(1 << 30).unwrap().memory_bytes, 1 << 30);
    assert_eq!(memory(1 << 20).unwrap().memory_bytes, LEAST_MEMORY);
    assert_eq!(memory(-1).unwrap().memory_bytes, 0);
    let cpu = |value| with("/linux/resources/cpu", value).unwrap().cpus;
    assert_eq!(cpu(json!({"quota": 150_000, "period": 100_000})), 2);
    assert_eq!(cpu(json!({"quota": 50_000})), 1);
    assert_eq!(cpu(json!({"quota": -1, "cpus": "0-2,7"})), 4);
    assert_eq!(cpu(json!({"cpus": "3-1,x"})), 0);
}

#[test]
fn huge_pages_are_beside_the_limit_of_memory() {
    let with = |more: Value| {
        let mut config = plain();
        let limits = json!([{"pageSize": "2MB", "limit": 4 << 20}]);
        config["linux"]["resources"]["hugepageLimits"] = limits;
        config["linux"]["resources"]["memory"] = more;
        translated(config).unwrap()
    };
    let limited = with(json!({"limit": 1 << 30}));
    assert_eq!(limited.memory_bytes, (1 << 30) + (4 << 20));
    assert_eq!(limited.resources.unwrap().huge_page_bytes, 4 << 20);
    assert_eq!(with(json!(null)).memory_bytes, 0, "the daemon adds them to its own size");
    let both = update(
        br#"{"memory": {"limit": 1073741824},
        "hugepageLimits": [{"pageSize": "2MB", "limit": 4194304}]}"#,
    );
    assert_eq!(both.unwrap().memory_bytes, (1 << 30) + (4 << 20));
    let giant = br#"{"hugepageLimits": [{"pageSize": "1GB", "limit": 1073741824}]}"#;
    assert_eq!(update(giant).unwrap_err().code, tonic::Code::InvalidArgument);
    assert!(member_update(giant).unwrap_err().contains("1GB"));
}

#[test]
fn annotations_decide() {
    let annotated = |key: &str, value: &str| {
        let mut config = plain();
        config["linux"]["resources"]["memory"] = json!({"limit": 1 << 30});
        config["annotations"] = json!({ key: value });
        translated(config)
    };
    assert_eq!(annotated(MEMORY, "512M").unwrap().memory_bytes, 512 << 20);
    assert_eq!(annotated(CPUS, "3").unwrap().cpus, 3);
    assert_eq!(annotated(MAX_CPUS, "4").unwrap().max_cpus, 4);
    assert_eq!(annotated(MAX_MEMORY, "2G").unwrap().max_memory_bytes, 2 << 30);
    assert_eq!(annotated(LAYERS, "64M").unwrap().layers_bytes, 64 << 20);
    assert_eq!(annotated(NETWORK, "none").unwrap().network, "none");
    for (value, asked) in [("true", true), ("false", false)] {
        let spec = annotated(FREE_PAGE_REPORTING, value).unwrap();
        assert_eq!(spec.free_page_reporting, Some(asked));
    }
    for (key, value) in [
        (MEMORY, "much"),
        (MEMORY, "0"),
        (MAX_MEMORY, "1T"),
        (LAYERS, "all"),
        (FREE_PAGE_REPORTING, "on"),
        (CPUS, "0"),
        (CPUS, "many"),
        (CPUS, "-1"),
    ] {
        let refused = annotated(key, value).unwrap_err();
        assert!(refused.contains(key), "{refused}");
    }
}

#[test]
fn a_privileged_container_has_its_guests_devices() {
    let mut config = plain();
    config["process"]["capabilities"]["bounding"] = json!(ALL.as_slice());
    // All capabilities are not all devices.
    assert!(!translated(config.clone()).unwrap().privileged);
    config["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}]);
    config["linux"]["devices"] =
        json!([{"path": "/dev/kmsg", "type": "c", "major": 1, "minor": 11}]);
    let spec = translated(config.clone()).unwrap();
    assert!(spec.privileged);
    assert_eq!(spec.security.unwrap().capabilities.unwrap().names, ALL);
    // As containerd's CRI plugin has it for a runtime with `privileged_without_host_devices`.
    config["linux"]["resources"]["devices"] = json!([]);
    config["linux"]["maskedPaths"] = json!([]);
    config["linux"]["readonlyPaths"] = json!([]);
    assert!(translated(config.clone()).unwrap().privileged);
    config["process"]["capabilities"]["bounding"] = json!(["CAP_SYS_ADMIN"]);
    config["linux"]["devices"] = json!([]);
    assert!(!translated(config).unwrap().privileged);
}

#[test]
fn a_control_group_that_cannot_be_is_refused() {
    for path in ["", "/kubepods/pod1/one", "kubepods-pod1.slice:cri-containerd:one", ":a:one"] {
        with("/linux/cgroupsPath", json!(path)).unwrap();
    }
    for path in ["kubepods/pod1", "/kubepods/../one", "pod1:cri:one", "a.slice:cri:", "a:b"] {
        let refused = with("/linux/cgroupsPath", json!(path)).unwrap_err();
        assert!(refused.contains("the control group"), "{refused}");
    }
}

#[test]
fn what_processes_may_do() {
    let security = |pointer: &str, value: Value| with(pointer, value).unwrap().security.unwrap();
    let plain = security("/linux/sysctl", json!({"net.core.somaxconn": "9"}));
    assert_eq!((plain.groups, plain.no_new_privileges), (vec![0, 10], true));
    assert_eq!(plain.masked.unwrap().paths, ["/proc/kcore"]);
    assert_eq!(plain.read_only.unwrap().paths, ["/proc/sys"]);
    assert_eq!(plain.sysctls["net.core.somaxconn"], "9");
    assert_eq!(plain.capabilities.unwrap().names, USUAL);
    assert!(plain.seccomp.is_empty());
    // As in runc, what is left out is nothing.
    let bare = security("/process/capabilities", json!(null));
    assert_eq!(bare.capabilities, Some(v1::Capabilities::default()));
    // An ambient capability is permitted and inheritable, or it is left out.
    let sets = json!({"bounding": ["CAP_A", "CAP_B", "CAP_C"], "permitted": ["CAP_A", "CAP_B"],
        "inheritable": ["CAP_A", "CAP_C"], "ambient": ["CAP_A", "CAP_B", "CAP_C", "CAP_D"]});
    let ambient = security("/process/capabilities", sets).capabilities.unwrap();
    assert_eq!((ambient.names.len(), ambient.ambient), (3, vec!["CAP_A".to_owned()]));
    let bare = security("/linux/maskedPaths", json!([]));
    assert_eq!(bare.masked, Some(v1::Paths::default()));
    let allowed = json!({"names": ["execve"], "action": "SCMP_ACT_ALLOW"});
    let profile = json!({"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 1,
        "architectures": ["SCMP_ARCH_X86_64"], "syscalls": [allowed]});
    let filtered = security("/linux/seccomp", profile);
    assert!(!filtered.seccomp.is_empty() && filtered.seccomp.len() % 8 == 0);
}

#[test]
fn what_cannot_be_honoured_is_named() {
    let mount = |kind: &str, source: &str, destination: &str, options: &[&str]| {
        let options = json!(options);
        json!([{"destination": destination, "type": kind, "source": source, "options": options}])
    };
    let namespaces = |kinds: &[&str]| {
        let list: Vec<_> = kinds.iter().map(|kind| json!({"type": kind})).collect();
        json!(list)
    };
    let path =
        json!([{"type": "pid"}, {"type": "ipc"}, {"type": "network", "path": "/run/netns/x"}]);
    let cases = [
        ("/mounts", mount("bind", "/srv", "/data", &["rbind", "rshared"]), "the host's /srv"),
        ("/mounts", mount("none", "/srv", "/data", &["bind", "shared"]), "the host's /srv"),
        (
            "/mounts",
            mount("tmpfs", "tmpfs", "/scratch", &[]),
            "tmpfs cannot be mounted at /scratch",
        ),
        ("/mounts", mount("nfs", "server:/", "/proc", &[]), "nfs"),
        ("/linux/namespaces", namespaces(&["pid", "ipc"]), "host's network"),
        ("/linux/namespaces", namespaces(&["network", "ipc"]), "host's pid"),
        ("/linux/namespaces", namespaces(&["network", "pid"]), "host's ipc"),
        ("/linux/namespaces", namespaces(&["network", "pid", "ipc", "user"]), "user namespaces"),
        ("/linux/namespaces", path, "/run/netns/x"),
        ("/linux/devices", json!([{"path": "/dev/fuse"}]), "/dev/fuse"),
        (
            "/linux/resources/hugepageLimits",
            json!([{"pageSize": "1GB", "limit": 1 << 30}]),
            "1073741824 bytes of huge pages of \"1GB\"",
        ),
        ("/hooks", json!({"startContainer": [{"path": "/bin/x"}]}), "startContainer"),
        ("/linux/seccomp", json!({"defaultAction": "SCMP_ACT_NOTIFY"}), "SCMP_ACT_NOTIFY"),
        ("/process/apparmorProfile", json!("k8s-nginx"), "AppArmor profile \"k8s-nginx\""),
        ("/process/selinuxLabel", json!("u:r:slipway_own_t:s0"), "u:r:slipway_own_t:s0"),
        ("/linux/mountLabel", json!("u:r:slipway_own_t:s0"), "linux.mountLabel"),
        ("/process/args", json!([]), "no program"),
    ];
    for (pointer, value, wanted) in cases {
        let refused = with(pointer, value).unwrap_err();
        assert!(refused.contains(wanted) && !refused.contains('\n'), "{pointer}: {refused}");
    }
}

#[test]
fn further_processes_and_updates() {
    let process = plain()["process"].clone();
    let exec = exec_spec(&serde_json::to_vec(&process).unwrap()).unwrap();
    assert_eq!(exec.command, ["/bin/sh", "-c", "true"]);
    let security = exec.security.unwrap();
    assert_eq!((security.groups, security.no_new_privileges), (vec![0, 10], true));
    assert_eq!(security.capabilities.unwrap().names, USUAL);
    assert!(security.masked.is_none() && security.seccomp.is_empty());
    assert!(exec_spec(b"{}").is_err() && exec_spec(b"no").is_err());
    let mut confined = process.clone();
    confined["apparmorProfile"] = json!("k8s-nginx");
    let refused = exec_spec(&serde_json::to_vec(&confined).unwrap()).unwrap_err();
    assert!(refused.contains("k8s-nginx"), "{refused}");
    let size = |cpus, memory_bytes| Ok(Update { cpus, memory_bytes, ..Update::default() });
    assert_eq!(update(br#"{"cpu": {"quota": 200000, "period": 100000}}"#), size(2, 0));
    assert_eq!(update(br#"{"memory": {"limit": 1073741824}}"#), size(0, 1 << 30));
    let set = update(br#"{"memory": {"limit": 5}, "cpu": {"cpus": "0"}}"#).unwrap();
    assert_eq!((set.cpus, set.memory_bytes), (0, LEAST_MEMORY));
    assert_eq!(set.placement.unwrap().cpus, "0");
    let limits = update(br#"{"memory": {"limit": 5}, "pids": {"limit": 7}}"#).unwrap().resources;
    assert_eq!(limits, Some(v1::Resources { pids: 7, ..v1::Resources::default() }));
    let file = br#"{"unified": {"io.weight": "7"}}"#;
    for bad in [&b"{}"[..], br#"{"memory": {"limit": -1}}"#, b"[", file] {
        assert!(update(bad).is_err());
    }
    let failed = [&b"["[..], file].map(|bad| update(bad).unwrap_err().code);
    assert_eq!(failed, [tonic::Code::InvalidArgument; 2]);
}

#[test]
fn a_container_alone_has_limits_beside_its_machine() {
    assert_eq!(translated(plain()).unwrap().resources, None);
    let limited = with("/linux/resources/pids", json!({"limit": 7})).unwrap().resources.unwrap();
    assert_eq!(limited, v1::Resources { pids: 7, ..v1::Resources::default() });
    let whole = with("/linux/resources/unified", json!({"memory.oom.group": "1"})).unwrap();
    assert_eq!(whole.resources.unwrap().oom_group, 2);
    let refused = with("/linux/resources/unified", json!({"io.weight": "1"})).unwrap_err();
    assert!(refused.contains("io.weight"), "{refused}");
}
