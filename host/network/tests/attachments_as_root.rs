//! Interfaces that are made for containers, with the kernel and a real plane. The host is a network
//! namespace of the test's own, and so is each container's.
//!
//! Over 500 lines: the tests share the host, the containers and what looks at them.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use slipway_netns::Namespace;
use slipway_network::reach::Policy;
use slipway_network::{Error, Networks, Settings};
use slipway_plane::{Plane, VirtualFunctions};
use slipway_plane_api::network_v1 as v1;
use slipway_plane_api::vf_v1::{Template, template};
use slipway_plane_api::{PlaneClient, VfClient};

/// A container: a network namespace that lives as long as a thread, or a descriptor in it.
struct Container {
    path: PathBuf,
    _end: mpsc::Sender<()>,
}

impl Container {
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
        let thread: i32 = told.recv().unwrap();
        Self { path: format!("/proc/self/task/{thread}/ns/net").into(), _end: end }
    }

    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Namespace::open(&self.path).unwrap().run(work).unwrap()
    }

    /// Runs `ip` there and returns its output.
    fn ip(&self, words: &str) -> String {
        self.run(|| {
            let done = Command::new("ip").args(words.split(' ')).output().unwrap();
            assert!(done.status.success(), "ip {words}: {done:?}");
            String::from_utf8(done.stdout).unwrap()
        })
    }

    /// Returns whether an interface of this name is there.
    fn has(&self, interface: &str) -> bool {
        self.ip("-o link").contains(&format!(": {interface}:"))
    }
}

/// Runs `body` on a thread whose network namespace is a new one, the host's.
fn as_host<F: Future<Output = ()>>(test: &str, body: impl FnOnce() -> F + Send + 'static) {
    // One after the other: a program that one test starts has, until it runs, copies of the sockets
    // that another test has just closed.
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
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
        if !Path::new("/dev/net/tun").exists() {
            return println!("SKIPPED: {test}: needs /dev/net/tun");
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(body());
    });
    done.join().unwrap();
}

struct Rig {
    plane: Plane,
    networks: Networks,
    dir: PathBuf,
}

