//! Ports, resets, pauses and interrupts, as a guest meets them.

use crate::common::{has_kvm, start};
use slipway_vmm::board::End;

guest!(hello:
    "mov dx, 0x3f8"
    "mov al, 'h'"
    "out dx, al"
    "mov al, 'i'"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

#[test]
fn a_guest_prints_and_powers_off() {
    if !has_kvm("a_guest_prints_and_powers_off") {
        return;
    }
    let mut guest = start(hello(), 1);
    assert_eq!(guest.read(2), b"hi");
    assert_eq!(guest.end(), End::PowerOff);
    let [port_writes, ..] = guest.running.board.exits();
    assert_eq!(port_writes, 3);
}

guest!(reset_register:
    "mov dx, 0x602"
    "mov al, 1"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

guest!(triple_fault:
    "mov esp, 0x8000"
    "push 0"
    "push 0"
    "lidt [esp]"
    "ud2"
);

guest!(panic_then_reset:
    "mov dx, 0x505"
    "mov al, 1"
    "out dx, al"
    "mov dx, 0x602"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

#[test]
fn a_guest_resets_in_every_way() {
    if !has_kvm("a_guest_resets_in_every_way") {
        return;
    }
    assert_eq!(start(reset_register(), 1).end(), End::Reset);
    assert_eq!(start(triple_fault(), 1).end(), End::Reset);
    let guest = start(panic_then_reset(), 1);
    assert_eq!(guest.end(), End::Panic);
    assert!(guest.running.board.has_panicked());
}

guest!(nobody_answers:
    "mov dx, 0x70"
    "in al, dx"
    "mov dx, 0x3f8"
    "out dx, al"
    "mov ebx, 0xd0000000"
    "mov eax, [ebx]"
    "out dx, al"
    "mov dword ptr [ebx], 0"
    "mov ebx, 0xe0000000"
    "mov eax, [ebx]"
    "out dx, al"
    "mov dword ptr [ebx], 0"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

#[test]
fn what_nobody_answers_reads_as_ones() {
    if !has_kvm("what_nobody_answers_reads_as_ones") {
        return;
    }
    let mut guest = start(nobody_answers(), 1);
    assert_eq!(guest.read(3), [0xff; 3]);
    assert_eq!(guest.end(), End::PowerOff);
}

// Counts at 0x9000 for ever.
guest!(counter:
    "mov ebx, 0x9000"
    "mov dx, 0x3f8"
    "2: inc dword ptr [ebx]"
    "mov al, [ebx]"
    "out dx, al"
    "jmp 2b"
);

#[test]
fn a_paused_guest_does_nothing_until_it_is_resumed() {
    if !has_kvm("a_paused_guest_does_nothing_until_it_is_resumed") {
        return;
    }
    let (machine, console) = crate::common::machine(counter(), 2);
    let memory = machine.ram().memory();
    let count = || memory.load_u32(0x9000).unwrap();
    let running = machine.start(|| ()).unwrap();
    let mut guest = crate::common::Guest { running, console };
    for _ in 0..20 {
        assert!(!guest.running.cpus.is_running());
        let before = count();
        guest.running.cpus.resume();
        while count() == before {
            guest.read(1);
        }
        guest.running.cpus.pause();
        while !guest.running.cpus.are_parked() {
            std::thread::yield_now();
        }
        let stopped = count();
        std::thread::sleep(std::time::Duration::from_millis(5));
        assert_eq!(count(), stopped, "it runs");
    }
}

// Waits for the power button: the generic event device's pin leads to vector 0x30, whose handler
// reads the pending events, prints them and powers off.
guest!(button:
    "jmp 1f"
    ".long 0x100000 + 4f - guest_button" // at 0x100002: the handler
    ".word 31"                           // at 0x100006: the table of segments
    ".long 0xb000"
    ".word 0x1ff"                        // at 0x10000c: the table of interrupts
    ".long 0xa000"
    "1: mov esp, 0x8000"
    "mov eax, [0x100002]"
    "mov ebx, 0xa000 + 8 * 0x30"         // the gate of vector 0x30
    "mov word ptr [ebx], ax"
    "shr eax, 16"
    "mov word ptr [ebx + 6], ax"
    "mov word ptr [ebx + 2], 0x10"
    "mov word ptr [ebx + 4], 0x8e00"
    "mov ebx, 0xb000"                    // segments 0x10 and 0x18: code and data, flat
    "mov dword ptr [ebx + 16], 0x0000ffff"
    "mov dword ptr [ebx + 20], 0x00cf9b00"
    "mov dword ptr [ebx + 24], 0x0000ffff"
    "mov dword ptr [ebx + 28], 0x00cf9300"
    "lgdt [0x100006]"
    "lidt [0x10000c]"
    "mov dword ptr [0xfee000f0], 0x1ff"  // the local APIC is on
    "mov dword ptr [0xfec00000], 0x1b"   // pin 5: upper half, then lower half
    "mov dword ptr [0xfec00010], 0"
    "mov dword ptr [0xfec00000], 0x1a"
    "mov dword ptr [0xfec00010], 0x30"
    "mov dx, 0x3f8"
    "mov al, 'r'"
    "out dx, al"
    "sti"
    "3: hlt"
    "jmp 3b"
    "4: mov dx, 0x604"
    "in al, dx"
    "add al, '0'"
    "mov dx, 0x3f8"
    "out dx, al"
    "mov dword ptr [0xfee000b0], 0"      // end of interrupt
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "iretd"
);

#[test]
fn the_power_button_interrupts() {
    if !has_kvm("the_power_button_interrupts") {
        return;
    }
    let mut guest = start(button(), 1);
    assert_eq!(guest.read(1), b"r");
    guest.running.board.press_power_button();
    assert_eq!(guest.read(1), b"1");
    assert_eq!(guest.end(), End::PowerOff);
}
