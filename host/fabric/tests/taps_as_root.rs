//! TAP interfaces in network namespaces: their settings, and programs there that slow the kernel
//! down.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use slipway_fabric::{Error, Fabric};
use slipway_netlink::{Address, LinkChange, Netlink};
use slipway_netns::Namespace;
use slipway_plane_api::v1;
use slipway_reactor::{Reactor, Settings};
use slipway_switch::ports::TapPort;

/// A time that no call takes.
const LONG: Duration = Duration::from_secs(60);
/// The port of the datagrams.
const PORT: u16 = 7000;
/// Frames for all namespaces: more than wait for a slow one.
const FRAMES: u32 = 1000;
/// Netlink attributes without content in each frame.
const ATTRIBUTES: usize = 350;
/// Packet sockets of the slow namespace.
const SOCKETS: usize = 50;
/// Searches of the filter of each.
const SEARCHES: usize = 2000;

/// A network namespace that lives as long as a thread, or a descriptor in it.
struct Container {
    path: PathBuf,
    host: u8,
    _end: Sender<()>,
}

impl Container {
    /// Makes a namespace for the address 10.77.0.`host`. Returns `None` if that is not permitted.
    fn make(host: u8) -> Option<Self> {
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        std::thread::spawn(move || {
            // SAFETY: unshare(2) takes no pointers; it concerns this thread.
            let made = unsafe { libc::unshare(libc::CLONE_NEWNET) } == 0;
            // SAFETY: no arguments.
            tell.send(made.then(|| unsafe { libc::gettid() })).unwrap();
            let _ = ended.recv();
        });
        let thread = told.recv().unwrap()?;
        Some(Self { path: format!("/proc/self/task/{thread}/ns/net").into(), host, _end: end })
    }

    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        Namespace::open(&self.path).unwrap().run(work).unwrap()
    }

    fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, 0, self.host)
    }

    /// Returns the request for an interface of the switch, which is up.
    fn request(&self) -> v1::AttachTapRequest {
        let namespace = Namespace::open(&self.path).unwrap().identity();
        let (address, prefix) = (self.address().to_string(), 24);
        let settings = v1::TapSettings {
            mtu: 1500,
            addresses: vec![v1::TapAddress { address, prefix }],
            routes: vec![route("10.77.0.100")],
        };
        v1::AttachTapRequest {
            name: format!("c{}", self.host),
            switch: "default".into(),
            namespace: self.path.to_str().unwrap().into(),
            device: namespace.device,
            inode: namespace.inode,
            interface: "eth0".into(),
            mac: format!("02:00:00:00:00:{:02x}", self.host),
            addresses: vec![self.address().to_string()],
            create: true,
            settings: Some(settings),
            ..Default::default()
        }
    }

    fn socket(&self, address: Ipv4Addr) -> UdpSocket {
        let socket = self.run(|| UdpSocket::bind((address, PORT)).unwrap());
        socket.set_broadcast(true).unwrap();
        socket.set_read_timeout(Some(LONG)).unwrap();
        socket
    }

    fn has_interface(&self) -> bool {
        self.run(|| Netlink::open().unwrap().link("eth0").unwrap().is_some())
    }

    /// Opens packet sockets, whose filters the kernel runs for each frame.
    fn slow_down(&self) -> Vec<OwnedFd> {
        self.run(|| (0..SOCKETS).map(|_| filtering()).collect())
    }
}

