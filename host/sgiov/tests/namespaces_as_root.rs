//! Tenants in network namespaces of the test's own. The kernel and the policy decide which of them
//! reach each other.
#![allow(clippy::unwrap_used, unsafe_code)] // unshare(2)

mod client;
mod netns;
mod running;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use client::{Client, Connected, PATIENCE};
use running::Running;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use slipway_sgiov::{Policy, Renewal, Settings, report};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::{NOT_OURS, Reply};

/// The body of a child process, chosen by the environment. Does nothing in a run of the tests. Its
/// standard input is a socket: for each byte it connects to the engine and sends the connection
/// back.
#[test]
fn in_a_child_process() {
    let Ok(address) = std::env::var("SGIOV_TEST_ADDRESS") else { return };
    let socket = std::env::var("SGIOV_TEST_SOCKET").unwrap();
    netns::add_address(address.parse().unwrap());
    let input = rustix::stdio::stdin().try_clone_to_owned().unwrap();
    let mut byte = [0];
    while rustix::io::read(&input, &mut byte).unwrap() == 1 {
        let connection = client::connect(Path::new(&socket));
        client::send(&input, &Reply::Done.encode(), &[connection.as_fd()]).unwrap();
    }
}

/// A process in a network namespace of its own, with one address beside loopback's.
struct Namespace {
    child: Child,
    socket: OwnedFd,
}

impl Namespace {
    /// Starts the process; `link` will lead to its namespace's file. Returns `None` without root.
    fn new(address: &str, engine: &Path, link: &Path) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (socket, theirs) = pair.unwrap();
        let mut command = netns::again("in_a_child_process");
        command
            .env("SGIOV_TEST_ADDRESS", address)
            .env("SGIOV_TEST_SOCKET", engine)
            .stdin(theirs)
            .stdout(Stdio::null());
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

/// A policy with other ports, the other direction, and no limit for b.
const OTHER_POLICY: &str = r#"
[[tenant]]
name = "a"
netns = "DIR/a"
[[tenant]]
name = "b"
netns = "DIR/b"
[[allow]]
from = "a"
to = "b"
ports = "7300"
[[allow]]
from = "b"
to = "a"
ports = "7201"
"#;

fn read(dir: &Path, policy: &str) -> Policy {
    let file = dir.join("socket.toml");
    std::fs::write(&file, policy.replace("DIR", dir.to_str().unwrap())).unwrap();
    Policy::read(&file).unwrap()
}

#[test]
fn a_tenant_is_its_namespace_as_root() {
    let dir = tempfile::tempdir().unwrap();
    let socket = Running::socket_in(&dir);
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
    let policy = read(dir.path(), POLICY);
    let engine = Running::within(dir, Settings { policy, ..Settings::default() });
    let (mut in_a, mut in_b) = (a.attach(), b.attach());
    let told = report(&socket).unwrap();
    let mut seen: Vec<_> = told.families.iter().map(|family| family.tenant.as_str()).collect();
    seen.sort_unstable();
    assert_eq!(seen, ["a", "b"]);
    let to = |port| Address::v4([10, 78, 0, 1], port);
    let (listener, _) = in_b.listen(Address::v4([0; 4], 7200), 8);
    in_b.listen(Address::v4([0; 4], 7300), 8);
    // Each namespace has a loopback of its own.
    assert_eq!(in_a.connect(Address::v4([127, 0, 0, 1], 7200)).err(), Some(NOT_OURS));
    // Only the rule's ports, and only addresses that b has, can be reached.
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
    // A listener at a foreign address does not get connections to it.
    in_a.listen(Address::v4([10, 78, 0, 9], 7202), 8);
    assert_eq!(in_b.connect(Address::v4([10, 78, 0, 9], 7202)).err(), Some(NOT_OURS));
    assert_eq!(in_a.connect(Address::v4([10, 78, 0, 9], 7202)).err(), Some(NOT_OURS));
    // The limit of b is three endpoints: one exists, so two more are allowed.
    let more = [in_a.connect(to(7200)).unwrap(), in_a.connect(to(7200)).unwrap()];
    assert_eq!(in_a.connect(to(7200)).err(), Some(105));
    more.into_iter().for_each(|there| in_a.close(there));
    // Two namespaces have this address: within each, it is its own.
    let mut in_c = c.attach();
    assert_eq!(in_c.connect(to(7200)).err(), Some(NOT_OURS), "its own address, nobody listens");
    in_c.listen(Address::v4([0; 4], 7200), 8);
    let own = in_c.connect(to(7200)).unwrap();
    assert!(own.endpoint.place.same_tenant);
    // To others either may be meant, though policy lets a reach b alone.
    assert_eq!(in_a.connect(to(7200)).err(), Some(NOT_OURS), "two listen at the address");
    drop((in_c, c));
    let open = Open { a: in_a, there, b: in_b, here };
    renews(open, &engine);
}

/// A connection from a to b, under the first policy.
struct Open {
    a: Client,
    there: Connected,
    b: Client,
    here: Connected,
}

impl Open {
    fn stays(&self) {
        self.a.write(&self.there, b"still").unwrap();
        assert_eq!(self.b.read(&self.here, 100).unwrap(), b"still");
        self.b.write(&self.here, b"here").unwrap();
        assert_eq!(self.a.read(&self.there, 100).unwrap(), b"here");
    }

