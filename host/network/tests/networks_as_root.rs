//! Networks with the kernel and a real plane, each test in a network namespace of its own: the
//! machine's own interfaces and rules are not touched.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use slipway_netlink::Netlink;
use slipway_network::reach::Policy;
use slipway_network::{Networks, Settings};
use slipway_plane::Plane;
use slipway_plane_api::PlaneClient;
use slipway_plane_api::network_v1 as v1;

/// Runs `body` in a namespace with only a loopback link, on a runtime whose threads are in it too.
fn in_namespace<F: Future<Output = ()>>(test: &str, body: impl FnOnce() -> F + Send + 'static) {
    let test = test.to_owned();
    let done = std::thread::spawn(move || {
        if Command::new("nft").arg("--version").output().is_err() {
            println!("SKIPPED: {test}: needs nft");
            return;
        }
        // SAFETY: unshare(2) takes no pointers; it concerns this thread and those it starts.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            println!("SKIPPED: {test}: needs root");
            return;
        }
        if !Path::new("/dev/net/tun").exists() {
            println!("SKIPPED: {test}: needs /dev/net/tun");
            return;
        }
        let mut netlink = Netlink::open().unwrap();
        let lo = netlink.link("lo").unwrap().unwrap();
        let up = slipway_netlink::LinkChange { up: Some(true), ..Default::default() };
        netlink.change(lo.index, up).unwrap();
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

fn request(id: &str, network: &str, publish: &[&str]) -> v1::JoinRequest {
    v1::JoinRequest {
        sandbox_id: id.into(),
        name: format!("name-{id}"),
        network: network.into(),
        publish: publish.iter().map(|text| (*text).to_owned()).collect(),
        ..Default::default()
    }
}

fn rules() -> String {
    let listed = Command::new("nft").args(["list", "ruleset"]).output().unwrap();
    String::from_utf8(listed.stdout).unwrap()
}

fn devices() -> BTreeSet<String> {
    let links = Netlink::open().unwrap().links().unwrap();
    links.into_iter().map(|link| link.name).filter(|name| name.starts_with("slip")).collect()
}

#[test]
fn a_network_comes_up_and_goes_with_its_rules_as_root() {
    in_namespace("a_network_comes_up_and_goes_with_its_rules_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let rig = open(dir.path()).await;
        let place = rig.networks.join(&request("a", "default", &["18080:80"])).await.unwrap();
        assert_eq!(
            (place.ipv4.as_str(), place.ipv4_gateway.as_str()),
            ("10.213.0.2", "10.213.0.1")
        );
        assert_eq!(place.published, ["18080:80/tcp"]);
        assert_eq!(devices().len(), 1);
        let addresses = Netlink::open().unwrap().addresses().unwrap();
        for gateway in [&place.ipv4_gateway, &place.ipv6_gateway] {
            let gateway: IpAddr = gateway.parse().unwrap();
            assert!(addresses.iter().any(|one| one.address == gateway), "{addresses:?}");
        }
        let text = rules();
        assert!(text.contains("tcp dport 18080 dnat ip to 10.213.0.2:80"), "{text}");
        assert!(text.contains("masquerade"), "{text}");
        let switches = rig.plane.fabric().list_switches();
        assert_eq!(switches[0].ports[0].name, "tap:slip0");
        // A sandbox that joins without ports changes no rule.
        rig.networks.join(&request("b", "default", &[])).await.unwrap();
        assert_eq!(rules(), text);
        let error = rig.networks.remove("default").await.unwrap_err().to_string();
        assert!(error.contains("name-a, name-b"), "{error}");
        rig.networks.leave("a").await.unwrap();
        assert!(!rules().contains("18080"));
        rig.networks.leave("b").await.unwrap();
        rig.networks.leave("b").await.unwrap();
        rig.networks.remove("default").await.unwrap();
        assert_eq!((devices().len(), rules().as_str()), (0, ""));
        assert!(rig.plane.fabric().list_switches().is_empty());
    });
}

/// Returns a query for the IPv4 address of `name`.
fn query(name: &str) -> Vec<u8> {
    let mut query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0".to_vec();
    for label in name.split('.') {
        query.push(label.len() as u8);
        query.extend(label.as_bytes());
    }
    query.extend(b"\0\0\x01\0\x01");
    query
}

fn ask(gateway: &str, name: &str) -> Vec<u8> {
    let socket = UdpSocket::bind((gateway, 0)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    socket.send_to(&query(name), (gateway, 53)).unwrap();
    let mut reply = vec![0; 512];
    let length = socket.recv(&mut reply).unwrap();
    reply.truncate(length);
    assert_eq!(reply[..2], query(name)[..2]);
    reply
}

fn ask_stream(gateway: &str, name: &str) -> Vec<u8> {
    let mut stream = TcpStream::connect((gateway, 53)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    stream.write_all(&(query(name).len() as u16).to_be_bytes()).unwrap();
    stream.write_all(&query(name)).unwrap();
    let mut length = [0; 2];
    stream.read_exact(&mut length).unwrap();
    let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
    stream.read_exact(&mut reply).unwrap();
    reply
}

#[test]
fn names_are_answered_on_the_gateway_as_root() {
    in_namespace("names_are_answered_on_the_gateway_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        // A resolver of the host that answers one query.
        std::fs::write(dir.path().join("resolv.conf"), "nameserver 127.0.0.77\n").unwrap();
        let upstream = UdpSocket::bind("127.0.0.77:53").unwrap();
        let answering = std::thread::spawn(move || {
            let mut query = [0; 512];
            let (length, client) = upstream.recv_from(&mut query).unwrap();
            query[2] |= 0x80;
            // A reply with a wrong identifier comes first: it must be ignored.
            let mut other = query;
            other[0] ^= 1;
            other[3] = 5;
            upstream.send_to(&other[..length], client).unwrap();
            upstream.send_to(&query[..length], client).unwrap();
        });
        let rig = open(dir.path()).await;
        let place = rig.networks.join(&request("a", "default", &[])).await.unwrap();
        let gateway = place.ipv4_gateway.clone();
        let asked = tokio::task::spawn_blocking(move || {
            let reply = ask(&gateway, "name-a");
            assert!(reply.ends_with(&[10, 213, 0, 2]), "{reply:?}");
            assert_eq!(ask_stream(&gateway, "name-a"), reply);
            assert_eq!(ask(&gateway, "nobody")[3] & 0xf, 3);
            let forwarded = ask(&gateway, "www.example.org");
            assert_eq!((forwarded[2] & 0x80, forwarded[3] & 0xf), (0x80, 0));
        });
        asked.await.unwrap();
        answering.join().unwrap();
        // The network is in use: it stays.
        rig.networks.close().await;
        assert_eq!(devices().len(), 1);
        rig.networks.leave("a").await.unwrap();
        rig.networks.close().await;
        assert_eq!(devices().len(), 0);
    });
}

#[test]
fn what_a_dead_daemon_left_is_taken_up_or_given_back_as_root() {
    in_namespace("what_a_dead_daemon_left_is_taken_up_or_given_back_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let rig = open(dir.path()).await;
        let before = rig.networks.join(&request("a", "default", &["18081:80"])).await.unwrap();
        rig.networks.join(&request("b", "default", &[])).await.unwrap();
        rig.networks.join(&request("c", "default", &[])).await.unwrap();
        // The daemon ends without a chance to clean up, as by kill -9: rules and ledger stay.
        leave_behind(rig).await;
        assert!(rules().contains("18081"));
        let rig = open(dir.path()).await;
        let live: BTreeSet<String> = ["a".to_owned(), "c".to_owned()].into();
        rig.networks.reconcile(&live).await.unwrap();
        let network = rig.networks.get("default").await.unwrap();
        let members: Vec<_> = network.members.iter().map(|one| one.ipv4.as_str()).collect();
        assert_eq!(members, ["10.213.0.2", "10.213.0.4"]);
        assert_eq!(network.ipv6_gateway, before.ipv6_gateway);
        assert!(rules().contains("18081"));
        assert!(TcpListener::bind("0.0.0.0:18081").is_err(), "the port is held again");
        let place = rig.networks.join(&request("d", "default", &[])).await.unwrap();
        assert_eq!(place.ipv4, "10.213.0.3");
        // A daemon that finds no live sandbox removes everything.
        leave_behind(rig).await;
        let rig = open(dir.path()).await;
        rig.networks.reconcile(&BTreeSet::new()).await.unwrap();
        assert_eq!((devices().len(), rules().as_str()), (0, ""));
        assert!(rig.networks.get("default").await.unwrap().members.is_empty());
    });
}

/// Ends a daemon's threads without a chance to clean up, and waits until they are gone, as a
/// successor would.
async fn leave_behind(rig: Rig) {
    for switch in rig.plane.fabric().list_switches() {
        rig.plane.remove_switch(&switch.name).unwrap();
    }
    drop(rig);
    // The thread that held ports and name server ends soon after.
    while TcpListener::bind("0.0.0.0:18081").is_err() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[test]
fn what_is_refused_leaves_nothing_as_root() {
    in_namespace("what_is_refused_leaves_nothing_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let rig = open(dir.path()).await;
        let error = rig.networks.join(&request("a", "blue", &[])).await.unwrap_err().to_string();
        assert!(error.contains("no network \"blue\""), "{error}");
        let small = v1::CreateNetworkRequest {
            name: "blue".into(),
            subnet: "10.7.0.0/30".into(),
            ..Default::default()
        };
        rig.networks.create(&small).await.unwrap();
        assert!(rig.networks.create(&small).await.unwrap_err().to_string().contains("exists"));
        for (subnet, mtu) in [("10.0.0.0/8", 0), ("10.8.0.0/24", 100), ("10.8.0.0/24", 65_535)] {
            let name = "green".to_owned();
            let subnet = subnet.to_owned();
            let request = v1::CreateNetworkRequest { name, subnet, mtu, ..Default::default() };
            assert!(rig.networks.create(&request).await.is_err(), "{request:?}");
        }
        // A port that another socket has: nothing comes up for it.
        let held = TcpListener::bind("0.0.0.0:0").unwrap();
        let port = format!("{}:80", held.local_addr().unwrap().port());
        let error = rig.networks.join(&request("a", "blue", &[&port])).await.unwrap_err();
        assert!(error.to_string().contains("is in use"), "{error}");
        assert_eq!((devices().len(), rules().as_str()), (0, ""));
        rig.networks.join(&request("a", "blue", &[])).await.unwrap();
        let error = rig.networks.join(&request("b", "blue", &[])).await.unwrap_err();
        assert!(error.to_string().contains("is full"), "{error}");
        let names: Vec<_> = rig.networks.list().await.into_iter().map(|one| one.name).collect();
        assert_eq!(names, ["blue"]);
        rig.networks.close().await;
    });
}

#[test]
fn many_join_at_once_and_nobody_shares_an_address_as_root() {
    in_namespace("many_join_at_once_and_nobody_shares_an_address_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let Rig { networks, plane: _plane } = open(dir.path()).await;
        let networks = Arc::new(networks);
        let joining = (0..200).map(|number| {
            let networks = Arc::clone(&networks);
            let request = request(&number.to_string(), "default", &[]);
            tokio::spawn(async move { networks.join(&request).await.unwrap() })
        });
        let joining: Vec<_> = joining.collect();
        let mut all = BTreeSet::new();
        for one in joining {
            let place = one.await.unwrap();
            assert!(all.insert(place.mac) && all.insert(place.ipv4) && all.insert(place.ipv6));
        }
        networks.close().await;
    });
}