/// Opens a packet socket with a filter that searches each frame for a netlink attribute of type 2,
/// many times, and drops the frame.
fn filtering() -> OwnedFd {
    // From <linux/bpf_common.h> and <linux/filter.h>.
    const LOAD: u16 = 0x00;
    const LOAD_FROM_FRAME: u16 = 0x20;
    const LOAD_INDEX: u16 = 0x01;
    const RETURN: u16 = 0x06;
    const SEARCH: u32 = 12_u32.wrapping_sub(0x1000);
    let step = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
    let mut filter = vec![step(LOAD_INDEX, 2)];
    for _ in 0..SEARCHES {
        // The search begins behind the headers.
        filter.extend([step(LOAD, 42), step(LOAD_FROM_FRAME, SEARCH)]);
    }
    filter.push(step(RETURN, 0));
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let (level, option) = (libc::SOL_SOCKET, libc::SO_ATTACH_FILTER);
    let size = size_of::<libc::sock_fprog>() as libc::socklen_t;
    // SAFETY: no pointers.
    let socket = unsafe {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
        libc::socket(libc::AF_PACKET, kind, i32::from((libc::ETH_P_ALL as u16).to_be()))
    };
    assert!(socket >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just made, and nobody else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: a program of this size, which points to as many instructions as it says.
    let set = unsafe {
        let program = (&raw const program).cast();
        libc::setsockopt(socket.as_raw_fd(), level, option, program, size)
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    socket
}

/// Returns the default route by a gateway.
fn route(gateway: &str) -> v1::TapRoute {
    v1::TapRoute { destination: "0.0.0.0".into(), prefix: 0, gateway: gateway.into() }
}

fn port(fabric: &Fabric, host: u8) -> v1::SwitchPort {
    let ports = fabric.list_switches().remove(0).ports;
    ports.into_iter().find(|port| port.name == format!("tap:c{host}")).unwrap()
}

/// Makes containers of these numbers and a fabric with a switch. Returns `None` if that is not
/// permitted.
fn rig(test: &str, hosts: RangeInclusive<u8>) -> Option<(Vec<Container>, Reactor, Fabric)> {
    let made: Option<Vec<_>> = hosts.map(Container::make).collect();
    let Some(made) = made else {
        println!("SKIPPED: {test}: needs root");
        return None;
    };
    if !std::path::Path::new("/dev/net/tun").exists() {
        println!("SKIPPED: {test}: needs /dev/net/tun");
        return None;
    }
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let fabric = Fabric::new(vec![reactor.handle()], false);
    let request = v1::CreateSwitchRequest { name: "default".into(), ..Default::default() };
    fabric.create_switch(&request).unwrap();
    Some((made, reactor, fabric))
}

#[test]
fn an_interface_has_its_settings_or_is_not_left_as_root() {
    let test = "an_interface_has_its_settings_or_is_not_left_as_root";
    let Some((made, _reactor, fabric)) = rig(test, 1..=1) else { return };
    let one = &made[0];
    let wrong = |request: &v1::AttachTapRequest| {
        let mut request = request.clone();
        request.settings.as_mut().unwrap().routes = vec![route("192.0.2.1")];
        request
    };
    let refused = |request: &v1::AttachTapRequest| {
        let error = fabric.attach_tap_in_namespace(request).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::TapSettings(_)), "{text}");
        assert!(text.starts_with("cannot add the route to 0.0.0.0/0 by eth0: "), "{text}");
    };
    let request = one.request();
    let placeholder = v1::AttachTapRequest { placeholder: true, ..request.clone() };
    for request in [&request, &placeholder] {
        refused(&wrong(request));
        assert!(!one.has_interface());
    }
    assert!(fabric.list_switches()[0].ports.is_empty());
    // Without an IPv6 address it has all that were asked for.
    assert!(fabric.attach_tap_in_namespace(&request).unwrap().has_ipv6);
    let settings = || {
        one.run(|| {
            let mut netlink = Netlink::open().unwrap();
            let link = netlink.link("eth0").unwrap().unwrap();
            let addresses = netlink.addresses().unwrap();
            let routes = netlink.routes().unwrap();
            let gateway: Option<IpAddr> = Some([10, 77, 0, 100].into());
            assert!(link.up && link.mtu == 1500, "{link:?}");
            let is_own = |had: &Address| had.address == one.address();
            assert!(addresses.iter().any(is_own), "{addresses:?}");
            assert!(routes.iter().any(|route| route.gateway == gateway), "{routes:?}");
        });
    };
    settings();
    // An interface that the last process left has its port even if its settings fail.
    let left = v1::AttachTapRequest { create: false, ..request.clone() };
    fabric.remove_switch("default").unwrap();
    let switch = v1::CreateSwitchRequest { name: "default".into(), ..Default::default() };
    fabric.create_switch(&switch).unwrap();
    let begin = Instant::now();
    while one.run(|| TapPort::open("eth0").is_err()) {
        assert!(begin.elapsed() < LONG, "the port's thread has the interface");
        std::thread::yield_now();
    }
    one.run(|| {
        let mut netlink = Netlink::open().unwrap();
        let index = netlink.link("eth0").unwrap().unwrap().index;
        netlink.change(index, LinkChange { up: Some(false), ..Default::default() }).unwrap();
    });
    refused(&wrong(&left));
    assert_eq!(port(&fabric, one.host).name, "tap:c1");
    fabric.detach_tap_in_namespace("c1").unwrap();
    assert!(!one.has_interface());
    fabric.attach_tap_in_namespace(&placeholder).unwrap();
    settings();
    assert!(fabric.list_switches()[0].ports.is_empty());
}

