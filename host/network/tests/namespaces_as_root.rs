//! Interfaces in network namespaces of others, with the kernel and a real plane. The host is a
//! network namespace of the test's own, and so is the other one.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use slipway_netns::Namespace;
use slipway_network::reach::Policy;
use slipway_network::{Error, Networks, Settings};
use slipway_plane::Plane;
use slipway_plane_api::PlaneClient;
use slipway_plane_api::network_v1 as v1;

/// A network namespace that lives as long as a thread, or a socket in it.
struct Other {
    path: PathBuf,
    thread: i32,
    _end: mpsc::Sender<()>,
}

impl Other {
    fn make() -> Self {
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        std::thread::spawn(move || {
            // SAFETY: unshare(2) takes no pointers; it concerns this thread.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
            // SAFETY: no arguments.
            tell.send(unsafe { libc::gettid() }).unwrap();
            let _ = ended.recv();
        });
        let thread = told.recv().unwrap();
        Self { path: format!("/proc/self/task/{thread}/ns/net").into(), thread, _end: end }
    }

    /// Runs `ip` there.
    fn ip(&self, words: &str) {
        let namespace = Namespace::open(&self.path).unwrap();
        namespace.run(|| ip(words)).unwrap();
    }

    fn rules(&self) -> String {
        let list = || Command::new("nft").args(["list", "ruleset"]).output().unwrap().stdout;
        let listed = Namespace::open(&self.path).unwrap().run(list).unwrap();
        String::from_utf8(listed).unwrap()
    }
}

fn ip(words: &str) {
    let done = Command::new("ip").args(words.split(' ')).status().unwrap();
    assert!(done.success(), "ip {words}");
}

/// Runs `body` on a thread whose network namespace is a new one, the host's.
fn as_host<F: Future<Output = ()>>(test: &str, body: impl FnOnce() -> F + Send + 'static) {
    let test = test.to_owned();
    let done = std::thread::spawn(move || {
        for (program, word) in [("nft", "--version"), ("ip", "-V")] {
            if Command::new(program).arg(word).output().is_err() {
                return println!("SKIPPED: {test}: needs {program}");
            }
        }
        // SAFETY: unshare(2) takes no pointers; it concerns this thread and those it starts.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return println!("SKIPPED: {test}: needs root");
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(body());
    });
    done.join().unwrap();
}

struct Rig {
    plane: Plane,
    networks: Networks,
}

async fn open(dir: &Path) -> Rig {
    let plane = Plane::new(slipway_plane::Settings::default()).unwrap();
    let client = PlaneClient::new(plane.connect().await.unwrap());
    let settings = Settings {
        dir: dir.join("networks"),
        ports_dir: dir.to_owned(),
        table: "slipway_test".into(),
        resolv_conf: dir.join("resolv.conf"),
        reach: Policy::default(),
        forwarding: dir.join("forwarding.json"),
    };
    Rig { plane, networks: Networks::open(settings, client).unwrap() }
}

impl Rig {
    /// Returns the first interface.
    async fn join(&self, id: &str, path: &Path) -> Result<v1::Interface, Error> {
        self.join_all(id, path).await.map(|mut all| all.remove(0))
    }

    async fn join_all(&self, id: &str, path: &Path) -> Result<Vec<v1::Interface>, Error> {
        let request = v1::JoinNamespaceRequest {
            sandbox_id: id.into(),
            name: format!("name-{id}"),
            path: path.to_str().unwrap().into(),
        };
        self.networks.join_namespace(&request).await.map(|joined| joined.interfaces)
    }

    /// Returns the names of switches and their ports.
    fn switches(&self) -> Vec<String> {
        let all = self.plane.fabric().list_switches().into_iter();
        all.flat_map(|one| {
            let name = one.name.clone();
            one.ports.into_iter().map(move |port| format!("{name}/{}", port.name))
        })
        .collect()
    }
}

/// Makes a pair of interfaces, as the plugin ptp does, and returns the other namespace.
fn wired() -> Other {
    let other = Other::make();
    ip(&format!("link add v0 type veth peer name eth0 netns {}", other.thread));
    for words in ["link set v0 up", "addr add 10.1.1.1/32 dev v0", "route add 10.1.1.2 dev v0"] {
        ip(words);
    }
    for words in [
        "link set eth0 mtu 1400 up",
        "addr add 10.1.1.2/24 dev eth0",
        "addr add fd01::2/64 dev eth0 nodad",
        "route del 10.1.1.0/24",
        "route add 10.1.1.1 dev eth0 src 10.1.1.2",
        "route add 10.1.1.0/24 via 10.1.1.1",
        "route add default via 10.1.1.1",
        "neigh add 10.1.1.9 lladdr 02:00:00:00:00:09 dev eth0",
    ] {
        other.ip(words);
    }
    other
}

