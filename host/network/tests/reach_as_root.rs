//! Which addresses a sandbox reaches beyond its host, and that the host forwards for nobody else:
//! with the kernel, its packet filter, and hosts in network namespaces of their own.
//!
//! The host's end of the network is replaced by a veth pair with a namespace as the guest at its
//! other end: so the guest is the kernel's own network stack.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use slipway_lock::Lock;
use slipway_network::reach::Policy;
use slipway_network::{Networks, Settings};
use slipway_plane::Plane;
use slipway_plane_api::PlaneClient;
use slipway_plane_api::network_v1 as v1;

/// The longest time for a connection that succeeds.
const PATIENCE: Duration = Duration::from_secs(100);
/// The longest time for a refusal: it comes at once, or never.
const REFUSAL: Duration = Duration::from_secs(1);
const PORT: u16 = 7777;

fn run(command: &str) {
    let words: Vec<&str> = command.split_whitespace().collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {said}");
}

/// Answers every connection to the thread's namespace with a word, until the process ends.
fn serve() {
    // One port for each family.
    for address in [SocketAddr::from(([0; 4], PORT)), SocketAddr::from(([0_u16; 8], PORT + 1))] {
        let listener = TcpListener::bind(address).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = stream.and_then(|mut stream| stream.write_all(b"secret"));
            }
        });
    }
}

/// A network namespace that exists as long as this value.
struct Host {
    holder: Child,
}

impl Host {
    fn new() -> Self {
        let mut command = Command::new("unshare");
        command.args(["--net", "--kill-child", "sleep", "infinity"]).stdin(Stdio::null());
        let host = Self { holder: command.spawn().unwrap() };
        let own = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
        let begun = Instant::now();
        while std::fs::read_link(host.namespace()).is_ok_and(|link| link == own) {
            assert!(begun.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(1));
        }
        host.run("ip link set lo up");
        host
    }

    fn namespace(&self) -> String {
        format!("/proc/{}/ns/net", self.holder.id())
    }

    fn run(&self, command: &str) {
        run(&format!("nsenter --net={} {command}", self.namespace()));
    }

    /// Makes a veth pair from this namespace, with these addresses, to an interface `there` of the
    /// thread's namespace.
    fn cable(&self, addresses: &[&str], there: &str, theirs: &[&str]) {
        let pid = self.holder.id();
        run(&format!("ip link add {there} type veth peer name eth0 netns {pid}"));
        run(&format!("ip link set {there} up"));
        self.run("ip link set eth0 up");
        for address in addresses {
            self.run(&format!("ip address add {address} dev eth0 nodad"));
        }
        for address in theirs {
            run(&format!("ip address add {address} dev {there} nodad"));
        }
    }

