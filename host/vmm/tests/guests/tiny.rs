//! Ports, resets and pauses, as a guest meets them.

use crate::common::{Guest, config, has_kvm, memory, start};
use slipway_vmm::board::End;
use slipway_vmm::{Config, Machine};

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

// Writes near the end of 3 GiB, prints what is there, and powers off.
guest!(high_memory:
    "mov ebx, 0xbffff000"
    "mov byte ptr [ebx], 'h'"
    "mov dx, 0x3f8"
    "mov al, [ebx]"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "2: hlt"
    "jmp 2b"
);

/// KVM is given 4 GiB by a thread of its own while the machine is made.
#[test]
fn a_guest_has_all_of_much_memory_when_it_begins() {
    if !has_kvm("a_guest_has_all_of_much_memory_when_it_begins") {
        return;
    }
    let (config, console) = config(high_memory(), 1);
    let machine = Machine::new(Config { memory: memory(4096), ..config }).unwrap();
    let running = machine.start(|| ()).unwrap();
    running.cpus.resume();
    let mut guest = Guest { running, console };
    assert_eq!(guest.read(1), b"h");
    assert_eq!(guest.end(), End::PowerOff);
    let mut byte = [0];
    guest.running.chassis.ram.memory().read(0xbfff_f000, &mut byte).unwrap();
    assert_eq!(&byte, b"h");
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
    let memory = machine.chassis.ram.memory();
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