/// Waits until no plane has the interface of a network open: a plane that was dropped closes it on
/// a thread of its own.
async fn until_closed() {
    let is_open = || {
        let shown = Command::new("ip").args(["-o", "link", "show", "slip0"]).output().unwrap();
        String::from_utf8_lossy(&shown.stdout).contains("LOWER_UP")
    };
    while is_open() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

async fn open(dir: &Path) -> Rig {
    until_closed().await;
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
    Rig { plane, networks: Networks::open(settings, client).unwrap(), dir: dir.to_owned() }
}

fn of(id: &str) -> Option<v1::ContainerInterface> {
    Some(v1::ContainerInterface {
        configuration: "blue".into(),
        container_id: id.into(),
        interface: "eth0".into(),
    })
}

fn request(id: &str, container: &Container) -> v1::AttachRequest {
    v1::AttachRequest {
        container: of(id),
        namespace: container.path.to_str().unwrap().into(),
        network: "default".into(),
        ..Default::default()
    }
}

fn join(sandbox: &str, container: &Container) -> v1::JoinNamespaceRequest {
    v1::JoinNamespaceRequest {
        sandbox_id: sandbox.into(),
        name: format!("name-{sandbox}"),
        path: container.path.to_str().unwrap().into(),
    }
}

impl Rig {
    async fn attach(&self, id: &str, container: &Container) -> Result<v1::Attachment, Error> {
        self.networks.attach(&request(id, container)).await
    }

    async fn detach(&self, id: &str) {
        self.networks.detach(of(id).as_ref()).await.unwrap();
    }

    async fn check(&self, id: &str) -> Result<v1::Attachment, Error> {
        let request = v1::CheckAttachmentRequest { container: of(id), namespace: String::new() };
        self.networks.check_attachment(&request).await
    }

    /// Returns the ids of the members of the default network.
    async fn members(&self) -> Vec<String> {
        let network = self.networks.get("default").await.unwrap();
        network.members.into_iter().map(|one| one.sandbox_id).collect()
    }

    /// Returns the ports of containers.
    fn container_ports(&self) -> Vec<slipway_plane_api::v1::SwitchPort> {
        let all = self.plane.fabric().list_switches().into_iter().flat_map(|one| one.ports);
        all.filter(|port| port.name.contains(',')).collect()
    }

    /// Returns the names of the ports of containers.
    fn ports(&self) -> Vec<String> {
        self.container_ports().into_iter().map(|port| port.name).collect()
    }

    /// Returns the receive rates of the ports of containers, with their bursts.
    fn receive_rates(&self) -> Vec<(u64, u64)> {
        let all = self.container_ports().into_iter();
        let mut rates: Vec<_> = all.map(|port| (port.receive_rate, port.receive_burst)).collect();
        // A daemon that follows opens several interfaces at once, so their order is by chance.
        rates.sort_unstable_by_key(|rate| std::cmp::Reverse(*rate));
        rates
    }

    /// Returns the names of the files of attachments.
    fn files(&self) -> Vec<String> {
        let all = std::fs::read_dir(self.dir.join("networks/attachments")).unwrap();
        all.map(|one| one.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// Checks that nothing of any attachment is left.
    async fn is_empty(&self) -> bool {
        self.members().await.is_empty() && self.ports().is_empty() && self.files().is_empty()
    }
}

/// Sends some bytes from one container to the other, at its address `to`.
fn talk(from: &Container, to: &Container, address: &str) {
    let at: SocketAddr = format!("{address}:7000").parse().unwrap();
    let listener = to.run(|| TcpListener::bind(at).unwrap());
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut got = Vec::new();
        stream.read_to_end(&mut got).unwrap();
        got
    });
    let patience = Duration::from_secs(60);
    let mut stream = from.run(|| TcpStream::connect_timeout(&at, patience).unwrap());
    let sent: Vec<u8> = (0..100_000_u32).map(|n| n as u8).collect();
    stream.write_all(&sent).unwrap();
    drop(stream);
    assert_eq!(server.join().unwrap(), sent);
}

#[test]
fn containers_reach_each_other_and_are_removed_as_root() {
    as_host("containers_reach_each_other_and_are_removed_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (Container::make(), Container::make());
        let rig = open(dir.path()).await;
        let first = rig.attach("a", &a).await.unwrap();
        let second = rig.attach("b", &b).await.unwrap();
        assert_ne!((&first.ipv4, &first.mac), (&second.ipv4, &second.mac));
        assert_eq!(rig.files().len(), 2);
        let link = a.ip("-o link show eth0");
        assert!(link.contains(&first.mac) && link.contains("mtu 1500"), "{link}");
        let routes = a.ip("route") + &a.ip("-6 route");
        for gateway in [&first.ipv4_gateway, &first.ipv6_gateway] {
            assert!(routes.contains(&format!("default via {gateway}")), "{routes}");
        }
        assert_eq!(first.routes.len(), 2);
        // On this thread: the switch has threads of its own.
        talk(&a, &b, &second.ipv4);
        talk(&b, &a, &format!("[{}]", first.ipv6));
        assert_eq!(rig.check("a").await.unwrap().ipv4, first.ipv4);
        let member = rig.networks.get("default").await.unwrap().members.remove(0);
        assert_eq!((member.container, member.name.as_str()), (of("a"), "a"));
        for _ in 0..2 {
            rig.detach("a").await;
        }
        assert!(!a.has("eth0"));
        assert!(rig.check("a").await.unwrap_err().to_string().contains("there is no"));
        // The address is free.
        assert_eq!(rig.attach("c", &a).await.unwrap().ipv4, first.ipv4);
        talk(&a, &b, &second.ipv4);
        // Without a word: the namespace of `b` lives as long as its interface is attached.
        drop(b);
        rig.detach("b").await;
        rig.detach("c").await;
        assert!(rig.is_empty().await);
        assert!(!rig.networks.is_attached().await);
    });
}