/// Reconciles without live sandboxes. The former daemon's threads are in this process, and may
/// still be releasing its interfaces and its name server's socket.
async fn reconcile_when_gone(rig: &Rig) {
    let begun = std::time::Instant::now();
    while let Err(error) = rig.networks.reconcile(&BTreeSet::new()).await {
        let error = error.to_string();
        let busy =
            ["resource busy", "Address already in use"].iter().any(|one| error.contains(one));
        assert!(busy && begun.elapsed() < Duration::from_secs(100), "{error}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn port(name: &str, network: &str, mac: &str) -> v1::CreatePortRequest {
    v1::CreatePortRequest {
        name: name.into(),
        network: network.into(),
        mac: mac.into(),
        ..Default::default()
    }
}

#[test]
fn memory_ports_outlive_the_daemon_as_root() {
    in_namespace("memory_ports_outlive_the_daemon_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        let rig = open(dir.path()).await;
        let mac = "02:00:00:00:00:09";
        let made = rig.networks.create_port(&port("gen", "default", mac)).await.unwrap();
        assert!(Path::new(&made.socket_path).exists());
        assert_eq!((made.payload, devices().len()), (2048, 1));
        // A network with a larger MTU has larger slots.
        let jumbo =
            v1::CreateNetworkRequest { name: "jumbo".into(), mtu: 9000, ..Default::default() };
        rig.networks.create(&jumbo).await.unwrap();
        let made = rig.networks.create_port(&port("long", "jumbo", "")).await.unwrap();
        assert_eq!(made.payload, 9024);
        // Invalid requests fail, and leave nothing.
        let gateway = rig.networks.get("default").await.unwrap();
        assert_eq!(gateway.ports.len(), 1);
        for (name, network, mac, says) in [
            ("gen", "jumbo", "", "a memory port called \"gen\" is there already"),
            ("new", "none-such", "", "there is no network \"none-such\""),
            ("new", "default", mac, "taken by memory port gen"),
            ("new", "default", "01:00:00:00:00:01", "multicast"),
            ("new", "default", "x", "is no MAC address"),
            ("a/b", "default", "", "is no name"),
        ] {
            let error = rig.networks.create_port(&port(name, network, mac)).await.unwrap_err();
            assert!(error.to_string().contains(says), "{name} {network} {mac}: {error}");
        }
        let mut wish = request("a", "default", &[]);
        wish.mac = mac.into();
        assert!(rig.networks.join(&wish).await.unwrap_err().to_string().contains("port gen"));
        let error = rig.networks.remove("jumbo").await.unwrap_err().to_string();
        assert!(error.contains("memory ports: long"), "{error}");
        // Another daemon starts after the last one ended without a chance to clean up.
        drop(rig);
        let rig = open(dir.path()).await;
        assert_eq!(rig.plane.fabric().count_ports(), 0);
        reconcile_when_gone(&rig).await;
        assert_eq!((rig.plane.fabric().count_ports(), devices().len()), (2, 2));
        assert!(Path::new(&made.socket_path).exists());
        for name in ["gen", "long"] {
            rig.networks.remove_port(name).await.unwrap();
        }
        assert!(!Path::new(&made.socket_path).exists());
        assert!(rig.networks.remove_port("gen").await.is_err());
        rig.networks.remove("jumbo").await.unwrap();
        rig.networks.remove("default").await.unwrap();
        assert_eq!((devices().len(), rules().as_str()), (0, ""));
    });
}

#[test]
fn a_name_server_that_ends_leaves_its_addresses_at_once_as_root() {
    in_namespace("a_name_server_that_ends_leaves_its_addresses_at_once_as_root", || async {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("resolv.conf"), "nameserver 127.0.0.78\n").unwrap();
        // A resolver that never answers.
        let upstream = UdpSocket::bind("127.0.0.78:53").unwrap();
        upstream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
        let rig = open(dir.path()).await;
        let create = v1::CreateNetworkRequest {
            name: "blue".into(),
            subnet: "10.44.0.0/24".into(),
            ..Default::default()
        };
        for _ in 0..5 {
            rig.networks.create(&create).await.unwrap();
            rig.networks.join(&request("a", "blue", &[])).await.unwrap();
            let client = UdpSocket::bind("10.44.0.1:0").unwrap();
            client.send_to(&query("example.org"), "10.44.0.1:53").unwrap();
            let _stream = TcpStream::connect("10.44.0.1:53").unwrap();
            // The query is in flight.
            upstream.recv(&mut [0; 512]).unwrap();
            rig.networks.leave("a").await.unwrap();
            rig.networks.remove("blue").await.unwrap();
        }
    });
}

