//! Tiny guests: 32-bit programs of a few instructions, in a kernel file of their own.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use slipway_pci::{Access, Function};
use slipway_virtio_mem::driver::{AccessError, RegisterAccess};
use slipway_vmm::board::End;
use slipway_vmm::local::Local;
use slipway_vmm::{Config, EmptyVm, HotRegion, Machine, Running, Start, Template};

/// The guest-physical address that guests are loaded at; they are position independent.
pub const CODE_AT: u32 = 0x10_0000;

/// The slots of each machine for hot plug.
pub const SLOTS: u8 = 8;

/// Names the bytes of a 32-bit program between two labels. It begins in protected mode, with flat
/// segments and no stack.
macro_rules! guest {
    ($name:ident: $($line:literal)*) => {
        core::arch::global_asm!(
            ".pushsection .rodata",
            concat!(".global guest_", stringify!($name)),
            concat!(".global guest_", stringify!($name), "_end"),
            ".code32",
            concat!("guest_", stringify!($name), ":"),
            $($line,)*
            concat!("guest_", stringify!($name), "_end:"),
            ".code64",
            ".popsection",
        );
        pub(crate) fn $name() -> &'static [u8] {
            unsafe extern "C" {
                #[link_name = concat!("guest_", stringify!($name))]
                static START: u8;
                #[link_name = concat!("guest_", stringify!($name), "_end")]
                static END: u8;
            }
            // SAFETY: both labels are in one read-only section of this program, in this order.
            unsafe {
                let start = &raw const START;
                std::slice::from_raw_parts(start, (&raw const END).offset_from(start) as usize)
            }
        }
    };
}

/// Returns whether this machine has a KVM, and says so if not.
pub fn has_kvm(test: &str) -> bool {
    let there = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").is_ok();
    if !there {
        println!("SKIPPED: {test}: needs /dev/kvm");
    }
    there
}

fn memfd(bytes: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create(c"kernel", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&file, bytes).unwrap();
    file
}

/// Returns a sealed file of `mib` MiB.
pub fn memory(mib: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(c"memory", flags).unwrap();
    rustix::fs::ftruncate(&file, mib << 20).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    file
}

/// Returns a file that guests may share: 2 MiB that begin with `content`, opened for reading only.
pub fn shared(content: &[u8]) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(c"shared", flags).unwrap();
    rustix::fs::ftruncate(&file, 2 << 20).unwrap();
    rustix::io::write(&file, content).unwrap();
    rustix::fs::fcntl_add_seals(&file, slipway_vmm::shared::SEALS).unwrap();
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    std::fs::File::open(path).unwrap().into()
}

/// Wraps a program in an ELF file with a PVH entry at its first byte.
pub fn elf(code: &[u8]) -> Vec<u8> {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let longs = |longs: &[u64]| longs.iter().flat_map(|long| long.to_le_bytes()).collect();
    let note: Vec<u8> = [words(&[4, 4, 18]), b"Xen\0".to_vec(), words(&[CODE_AT])].concat();
    let data = 64 + 2 * 56;
    let (len, note_len, at) = (code.len() as u64, note.len() as u64, u64::from(CODE_AT));
    let parts: [Vec<u8>; 10] = [
        b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec(),
        words(&[2 | 62 << 16, 1]),
        longs(&[at, 64, 0]),
        words(&[0, 64 | 56 << 16, 2, 0]),
        words(&[1, 5]),
        longs(&[data + note_len, at, at, len, len, 4096]),
        words(&[4, 4]),
        longs(&[data, 0, 0, note_len, note_len, 4]),
        note,
        code.to_vec(),
    ];
    parts.concat()
}

/// Returns a start at the first byte of a program.
pub fn kernel(code: &[u8]) -> Start {
    let kernel = memfd(&elf(code));
    Start::Kernel { kernel, initramfs: None, command_line: String::new() }
}

/// The registers of a device in a machine, for a driver of a test's own.
pub struct Registers<F>(pub Arc<Local<F>>);

impl<F: Function + 'static> RegisterAccess for Registers<F> {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let access = self.0.with(|device| device.read(0, offset, into));
        assert_eq!(access, Access::Done);
        Ok(())
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        let access = self.0.with(|device| device.write(0, offset, from));
        assert_eq!(access, Access::Done);
        Ok(())
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        self.0.step();
        Ok(())
    }
}

/// A machine with a tiny guest, and what it prints.
pub struct Guest {
    pub running: Running,
    pub console: std::fs::File,
}