#[test]
fn an_attachment_outlives_the_daemon_as_root() {
    as_host("an_attachment_outlives_the_daemon_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, c) = (Container::make(), Container::make(), Container::make());
        let rig = open(dir.path()).await;
        let (receive_rate, receive_burst) = (125_000_000, 1 << 20);
        let rates = Some(v1::PortRates { receive_rate, receive_burst, ..Default::default() });
        let limited = v1::AttachRequest { rates, ..request("a", &a) };
        rig.networks.attach(&limited).await.unwrap();
        let second = rig.attach("b", &b).await.unwrap();
        rig.attach("c", &c).await.unwrap();
        assert_eq!(rig.receive_rates(), [(receive_rate, receive_burst), (0, 0), (0, 0)]);
        // As plugins that are called later do.
        a.ip("addr add 192.0.2.1/32 dev eth0");
        let before = a.ip("-o addr") + &a.ip("route");
        drop(rig);
        assert!(a.has("eth0"), "it goes with the daemon");
        // One is removed while no daemon serves, and one's namespace goes.
        std::fs::write(dir.path().join("networks/attachments/blue,a2,eth0.gone"), "").unwrap();
        let path = c.path.clone();
        drop(c);
        while path.exists() {
            std::thread::yield_now();
        }
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
        assert_eq!(rig.members().await, ["blue,a,eth0", "blue,b,eth0"]);
        assert_eq!((rig.ports().len(), rig.files().len()), (2, 2));
        assert_eq!(rig.receive_rates(), [(receive_rate, receive_burst), (0, 0)]);
        let strip = |text: String| text.replace(" linkdown", "").replace(" tentative", "");
        assert_eq!(strip(a.ip("-o addr") + &a.ip("route")), strip(before));
        talk(&a, &b, &second.ipv4);
        // Told twice, it has the same ports.
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
        assert_eq!(rig.ports().len(), 2);
        drop(rig);
        std::fs::write(dir.path().join("networks/attachments/blue,a,eth0.gone"), "").unwrap();
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
        assert_eq!((rig.members().await, rig.files().len()), (vec!["blue,b,eth0".to_owned()], 1));
        assert!(!a.has("eth0"));
        // A daemon that was killed while it wrote, or while it made an interface.
        drop(rig);
        b.ip("link delete eth0");
        std::fs::write(dir.path().join("networks/attachments/blue,x,eth0.json"), "{\"key").unwrap();
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
        assert_eq!(rig.files().len(), 1);
        rig.check("b").await.unwrap();
        rig.detach("b").await;
        assert!(!b.has("eth0") && rig.is_empty().await);
    });
}

#[test]
fn what_is_refused_leaves_nothing_as_root() {
    as_host("what_is_refused_leaves_nothing_as_root", || async {
        let (dir, a, b) = (tempfile::tempdir().unwrap(), Container::make(), Container::make());
        let rig = open(dir.path()).await;
        let refused = |changed: v1::AttachRequest, why: &str| {
            let (rig, why) = (&rig, why.to_owned());
            async move {
                let error = rig.networks.attach(&changed).await.unwrap_err().to_string();
                assert!(error.contains(&why) && !error.contains('\n'), "{error}");
            }
        };
        let with = |change: &dyn Fn(&mut v1::AttachRequest)| {
            let mut changed = request("a", &a);
            change(&mut changed);
            changed
        };
        refused(with(&|one| one.network = "red".into()), "there is no network").await;
        refused(with(&|one| one.namespace = "/run/netns/none".into()), "cannot open").await;
        refused(with(&|one| one.namespace = "/dev/null".into()), "no network namespace").await;
        refused(with(&|one| one.namespace = "/proc/self/ns/net".into()), "the host's own").await;
        refused(with(&|one| one.namespace = "/proc/self/ns/mnt".into()), "no network namespace")
            .await;
        refused(with(&|one| one.container = None), "names no container").await;
        refused(with(&|one| one.mac = "x".into()), "no MAC address").await;
        let burst = Some(v1::PortRates { receive_burst: 7, ..Default::default() });
        refused(with(&|one| one.rates = burst), "a burst of 7 bytes has no rate").await;
        refused(with(&|one| one.addresses = vec!["192.0.2.1".into()]), "outside of").await;
        let route = v1::InterfaceRoute { destination: "x".into(), ..Default::default() };
        let routes = Some(v1::AttachmentRoutes { routes: vec![route] });
        refused(with(&|one| one.routes = routes.clone()), "there is no route to x/0").await;
        // A gateway that is not on the link: the interface is made, and removed again.
        let away = v1::InterfaceRoute {
            destination: "0.0.0.0".into(),
            gateway: "192.0.2.1".into(),
            ..Default::default()
        };
        let routes = Some(v1::AttachmentRoutes { routes: vec![away] });
        refused(with(&|one| one.routes = routes.clone()), "cannot add the route").await;
        assert!(!a.has("eth0"));
        // An interface of somebody else's stays as it is.
        a.ip("link add eth0 type veth peer name other");
        refused(request("a", &a), "eth0").await;
        assert!(a.has("eth0@other") && rig.is_empty().await);
        rig.attach("b", &b).await.unwrap();
        refused(request("b", &b), "is there already").await;
        refused(request("b2", &b), "is there already").await;
        assert_eq!(rig.members().await, ["blue,b,eth0"]);
        b.ip("addr flush dev eth0");
        assert!(rig.check("b").await.unwrap_err().to_string().contains("lost its address"));
        rig.detach("b").await;
        assert!(rig.is_empty().await);
    });
}

