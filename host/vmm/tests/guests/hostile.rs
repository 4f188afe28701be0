//! A guest that accesses all of the machine at random: ports, registers, configuration space, BARs
//! that it moves over each other. The VMM must survive it, end it when told to, and leave the
//! function's server as it was.
//!
//! `SLIPWAY_HOSTILE_SECONDS` (15) is how long new guests are started. `SLIPWAY_HOSTILE_SEED` names
//! the first one's seed, which a failure prints.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::{CODE_AT, has_kvm};
use slipway_reactor::{Reactor, Settings};
use slipway_vmm::plug::{FIRST_FUNCTION, Kind};
use slipway_vmm::power::{SLEEP_CONTROL, SLEEP_TYPE_OFF};
use slipway_vmm::remote::Attached;
use slipway_vmm::{Running, layout, own};

// The assembler takes no constants of Rust, so that the program has these as literals.
const _: () = {
    assert!(CODE_AT == 0x10_0000);
    assert!(layout::ECAM.start == 0xe000_0000 && 8 << layout::DEVICE_SHIFT == 0x3_ffff + 1);
    assert!((FIRST_FUNCTION as u64) << layout::DEVICE_SHIFT == 0x2_0000);
    assert!(layout::IOAPIC.start == 0xfec0_0000);
    assert!(layout::PCI_WINDOW.start == 0xc000_0000);
    assert!(layout::PCI_WINDOW.end - layout::PCI_WINDOW.start == 0x1fff_ffff + 1);
    assert!(layout::SERIAL.start == 0x3f8 && layout::SERIAL.end == 0x3f8 + 8);
    // Eight registers of four bytes each.
    assert!(layout::FUNCTION_SLOTS.start == 0x610 && layout::CPU_SLOTS.end == 0x610 + 8 * 4);
    assert!(layout::POWER.start == 0x600 && SLEEP_CONTROL == 0);
    // Bit 5 is SLP_EN, and SLP_TYP begins at bit 2.
    assert!(SLEEP_TYPE_OFF << 2 | 1 << 5 == 0x34);
};

// EBP is the state of a generator (x = x * 1664525 + 1013904223), ECX the accesses that are left.
// Each access takes its kind (ESI), its address (EDX) and its value (EAX) from three numbers of it.
// Of the kind, bit 0 is memory or ports, bits 1 to 3 the range, bit 4 write or read, bit 5 width.
guest!(random:
    "jmp 1f"
    ".long 0"                            // at 0x100002: the seed
    ".long 0"                            // at 0x100006: the number of accesses
    "1: mov ebp, [0x100002]"             // the beginning
    "mov ecx, [0x100006]"
    "2: imul ebp, ebp, 1664525"          // the next access
    "add ebp, 1013904223"
    "mov esi, ebp"                       // the kind
    "shr esi, 16"
    "imul ebp, ebp, 1664525"
    "add ebp, 1013904223"
    "mov edx, ebp"                       // the place
    "shr edx, 8"
    "imul ebp, ebp, 1664525"
    "add ebp, 1013904223"
    "mov eax, ebp"                       // the value
    "shr eax, 4"
    "test esi, 1"
    "jz 5f"                              // to ports
    // Memory: ECAM of the first eight devices, IOAPIC, a BAR's first pages, or the whole window.
    "test esi, 2"
    "jz 3f"
    "and edx, 0x3ffff"
    "add edx, 0xe0000000"
    "test esi, 4"
    "jz 6f"
    "and edx, 0xff"                      // the head of the function's configuration space
    "add edx, 0xe0020000"
    "jmp 6f"
    "3: test esi, 4"                     // not ECAM: the IOAPIC, or BARs
    "jz 4f"
    "and edx, 0xff"
    "add edx, 0xfec00000"
    "jmp 6f"
    "4: and edx, 0x1ffff"                // BARs
    "add edx, 0xc0000000"
    "test esi, 8"
    "jz 6f"
    "shl edx, 10"
    "and edx, 0x1fffffff"
    "add edx, 0xc0000000"
    "6: test esi, 16"                    // the access to memory
    "jz 7f"
    "test esi, 32"
    "jz 8f"
    "mov [edx], eax"
    "jmp 9f"
    "8: mov [edx], ax"
    "jmp 9f"
    "7: test esi, 32"                    // a read
    "jz 8f"
    "mov eax, [edx]"
    "jmp 9f"
    "8: mov al, [edx]"
    "jmp 9f"
    // Ports: any below 0x800, the registers of hot plug, or the serial port.
    "5: and edx, 0x7ff"
    "test esi, 2"
    "jz 6f"
    "and edx, 7"
    "add edx, 0x3f8"
    "test esi, 4"
    "jz 6f"
    "sub edx, 0x3f8"
    "shl edx, 2"
    "add edx, 0x610"
    "6: test esi, 16"                    // the access to a port
    "jz 7f"
    "test esi, 32"
    "jz 8f"
    "out dx, eax"
    "jmp 9f"
    "8: out dx, al"
    "jmp 9f"
    "7: test esi, 32"                    // a read
    "jz 8f"
    "in eax, dx"
    "jmp 9f"
    "8: in al, dx"
    "9: dec ecx"                         // the end of an access
    "jnz 2b"
    "mov dx, 0x600"                      // the end: sleep control, S5
    "mov al, 0x34"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

/// Accesses of one guest.
const ACCESSES: u32 = 2000;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(default)
}

