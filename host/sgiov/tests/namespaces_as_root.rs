//! Tenants in network namespaces of the test's own: who reaches whom is the kernel's and the policy's word.
#![allow(clippy::unwrap_used, unsafe_code)]

mod client;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use client::Client;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use slipway_netlink::{Address as Own, LinkChange, Netlink};
use slipway_sgiov::{Engine, Policy, Settings, report};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{NOT_OURS, Reply};

/// What a child process does, by its environment; nothing in a run of the tests. Its standard input is a socket:
/// for each byte it connects to the engine and sends the connection back.
#[test]
fn in_a_child_process() {
    let Ok(address) = std::env::var("SGIOV_TEST_ADDRESS") else { return };
    let socket = std::env::var("SGIOV_TEST_SOCKET").unwrap();
    let mut netlink = Netlink::open().unwrap();
    let lo = netlink.link("lo").unwrap().unwrap();
    netlink.change(lo.index, LinkChange { up: Some(true), ..Default::default() }).unwrap();
    let address = address.parse().unwrap();
    netlink.add_address(&Own { index: lo.index, address, prefix: 24 }).unwrap();
    let input = rustix::stdio::stdin().try_clone_to_owned().unwrap();
    let mut byte = [0];
    while rustix::io::read(&input, &mut byte).unwrap() == 1 {
        let connection = client::connect(Path::new(&socket));
        client::send(&input, &Reply::Done.encode(), &[connection.as_fd()]).unwrap();
    }
}

/// A process in a namespace of its own, which has one address beside loopback's.
struct Namespace {
    child: Child,
    socket: OwnedFd,
}

impl Namespace {
    /// None: that needs root. `link` will lead to its file.
    fn new(address: &str, engine: &Path, link: &Path) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (socket, theirs) = pair.unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "in_a_child_process", "--nocapture", "--test-threads=1"])
            .env("SGIOV_TEST_ADDRESS", address)
            .env("SGIOV_TEST_SOCKET", engine)
            .stdin(theirs)
            .stdout(Stdio::null());
        // SAFETY: unshare(2) may be called between fork and exec.
        unsafe {
            command.pre_exec(|| match libc::unshare(libc::CLONE_NEWNET) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().ok()?;
        symlink(format!("/proc/{}/ns/net", child.id()), link).unwrap();
        Some(Self { child, socket })
    }

    fn attach(&self) -> Client {
        rustix::io::write(&self.socket, &[1]).unwrap();
        let (_, files) = client::receive(&self.socket).unwrap();
        Client::over(files.into_iter().next().unwrap())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const POLICY: &str = r#"
[[tenant]]
name = "a"
netns = "DIR/a"
[[tenant]]
name = "b"
netns = "DIR/b"
sockets = 3
[[tenant]]
name = "c"
netns = "DIR/c"
[[allow]]
from = "a"
to = "b"
ports = "7200-7209"
[[allow]]
from = "c"
to = "10.78.0.0/16"
"#;

#[test]
fn a_tenant_is_its_namespace_as_root() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let names = ["a", "b", "c"].map(|name| dir.path().join(name));
    let addresses = ["10.77.0.1", "10.78.0.1", "10.78.0.1"];
    let spaces: Vec<_> = names
        .iter()
        .zip(addresses)
        .filter_map(|(name, at)| Namespace::new(at, &socket, name))
        .collect();
    let [a, b, c] = &spaces[..] else {
        println!("SKIPPED: namespaces_as_root: needs root");
        return;
    };
    let file = dir.path().join("socket.toml");
    std::fs::write(&file, POLICY.replace("DIR", dir.path().to_str().unwrap())).unwrap();
    let policy = Policy::read(&file).unwrap();
    let settings = Settings { socket: socket.clone(), policy, ..Settings::default() };
    let mut engine = Engine::bind(settings).unwrap();
    let stop = engine.stop();
    let thread = std::thread::spawn(move || engine.run());
    let (mut in_a, mut in_b) = (a.attach(), b.attach());
    let told = report(&socket).unwrap();
    let mut seen: Vec<_> = told.families.iter().map(|family| family.tenant.as_str()).collect();
    seen.sort_unstable();
    assert_eq!(seen, ["a", "b"]);
    let to = |port| Address::v4([10, 78, 0, 1], port);
    let (listener, _) = in_b.listen(Address::v4([0; 4], 7200), 8);
    in_b.listen(Address::v4([0; 4], 7300), 8);
    // Loopback is each namespace's own.
    assert_eq!(in_a.connect(Address::v4([127, 0, 0, 1], 7200)).err(), Some(NOT_OURS));
    // The rule's ports, and no others; an address that b has, and no other.
    assert_eq!(in_a.connect(to(7300)).err(), Some(NOT_OURS));
    assert_eq!(in_a.connect(Address::v4([10, 78, 0, 2], 7200)).err(), Some(NOT_OURS));
    let there = in_a.connect(to(7200)).unwrap();
    assert!(!there.endpoint.place.same_tenant);
    assert_eq!(there.endpoint.local.as_v4(), Some([10, 77, 0, 1]));
    let here = in_b.accept(listener).unwrap();
    in_a.write(&there, b"from another namespace").unwrap();
    assert_eq!(in_b.read(&here, 100).unwrap(), b"from another namespace");
    // Rules have a direction.
    let (_, _) = in_a.listen(Address::v4([0; 4], 7201), 8);
    assert_eq!(in_b.connect(Address::v4([10, 77, 0, 1], 7201)).err(), Some(NOT_OURS));
    // An address that somebody claims to listen at is not his for that.
    in_a.listen(Address::v4([10, 78, 0, 9], 7202), 8);
    assert_eq!(in_b.connect(Address::v4([10, 78, 0, 9], 7202)).err(), Some(NOT_OURS));
    assert_eq!(in_a.connect(Address::v4([10, 78, 0, 9], 7202)).err(), Some(NOT_OURS));
    // The limit of b: one endpoint is there, two more may be.
    let more = [in_a.connect(to(7200)).unwrap(), in_a.connect(to(7200)).unwrap()];
    assert_eq!(in_a.connect(to(7200)).err(), Some(105));
    more.into_iter().for_each(|there| in_a.close(there));
    // Two namespaces have this address: within its own each reaches itself.
    let mut in_c = c.attach();
    assert_eq!(in_c.connect(to(7200)).err(), Some(NOT_OURS), "its own address, nobody listens");
    in_c.listen(Address::v4([0; 4], 7200), 8);
    let own = in_c.connect(to(7200)).unwrap();
    assert!(own.endpoint.place.same_tenant);
    stop.stop();
    thread.join().unwrap().unwrap();
}