#[test]
fn a_namespace_without_ipv6_has_ipv4_as_root() {
    as_host("a_namespace_without_ipv6_has_ipv4_as_root", || async {
        let (dir, a) = (tempfile::tempdir().unwrap(), Container::make());
        let off = a.run(|| std::fs::write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1"));
        off.unwrap();
        let rig = open(dir.path()).await;
        let made = rig.attach("a", &a).await.unwrap();
        assert_eq!((made.ipv6.as_str(), made.routes.len()), ("", 1));
        assert_eq!(rig.check("a").await.unwrap().ipv6, "");
        rig.detach("a").await;
    });
}

#[test]
fn what_is_not_valid_is_collected_as_root() {
    as_host("what_is_not_valid_is_collected_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let containers: Vec<_> = (0..4).map(|_| Container::make()).collect();
        let rig = open(dir.path()).await;
        for (number, one) in containers.iter().enumerate() {
            rig.attach(&format!("c{number}"), one).await.unwrap();
        }
        let collect = |configuration: &str, valid: &[&str]| v1::CollectAttachmentsRequest {
            configuration: configuration.into(),
            valid: valid.iter().filter_map(|id| of(id)).collect(),
        };
        let none = rig.networks.collect_attachments(&collect("green", &[])).await.unwrap();
        let two = rig.networks.collect_attachments(&collect("blue", &["c1", "c3"])).await.unwrap();
        assert_eq!((none, two), (0, 2));
        assert_eq!(rig.members().await, ["blue,c1,eth0", "blue,c3,eth0"]);
        let there: Vec<_> = containers.iter().map(|one| one.has("eth0")).collect();
        assert_eq!(there, [false, true, false, true]);
        rig.networks.collect_attachments(&collect("blue", &[])).await.unwrap();
        assert!(rig.is_empty().await);
    });
}

#[test]
fn a_sandbox_has_a_port_of_the_network_as_root() {
    as_host("a_sandbox_has_a_port_of_the_network_as_root", || async {
        let (dir, a) = (tempfile::tempdir().unwrap(), Container::make());
        let rig = open(dir.path()).await;
        let rates = v1::PortRates { max_rate: 1000, receive_rate: 2000, ..Default::default() };
        let rates = Some(rates);
        let wanted = v1::AttachRequest { function: true, rates, ..request("a", &a) };
        let made = rig.networks.attach(&wanted).await.unwrap();
        assert!(a.ip("-o link show eth0").contains("NO-CARRIER") && rig.ports().is_empty());
        rig.check("a").await.unwrap();
        let join = |id: &str| join(id, &a);
        // Addresses that were added in the namespace are not the sandbox's.
        let more = format!("{}.77", made.ipv4_gateway.rsplit_once('.').unwrap().0);
        a.ip(&format!("addr add {more}/24 dev eth0"));
        a.ip(&format!("addr add {}77/64 dev eth0 nodad", made.ipv6_gateway));
        a.ip(&format!("route add 192.0.2.0/24 via {} src {more}", made.ipv4_gateway));
        let found = rig.networks.join_namespace(&join("s")).await.unwrap().interfaces.remove(0);
        assert!(found.routes.iter().all(|one| one.source != more), "{:?}", found.routes);
        assert_eq!((&found.switch, &found.mac, found.mtu), (&"default".into(), &made.mac, 1500));
        assert_eq!(found.rates, rates);
        let addresses: BTreeSet<_> = found.addresses.iter().map(|one| &one.address).collect();
        assert_eq!(addresses, [&made.ipv4, &made.ipv6].into());
        let defaults = found.routes.iter().filter(|one| one.prefix == 0);
        let gateways: BTreeSet<_> = defaults.map(|one| &one.gateway).collect();
        assert_eq!(gateways, [&made.ipv4_gateway, &made.ipv6_gateway].into());
        let taken = rig.networks.join_namespace(&join("other")).await.unwrap_err();
        assert!(taken.to_string().contains("taken by sandbox name-s"), "{taken}");
        drop(rig);
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&["s".to_owned()].into()).await.unwrap();
        rig.check("a").await.unwrap();
        for _ in 0..2 {
            rig.networks.leave("s").await.unwrap();
        }
        let again = rig.networks.join_namespace(&join("t")).await.unwrap().interfaces.remove(0);
        assert_eq!((again.switch.as_str(), again.rates), ("default", rates), "after a restart");
        rig.networks.leave("t").await.unwrap();
        rig.detach("a").await;
        assert!(!a.has("eth0") && rig.is_empty().await);
    });
}