    /// Runs `what` on a thread in this namespace.
    fn there<T: Send>(&self, what: impl FnOnce() -> T + Send) -> T {
        let namespace = File::open(self.namespace()).unwrap();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                // SAFETY: setns(2) takes no pointers, and concerns this thread alone.
                let outcome = unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) };
                assert_eq!(outcome, 0);
                what()
            });
            thread.join().unwrap()
        })
    }

    /// Answers every connection to this namespace with a word, until the process ends.
    fn serve(&self) {
        self.there(serve);
    }

    /// Returns whether a connection from this namespace to `address` is answered.
    fn reaches(&self, address: &str, patience: Duration) -> bool {
        let address: std::net::IpAddr = address.parse().unwrap();
        let port = if address.is_ipv4() { PORT } else { PORT + 1 };
        self.there(move || {
            let stream = TcpStream::connect_timeout(&SocketAddr::new(address, port), patience);
            let Ok(mut stream) = stream else { return false };
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut word = [0; 6];
            stream.read_exact(&mut word).is_ok() && &word == b"secret"
        })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Runs `body` in a namespace of its own.
fn in_namespace<F: Future<Output = ()>>(test: &str, body: impl FnOnce() -> F + Send + 'static) {
    let test = test.to_owned();
    let done = std::thread::spawn(move || {
        for program in ["nft", "ip", "nsenter", "unshare"] {
            if Command::new(program).arg("--version").output().is_err() {
                return println!("SKIPPED: {test}: needs {program}");
            }
        }
        // SAFETY: unshare(2) takes no pointers; it concerns this thread and those it starts.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return println!("SKIPPED: {test}: needs root");
        }
        if !Path::new("/dev/net/tun").exists() {
            return println!("SKIPPED: {test}: needs /dev/net/tun");
        }
        run("ip link set lo up");
        // A new namespace may take its defaults from the host, where another daemon may run.
        for default in ["ipv4/conf/all/forwarding", "ipv4/conf/default/forwarding"] {
            std::fs::write(Path::new("/proc/sys/net").join(default), "0").unwrap();
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(body());
    });
    done.join().unwrap();
}

struct Rig {
    _plane: Plane,
    networks: Networks,
}

async fn open(dir: &Path, reach: Policy) -> Rig {
    let plane = Plane::new(slipway_plane::Settings::default()).unwrap();
    let client = PlaneClient::new(plane.connect().await.unwrap());
    let networks = Networks::open(settings(dir, reach), client).unwrap();
    Rig { _plane: plane, networks }
}

/// Returns the record of the forwarding switches of this thread's namespace.
fn record(dir: &Path) -> std::path::PathBuf {
    let cookie = slipway_netns::cookie().unwrap();
    dir.join(format!("run/forwarding-{cookie}.json"))
}

fn settings(dir: &Path, reach: Policy) -> Settings {
    Settings {
        dir: dir.join("networks"),
        ports_dir: dir.to_owned(),
        table: "slipway_test".into(),
        resolv_conf: dir.join("resolv.conf"),
        reach,
        forwarding: dir.join("run/forwarding.json"),
    }
}

impl Rig {
    async fn join(&self) -> v1::Attachment {
        let request = v1::JoinRequest {
            sandbox_id: "a".into(),
            name: "guest".into(),
            network: "default".into(),
            ..Default::default()
        };
        self.networks.join(&request).await.unwrap()
    }

    /// Puts a namespace in the place of the sandbox.
    fn guest(place: &v1::Attachment) -> Host {
        run("ip link set slip0 down");
        run("ip link set slip0 name tap0");
        run("ip address flush dev tap0");
        let guest = Host::new();
        let v1::Attachment { ipv4, ipv4_gateway, ipv6, ipv6_gateway, .. } = place;
        let own = [format!("{ipv4}/24"), format!("{ipv6}/64")];
        let gateways = [format!("{ipv4_gateway}/24"), format!("{ipv6_gateway}/64")];
        guest.cable(
            &own.each_ref().map(String::as_str),
            "slip0",
            &gateways.each_ref().map(String::as_str),
        );
        guest.run(&format!("ip route add default via {ipv4_gateway}"));
        guest.run(&format!("ip route add default via {ipv6_gateway}"));
        guest
    }
}

const PUBLIC: [&str; 2] = ["203.0.113.1", "2001:db8::1"];
const METADATA: [&str; 2] = ["169.254.169.254", "fd00:ec2::254"];
const PRIVATE: [&str; 2] = ["10.99.0.1", "fd55::1"];

/// Makes the internet, a cloud's metadata service, and a network of the host's: all on one veth
/// pair.
fn outside() -> Host {
    let outside = Host::new();
    let own = [
        "203.0.113.1/24",
        "2001:db8::1/64",
        "169.254.169.254/16",
        "fd00:ec2::254/64",
        "10.99.0.1/24",
        "fd55::1/64",
    ];
    let ours = [
        "203.0.113.2/24",
        "2001:db8::2/64",
        "169.254.1.1/16",
        "fd00:ec2::1/64",
        "10.99.0.2/24",
        "fd55::2/64",
    ];
    outside.cable(&own, "up0", &ours);
    outside.serve();
    outside
}

async fn with_policy(policy: Policy, body: impl FnOnce(&Host)) {
    let dir = tempfile::tempdir().unwrap();
    let _outside = outside();
    let rig = open(dir.path(), policy).await;
    let guest = Rig::guest(&rig.join().await);
    // All addresses work except those that are refused.
    for address in PUBLIC {
        assert!(guest.reaches(address, PATIENCE), "{address}");
    }
    body(&guest);
}

fn policy(reach: &str, allow: &[&str], deny: &[&str]) -> Policy {
    let texts = |all: &[&str]| all.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
    Policy::parse(reach, &texts(allow), &texts(deny)).unwrap()
}

#[test]
fn a_guest_does_not_get_to_the_clouds_metadata_as_root() {
    in_namespace("a_guest_does_not_get_to_the_clouds_metadata_as_root", || async {
        with_policy(policy("all", &[], &[]), |guest| {
            for address in METADATA {
                assert!(!guest.reaches(address, REFUSAL), "{address}");
            }
            for address in PRIVATE {
                assert!(guest.reaches(address, PATIENCE), "{address}");
            }
        })
        .await;
    });
}

#[test]
fn what_an_administrator_allows_is_reached_as_root() {
    in_namespace("what_an_administrator_allows_is_reached_as_root", || async {
        with_policy(policy("internet", &["169.254.169.254", "fd00:ec2::254"], &[]), |guest| {
            for address in METADATA {
                assert!(guest.reaches(address, PATIENCE), "{address}");
            }
        })
        .await;
    });
}

#[test]
fn the_internet_is_not_the_hosts_own_networks_as_root() {
    in_namespace("the_internet_is_not_the_hosts_own_networks_as_root", || async {
        with_policy(policy("internet", &[], &[]), |guest| {
            for address in PRIVATE {
                assert!(!guest.reaches(address, REFUSAL), "{address}");
            }
        })
        .await;
    });
}

#[test]
fn what_is_denied_is_not_reached_as_root() {
    in_namespace("what_is_denied_is_not_reached_as_root", || async {
        with_policy(policy("all", &["10.99.0.1"], &["10.99.0.0/16", "fd55::/64"]), |guest| {
            let [four, six] = PRIVATE;
            assert!(guest.reaches(four, PATIENCE) && !guest.reaches(six, REFUSAL));
        })
        .await;
    });
}

#[test]
fn a_link_local_service_on_the_host_is_refused_as_root() {
    in_namespace("a_link_local_service_on_the_host_is_refused_as_root", || async {
        with_policy(policy("all", &[], &[]), |guest| {
            // Addresses of lo, as an agent for credentials of pods has them.
            for address in ["169.254.170.23/32", "fd00:ec2::23/128", "198.51.100.7/32"] {
                run(&format!("ip address add {address} dev lo nodad"));
            }
            serve();
            assert!(guest.reaches("198.51.100.7", PATIENCE), "the host is a neighbour");
            for address in ["169.254.170.23", "fd00:ec2::23"] {
                assert!(!guest.reaches(address, REFUSAL), "{address}");
            }
        })
        .await;
    });
}

fn switch(path: &str) -> String {
    std::fs::read_to_string(Path::new("/proc/sys/net").join(path)).unwrap().trim().to_owned()
}

/// Makes two hosts on two veth pairs of this one, each with a route to the other through it.
fn neighbours() -> [Host; 2] {
    let (left, right) = (Host::new(), Host::new());
    let addresses =
        |net: u8, host: u8| [format!("10.{net}.0.{host}/24"), format!("fd{net}::{host}/64")];
    for (host, name, net) in [(&left, "left0", 71), (&right, "right0", 72)] {
        let (theirs, ours) = (addresses(net, 1), addresses(net, 2));
        host.cable(
            &theirs.each_ref().map(String::as_str),
            name,
            &ours.each_ref().map(String::as_str),
        );
        host.run(&format!("ip route add default via 10.{net}.0.2"));
        host.run(&format!("ip route add default via fd{net}::2"));
        host.serve();
    }
    [left, right]
}

const RIGHT: [&str; 2] = ["10.72.0.1", "fd72::1"];

#[test]
fn the_host_becomes_no_router_between_its_other_interfaces_as_root() {
    in_namespace("the_host_becomes_no_router_between_its_other_interfaces_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let (_outside, [left, _right]) = (outside(), neighbours());
        let rig = open(dir.path(), Policy::default()).await;
        let place = rig.join().await;
        for address in RIGHT {
            assert!(!left.reaches(address, REFUSAL), "{address}");
        }
        let guest = Rig::guest(&place);
        for address in PUBLIC.iter().chain(&RIGHT) {
            assert!(guest.reaches(address, PATIENCE), "{address}");
        }
        assert_eq!(switch("ipv4/ip_forward"), "0");
        // Another program switches the host's forwarding on for its own reasons: this is noticed
        // with the next sandbox.
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        std::fs::write("/proc/sys/net/ipv6/conf/all/forwarding", "1").unwrap();
        rig.networks
            .join(&v1::JoinRequest {
                sandbox_id: "b".into(),
                name: "b".into(),
                network: "default".into(),
                ..Default::default()
            })
            .await
            .unwrap();
        assert!(left.reaches(RIGHT[0], PATIENCE));
    });
}

