//! Memory that a guest plugs and unplugs, as guests and devices meet it. The driver of the device
//! is this test's.

use std::os::unix::net::UnixStream;
use std::sync::Arc;

use slipway_reactor::{Reactor, Settings};
use slipway_vfio_user::Control;
use slipway_virtio_mem::driver::{Arena, FEATURES, SingleQueue, ask, request as request_of};
use slipway_virtio_mem::{MIN_BLOCK, Mem};
use slipway_virtio_spec::mem::{request, response};
use slipway_vmm::board::End;
use slipway_vmm::local::Local;
use slipway_vmm::remote::Attached;
use slipway_vmm::{HotRegion, own};

use crate::common::{Guest, Registers, has_kvm, hot_memory};

// Maps 4 MiB at 68 GiB at 1 GiB, prints the first byte, writes to both blocks, and prints the byte
// in the second one. When the host has written to 0xc000, prints the first byte again, reads the
// second block, prints `x`, and powers off.
guest!(touches_both_blocks:
    "mov dword ptr [0x8000], 0x9003"     // the table of tables of directories
    "mov dword ptr [0x9000], 0xa003"     // the directories of the first and the second GiB
    "mov dword ptr [0x9008], 0xb003"
    "mov dword ptr [0xa000], 0x83"       // the first 2 MiB
    "mov dword ptr [0xb000], 0x83"       // 4 MiB at 68 GiB
    "mov dword ptr [0xb004], 0x11"
    "mov dword ptr [0xb008], 0x200083"
    "mov dword ptr [0xb00c], 0x11"
    "mov eax, cr4"
    "or eax, 0x20"                       // physical address extension
    "mov cr4, eax"
    "mov eax, 0x8000"
    "mov cr3, eax"
    "mov ecx, 0xc0000080"                // EFER: long mode, in which this code is compatible
    "rdmsr"
    "or eax, 0x100"
    "wrmsr"
    "mov eax, cr0"
    "or eax, 0x80000000"                 // paging
    "mov cr0, eax"
    "mov ebx, 0x40000000"
    "mov dx, 0x3f8"
    "mov al, [ebx]"
    "out dx, al"
    "mov byte ptr [ebx], 'a'"
    "mov byte ptr [ebx + 0x200000], 'b'"
    "mov al, [ebx + 0x200000]"
    "out dx, al"
    "2: cmp byte ptr [0xc000], 0"
    "je 2b"
    "mov al, [ebx]"
    "out dx, al"
    "mov eax, [ebx + 0x200000]"          // gone
    "mov dx, 0x3f8"
    "mov al, 'x'"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "4: hlt"
    "jmp 4b"
);

const REGION: HotRegion = HotRegion { bytes: 128 << 20, node: 1 };
/// The region's guest-physical address.
const START: u64 = 68 << 30;

/// A machine whose device has a driver.
struct Plugging {
    guest: Guest,
    device: Arc<Local<Mem>>,
    driver: SingleQueue<Registers<Mem>>,
}

impl Plugging {
    /// Starts the guest with two blocks plugged.
    fn start() -> Self {
        let (machine, console) = hot_memory(touches_both_blocks(), vec![REGION]);
        let device = Arc::new(own::memory(&machine.chassis).unwrap().pop().unwrap());
        let memory = machine.chassis.ram.memory();
        // The guest's polls of this byte make no page later.
        memory.write(0xc000, &[0]).unwrap();
        let arena = Arena::new(memory, 32 << 20, 1 << 20);
        let registers = Registers(Arc::clone(&device));
        let mut driver = SingleQueue::with_features(registers, arena, 8, FEATURES).unwrap();
        device.with(|mem| mem.request(2 * MIN_BLOCK)).unwrap();
        let plugged = ask(&mut driver, &request_of(request::PLUG, START, 2)).unwrap();
        assert_eq!(plugged.0, response::ACK);
        let running = machine.start(|| ()).unwrap();
        running.cpus.resume();
        Self { guest: Guest { running, console }, device, driver }
    }

    /// Lets the guest go on.
    fn go_on(&self) {
        self.guest.running.chassis.ram.memory().write(0xc000, &[1]).unwrap();
    }
}