impl Rig {
    /// Attaches a container with a function of the pool "nics", as soon as one is ready.
    async fn attach_pooled(&self, id: &str, container: &Container) -> v1::Attachment {
        let wanted = v1::AttachRequest { pool: "nics".into(), ..request(id, container) };
        loop {
            match self.networks.attach(&wanted).await {
                Err(Error::Functions(status)) if status.message().contains("1 is being reset") => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                made => break made.unwrap(),
            }
        }
    }
}

#[test]
fn an_attachment_has_a_function_of_a_pool_as_root() {
    as_host("an_attachment_has_a_function_of_a_pool_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, c) = (Container::make(), Container::make(), Container::make());
        let Rig { plane, networks, dir: place } = open(dir.path()).await;
        let ledger = dir.path().join("ledger");
        let functions = VirtualFunctions::open(plane.clone(), dir.path(), &ledger);
        let pools = VfClient::new(functions.connect().await.unwrap());
        let rig = Rig { plane, networks: networks.with_functions(pools), dir: place };
        // It keeps the network's switch, which the pool is on.
        rig.attach("c", &c).await.unwrap();
        for (name, switch) in [("nics", "default"), ("others", "other")] {
            let nic = template::Nic { switch: switch.into(), mtu: 0 };
            let kind = Some(template::Kind::Nic(nic));
            functions.create(name, Template { kind, count: 1, ..Default::default() }).unwrap();
        }
        let made = rig.attach_pooled("a", &a).await;
        assert!(made.socket_path.ends_with("/nics.0"), "{}", made.socket_path);
        assert!(a.ip("-o link show eth0").contains("NO-CARRIER"));
        assert_eq!(rig.check("a").await.unwrap().socket_path, made.socket_path);
        for (pool, why) in [
            ("nics", "has no VF ready"),
            ("none", "there is no pool"),
            ("others", "on the switch other"),
        ] {
            let wanted = v1::AttachRequest { pool: pool.into(), ..request("b", &b) };
            let refused = rig.networks.attach(&wanted).await.unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
        assert!(!b.has("eth0") && rig.files().len() == 2);
        let found = rig.networks.join_namespace(&join("s", &a)).await.unwrap().interfaces.remove(0);
        assert_eq!((&*found.pool, &*found.owner), ("nics", "slipway-cni:blue,a,eth0"));
        rig.networks.leave("s").await.unwrap();
        for _ in 0..2 {
            rig.detach("a").await;
        }
        rig.attach_pooled("b", &b).await;
        // An attachment keeps its function.
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
        rig.check("b").await.unwrap();
        for id in ["b", "c"] {
            rig.detach(id).await;
        }
        assert!(rig.is_empty().await);
    });
}

#[test]
fn many_at_once_have_addresses_of_their_own_as_root() {
    as_host("many_at_once_have_addresses_of_their_own_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let containers: Vec<_> = (0..24).map(|_| Container::make()).collect();
        let rig = std::sync::Arc::new(open(dir.path()).await);
        let mut tasks = tokio::task::JoinSet::new();
        for (number, one) in containers.iter().enumerate() {
            let (rig, request) = (rig.clone(), request(&format!("c{number}"), one));
            tasks.spawn(async move { rig.networks.attach(&request).await.unwrap().ipv4 });
        }
        let addresses: BTreeSet<String> = tasks.join_all().await.into_iter().collect();
        assert_eq!((addresses.len(), rig.ports().len()), (24, 24));
        for number in 0..24 {
            rig.detach(&format!("c{number}")).await;
        }
        assert!(rig.is_empty().await);
    });
}

