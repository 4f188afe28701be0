//! The bus as a guest's enumeration sees it: configuration space, BARs that are sized and moved,
//! MSI-X tables, for a function of this process and for one behind a socket. No guest runs.

use std::os::unix::net::UnixStream;

use crate::common::{Guest, has_kvm};
use kvm_ioctls::Cap;
use slipway_reactor::{Reactor, Settings};
use slipway_vmm::board::{End, Exit};
use slipway_vmm::layout::{ECAM, PCI_WINDOW};
use slipway_vmm::remote::Attached;
use slipway_vmm::{Machine, own};

guest!(nothing: "2: hlt" "jmp 2b");

/// A machine, as its CPU accesses it.
struct Bus(Machine);

impl Bus {
    fn read(&self, address: u64) -> u32 {
        let mut bytes = [0; 4];
        self.0.board.memory_read(address, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn write(&self, address: u64, value: u32) {
        self.0.board.memory_write(address, &value.to_le_bytes()).unwrap();
    }

    fn config(&self, device: u64, register: u64) -> u32 {
        self.read(ECAM.start + (device << 15) + register)
    }

    fn set_config(&self, device: u64, register: u64, value: u32) {
        self.write(ECAM.start + (device << 15) + register, value);
    }

    /// Switches a device's BARs on or off.
    fn enable(&self, device: u64, on: bool) {
        self.set_config(device, 4, if on { 0b110 } else { 0 });
    }

    /// Returns the offset of the device's capability `id`.
    fn capability(&self, device: u64, id: u8) -> u64 {
        let mut at = u64::from(self.config(device, 0x34) & 0xfc);
        while self.config(device, at) as u8 != id {
            at = u64::from(self.config(device, at) >> 8 & 0xfc);
            assert_ne!(at, 0, "there is no capability {id:#x}");
        }
        at
    }
}

fn machine(test: &str) -> Option<Bus> {
    has_kvm(test).then(|| Bus(crate::common::machine(nothing(), 1).0))
}

#[test]
fn devices_are_where_they_were_put_and_nowhere_else() {
    let Some(bus) = machine("devices_are_where_they_were_put_and_nowhere_else") else { return };
    let _rng = own::rng(&bus.0.chassis).unwrap();
    let _console = own::console(&bus.0.chassis).unwrap();
    assert_eq!(bus.config(1, 0), 0x1043_1af4, "virtio console");
    assert_eq!(bus.config(2, 0), 0x1044_1af4, "virtio entropy");
    for device in [0, 3, 31] {
        assert_eq!(bus.config(device, 0), u32::MAX);
    }
    assert_eq!(bus.read(ECAM.start + (2 << 15) + (1 << 12)), u32::MAX, "function 1");
    assert!(own::rng(&bus.0.chassis).is_err(), "the slot is taken");
}

#[test]
fn shared_pages_are_told_of_by_a_device() {
    let test = "shared_pages_are_told_of_by_a_device";
    let Some(bus) = machine(test) else { return };
    assert!(own::pmem(&bus.0.chassis).unwrap().is_none(), "there are none");
    let file = crate::common::shared(b"");
    let bus = Bus(crate::common::sharing(nothing(), 1, Some(file)).0);
    let _pmem = own::pmem(&bus.0.chassis).unwrap().unwrap();
    assert_eq!(bus.config(3, 0), 0x105b_1af4, "virtio persistent memory");
    bus.enable(3, true);
    let bar = u64::from(bus.config(3, 0x10) & !0xf);
    let config = bar + slipway_virtio_pmem::layout::DEVICE.start;
    let words = [0, 4, 8, 12].map(|at| bus.read(config + at));
    assert_eq!(words, [0, 1, 2 << 20, 0], "2 MiB at 4 GiB");
}

/// Checks what a guest does with BAR 0 of a device whose BAR begins with the register `first`.
fn check_bar(bus: &Bus, device: u64, size: u32, first: u32) {
    let at = u64::from(bus.config(device, 0x10) & !0xf);
    assert!(PCI_WINDOW.contains(&at), "{at:#x} was not given by the machine");
    assert_eq!(bus.read(at), u32::MAX, "it answers before it is enabled");
    bus.enable(device, true);
    assert_eq!(bus.read(at), first);
    // Sizing, as Linux does it.
    bus.enable(device, false);
    let old = bus.config(device, 0x10);
    bus.set_config(device, 0x10, u32::MAX);
    assert_eq!(bus.config(device, 0x10) & !0xf, !(size - 1));
    bus.set_config(device, 0x10, old);
    bus.enable(device, true);
    assert_eq!(bus.read(at), first);
    // A move, and places where no BAR may be.
    let elsewhere = PCI_WINDOW.end - 0x100_0000;
    bus.set_config(device, 0x10, elsewhere as u32);
    assert_eq!((bus.read(elsewhere), bus.read(at)), (first, u32::MAX));
    for bad in [0, 0x10_0000, ECAM.start as u32, 0xfec0_0000, 0xfff0_0000] {
        bus.set_config(device, 0x10, bad);
        assert_eq!(bus.read(elsewhere), u32::MAX);
    }
    bus.set_config(device, 0x14, 1);
    bus.set_config(device, 0x10, at as u32);
    assert_eq!(bus.read(at), u32::MAX, "above 4 GiB");
    bus.set_config(device, 0x14, 0);
    assert_eq!(bus.read(at), first);
}

/// Checks the MSI-X table of a device.
fn check_vectors(bus: &Bus, device: u64) {
    let msix = bus.capability(device, 0x11);
    let place = bus.config(device, msix + 4);
    assert_eq!(place & 7, 0, "in BAR 0");
    let table = u64::from(bus.config(device, 0x10) & !0xf) + u64::from(place & !7);
    assert_eq!(bus.read(table + 12), 1, "masked after a reset");
    bus.write(table, 0xfee0_1003);
    bus.write(table + 8, 0x4031);
    bus.write(table + 12, 0);
    assert_eq!((bus.read(table), bus.read(table + 8)), (0xfee0_1000, 0x4031));
    bus.set_config(device, msix, 0x8000_0000);
    assert_eq!(bus.config(device, msix) >> 30, 0b10, "enabled, and not masked");
    // A function-level reset masks the vectors and switches MSI-X off.
    let express = bus.capability(device, 0x10);
    bus.set_config(device, express + 8, bus.config(device, express + 8) & 0xffff | 1 << 15);
    assert_eq!(bus.config(device, msix) >> 30, 0);
    assert_eq!(bus.config(device, 4) & 0xffff, 0, "BARs are off");
}

#[test]
fn a_function_of_this_process_is_decoded() {
    let Some(bus) = machine("a_function_of_this_process_is_decoded") else { return };
    let _rng = own::rng(&bus.0.chassis).unwrap();
    // The first register of the common configuration selects features.
    check_bar(&bus, 2, 0x8000, 0);
    check_vectors(&bus, 2);
}

#[test]
fn a_function_behind_a_socket_is_decoded() {
    let Some(bus) = machine("a_function_behind_a_socket_is_decoded") else { return };
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("function");
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let control = crate::ramdisk::serve(socket.to_str().unwrap(), &reactor).unwrap();
    let stream = UnixStream::connect(&socket).unwrap();
    let function = Attached::new(&bus.0, 4, 0, stream.into()).unwrap();
    assert_eq!(bus.config(4, 8) >> 8, 0x01_08_02, "an NVMe controller");
    let size = {
        bus.set_config(4, 0x10, u32::MAX);
        let size = !(bus.config(4, 0x10) & !0xf) + 1;
        bus.set_config(4, 0x10, PCI_WINDOW.start as u32);
        size
    };
    // CAP: 4096 queue entries at most, or what the controller says; it does not change.
    bus.enable(4, true);
    let capabilities = bus.read(PCI_WINDOW.start);
    assert_ne!(capabilities, u32::MAX);
    bus.enable(4, false);
    check_bar(&bus, 4, size, capabilities);
    check_vectors(&bus, 4);
    assert!(function.lost().is_none());
    // The server leaves for good: its function is lost, and nothing else is.
    control.close();
    control.wait_closed(std::time::Duration::from_secs(60));
    assert!(!function.lost().unwrap().is_final);
    assert_eq!(bus.config(4, 0), bus.config(4, 0));
}

// Prints the low byte of the console's ID, the high byte of its BAR 0 while that is sized, and a
// byte of function 1, which is not there.
guest!(enumerates:
    "mov dx, 0x3f8"
    "mov ebx, 0xe0008000"
    "mov eax, [ebx]"
    "out dx, al"
    "mov dword ptr [ebx + 0x10], 0xffffffff"
    "mov eax, [ebx + 0x10]"
    "shr eax, 24"
    "out dx, al"
    "mov eax, [ebx + 0x1000]"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

/// Makes a machine with the devices that every machine has.
fn whole_machine(code: &[u8]) -> (Machine, std::fs::File, impl Sized) {
    let (machine, console) = crate::common::machine(code, 1);
    let devices = (own::console(&machine.chassis).unwrap(), own::rng(&machine.chassis).unwrap());
    (machine, console, devices)
}

fn run(machine: Machine, console: std::fs::File) -> Guest {
    let running = machine.start(|| ()).unwrap();
    running.cpus.resume();
    Guest { running, console }
}

#[test]
fn a_guest_reads_configuration_space_without_leaving() {
    if !has_kvm("a_guest_reads_configuration_space_without_leaving") {
        return;
    }
    let (machine, console, _devices) = whole_machine(enumerates());
    let shows = machine.chassis.vm.check_extension(Cap::ReadonlyMem);
    let mut guest = run(machine, console);
    assert_eq!(guest.read(3), [0xf4, 0xff, 0xff]);
    assert_eq!(guest.end(), End::PowerOff);
    let exits = guest.running.board.exits();
    let count = |exit: Exit| exits[exit as usize];
    assert_eq!(count(Exit::MemoryRead), if shows { 0 } else { 3 });
    assert_eq!(count(Exit::MemoryWrite), 1);
}

// Has the window capability at the address in 0x9000 show two bytes at offset 0x12 of BAR 0, and
// prints the lower.
guest!(looks_through_the_window:
    "mov ebx, dword ptr [0x9000]"
    "mov byte ptr [ebx + 4], 0"
    "mov dword ptr [ebx + 8], 0x12"
    "mov dword ptr [ebx + 12], 2"
    "mov ax, word ptr [ebx + 16]"
    "mov dx, 0x3f8"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

#[test]
fn what_a_window_shows_is_read_when_it_is_read() {
    if !has_kvm("what_a_window_shows_is_read_when_it_is_read") {
        return;
    }
    let (machine, console, _devices) = whole_machine(looks_through_the_window());
    let bus = Bus(machine);
    // The window is the vendor's capability of type 5.
    let mut at = bus.capability(1, 9);
    while bus.config(1, at) as u8 != 9 || bus.config(1, at) >> 24 != 5 {
        at = u64::from(bus.config(1, at) >> 8 & 0xfc);
    }
    let address = (ECAM.start + (1 << 15) + at) as u32;
    bus.0.chassis.ram.memory().write(0x9000, &address.to_le_bytes()).unwrap();
    let mut guest = run(bus.0, console);
    // A console of two ports has six queues (Virtio 1.3, 5.3.2).
    assert_eq!(guest.read(1), [6]);
    assert_eq!(guest.end(), End::PowerOff);
}
