//! Events of the machine that reach a guest by the generic event device: the power button, and
//! functions that come and go.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use slipway_reactor::{Reactor, Settings};
use slipway_vmm::board::{Board, End};
use slipway_vmm::layout::{ECAM, PCI_WINDOW, PINS};
use slipway_vmm::plug::{self, Kind};
use slipway_vmm::remote::Attached;
use slipway_vmm::{Chassis, own};

use crate::common::{SLOTS, events, has_kvm, machine, start};

#[test]
fn the_power_button_interrupts() {
    if !has_kvm("the_power_button_interrupts") {
        return;
    }
    let mut guest = start(events(), 1);
    assert_eq!(guest.read(1), b"r");
    guest.running.board.press_power_button();
    assert_eq!(guest.read(2), b"1.");
    assert_eq!(guest.end(), End::PowerOff);
}

/// Plugs the function behind `socket` as device 4.
fn plug_function(chassis: &Chassis, board: &Board, socket: &Path) -> Attached {
    let stream = UnixStream::connect(socket).unwrap();
    let function = Attached::plug(chassis, 4, 0, stream.into()).unwrap();
    board.plugged(Kind::Function, 4);
    function
}

/// Waits until the guest has ejected a device, and returns those that it has ejected.
fn ejected(board: &Board) -> u32 {
    loop {
        match board.ejected(Kind::Function) {
            0 => std::thread::yield_now(),
            devices => return devices,
        }
    }
}

#[test]
fn a_function_comes_and_goes_while_the_guest_runs() {
    if !has_kvm("a_function_comes_and_goes_while_the_guest_runs") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("function");
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let control = crate::ramdisk::serve(socket.to_str().unwrap(), &reactor).unwrap();
    let mut guest = start(events(), 1);
    assert_eq!(guest.read(1), b"r");
    let board = std::sync::Arc::clone(&guest.running.board);
    let chassis = guest.running.chassis.clone();
    // The server takes one connection at a time: the next one shows that this one has ended.
    for _ in 0..3 {
        let function = plug_function(&chassis, &board, &socket);
        assert_eq!(guest.read(4), [b'4', b'p', 0xf4, b'.'], "the first byte of the vendor's ID");
        assert_eq!(board.ejected(Kind::Function), 0, "nobody asked for it");
        board.ask_for(Kind::Function, 4);
        assert_eq!(guest.read(4), [b'4', b'e', 0xff, b'.'], "nothing is there");
        assert_eq!(ejected(&board), 1 << 4);
        function.close(&chassis);
    }
    // Nothing is there, and nobody is told.
    board.ask_for(Kind::Function, 4);
    board.press_power_button();
    assert_eq!(guest.read(2), b"1.");
    assert_eq!(guest.end(), End::PowerOff);
    control.close();
}

#[test]
fn an_event_before_the_guest_listens_is_not_lost() {
    if !has_kvm("an_event_before_the_guest_listens_is_not_lost") {
        return;
    }
    let (machine, console) = machine(events(), 1);
    machine.board.press_power_button();
    let running = machine.start(|| ()).unwrap();
    running.cpus.resume();
    let mut guest = crate::common::Guest { running, console };
    assert_eq!(guest.read(3), b"r1.");
    assert_eq!(guest.end(), End::PowerOff);
}

/// Accesses of a CPU to the bus.
struct Accesses<'a>(&'a Board);

impl Accesses<'_> {
    fn read(&self, address: u64) -> u32 {
        let mut bytes = [0; 4];
        self.0.memory_read(address, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn write(&self, address: u64, value: u32) {
        self.0.memory_write(address, &value.to_le_bytes()).unwrap();
    }

    fn eject(&self, bits: u32) {
        self.0.port_write(0x61c, &bits.to_le_bytes()).unwrap();
    }
}

/// The configuration space of device 4.
const DEVICE_4: u64 = ECAM.start + (4 << 15);

/// Switches MSI-X of device 4 on, whose BAR 0 is at `bar`, and unmasks vector 0.
fn wire_vector(bus: &Accesses<'_>, bar: u64) {
    let mut msix = DEVICE_4 + u64::from(bus.read(DEVICE_4 + 0x34) & 0xfc);
    while bus.read(msix) as u8 != 0x11 {
        msix = DEVICE_4 + u64::from(bus.read(msix) >> 8 & 0xfc);
        assert_ne!(msix, DEVICE_4, "there is no MSI-X");
    }
    bus.write(msix, 0x8000_0000);
    let table = bar + u64::from(bus.read(msix + 4) & !7);
    for (offset, value) in [(0, 0xfee0_0000), (8, 0x40), (12, 0)] {
        bus.write(table + offset, value);
    }
}

#[test]
fn a_plugged_function_answers_where_the_guest_puts_it_until_it_is_ejected() {
    if !has_kvm("a_plugged_function_answers_where_the_guest_puts_it_until_it_is_ejected") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("function");
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let control = crate::ramdisk::serve(socket.to_str().unwrap(), &reactor).unwrap();
    let (machine, _console) = machine(events(), 1);
    let _rng = own::rng(&machine.chassis).unwrap();
    let (board, chassis) = (&machine.board, &machine.chassis);
    let bus = Accesses(board);
    assert_eq!(board.slots().functions, plug::FIRST_FUNCTION..plug::FIRST_FUNCTION + SLOTS);
    for _ in 0..2 {
        let function = plug_function(chassis, board, &socket);
        assert_eq!(bus.read(DEVICE_4 + 0x10) & !0xf, 0, "its BAR has no place");
        let at = PCI_WINDOW.end - 0x100_0000;
        bus.write(DEVICE_4 + 0x10, at as u32);
        bus.write(DEVICE_4 + 4, 0b110);
        assert_ne!(bus.read(at), u32::MAX);
        wire_vector(&bus, at);
        // Ejections that nobody asked for, of this function and of all others.
        bus.eject(u32::MAX);
        assert_ne!(bus.read(at), u32::MAX);
        board.ask_for(Kind::Function, 4);
        bus.eject(u32::MAX);
        assert_eq!((bus.read(at), bus.read(DEVICE_4)), (u32::MAX, u32::MAX));
        assert_eq!(bus.read(ECAM.start + (2 << 15)), 0x1044_1af4, "the machine's own stays");
        assert_eq!(ejected(board), 1 << 4);
        function.close(chassis);
        drop(function);
        let routes = chassis.interrupts.routes();
        let gsi = routes.reserve().unwrap();
        assert_eq!(gsi, PINS as u32, "the vector's interrupt was not given back");
        routes.release(gsi);
    }
    control.close();
    control.wait_closed(Duration::from_secs(60));
}