#[test]
fn forwarding_is_as_before_when_the_last_network_has_gone_as_root() {
    in_namespace("forwarding_is_as_before_when_the_last_network_has_gone_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let [_left, _right] = neighbours();
        let four = |name: &str| switch(&format!("ipv4/conf/{name}/forwarding"));
        // An administrator's own setting.
        std::fs::write("/proc/sys/net/ipv4/conf/left0/forwarding", "1").unwrap();
        let rig = open(dir.path(), Policy::default()).await;
        rig.join().await;
        assert_eq!([four("left0"), four("right0"), four("slip0"), four("default")], ["1"; 4]);
        // Another daemon takes over, and the last sandbox goes.
        let Rig { networks, _plane } = rig;
        drop(networks);
        drop(_plane);
        // The end of a process takes its interfaces with it; here a thread does so in a moment.
        let begun = Instant::now();
        while Path::new("/proc/sys/net/ipv4/conf/slip0").exists() {
            assert!(begun.elapsed() < PATIENCE, "the first daemon's interface stays");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let rig = open(dir.path(), Policy::default()).await;
        rig.networks.reconcile(&std::collections::BTreeSet::new()).await.unwrap();
        assert_eq!([four("left0"), four("right0"), four("default")], ["1", "0", "0"]);
        for name in ["all", "default", "left0"] {
            assert_eq!(switch(&format!("ipv6/conf/{name}/forwarding")), "0", "{name}");
        }
        let six = "ipv6/conf/right0/force_forwarding";
        if Path::new("/proc/sys/net").join(six).exists() {
            assert_eq!(switch(six), "0");
        }
        assert!(!record(dir.path()).exists());
        // A host that forwards already is left as it is.
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
        rig.join().await;
        rig.networks.leave("a").await.unwrap();
        rig.networks.remove("default").await.unwrap();
        assert_eq!([switch("ipv4/ip_forward"), four("right0")], ["1", "1"]);
    });
}