/// Makes a machine of `cpus` CPUs and 64 MiB that runs `code`, paused.
pub fn machine(code: &[u8], cpus: u32) -> (Machine, std::fs::File) {
    sharing(code, cpus, None)
}

/// Makes the machine, with hot-plug memory behind its RAM.
pub fn hot_memory(code: &[u8], regions: Vec<HotRegion>) -> (Machine, std::fs::File) {
    let (config, console) = config(code, 1);
    let hot: u64 = regions.iter().map(|region| region.bytes).sum();
    let config = Config { memory: memory(64 + (hot >> 20)), hot_memory: regions, ..config };
    (Machine::new(config).unwrap(), console)
}

/// Makes the machine, and shares the pages of `shared` with it.
pub fn sharing(code: &[u8], cpus: u32, shared: Option<OwnedFd>) -> (Machine, std::fs::File) {
    let (config, console) = config(code, cpus);
    (Machine::new(Config { shared, ..config }).unwrap(), console)
}

/// Returns the configuration of the machine, and what its guest prints.
pub fn config(code: &[u8], cpus: u32) -> (Config, std::fs::File) {
    let (console, theirs) = rustix::pipe::pipe().unwrap();
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").unwrap();
    let config = Config {
        cpus,
        max_cpus: cpus,
        slots: SLOTS,
        template: Template::Host,
        vm: EmptyVm::new(kvm.into()).unwrap(),
        memory: memory(64),
        lease: None,
        shared: None,
        hot_memory: Vec::new(),
        free_page_reporting: false,
        start: kernel(code),
        console: theirs,
    };
    (config, console.into())
}

/// Makes the machine and runs it.
pub fn start(code: &[u8], cpus: u32) -> Guest {
    let (machine, console) = machine(code, cpus);
    let running = machine.start(|| ()).unwrap();
    running.cpus.resume();
    Guest { running, console }
}

impl Guest {
    /// Waits for the machine's end.
    pub fn end(&self) -> End {
        for _ in 0..6000 {
            if let Some(end) = self.running.board.ended() {
                return end;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the guest has not ended after a minute; exits {:?}", self.running.board.exits());
    }

    /// Reads `count` bytes of the console.
    pub fn read(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.console.read_exact(&mut bytes).unwrap();
        bytes
    }
}

// The generic event device's pin leads to vector 0x30. Its handler prints the pending events, then
// for each plugged function `p` and the first byte of device 4's configuration space, and for each
// function that is to leave `e` and that byte after it has ejected it, `c` for plugged CPUs and `d`
// for those that it has ejected, then a full stop. The power button powers off.
guest!(events:
    "jmp 1f"
    ".long 0x100000 + 4f - guest_events" // at 0x100002: the handler
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
    "3: mov esp, 0x8000"                 // a software KVM does not know `iretd`
    "sti"
    "hlt"
    "jmp 3b"
    "4: mov dx, 0x604"
    "in al, dx"
    "mov bl, al"
    "add al, '0'"
    "mov dx, 0x3f8"
    "out dx, al"
    "mov dx, 0x614"                      // plugged
    "in eax, dx"
    "test eax, eax"
    "jz 5f"
    "mov al, 'p'"
    "mov dx, 0x3f8"
    "out dx, al"
    "mov al, [0xe0020000]"
    "out dx, al"
    "5: mov dx, 0x618"                   // leaving
    "in eax, dx"
    "test eax, eax"
    "jz 6f"
    "mov dx, 0x61c"                      // eject
    "out dx, eax"
    "mov al, 'e'"
    "mov dx, 0x3f8"
    "out dx, al"
    "mov al, [0xe0020000]"
    "out dx, al"
    "6: mov dx, 0x624"                   // plugged CPUs
    "in eax, dx"
    "test eax, eax"
    "jz 5f"
    "mov al, 'c'"
    "mov dx, 0x3f8"
    "out dx, al"
    "5: mov dx, 0x628"                   // CPUs that are to leave
    "in eax, dx"
    "test eax, eax"
    "jz 6f"
    "mov dx, 0x62c"                      // eject
    "out dx, eax"
    "mov al, 'd'"
    "mov dx, 0x3f8"
    "out dx, al"
    "6: mov dx, 0x3f8"
    "mov al, '.'"
    "out dx, al"
    "mov dword ptr [0xfee000b0], 0"      // end of interrupt
    "test bl, 1"
    "jz 7f"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "7: jmp 3b"
);