/// Removes the interface and gives its name and its MAC address to the loopback interface, which
/// the kernel removes for nobody.
fn disguise(container: &Container, mac: &str) {
    for words in ["link delete eth0", "link set lo down", "link set lo name eth0"] {
        container.ip(words);
    }
    container.ip(&format!("link set eth0 address {mac}"));
}

#[test]
fn no_container_keeps_its_attachment_as_root() {
    as_host("no_container_keeps_its_attachment_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let containers: Vec<_> = (0..4).map(|_| Container::make()).collect();
        let [a, b, c, d] = &containers[..] else { panic!() };
        let rig = open(dir.path()).await;
        // The second attachment has the name and the addresses of the first one.
        for _ in 0..2 {
            rig.attach("a", a).await.unwrap();
            a.ip("link delete eth0");
            rig.detach("a").await;
            assert!(rig.is_empty().await);
        }
        let made = rig.attach("b", b).await.unwrap();
        disguise(b, &made.mac);
        rig.detach("b").await;
        assert!(b.has("eth0") && rig.is_empty().await);
        let wanted = v1::AttachRequest { function: true, ..request("c", c) };
        let made = rig.networks.attach(&wanted).await.unwrap();
        disguise(c, &made.mac);
        rig.detach("c").await;
        assert!(c.has("eth0") && rig.is_empty().await);
        // The next daemon gives it no port, and collects it.
        let made = rig.attach("d", d).await.unwrap();
        drop(rig);
        disguise(d, &made.mac);
        let rig = open(dir.path()).await;
        let refused = rig.networks.reconcile(&BTreeSet::new()).await.unwrap_err();
        assert!(refused.to_string().contains("cannot have the TAP interface eth0"), "{refused}");
        let all = v1::CollectAttachmentsRequest { configuration: "blue".into(), valid: vec![] };
        assert_eq!(rig.networks.collect_attachments(&all).await.unwrap(), 1);
        assert!(d.has("eth0") && rig.is_empty().await);
    });
}

#[test]
fn addresses_stay_with_a_sandbox_until_it_leaves_as_root() {
    as_host("addresses_stay_with_a_sandbox_until_it_leaves_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, c) = (Container::make(), Container::make(), Container::make());
        let function = |id: &str, one| v1::AttachRequest { function: true, ..request(id, one) };
        let rig = open(dir.path()).await;
        let made = rig.networks.attach(&function("a", &a)).await.unwrap();
        rig.networks.join_namespace(&join("s", &a)).await.unwrap();
        rig.detach("a").await;
        assert!(!a.has("eth0") && rig.files().is_empty());
        let kept = rig.networks.get("default").await.unwrap().members.remove(0);
        assert_eq!((kept.sandbox_id.as_str(), kept.name.as_str()), ("s", "name-s"));
        assert_eq!((&kept.ipv4, &kept.ipv6, &kept.mac), (&made.ipv4, &made.ipv6, &made.mac));
        assert!(kept.container.is_none());
        // The next one gets another address, and the sandbox's stays so with the next daemon.
        let next = rig.attach("b", &b).await.unwrap();
        assert_ne!((&next.ipv4, &next.mac), (&made.ipv4, &made.mac));
        drop(rig);
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&["s".to_owned()].into()).await.unwrap();
        assert_eq!(rig.members().await, ["blue,b,eth0", "s"]);
        rig.networks.leave("s").await.unwrap();
        assert_eq!(rig.members().await, ["blue,b,eth0"]);
        // The attachment is removed while no daemon serves, and then the sandbox is.
        let again = rig.networks.attach(&function("c", &c)).await.unwrap();
        assert_eq!((&again.ipv4, &again.mac), (&made.ipv4, &made.mac));
        rig.networks.join_namespace(&join("t", &c)).await.unwrap();
        drop(rig);
        std::fs::write(dir.path().join("networks/attachments/blue,c,eth0.gone"), "").unwrap();
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&["t".to_owned()].into()).await.unwrap();
        assert_eq!(rig.members().await, ["blue,b,eth0", "t"]);
        drop(rig);
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
        assert_eq!(rig.members().await, ["blue,b,eth0"]);
        rig.detach("b").await;
        assert!(rig.is_empty().await);
    });
}