#[test]
fn forwarding_is_left_alone_while_another_daemon_changes_it_as_root() {
    in_namespace("forwarding_is_left_alone_while_another_daemon_changes_it_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let [_left, _right] = neighbours();
        let record = record(dir.path());
        std::fs::create_dir(dir.path().join("run")).unwrap();
        let other = Lock::try_take(&record.with_extension("lock")).unwrap();
        let namespace = File::open("/proc/thread-self/ns/net").unwrap();
        let is_open = || switch("ipv4/conf/right0/forwarding") == "1";
        let recorded = record.clone();
        let holder = std::thread::spawn(move || {
            // SAFETY: setns(2) takes no pointers, and concerns this thread alone.
            assert_eq!(unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) }, 0);
            // The interface is there before the lock is asked for.
            let begun = Instant::now();
            while !Path::new("/proc/sys/net/ipv4/conf/slip0").exists() {
                assert!(begun.elapsed() < PATIENCE, "the daemon makes no interface");
                std::thread::sleep(Duration::from_millis(1));
            }
            std::thread::sleep(Duration::from_millis(100));
            let before = (is_open(), recorded.exists());
            drop(other);
            before
        });
        let rig = open(dir.path(), Policy::default()).await;
        rig.join().await;
        assert_eq!(holder.join().unwrap(), (false, false));
        assert!(is_open());
        // A daemon in another namespace has other switches, and leaves the record alone.
        let shared = dir.path().join("run/forwarding.json");
        Host::new().there(|| {
            let elsewhere = tempfile::tempdir().unwrap();
            let mut settings = settings(elsewhere.path(), Policy::default());
            settings.forwarding = shared;
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.unwrap().block_on(async {
                let plane = Plane::new(slipway_plane::Settings::default()).unwrap();
                let client = PlaneClient::new(plane.connect().await.unwrap());
                let other = Networks::open(settings, client).unwrap();
                other.reconcile(&std::collections::BTreeSet::new()).await.unwrap();
            });
        });
        assert!(is_open() && record.exists());
        // The lock of a daemon that hangs is not waited for longer than some seconds.
        let other = Lock::try_take(&record.with_extension("lock")).unwrap();
        rig.networks.leave("a").await.unwrap();
        rig.networks.remove("default").await.unwrap();
        assert!(is_open());
        drop(other);
        // The next daemon restores the switches, whatever networks it has.
        let elsewhere = tempfile::tempdir().unwrap();
        let mut settings = settings(elsewhere.path(), Policy::default());
        settings.forwarding = dir.path().join("run/forwarding.json");
        let client = PlaneClient::new(rig._plane.connect().await.unwrap());
        let next = Networks::open(settings, client).unwrap();
        next.reconcile(&std::collections::BTreeSet::new()).await.unwrap();
        assert!(!is_open() && !record.exists());
        // Nor does anything drop what others forward from now on.
        let rules = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
        assert_eq!(String::from_utf8(rules.stdout).unwrap(), "");
    });
}