#[test]
fn a_guest_uses_what_is_plugged_and_loses_what_is_not() {
    if !has_kvm("a_guest_uses_what_is_plugged_and_loses_what_is_not") {
        return;
    }
    let mut machine = Plugging::start();
    assert_eq!(machine.guest.read(2), b"\0b");
    let chassis = machine.guest.running.chassis.clone();
    let mut byte = [0];
    chassis.ram.memory().read(START, &mut byte).unwrap();
    assert_eq!(&byte, b"a", "devices see it");
    let before = chassis.touched();
    let unplug = request_of(request::UNPLUG, START + MIN_BLOCK, 1);
    assert_eq!(ask(&mut machine.driver, &unplug).unwrap().0, response::ACK);
    assert_eq!(machine.device.with(|mem| mem.plugged()), MIN_BLOCK);
    assert_eq!(before - chassis.touched(), 4096, "its page is the host's again");
    machine.go_on();
    assert_eq!(machine.guest.read(1), b"a", "its neighbour is as it was");
    match machine.guest.end() {
        End::Failed(reason) => assert!(reason.contains("memory that is not there"), "{reason}"),
        // A KVM that emulates the guest's instructions takes the block for a device.
        End::PowerOff => assert_eq!(machine.guest.read(1), b"x"),
        end => panic!("{end:?}"),
    }
    assert_eq!(before - chassis.touched(), 4096, "the guest has got no page back");
}

/// Returns the bytes of hot-plug memory that a function's server has mapped.
fn reached(control: &Control) -> u64 {
    let regions = control.stats().regions;
    regions.iter().filter(|region| region.iova >= START).map(|region| region.len).sum()
}

#[test]
fn functions_reach_as_much_as_was_ever_asked_for() {
    if !has_kvm("functions_reach_as_much_as_was_ever_asked_for") {
        return;
    }
    let region = HotRegion { bytes: 512 << 20, node: 1 };
    let (machine, _console) = hot_memory(touches_both_blocks(), vec![region]);
    let device = own::memory(&machine.chassis).unwrap().pop().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let connect = |number: u8| {
        let socket = directory.path().join(number.to_string());
        let control = crate::ramdisk::serve(socket.to_str().unwrap(), &reactor).unwrap();
        let stream = UnixStream::connect(&socket).unwrap();
        let function = Attached::new(&machine, number, 0, stream.into()).unwrap();
        (control, function)
    };
    let ask = |bytes| device.with(|mem| mem.request(bytes)).unwrap();
    let (first, function) = connect(4);
    assert_eq!(reached(&first), 0, "nothing was asked for");
    ask(2 * MIN_BLOCK);
    assert_eq!(reached(&first), 128 << 20, "a block of the guest's memory hot plug");
    ask(128 << 20);
    assert_eq!(reached(&first), 128 << 20);
    let (second, _other) = connect(5);
    assert_eq!(reached(&second), 128 << 20, "a later function reaches as much");
    ask(200 << 20);
    assert_eq!((reached(&first), reached(&second)), (256 << 20, 256 << 20));
    ask(0);
    assert_eq!((reached(&first), reached(&second)), (256 << 20, 256 << 20));
    // A function whose server is gone for good does not keep others from more.
    first.close();
    first.wait_closed(std::time::Duration::from_secs(60));
    assert!(function.lost().is_some());
    ask(512 << 20);
    assert_eq!(reached(&second), 512 << 20);
}

#[test]
fn a_block_that_is_plugged_again_is_zero() {
    if !has_kvm("a_block_that_is_plugged_again_is_zero") {
        return;
    }
    let mut machine = Plugging::start();
    assert_eq!(machine.guest.read(2), b"\0b");
    for (kind, blocks) in [(request::UNPLUG, 2), (request::PLUG, 2)] {
        let asked = request_of(kind, START, blocks);
        assert_eq!(ask(&mut machine.driver, &asked).unwrap().0, response::ACK);
    }
    machine.go_on();
    assert_eq!(machine.guest.read(2), b"\0x");
    assert_eq!(machine.guest.end(), End::PowerOff);
}
