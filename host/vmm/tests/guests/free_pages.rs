//! Free pages that are reported, as a guest meets them that goes on. The driver of the device is
//! this test's.

use std::sync::Arc;

use slipway_virtio_balloon::driver::{Arena, DriverError, Reporter};
use slipway_virtio_balloon::{Balloon, PIECE};
use slipway_virtio_spec::balloon::queue::REPORTING_WITHOUT_OTHERS;
use slipway_vmm::board::End;
use slipway_vmm::{Config, Machine, own};

use crate::common::{Guest, Registers, config, has_kvm};

// Writes `g` to the first and the last byte of each range that will be reported, and `n` to the
// bytes beside them, and prints `r`. When the host has written to 0xc000, prints what these eight
// bytes are, and powers off.
guest!(fills_and_looks:
    "mov byte ptr [0x9fffff], 'n'"
    "mov byte ptr [0xa00000], 'g'"       // 2 MiB
    "mov byte ptr [0xbfffff], 'g'"
    "mov byte ptr [0xc00000], 'n'"
    "mov byte ptr [0xffffff], 'n'"
    "mov byte ptr [0x1000000], 'g'"      // 4 MiB
    "mov byte ptr [0x13fffff], 'g'"
    "mov byte ptr [0x1400000], 'n'"
    "mov dx, 0x3f8"
    "mov al, 'r'"
    "out dx, al"
    "2: cmp byte ptr [0xc000], 0"
    "je 2b"
    "mov al, [0x9fffff]"
    "out dx, al"
    "mov al, [0xa00000]"
    "out dx, al"
    "mov al, [0xbfffff]"
    "out dx, al"
    "mov al, [0xc00000]"
    "out dx, al"
    "mov al, [0xffffff]"
    "out dx, al"
    "mov al, [0x1000000]"
    "out dx, al"
    "mov al, [0x13fffff]"
    "out dx, al"
    "mov al, [0x1400000]"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "4: hlt"
    "jmp 4b"
);

/// The ranges that the guest leaves, each by its guest-physical address and bytes.
const RANGES: [(u64, u32); 2] = [(0xa0_0000, PIECE as u32), (0x100_0000, 2 * PIECE as u32)];
/// The guest-physical address behind the RAM.
const BEHIND: u64 = 64 << 20;

/// A machine whose device has a driver, and whose guest has filled its memory.
struct Reporting {
    guest: Guest,
    driver: Reporter<Registers<Balloon>>,
}

impl Reporting {
    fn start() -> Self {
        let (config, console) = config(fills_and_looks(), 1);
        let machine = Machine::new(Config { free_page_reporting: true, ..config }).unwrap();
        let device = Arc::new(own::balloon(&machine.chassis).unwrap());
        let memory = machine.chassis.ram.memory();
        // The guest's polls of this byte make no page later.
        memory.write(0xc000, &[0]).unwrap();
        let arena = Arena::new(memory, 32 << 20, 1 << 20);
        let mut driver = Reporter::new(Registers(device), arena, REPORTING_WITHOUT_OTHERS).unwrap();
        let running = machine.start(|| ()).unwrap();
        running.cpus.resume();
        let mut guest = Guest { running, console };
        assert_eq!(guest.read(1), b"r");
        // All pages of the queue are there after a report, and less than a piece stays.
        driver.report(&[(RANGES[0].0, 4096)]).unwrap();
        Self { guest, driver }
    }

    /// Returns the bytes of the guest's memory that have pages.
    fn touched(&self) -> u64 {
        self.guest.running.chassis.touched()
    }

    /// Lets the guest go on, and returns the bytes that it finds.
    fn found(&mut self) -> Vec<u8> {
        self.guest.running.chassis.ram.memory().write(0xc000, &[1]).unwrap();
        let found = self.guest.read(8);
        assert_eq!(self.guest.end(), End::PowerOff);
        found
    }
}

#[test]
fn what_is_reported_is_a_hole_and_its_neighbours_stay() {
    if !has_kvm("what_is_reported_is_a_hole_and_its_neighbours_stay") {
        return;
    }
    let mut machine = Reporting::start();
    let before = machine.touched();
    machine.driver.report(&RANGES).unwrap();
    assert_eq!(before - machine.touched(), 4 * 4096, "the pages of `g` are the host's again");
    assert_eq!(machine.found(), b"n\0\0nn\0\0n");
}

#[test]
fn a_report_of_memory_that_is_not_there_takes_nothing_and_the_guest_goes_on() {
    if !has_kvm("a_report_of_memory_that_is_not_there_takes_nothing_and_the_guest_goes_on") {
        return;
    }
    let mut machine = Reporting::start();
    let before = machine.touched();
    for at in [BEHIND, 1 << 40, u64::MAX - PIECE] {
        let refused = machine.driver.report(&[(at / PIECE * PIECE, PIECE as u32), RANGES[1]]);
        assert!(matches!(refused, Err(DriverError::NeedsReset)), "{at:#x}: {refused:?}");
        machine.driver.start().unwrap();
    }
    assert_eq!(machine.touched(), before);
    machine.driver.report(&RANGES[..1]).unwrap();
    assert_eq!(machine.found(), b"n\0\0nnggn");
}