#[test]
fn what_sandboxes_are_on_stays_when_their_network_does_not_come_up_as_root() {
    in_namespace(
        "what_sandboxes_are_on_stays_when_their_network_does_not_come_up_as_root",
        || async {
            let dir = tempfile::tempdir().unwrap();
            let Rig { plane, networks } = open(dir.path()).await;
            networks.join(&request("a", "default", &["18080:80"])).await.unwrap();
            drop(networks);
            // The next daemon finds that another socket has the port for names.
            let begun = std::time::Instant::now();
            let blocker = loop {
                match UdpSocket::bind("0.0.0.0:53") {
                    Ok(socket) => break socket,
                    Err(error) => assert!(begun.elapsed() < Duration::from_secs(100), "{error}"),
                }
                std::thread::sleep(Duration::from_millis(1));
            };
            let again = |plane: &Plane| {
                let plane = plane.clone();
                let settings = Settings {
                    dir: dir.path().join("networks"),
                    ports_dir: dir.path().to_owned(),
                    table: "slipway_test".into(),
                    resolv_conf: dir.path().join("resolv.conf"),
                    reach: Policy::default(),
                    forwarding: dir.path().join("forwarding.json"),
                };
                async move {
                    let client = PlaneClient::new(plane.connect().await.unwrap());
                    Networks::open(settings, client).unwrap()
                }
            };
            let networks = again(&plane).await;
            let live = BTreeSet::from(["a".to_owned()]);
            let error = networks.reconcile(&live).await.unwrap_err().to_string();
            assert!(error.contains("names"), "{error}");
            assert_eq!((plane.fabric().list_switches().len(), devices().len()), (1, 1));
            // The next sandbox that joins triggers another attempt, for all.
            assert!(networks.join(&request("b", "default", &[])).await.is_err());
            drop(blocker);
            networks.join(&request("b", "default", &[])).await.unwrap();
            TcpStream::connect("127.0.0.1:18080").unwrap();
            assert!(rules().contains("18080"));
            for id in ["a", "b"] {
                networks.leave(id).await.unwrap();
            }
            networks.remove("default").await.unwrap();
            assert_eq!((plane.fabric().list_switches().len(), devices().len()), (0, 0));
        },
    );
}
