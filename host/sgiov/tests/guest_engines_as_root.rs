//! The engines of guests and the machine's engine, over the functions' vfio-user sockets:
//! everything but the virtual machines. Needs root: the test runs itself in a network namespace of
//! its own, with the guests' addresses.
#![cfg(feature = "guests")]
#![allow(clippy::unwrap_used, unsafe_code)] // unshare(2)

mod client;
mod netns;
mod running;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use client::{Client, Connected, PATIENCE, readable, until};
use running::Running;
use rustix::event::{EventfdFlags, eventfd};
use slipway_ram::Lasting;
use slipway_ring::cross::Error;
use slipway_sgiov::guest::{Device, FunctionRemote, Piece};
use slipway_sgiov::{Function, Settings, report, serve_function};
use slipway_sgiov_spec::Address;
use slipway_sgiov_spec::control::NOT_OURS;
use slipway_sgiov_spec::function::PIECE;
use slipway_vfio_user_client::Client as Vmm;
use slipway_vfio_user_spec::IrqSetFlags;

const A: [u8; 4] = [10, 9, 0, 1];
const B: [u8; 4] = [10, 9, 0, 2];

#[test]
fn programs_in_two_guests_talk() {
    netns::alone("programs_in_two_guests_talk", &[A, B], inside);
}

/// A function over its socket, as a guest's driver uses it through a VMM.
struct Wire {
    vmm: Vmm,
    pin: OwnedFd,
    next: u64,
}

impl Device for Wire {
    fn read(&mut self, offset: u64) -> u32 {
        // Reads of a function that is gone return all ones, as on a PCI bus.
        self.vmm.read_u32(0, offset).unwrap_or(u32::MAX)
    }

    fn write(&mut self, offset: u64, value: u32) {
        let _ = self.vmm.write(0, offset, &value.to_le_bytes());
    }

    fn interrupt(&self) -> Option<BorrowedFd<'_>> {
        Some(self.pin.as_fd())
    }

    fn take_interrupt(&mut self) {
        slipway_peer::eventfd::drain(self.pin.as_fd());
    }

    /// Unmasks the line, which each interrupt masks.
    fn unmask(&mut self) {
        let flags = IrqSetFlags::DATA_NONE | IrqSetFlags::UNMASK;
        let _ = self.vmm.set_irqs(flags, 0, 0, 1, &[], &[]);
    }

    fn piece(&mut self) -> std::io::Result<Piece> {
        let (memory, at) = (Lasting::new("guest", PIECE)?, self.next);
        self.next += PIECE as u64;
        self.vmm.map(at, PIECE as u64, memory.file().unwrap(), 0, true).unwrap();
        Ok(Piece { memory, at })
    }
}

impl Running {
    /// Starts a guest's engine on a function that `machine` serves.
    fn guest(machine: &Self, name: &str, ip: [u8; 4]) -> Self {
        let path = machine.dir.path().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let function = Function {
            name: name.into(),
            tenant: "network:one".into(),
            addresses: vec![ip.into()],
            memory: None,
        };
        let asked = serve_function(&machine.socket(), listener.as_fd(), &function, None).unwrap();
        let mut vmm = Vmm::connect(&path, PATIENCE).unwrap();
        drop(asked);
        let pin = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        vmm.route_irqs(0, 0, 1, &[pin.as_fd()]).unwrap();
        let device = Wire { vmm, pin, next: PIECE as u64 };
        let remote = FunctionRemote::start(Box::new(device)).unwrap();
        Self::new(Settings { remote: Some(Box::new(remote)), ..Settings::default() })
    }

    fn attach(&self) -> Client {
        Client::attach(&self.socket())
    }
}

fn listeners(machine: &Path) -> usize {
    report(machine).unwrap().guests.iter().map(|guest| guest.listeners.len()).sum()
}

/// Sends `bytes` in one direction, polling both ends in turn, and compares.
fn send((from, out): (&Client, &Connected), (to, into): (&Client, &Connected), bytes: &[u8]) {
    let (mut sent, mut got) = (0, Vec::new());
    while got.len() < bytes.len() {
        sent += from.write(out, &bytes[sent..]).unwrap();
        got.extend(to.read(into, 1 << 20).unwrap());
    }
    assert!(got == bytes, "other bytes came");
}

fn inside() {
    let machine = Running::new(Settings { guests: true, ..Settings::default() });
    let guests = [Running::guest(&machine, "a", A), Running::guest(&machine, "b", B)];
    let (mut server, mut client) = (guests[0].attach(), guests[1].attach());
    let (listener, waits) = server.listen(Address::v4([0; 4], 8080), 64);
    until("the machine knows of the listener", || listeners(&machine.socket()) == 1);
    let (from, to) = (Address::v4(B, 0), Address::v4(A, 8080));
    let mut pairs = Vec::new();
    for _ in 0..40 {
        let c = client.connect_from(from, to).unwrap();
        assert!(readable(waits.as_fd(), PATIENCE));
        let s = server.accept(listener).unwrap();
        assert_eq!((s.endpoint.local, s.endpoint.peer.ip), (to, from.ip));
        pairs.push((c, s));
    }
    let bytes: Vec<u8> = (0..2_000_000_u32).map(|n| (n % 251) as u8).collect();
    for (number, (c, s)) in pairs.iter().enumerate() {
        let part = if number == 0 { &bytes[..] } else { &bytes[number..number + 3000] };
        send((&client, c), (&server, s), part);
        send((&server, s), (&client, c), part);
    }
    assert_eq!(client.connect_from(from, Address::v4(A, 81)).err(), Some(NOT_OURS));
    let sent: u64 = report(&machine.socket()).unwrap().guests.iter().map(|guest| guest.sent).sum();
    assert!(sent >= 4_000_000, "{sent}");
    // A close is the end of the stream, and a reset if bytes were unread.
    let (c, s) = pairs.pop().unwrap();
    client.close(c);
    assert_eq!(server.read(&s, 1).unwrap(), b"");
    server.close(s);
    let (c, s) = pairs.pop().unwrap();
    client.write(&c, b"nobody reads all of this").unwrap();
    assert_eq!(server.read(&s, 1).unwrap(), b"n");
    server.close(s);
    assert_eq!(client.read(&c, 1), Err(Error::Reset));
    client.close(c);
    // A program is killed, and then a guest with all of its programs.
    let (c, s) = (client.connect_from(from, to).unwrap(), server.accept(listener).unwrap());
    send((&client, &c), (&server, &s), b"last words");
    drop(client);
    assert_eq!(server.read(&s, 1).unwrap(), b"");
    let mut client = guests[1].attach();
    let (c, s) = (client.connect_from(from, to).unwrap(), server.accept(listener).unwrap());
    send((&server, &s), (&client, &c), b"to who goes on");
    drop(server);
    let [a, b] = guests;
    drop(a);
    until("the machine has forgotten the guest", || {
        report(&machine.socket()).unwrap().guests.len() == 1
    });
    assert_ne!(client.connect_from(from, to).err(), None);
    // The machine's engine ends: streams that leave the other guest are reset, those within it are
    // not.
    let (listener, _) = client.listen(Address::v4([127, 0, 0, 1], 7000), 5);
    let mut other = b.attach();
    let here = other.connect(Address::v4([127, 0, 0, 1], 7000)).unwrap();
    let there = client.accept(listener).unwrap();
    drop(machine);
    send((&other, &here), (&client, &there), b"in the same guest");
}
