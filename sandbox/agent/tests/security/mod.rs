//! Tests of what a container's processes may do.

#![allow(unsafe_code)] // unshare

use slipway_agent_protocol::v1::*;

use crate::harness::*;

/// Prints the process's groups, and then what the kernel says that it may do.
const RIGHTS: &str = "id -G; grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status";

fn named(names: &[&str]) -> Security {
    ambient(names, &[])
}

fn ambient(names: &[&str], ambient: &[&str]) -> Security {
    let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let capabilities = Capabilities { names: owned(names), ambient: owned(ambient) };
    Security { capabilities: Some(capabilities), ..Security::default() }
}

fn with(text: &str, user: &str, security: &Security) -> ProcessSpec {
    ProcessSpec { user: user.into(), security: Some(security.clone()), ..script(text) }
}

fn paths(paths: &[&str]) -> Option<Paths> {
    Some(Paths { paths: paths.iter().map(|path| (*path).to_owned()).collect() })
}

/// Returns the output of [`RIGHTS`] for these groups and sets, and no ambient capability.
fn rights(groups: &str, own: u64, bounding: u64, no_new: u32, seccomp: u32) -> String {
    with_ambient(0, groups, own, bounding, no_new, seccomp)
}

/// Returns the output of [`RIGHTS`] for these groups and sets.
fn with_ambient(
    ambient: u64,
    groups: &str,
    own: u64,
    bounding: u64,
    no_new: u32,
    seccomp: u32,
) -> String {
    format!(
        "{groups}\nCapInh:\t{ambient:016x}\nCapPrm:\t{own:016x}\nCapEff:\t{own:016x}\n\
         CapBnd:\t{bounding:016x}\nCapAmb:\t{ambient:016x}\nNoNewPrivs:\t{no_new}\n\
         Seccomp:\t{seccomp}\n"
    )
}

#[tokio::test]
async fn groups_and_capabilities_are_those_that_were_named() {
    let mut sandbox = sandbox!("groups_and_capabilities_are_those_that_were_named");
    // CAP_CHOWN is bit 0, CAP_SYS_PTRACE 19.
    let some = Security { groups: vec![77, 5], ..named(&["CAP_CHOWN", "CAP_SYS_PTRACE"]) };
    let none = named(&["CAP_OF_A_LATER_KERNEL"]);
    for (user, security, expected) in [
        ("0:0", &some, rights("0 5 77", 0x8_0001, 0x8_0001, 0, 0)),
        ("1000:1000", &some, rights("1000 5 77", 0, 0x8_0001, 0, 0)),
        ("ada", &some, rights("1000 5 29 77", 0, 0x8_0001, 0, 0)),
        ("0:0", &none, rights("0", 0, 0, 0, 0)),
        ("0:0", &Security::default(), rights("0", 0xa804_25fb, 0xa804_25fb, 0, 0)),
    ] {
        let run = sandbox.run(container("a", with(RIGHTS, user, security))).await.unwrap();
        assert_eq!((run.stderr.as_str(), run.stdout), ("", expected), "{user}");
    }
}

