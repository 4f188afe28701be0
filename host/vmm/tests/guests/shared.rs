//! Pages that guests share, as guests and devices meet them.

use std::os::fd::OwnedFd;

use crate::common::{Guest, has_kvm, shared, sharing};
use slipway_vmm::board::End;

// Maps 2 MiB at 4 GiB at 1 GiB, prints four bytes of it, writes there in four ways, and
// prints them again.
guest!(reads_writes_reads:
    "mov dword ptr [0x8000], 0x9003"     // the table of tables of directories
    "mov dword ptr [0x9000], 0xa003"     // the directories of the first and the second GiB
    "mov dword ptr [0x9008], 0xb003"
    "mov dword ptr [0xa000], 0x83"       // the first 2 MiB
    "mov dword ptr [0xb000], 0x83"       // 2 MiB at 4 GiB
    "mov dword ptr [0xb004], 1"
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
    "mov esi, 2"
    "mov dx, 0x3f8"
    "2: xor ecx, ecx"
    "3: mov al, [ebx + ecx]"
    "out dx, al"
    "inc ecx"
    "cmp ecx, 4"
    "jne 3b"
    "mov dword ptr [ebx], 0x78787878"
    "mov byte ptr [ebx + 1], 'y'"
    "mov eax, 0x7a7a7a7a"
    "xchg [ebx], eax"
    "inc dword ptr [ebx]"
    "dec esi"
    "jnz 2b"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "4: hlt"
    "jmp 4b"
);

fn run(file: OwnedFd) -> Guest {
    let (machine, console) = sharing(reads_writes_reads(), 1, Some(file));
    let running = machine.start(|| ()).unwrap();
    running.cpus.resume();
    Guest { running, console }
}

#[test]
fn guests_read_the_pages_and_cannot_change_them() {
    if !has_kvm("guests_read_the_pages_and_cannot_change_them") {
        return;
    }
    let file = shared(b"root");
    let mut guests = [(); 2].map(|()| run(file.try_clone().unwrap()));
    for guest in &mut guests {
        assert_eq!(guest.read(8), b"rootroot", "before and after its writes");
        assert_eq!(guest.end(), End::PowerOff);
        let [_, _, memory_writes, ..] = guest.running.board.exits();
        assert!(memory_writes >= 8, "{memory_writes} of eight writes reached nobody");
    }
    let mut bytes = [0; 4];
    rustix::io::pread(&file, &mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"root");
}

#[test]
fn machines_map_the_same_pages() {
    if !has_kvm("machines_map_the_same_pages") {
        return;
    }
    let file = shared(b"root");
    let stat = rustix::fs::fstat(&file).unwrap();
    let machines = [(); 2].map(|()| {
        let file = file.try_clone().unwrap();
        sharing(reads_writes_reads(), 1, Some(file)).0
    });
    for machine in &machines {
        let there = machine.chassis.ram.shared().unwrap();
        let found = rustix::fs::fstat(there.file()).unwrap();
        assert_eq!((found.st_dev, found.st_ino), (stat.st_dev, stat.st_ino));
        let memory = machine.chassis.ram.memory();
        let mut bytes = [0; 4];
        memory.read(there.part.start, &mut bytes).unwrap();
        assert_eq!(&bytes, b"root");
        assert!(memory.write(there.part.start, b"x").is_err(), "a device writes it");
    }
    // One page was touched, by whomever, and the file has no other.
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_blocks * 512, 4096);
}