/// Returns whether the kernel behind 10.1.1.2 refuses a connection, as it does where nobody
/// listens, or says nothing.
fn answers() -> bool {
    let address: SocketAddr = "10.1.1.2:9".parse().unwrap();
    let error = TcpStream::connect_timeout(&address, Duration::from_secs(2)).unwrap_err();
    error.kind() == ErrorKind::ConnectionRefused
}

#[test]
fn an_interface_of_others_is_taken_and_given_back_as_root() {
    as_host("an_interface_of_others_is_taken_and_given_back_as_root", || async {
        let (dir, other) = (tempfile::tempdir().unwrap(), wired());
        let rig = open(dir.path()).await;
        assert!(answers());
        let found = rig.join("a", &other.path).await.unwrap();
        assert_eq!((found.name.as_str(), found.mtu), ("eth0", 1400));
        let texts: BTreeSet<_> =
            found.addresses.iter().map(|one| format!("{}/{}", one.address, one.prefix)).collect();
        assert_eq!(texts, ["10.1.1.2/24".to_owned(), "fd01::2/64".to_owned()].into());
        let routes: BTreeSet<_> = found
            .routes
            .iter()
            .map(|one| format!("{}/{} {}", one.destination, one.prefix, one.gateway))
            .collect();
        let expected = ["10.1.1.1/32 ", "10.1.1.0/24 10.1.1.1", "0.0.0.0/0 10.1.1.1", "fd01::/64 "];
        assert_eq!(routes, expected.map(str::to_owned).into());
        assert_eq!(found.neighbours.len(), 1, "{:?}", found.neighbours);
        assert_eq!(rig.switches(), ["uplink.a/uplink:eth0"]);
        // The namespace's own kernel says nothing any more, and its addresses are still there.
        assert!(!answers());
        let again = rig.join("b", &other.path).await.unwrap_err();
        assert!(again.to_string().contains("taken by sandbox name-a"), "{again}");
        rig.networks.leave("b").await.unwrap();
        for _ in 0..2 {
            rig.networks.leave("a").await.unwrap();
        }
        assert!(answers());
        assert_eq!((other.rules(), rig.switches()), (String::new(), vec![]));
        assert_eq!(rig.join("b", &other.path).await.unwrap().addresses, found.addresses);
    });
}

#[test]
fn the_next_daemon_takes_an_interface_up_or_gives_it_back_as_root() {
    as_host("the_next_daemon_takes_an_interface_up_or_gives_it_back_as_root", || async {
        let (dir, other) = (tempfile::tempdir().unwrap(), wired());
        let rig = open(dir.path()).await;
        rig.join("a", &other.path).await.unwrap();
        drop(rig);
        assert!(!answers());
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&["a".to_owned()].into()).await.unwrap();
        assert_eq!(rig.switches(), ["uplink.a/uplink:eth0"]);
        assert!(!answers());
        drop(rig);
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
        assert_eq!((other.rules(), rig.switches()), (String::new(), vec![]));
        assert!(answers());
    });
}

#[test]
fn a_namespace_that_is_gone_is_no_obstacle_as_root() {
    as_host("a_namespace_that_is_gone_is_no_obstacle_as_root", || async {
        let (dir, other) = (tempfile::tempdir().unwrap(), wired());
        let rig = open(dir.path()).await;
        rig.join("a", &other.path).await.unwrap();
        // Its maker removes the interface; the port stays, without a peer.
        ip("link delete v0");
        assert_eq!(rig.switches(), ["uplink.a/uplink:eth0"]);
        drop(rig);
        let rig = open(dir.path()).await;
        let gone = rig.networks.reconcile(&["a".to_owned()].into()).await.unwrap_err();
        assert!(gone.to_string().contains("is not there any more"), "{gone}");
        let path = other.path.clone();
        drop(other);
        while path.exists() {
            std::thread::yield_now();
        }
        drop(rig);
        let rig = open(dir.path()).await;
        let gone = rig.networks.reconcile(&["a".to_owned()].into()).await.unwrap_err();
        assert!(gone.to_string().contains("cannot open the network namespace"), "{gone}");
        rig.networks.leave("a").await.unwrap();
        assert!(rig.switches().is_empty());
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
    });
}