#[test]
fn of_two_interfaces_for_one_port_at_once_one_is_refused_as_root() {
    let test = "of_two_interfaces_for_one_port_at_once_one_is_refused_as_root";
    let Some((made, _reactor, fabric)) = rig(test, 1..=1) else { return };
    let one = &made[0];
    let attach = |interface: &str| {
        let interface = interface.to_owned();
        fabric.attach_tap_in_namespace(&v1::AttachTapRequest { interface, ..one.request() })
    };
    let outcomes = std::thread::scope(|scope| {
        let other = scope.spawn(|| attach("eth1"));
        [attach("eth0"), other.join().unwrap()]
    });
    let refused = |one: &Result<_, Error>| matches!(one, Err(Error::ExistingTap(_)));
    assert_eq!(outcomes.iter().filter(|one| one.is_ok()).count(), 1, "{outcomes:?}");
    assert_eq!(outcomes.iter().filter(|one| refused(one)).count(), 1, "{outcomes:?}");
    fabric.detach_tap_in_namespace("c1").unwrap();
    assert!(fabric.list_switches()[0].ports.is_empty());
}

/// Each frame goes to the slow namespace first, and the test sends the next one when the neighbour
/// has got it. A switch that waits for the slow namespace has given it all frames by the end.
#[test]
fn a_slow_namespace_slows_down_no_other_as_root() {
    let test = "a_slow_namespace_slows_down_no_other_as_root";
    let Some((made, _reactor, fabric)) = rig(test, 1..=3) else { return };
    let [slow, sender, neighbour] = &made[..] else { panic!() };
    for one in &made {
        fabric.attach_tap_in_namespace(&one.request()).unwrap();
    }
    let from = sender.socket(sender.address());
    let to = neighbour.socket(Ipv4Addr::UNSPECIFIED);
    let filters = slow.slow_down();
    for number in 0..FRAMES {
        // Attributes of four bytes, of type 1.
        let datagram = [&[4, 0, 1, 0].repeat(ATTRIBUTES)[..], &number.to_le_bytes()].concat();
        from.send_to(&datagram, (Ipv4Addr::new(10, 77, 0, 255), PORT)).unwrap();
        let mut got = vec![0; datagram.len()];
        assert_eq!(to.recv(&mut got).unwrap(), datagram.len());
        assert_eq!(got, datagram);
    }
    let counted = port(&fabric, slow.host);
    assert!(counted.frames_out < u64::from(FRAMES), "{counted:?}");
    assert!(counted.dropped_out.get("full").is_some_and(|count| *count > 0), "{counted:?}");
    assert!(port(&fabric, neighbour.host).frames_out >= u64::from(FRAMES));
    // The thread of the port is at a frame, and removes the interface after it.
    fabric.detach_tap_in_namespace("c1").unwrap();
    drop(filters);
    let begin = Instant::now();
    while slow.has_interface() {
        assert!(begin.elapsed() < LONG, "the interface stays");
        std::thread::yield_now();
    }
    for one in [sender, neighbour] {
        fabric.detach_tap_in_namespace(&format!("c{}", one.host)).unwrap();
        assert!(!one.has_interface());
    }
}