#[tokio::test]
async fn ambient_capabilities_are_those_of_any_users_programs() {
    let mut sandbox = sandbox!("ambient_capabilities_are_those_of_any_users_programs");
    // CAP_CHOWN is bit 0, CAP_KILL 5, CAP_NET_BIND_SERVICE 10.
    let asked = ambient(&["CAP_CHOWN", "CAP_NET_BIND_SERVICE"], &["CAP_NET_BIND_SERVICE"]);
    let outside = ambient(&["CAP_CHOWN"], &["CAP_KILL"]);
    let filtered = Security { seccomp: filter(), ..asked.clone() };
    let no_new = Security { no_new_privileges: true, ..asked.clone() };
    for (user, security, expected) in [
        ("1000:1000", &asked, with_ambient(0x400, "1000", 0x400, 0x401, 0, 0)),
        ("1000:1000", &filtered, with_ambient(0x400, "1000", 0x400, 0x401, 0, 2)),
        ("1000:1000", &no_new, with_ambient(0x400, "1000", 0x400, 0x401, 1, 0)),
        ("0:0", &asked, with_ambient(0x400, "0", 0x401, 0x401, 0, 0)),
        ("1000:1000", &outside, rights("1000", 0, 1, 0, 0)),
    ] {
        let run = sandbox.run(container("a", with(RIGHTS, user, security))).await.unwrap();
        assert_eq!((run.stderr.as_str(), run.stdout), ("", expected), "{user}");
    }
    sandbox.create(container("a", with("sleep 1000", "0:0", &named(&["CAP_CHOWN"])))).await;
    sandbox.start_container("a").await;
    let run = sandbox.exec("a", with(RIGHTS, "1000:1000", &asked)).await.unwrap();
    assert_eq!(run.stdout, with_ambient(0x400, "1000", 0x400, 0x401, 0, 0));
    sandbox.remove("a").await;
}

#[tokio::test]
async fn an_exec_has_rights_of_its_own() {
    let mut sandbox = sandbox!("an_exec_has_rights_of_its_own");
    sandbox.create(container("a", with("sleep 1000", "0:0", &named(&["CAP_CHOWN"])))).await;
    sandbox.start_container("a").await;
    let own = Security { no_new_privileges: true, groups: vec![9], ..named(&["CAP_KILL"]) };
    let run = sandbox.exec("a", with(RIGHTS, "0:0", &own)).await.unwrap();
    assert_eq!(run.stdout, rights("0 9", 0x20, 0x20, 1, 0));
    sandbox.remove("a").await;
}

#[tokio::test]
async fn paths_are_hidden_and_read_only() {
    let mut sandbox = sandbox!("paths_are_hidden_and_read_only");
    let text = "ls -A /home; cat /bin/data; echo x > /etc/x; mount -o remount,rw /etc; \
        echo y > /etc/x; /etc/../bin/id -u; grep -c ' /proc/' /proc/mounts";
    let request = |masked, read_only_paths| CreateContainerRequest {
        masked,
        read_only_paths,
        ..container("a", script(text))
    };
    let given = request(paths(&["/home", "/bin/data", "/no/such"]), paths(&["/etc", "/no"]));
    let run = sandbox.run(given).await.unwrap();
    assert_eq!(run.stdout, "0\n0\n", "and the usual ones are not hidden");
    assert_eq!(run.stderr.matches("/etc/x: Read-only file system").count(), 2, "{}", run.stderr);
    let run = sandbox.run(request(paths(&[]), None)).await.unwrap();
    assert_eq!(run.stdout, "ada\nno program\n0\n4\n", "the usual ones are read-only");
}

#[tokio::test]
async fn a_path_leads_neither_out_of_the_container_nor_over_its_root() {
    let mut sandbox = sandbox!("a_path_leads_neither_out_of_the_container_nor_over_its_root");
    for (path, said) in [
        ("/proc/self/exe", "masking /proc/self/exe: a link of procfs is not followed"),
        ("/proc/self/cwd", "masking /proc/self/cwd: a link of procfs is not followed"),
        ("/bin/..", "masking /bin/..: it is the whole root"),
        ("etc", "masking etc: it is not an absolute path"),
    ] {
        let masked = paths(&[path]);
        let request = CreateContainerRequest { masked, ..container("a", script("true")) };
        let error = sandbox.run(request).await.unwrap_err();
        assert!(error.message().contains(said), "{error}");
    }
    // A link of the image's, as of a file of the image's choosing: the container's own loss.
    let request = CreateContainerRequest {
        masked: paths(&["/bin/true"]),
        ..container("a", process(&["/bin/false"]))
    };
    let error = sandbox.run(request).await.unwrap_err();
    assert!(error.message().contains("permission denied"), "{error}");
}