#[test]
fn further_interfaces_are_taken_and_given_back_with_the_first_as_root() {
    as_host("further_interfaces_are_taken_and_given_back_with_the_first_as_root", || async {
        let (dir, other) = (tempfile::tempdir().unwrap(), wired());
        ip(&format!("link add v1 type veth peer name net1 netns {}", other.thread));
        for words in ["link set v1 up", "addr add 10.2.1.1/24 dev v1"] {
            ip(words);
        }
        for words in ["addr add 10.2.1.2/24 dev net1", "link set net1 mtu 1300 up"] {
            other.ip(words);
        }
        let rig = open(dir.path()).await;
        let all = rig.join_all("a", &other.path).await.unwrap();
        let texts = all.iter().map(|one| (one.name.as_str(), one.switch.as_str(), one.mtu));
        assert!(texts.eq([("eth0", "uplink.a", 1400), ("net1", "uplink.a.1", 1300)]), "{all:?}");
        assert_eq!(all[1].addresses[0].address, "10.2.1.2");
        let routes = all[1].routes.iter().filter(|one| one.destination.contains('.'));
        assert_eq!(routes.map(|one| one.destination.as_str()).collect::<Vec<_>>(), ["10.2.1.0"]);
        let both = ["uplink.a.1/uplink:net1", "uplink.a/uplink:eth0"];
        let sorted = |rig: &Rig| {
            let mut switches = rig.switches();
            switches.sort();
            switches
        };
        assert_eq!(sorted(&rig), both);
        let tables = ["table netdev slipway_uplink {", "table netdev slipway_uplink_1 {"];
        for table in tables {
            assert!(other.rules().contains(table), "{}", other.rules());
        }
        drop(rig);
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&["a".to_owned()].into()).await.unwrap();
        assert_eq!(sorted(&rig), both);
        rig.networks.leave("a").await.unwrap();
        assert_eq!((other.rules(), rig.switches()), (String::new(), vec![]));
        // If one interface cannot be joined, none is.
        ip("link set v1 down");
        other.ip("link set net1 down");
        other.ip("link set net1 address 02:00:00:00:00:01 up");
        other.ip("link add net2 address 02:00:00:00:00:01 type veth peer name net3");
        other.ip("link set net2 up");
        let refused = rig.join("a", &other.path).await.unwrap_err().to_string();
        assert!(refused.contains("net1 and net2 have the same MAC address"), "{refused}");
        assert_eq!((other.rules(), rig.switches()), (String::new(), vec![]));
    });
}

#[test]
fn what_is_no_interface_for_a_sandbox_is_refused_as_root() {
    as_host("what_is_no_interface_for_a_sandbox_is_refused_as_root", || async {
        let (dir, other) = (tempfile::tempdir().unwrap(), Other::make());
        let rig = open(dir.path()).await;
        let refusal = |path: &str| {
            let path = PathBuf::from(path);
            let rig = &rig;
            async move { rig.join("a", &path).await.unwrap_err().to_string() }
        };
        let there = other.path.to_str().unwrap();
        assert!(refusal("/run/netns/nobodys").await.contains("cannot open"));
        assert!(refusal("/dev/null").await.contains("is no network namespace"));
        assert!(refusal("/proc/self/ns/mnt").await.contains("is no network namespace"));
        assert!(refusal("/proc/self/ns/net").await.contains("the host's own"));
        assert!(refusal(there).await.contains("no Ethernet interface"));
        ip(&format!("link add v0 type veth peer name net1 netns {}", other.thread));
        assert!(refusal(there).await.contains("is down"));
        ip(&format!("link add v1 type veth peer name net2 netns {}", other.thread));
        assert!(refusal(there).await.contains("net1"));
        for (id, why) in [("a/b", "is no id"), ("a.1", "has a dot")] {
            let bad = rig.join(id, &other.path).await.unwrap_err().to_string();
            assert!(bad.contains(why), "{bad}");
        }
        assert_eq!((other.rules(), rig.switches()), (String::new(), vec![]));
        rig.networks.reconcile(&["a".to_owned()].into()).await.unwrap();
    });
}
