//! The ports of a console that is saved with its machine, and goes on in a successor. A small real
//! driver takes the guest's place.

use std::sync::Arc;

use slipway_virtio_console::Console;
use slipway_virtio_console::driver::{AccessError, Arena, Driver, Options, RegisterAccess};
use slipway_vmm::board::Board;
use slipway_vmm::layout::ECAM;
use slipway_vmm::local::Local;
use slipway_vmm::own::{AGENT_PORT, CONSOLE_PORT};

use crate::common::{has_kvm, machine};
use crate::saved::{Whole, successor};

guest!(stays: "2: hlt" "jmp 2b");

/// The configuration space of the console.
const DEVICE_1: u64 = ECAM.start + (1 << 15);
/// Memory for the driver's queues.
const ARENA: u64 = 0x20_0000;

/// The console's registers, as a CPU accesses them.
struct Registers {
    board: Arc<Board>,
    bar: u64,
}

impl Registers {
    fn new(guest: &Whole) -> Self {
        let board = Arc::clone(&guest.running.board);
        board.memory_write(DEVICE_1 + 4, &6_u32.to_le_bytes()).unwrap();
        let mut bytes = [0; 4];
        board.memory_read(DEVICE_1 + 0x10, &mut bytes);
        Self { board, bar: u64::from(u32::from_le_bytes(bytes) & !0xf) }
    }
}

impl RegisterAccess for Registers {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.board.memory_read(self.bar + offset, into);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.board.memory_write(self.bar + offset, from).unwrap();
        Ok(())
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        Ok(())
    }
}

type Guest = Driver<Registers>;

/// Lets the device and the driver work until both have told each other everything.
fn settle(console: &Local<Console>, driver: &mut Guest) {
    for _ in 0..10 {
        console.serve(|_| ());
        driver.pump().unwrap();
    }
}

fn host_reads(console: &Local<Console>, port: u16) -> Vec<u8> {
    let mut bytes = [0; 100];
    let len = console.serve(|console| console.port_read(port, &mut bytes));
    bytes[..len].to_vec()
}

#[test]
fn ports_go_on_and_the_agent_is_told_of_a_close() {
    if !has_kvm("ports_go_on_and_the_agent_is_told_of_a_close") {
        return;
    }
    let (machine, console) = machine(stays(), 1);
    let guest = Whole::new(machine, console);
    let memory = guest.running.chassis.ram.memory();
    let device = &guest.console_device;
    device.serve(|console| {
        console.set_host_open(CONSOLE_PORT, true);
        console.set_host_open(AGENT_PORT, true);
    });
    let arena = Arena::new(memory, ARENA, 1 << 20);
    let mut driver = Driver::new(Registers::new(&guest), arena, Options::default()).unwrap();
    settle(device, &mut driver);
    driver.open(AGENT_PORT, true).unwrap();
    settle(device, &mut driver);
    assert_eq!(driver.ports[usize::from(AGENT_PORT)].host_opens, [true]);
    // A part is read before the save, the rest by the successor; bytes to the guest wait in its
    // memory.
    driver.send(CONSOLE_PORT, b"abcdef", 2).unwrap();
    let mut part = [0; 2];
    assert_eq!(device.serve(|console| console.port_read(CONSOLE_PORT, &mut part)), 2);
    assert_eq!(&part, b"ab");
    assert_eq!(device.serve(|console| console.port_write(AGENT_PORT, b"before")), 6);
    while !guest.running.cpus.are_parked() {
        std::thread::yield_now();
    }
    let file = guest.save().unwrap();
    // The same memory: the driver goes on in it, and the saved machine does nothing any more.
    let same = guest.running.chassis.ram.file().try_clone_to_owned().unwrap();
    let heir = successor(&file, same, 1).unwrap();
    let device = &heir.console_device;
    device.serve(|console| console.set_host_open(AGENT_PORT, true));
    driver.registers = Registers::new(&heir);
    settle(device, &mut driver);
    assert_eq!(host_reads(device, CONSOLE_PORT), b"cdef");
    let agent = &driver.ports[usize::from(AGENT_PORT)];
    assert_eq!(agent.host_opens, [true, false, true], "closed, and open again");
    assert_eq!(driver.receive(AGENT_PORT).unwrap(), b"before");
    driver.send(AGENT_PORT, b"after", 1).unwrap();
    assert_eq!(host_reads(device, AGENT_PORT), b"after");
}