#[test]
fn a_guest_that_accesses_everything_harms_nobody() {
    if !has_kvm("a_guest_that_accesses_everything_harms_nobody") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("function");
    let reactor = Reactor::spawn(Settings::default()).unwrap();
    let control = crate::ramdisk::serve(socket.to_str().unwrap(), &reactor).unwrap();
    let deadline = Instant::now() + Duration::from_secs(setting("SLIPWAY_HOSTILE_SECONDS", 15));
    let mut seed = setting("SLIPWAY_HOSTILE_SEED", u64::from(std::process::id())) as u32;
    let (mut guests, mut exits) = (0, 0);
    while guests == 0 || Instant::now() < deadline {
        seed = seed.wrapping_mul(747_796_405).wrapping_add(1);
        println!("seed {seed}");
        exits += run(seed, &socket);
        guests += 1;
    }
    println!("{guests} guests, {exits} exits");
    assert!(exits > u64::from(ACCESSES) / 2, "the guests did nothing");
    // The function serves the next client as if nothing had happened.
    let stream = UnixStream::connect(&socket).unwrap();
    let patience = Duration::from_secs(60);
    let function = slipway_vfio_user_client::RemoteFunction::new(stream.into(), patience).unwrap();
    let mut class = [0; 4];
    function.read(slipway_vfio_user_spec::region::CONFIG, 8, &mut class).unwrap();
    assert_eq!(class[1..], [0x02, 0x08, 0x01], "an NVMe controller");
    control.close();
}

/// Asks the guest to give up its function, and gives it another connection if it has.
fn replace_if_ejected(running: &Running, function: Attached, socket: &Path) -> Attached {
    let Running { board, chassis, .. } = running;
    board.ask_for(Kind::Function, FIRST_FUNCTION);
    if board.ejected(Kind::Function) == 0 {
        return function;
    }
    function.close(chassis);
    drop(function);
    let stream = UnixStream::connect(socket).unwrap();
    let function = Attached::plug(chassis, FIRST_FUNCTION, 0, stream.into()).unwrap();
    board.plugged(Kind::Function, FIRST_FUNCTION);
    function
}

/// Runs one guest, and returns the number of its exits.
fn run(seed: u32, socket: &std::path::Path) -> u64 {
    let mut code = random().to_vec();
    code[2..6].copy_from_slice(&seed.to_le_bytes());
    code[6..10].copy_from_slice(&ACCESSES.to_le_bytes());
    let (machine, console) = crate::common::machine(&code, 1);
    let stream = UnixStream::connect(socket).unwrap();
    let console_function = own::console(&machine.chassis).unwrap();
    let rng = own::rng(&machine.chassis).unwrap();
    let mut function = Attached::new(&machine, FIRST_FUNCTION, 0, stream.into()).unwrap();
    machine.board.function_present(FIRST_FUNCTION);
    let running = machine.start(|| ()).unwrap();
    running.cpus.resume();
    // A guest may stop its only CPU by an interrupt that it sends itself.
    let give_up = Instant::now() + Duration::from_secs(2);
    while running.board.ended().is_none() && Instant::now() < give_up {
        std::thread::sleep(Duration::from_millis(1));
        function.pin_raised();
        function = replace_if_ejected(&running, function, socket);
        console_function.serve(|console| {
            let mut bytes = [0; 64];
            console.port_read(own::AGENT_PORT, &mut bytes);
            console.port_write(own::AGENT_PORT, &bytes);
        });
        rng.serve(|_| ());
    }
    let exits = running.board.exits().iter().sum();
    drop(console);
    exits
}