/// Returns a filter that refuses mkdir(2) with ENOTBLK and allows everything else.
fn filter() -> Vec<u8> {
    let instruction = |code: u16, jt: u8, jf: u8, k: u32| {
        let [c0, c1] = code.to_le_bytes();
        let [k0, k1, k2, k3] = k.to_le_bytes();
        [c0, c1, jt, jf, k0, k1, k2, k3]
    };
    [
        instruction(0x20, 0, 0, 0),
        instruction(0x15, 0, 1, libc::SYS_mkdir as u32),
        instruction(0x06, 0, 0, libc::SECCOMP_RET_ERRNO | libc::ENOTBLK as u32),
        instruction(0x06, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
    .concat()
}

#[tokio::test]
async fn system_calls_are_filtered_from_the_first_on() {
    let mut sandbox = sandbox!("system_calls_are_filtered_from_the_first_on");
    let text = format!("mkdir /dev/shm/x; {RIGHTS}");
    for (user, own, no_new_privileges) in
        [("0:0", 1, false), ("0:0", 1, true), ("1000:1000", 0, false), ("1000:1000", 0, true)]
    {
        let security = Security { seccomp: filter(), no_new_privileges, ..named(&["CAP_CHOWN"]) };
        let run = sandbox.run(container("a", with(&text, user, &security))).await.unwrap();
        let group = user.split(':').next().unwrap();
        assert_eq!(run.stdout, rights(group, own, 1, no_new_privileges.into(), 2), "{user}");
        assert!(run.stderr.contains("/dev/shm/x': Block device required"), "{}", run.stderr);
    }
}

#[tokio::test]
async fn a_filter_that_is_none_says_so() {
    let mut sandbox = sandbox!("a_filter_that_is_none_says_so");
    for (seccomp, said) in [
        (vec![0; 7], "a filter of system calls of 7 bytes"),
        (vec![0; 8], "loading the filter of system calls: Invalid argument"),
    ] {
        let security = Security { seccomp, ..Security::default() };
        let error = sandbox.run(container("a", with("true", "", &security))).await.unwrap_err();
        assert!(error.message().contains(said), "{error}");
    }
}

#[tokio::test]
async fn kernel_settings_are_the_sandboxs() {
    let namespaces = libc::CLONE_NEWIPC | libc::CLONE_NEWUTS | libc::CLONE_NEWNET;
    // SAFETY: the call moves this thread, which is the only one of this test, into namespaces that
    // it shares no descriptor with. The agent that it starts is in them, too.
    if unsafe { libc::unshare(namespaces) } != 0 {
        eprintln!("SKIPPED: kernel_settings_are_the_sandboxs: needs root");
        return;
    }
    let mut sandbox = sandbox!("kernel_settings_are_the_sandboxs");
    let configure = |settings: &[(&str, &str)]| ConfigureRequest {
        sysctls: settings.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect(),
        ..ConfigureRequest::default()
    };
    let settings = [
        ("kernel.shmmni", "77"),
        ("kernel.domainname", "lab"),
        ("net.ipv4.ip_local_port_range", "500\t999"),
        ("net.ipv4.ip_unprivileged_port_start", "0"),
    ];
    sandbox.client.configure(configure(&settings)).await.unwrap();
    let text = "cd /proc/sys; cat kernel/shmmni kernel/domainname net/ipv4/ip_local_port_range \
        net/ipv4/ip_unprivileged_port_start";
    let run = sandbox.run(container("a", script(text))).await.unwrap();
    assert_eq!(run.stdout, "77\nlab\n500\t999\n0\n");
    for (name, value, said) in [
        ("vm.swappiness", "1", "not one of a network, IPC or UTS namespace"),
        ("net.none", "1", "net.none=\"1\": No such file"),
        ("kernel.shmmni", "many", "kernel.shmmni=\"many\": Invalid argument"),
    ] {
        let error = sandbox.client.configure(configure(&[(name, value)])).await.unwrap_err();
        assert!(error.message().contains(said), "{error}");
    }
}