    /// Returns whether a reaches two ports of b, and b one of a.
    fn reach(&mut self) -> [bool; 3] {
        let in_b = [7200, 7300].map(|port| reaches(&mut self.a, [10, 78, 0, 1], port));
        [in_b[0], in_b[1], reaches(&mut self.b, [10, 77, 0, 1], 7201)]
    }
}

/// Returns whether a client reaches an address through the engine, rather than the kernel.
fn reaches(client: &mut Client, ip: [u8; 4], port: u16) -> bool {
    let connected = client.connect(Address::v4(ip, port));
    match connected {
        Ok(there) => {
            client.close(there);
            true
        }
        Err(errno) => {
            assert_eq!(errno, NOT_OURS);
            false
        }
    }
}

fn go_by(engine: &Running, policy: Policy) {
    let tried = || report(&engine.socket()).unwrap().reloads.tried;
    let (before, begun) = (tried(), Instant::now());
    let renewal = Renewal {
        policy,
        #[cfg(feature = "links")]
        links: None,
    };
    engine.reload.renew(Ok(renewal));
    while tried() == before {
        assert!(begun.elapsed() < PATIENCE);
    }
}

/// A new policy holds for connections that begin after it, and not for existing ones.
fn renews(mut open: Open, engine: &Running) {
    let dir = engine.dir.path();
    go_by(engine, read(dir, OTHER_POLICY));
    assert_eq!(open.reach(), [false, true, true]);
    open.stays();
    // More than the first policy allowed b, which has that many already.
    let to = Address::v4([10, 78, 0, 1], 7300);
    let all: Vec<_> = (0..4).map(|_| open.a.connect(to).unwrap()).collect();
    all.into_iter().for_each(|there| open.a.close(there));
    go_by(engine, Policy::default());
    assert_eq!(open.reach(), [false; 3]);
    open.stays();
    go_by(engine, read(dir, &POLICY.replace("sockets = 3", "")));
    assert_eq!(open.reach(), [true, false, false]);
    open.stays();
}

/// A program with the rights of its namespace's network gives it as many addresses as it likes. The
/// engine's thread, which serves everybody, does not read them all.
#[test]
fn a_namespace_with_very_many_addresses_has_loopback_alone() {
    let test = "a_namespace_with_very_many_addresses_has_loopback_alone";
    let own = [10, 79, 0, 1];
    netns::alone(test, &[own], || {
        let engine = Running::new(Settings::default());
        let mut program = Client::attach(&engine.socket());
        program.listen(Address::v4([0; 4], 7400), 8);
        assert!(reaches(&mut program, own, 7400));
        netns::add_many(17_000);
        // The kernel's last answer is used for a second.
        std::thread::sleep(Duration::from_millis(1200));
        assert!(!reaches(&mut program, own, 7400));
        assert!(reaches(&mut program, [127, 0, 0, 1], 7400));
    });
}
