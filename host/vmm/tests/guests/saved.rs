//! Machines that are saved, and their successors.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::SeekFrom;
use slipway_virtio_console::Console;
use slipway_virtio_rng::Rng;
use slipway_vmm::board::{End, Exit};
use slipway_vmm::layout::GENERATION_ID;
use slipway_vmm::local::Local;
use slipway_vmm::state::{OwnState, Saved};
use slipway_vmm::{Config, EmptyVm, Error, Machine, Parts, Running, Start, Template, own};

use crate::common::{self, SLOTS, events, has_kvm, memory};

/// A machine with its own functions.
pub struct Whole {
    pub running: Running,
    pub console: std::fs::File,
    pub console_device: Local<Console>,
    rng: Local<Rng>,
    /// The bytes of `console` that were read.
    taken: usize,
}

impl Whole {
    pub fn new(machine: Machine, console: std::fs::File) -> Self {
        let console_device = own::console(&machine.chassis).unwrap();
        let rng = own::rng(&machine.chassis).unwrap();
        let running = machine.start(|| ()).unwrap();
        Self { running, console, console_device, rng, taken: 0 }
    }

    /// Makes a machine of `cpus` CPUs that runs `code`.
    fn start(code: &[u8], cpus: u32) -> Self {
        let (machine, console) = common::machine(code, cpus);
        let whole = Self::new(machine, console);
        whole.running.cpus.resume();
        whole
    }

    fn read(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        if count > 0 {
            let mut poll = [PollFd::new(&self.console, PollFlags::IN)];
            let minute = Timespec { tv_sec: 60, tv_nsec: 0 };
            let ready = rustix::event::poll(&mut poll, Some(&minute)).unwrap();
            assert_ne!(ready, 0, "it prints nothing; {:?}", self.running.board.ended());
        }
        std::io::Read::read_exact(&mut self.console, &mut bytes).unwrap();
        self.taken += count;
        bytes
    }

    /// Stops the guest, which writes to the serial port alone, and returns what it has printed that
    /// was not read.
    fn stop(&mut self) -> Vec<u8> {
        self.running.cpus.pause();
        while !self.running.cpus.are_parked() {
            std::thread::yield_now();
        }
        let printed = self.running.board.exits()[Exit::PortWrite as usize] as usize;
        self.read(printed - self.taken)
    }

    pub fn save(&self) -> Result<Vec<u8>, Error> {
        self.running.saver().save(self.parts())
    }

    fn parts(&self) -> Parts {
        let (console, rng) = (self.console_device.save(), self.rng.save());
        let own = OwnState { console, rng, pmem: None, memory: Vec::new(), balloon: None };
        Parts { own, functions: Vec::new(), plugged_cpus: Vec::new() }
    }

    /// Returns a copy of the guest's memory.
    fn copy(&self) -> OwnedFd {
        let copy = memory(64);
        copy_file(self.running.chassis.ram.file(), &copy);
        copy
    }

    fn end(&self) -> End {
        for _ in 0..6000 {
            if let Some(end) = self.running.board.ended() {
                return end;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("the guest has not ended after a minute");
    }
}

/// Copies the parts of a file that have pages.
fn copy_file(from: BorrowedFd<'_>, to: &OwnedFd) {
    let mut at = 0;
    while let Ok(start) = rustix::fs::seek(from, SeekFrom::Data(at)) {
        at = rustix::fs::seek(from, SeekFrom::Hole(start)).unwrap();
        let mut bytes = vec![0; (at - start) as usize];
        assert_eq!(rustix::io::pread(from, &mut bytes, start).unwrap(), bytes.len());
        assert_eq!(rustix::io::pwrite(to, &bytes, start).unwrap(), bytes.len());
    }
}

/// Makes a machine that goes on from a saved state, with this memory.
pub fn successor(file: &[u8], memory: OwnedFd, cpus: u32) -> Result<Whole, Error> {
    let (console, theirs) = rustix::pipe::pipe().unwrap();
    let kvm = std::fs::OpenOptions::new().read(true).write(true).open("/dev/kvm").unwrap();
    let saved = Arc::new(Saved::decode(file)?);
    let config = Config {
        cpus,
        max_cpus: cpus,
        slots: SLOTS,
        template: Template::Host,
        vm: EmptyVm::new(kvm.into())?,
        memory,
        lease: None,
        shared: None,
        hot_memory: Vec::new(),
        free_page_reporting: false,
        start: Start::Saved(Arc::clone(&saved)),
        console: theirs,
    };
    let machine = Machine::new(config)?;
    let (console_device, rng) = (own::console(&machine.chassis)?, own::rng(&machine.chassis)?);
    console_device.serve(|console| console.set_host_open(own::CONSOLE_PORT, true));
    let OwnState { console: its_console, rng: its_rng, .. } = &saved.machine.own;
    own::restore_console(&console_device, &machine.chassis.pci, its_console)?;
    rng.restore(&machine.chassis.pci, its_rng)?;
    machine.route_interrupts()?;
    let running = machine.start(|| ())?;
    Ok(Whole { running, console: console.into(), console_device, rng, taken: 0 })
}

// Counts in a register and in memory, and prints each value's low byte.
guest!(counts:
    "xor ecx, ecx"
    "mov dx, 0x3f8"
    "2: inc ecx"
    "inc dword ptr [0x9000]"
    "mov al, cl"
    "out dx, al"
    "jmp 2b"
);

// Counts in a register of SSE, with moves that the kernel can emulate.
guest!(counts_in_sse:
    "mov eax, cr4"
    "or eax, 0x200"
    "mov cr4, eax"
    "mov dx, 0x3f8"
    "movdqu xmm5, [0x9010]"
    "2: movdqu [0x9010], xmm5"
    "inc dword ptr [0x9010]"
    "mov eax, [0x9010]"
    "movdqu xmm5, [0x9010]"
    "mov dword ptr [0x9010], 0"
    "out dx, al"
    "xor eax, eax"
    "jmp 2b"
);

/// Checks that the guest prints each number once, in order, the next one after `last` first.
/// Returns the last one.
fn follow(printed: &[u8], last: u8) -> u8 {
    let next = |last: u8, &byte: &u8| {
        assert_eq!(byte, last.wrapping_add(1));
        byte
    };
    printed.iter().fold(last, next)
}

/// Checks that a guest that prints numbers goes on with the next one in its successors, and in
/// theirs.
fn check_counting(code: &[u8]) {
    let mut guest = Whole::start(code, 1);
    let mut last = 0;
    for _ in 0..5 {
        last = follow(&guest.read(100), last);
        last = follow(&guest.stop(), last);
        let file = guest.save().unwrap();
        let heirs = [(); 3].map(|()| successor(&file, guest.copy(), 1).unwrap());
        heirs.iter().for_each(|heir| heir.running.cpus.resume());
        for mut heir in heirs {
            follow(&heir.read(10), last);
            guest = heir;
        }
        last = last.wrapping_add(10);
    }
}

#[test]
fn a_successor_goes_on_where_the_saved_guest_was() {
    if has_kvm("a_successor_goes_on_where_the_saved_guest_was") {
        check_counting(counts());
    }
}

#[test]
fn extended_registers_are_saved() {
    if has_kvm("extended_registers_are_saved") {
        check_counting(counts_in_sse());
    }
}

#[test]
fn a_saved_machine_can_go_on_itself() {
    if !has_kvm("a_saved_machine_can_go_on_itself") {
        return;
    }
    let mut guest = Whole::start(counts(), 1);
    let mut last = follow(&guest.read(1), 0);
    assert!(guest.save().unwrap_err().to_string().contains("not stopped"));
    for _ in 0..5 {
        last = follow(&guest.stop(), last);
        guest.save().unwrap();
        guest.running.cpus.resume();
        last = follow(&guest.read(10), last);
    }
}

// The second CPU runs from 0x8000 on in real mode, and prints numbers with the highest bit set, the
// first one numbers without it.
guest!(two_cpus:
    "jmp 2f"
    ".long 0x100000 + 3f - guest_two_cpus" // at 0x100002
    "3: .byte 0x66, 0x31, 0xc9"            // xor ecx, ecx
    ".byte 0xba, 0xf8, 0x03"               // mov dx, 0x3f8
    ".byte 0x41"                           // inc cx
    ".byte 0x88, 0xc8, 0x0c, 0x80, 0xee"   // mov al, cl; or al, 0x80; out dx, al
    ".byte 0xeb, 0xf8"                     // back to inc cx
    "2: mov esi, [0x100002]"
    "mov edi, 0x8000"
    "mov ecx, 4"
    "5: mov eax, [esi]"
    "mov [edi], eax"
    "add esi, 4"
    "add edi, 4"
    "dec ecx"
    "jnz 5b"
    "mov dword ptr [0xfee000f0], 0x1ff"    // the local APIC is on
    "mov dword ptr [0xfee00310], 0x1000000"
    "mov dword ptr [0xfee00300], 0x4500"   // INIT
    "mov dword ptr [0xfee00310], 0x1000000"
    "mov dword ptr [0xfee00300], 0x4608"   // SIPI, page 8
    "mov dx, 0x3f8"
    "xor ecx, ecx"
    "6: inc ecx"
    "mov al, cl"
    "and al, 0x7f"
    "out dx, al"
    "jmp 6b"
);

/// Checks that each CPU has counted without gaps from where it was. Returns where each one is.
fn follow_both(printed: &[u8], mut at: [u8; 2]) -> [u8; 2] {
    for byte in printed {
        let cpu = usize::from(byte >> 7);
        at[cpu] = (at[cpu] + 1) & 0x7f;
        assert_eq!(byte & 0x7f, at[cpu], "CPU {cpu}");
    }
    at
}

#[test]
fn each_cpu_goes_on() {
    if !has_kvm("each_cpu_goes_on") {
        return;
    }
    let mut guest = Whole::start(two_cpus(), 2);
    let mut at = [0; 2];
    for _ in 0..5 {
        let mut seen = [false; 2];
        while seen != [true; 2] {
            let byte = guest.read(1);
            seen[usize::from(byte[0] >> 7)] = true;
            at = follow_both(&byte, at);
        }
        at = follow_both(&guest.stop(), at);
        let file = guest.save().unwrap();
        guest = successor(&file, guest.copy(), 2).unwrap();
        guest.running.cpus.resume();
    }
}

#[test]
fn of_two_saves_at_once_each_has_all_cpus() {
    if !has_kvm("of_two_saves_at_once_each_has_all_cpus") {
        return;
    }
    let mut guest = Whole::start(two_cpus(), 2);
    guest.read(1);
    guest.stop();
    for _ in 0..100 {
        let (done, saved) = std::sync::mpsc::channel();
        for _ in 0..2 {
            let (saver, parts, done) = (guest.running.saver(), guest.parts(), done.clone());
            std::thread::spawn(move || done.send(saver.save(parts)));
        }
        for _ in 0..2 {
            let file = saved.recv_timeout(std::time::Duration::from_secs(60));
            Saved::decode(&file.expect("a save waits for ever").unwrap()).unwrap();
        }
    }
}

#[test]
fn a_successor_is_told_that_it_is_a_copy() {
    if !has_kvm("a_successor_is_told_that_it_is_a_copy") {
        return;
    }
    let mut guest = Whole::start(events(), 1);
    assert_eq!(guest.read(1), b"r");
    guest.running.cpus.pause();
    while !guest.running.cpus.are_parked() {
        std::thread::yield_now();
    }
    let file = guest.save().unwrap();
    let generation = |guest: &Whole| {
        let mut bytes = [0; 16];
        guest.running.chassis.ram.memory().read(GENERATION_ID, &mut bytes).unwrap();
        bytes
    };
    let mut all = vec![generation(&guest)];
    for _ in 0..3 {
        let mut heir = successor(&file, guest.copy(), 1).unwrap();
        all.push(generation(&heir));
        heir.running.cpus.resume();
        assert_eq!(heir.read(2), b"2.", "the event of a new generation");
        heir.running.board.press_power_button();
        assert_eq!(heir.read(2), b"1.");
        assert_eq!(heir.end(), End::PowerOff);
    }
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), 4, "each has a generation of its own");
}

// Vector 0x31 prints `t` and powers off. The local APIC's timer interrupts by it, at a deadline of
// the time-stamp counter which lies as far in the future as the word at 0x9008 says. Prints `a` and
// waits with interrupts off until the word at 0x9004 is set.
guest!(waits_for_a_timer:
    "jmp 1f"
    ".long 0x100000 + 4f - guest_waits_for_a_timer" // at 0x100002: the handler
    ".word 31"                           // at 0x100006: the table of segments
    ".long 0xb000"
    ".word 0x1ff"                        // at 0x10000c: the table of interrupts
    ".long 0xa000"
    "1: mov esp, 0x8000"
    "mov eax, [0x100002]"
    "mov ebx, 0xa000 + 8 * 0x31"
    "mov word ptr [ebx], ax"
    "shr eax, 16"
    "mov word ptr [ebx + 6], ax"
    "mov word ptr [ebx + 2], 0x10"
    "mov word ptr [ebx + 4], 0x8e00"
    "mov ebx, 0xb000"
    "mov dword ptr [ebx + 16], 0x0000ffff"
    "mov dword ptr [ebx + 20], 0x00cf9b00"
    "mov dword ptr [ebx + 24], 0x0000ffff"
    "mov dword ptr [ebx + 28], 0x00cf9300"
    "lgdt [0x100006]"
    "lidt [0x10000c]"
    "mov dword ptr [0xfee000f0], 0x1ff"  // the local APIC is on
    "mov dword ptr [0xfee00320], 0x40031"
    "rdtsc"
    "add eax, [0x9008]"
    "adc edx, 0"
    "mov ecx, 0x6e0"
    "wrmsr"
    "mov dx, 0x3f8"
    "mov al, 'a'"
    "out dx, al"
    "mov dx, 0x80"
    "2: out dx, al"
    "cmp dword ptr [0x9004], 0"
    "je 2b"
    "3: mov esp, 0x8000"
    "sti"
    "hlt"
    "jmp 3b"
    "4: mov dx, 0x3f8"
    "mov al, 't'"
    "out dx, al"
    "mov dx, 0x600"
    "mov al, 0x34"
    "out dx, al"
    "hlt"
);

#[test]
fn a_timer_that_waits_or_has_expired_interrupts_the_successor() {
    if !has_kvm("a_timer_that_waits_or_has_expired_interrupts_the_successor") {
        return;
    }
    // At once, and not before the guest is saved.
    for ticks in [0_u32, u32::MAX] {
        let (machine, console) = common::machine(waits_for_a_timer(), 1);
        machine.chassis.ram.memory().write(0x9008, &ticks.to_le_bytes()).unwrap();
        let mut guest = Whole::new(machine, console);
        guest.running.cpus.resume();
        assert_eq!(guest.read(1), b"a");
        guest.running.cpus.pause();
        while !guest.running.cpus.are_parked() {
            std::thread::yield_now();
        }
        let file = guest.save().unwrap();
        let mut heir = successor(&file, guest.copy(), 1).unwrap();
        heir.running.chassis.ram.memory().write(0x9004, &[1]).unwrap();
        heir.running.cpus.resume();
        assert_eq!(heir.end(), End::PowerOff, "{ticks} ticks");
        assert_eq!(heir.read(1), b"t");
    }
}

#[test]
fn a_state_that_is_damaged_or_of_another_machine_is_refused() {
    if !has_kvm("a_state_that_is_damaged_or_of_another_machine_is_refused") {
        return;
    }
    let mut guest = Whole::start(counts(), 1);
    guest.read(1);
    guest.stop();
    let file = guest.save().unwrap();
    let refused = |file: &[u8], memory: OwnedFd, cpus: u32, words: &str| {
        let text = successor(file, memory, cpus).err().unwrap().to_string();
        assert!(text.starts_with("the saved state: ") && text.contains(words), "{text}");
    };
    for at in [0, 8, 16, 24, 56, file.len() / 2, file.len() - 1] {
        let mut changed = file.clone();
        changed[at] ^= 1;
        refused(&changed, guest.copy(), 1, "");
    }
    for len in [0, 10, 55, 56, 1000, file.len() - 1] {
        refused(&file[..len], guest.copy(), 1, "cut off");
    }
    refused(&[&file[..], b"x"].concat(), guest.copy(), 1, "behind its end");
    refused(&file, memory(65), 1, "bytes of memory: it was saved with 67108864");
    refused(&file, guest.copy(), 2, "--cpus: it was saved with 1, and this machine has 2");
    let other = |change: fn(&mut Saved)| {
        let mut saved = Saved::decode(&file).unwrap();
        change(&mut saved);
        saved.encode().unwrap()
    };
    let build = other(|saved| saved.identity.build = "0.0.1".into());
    refused(&build, guest.copy(), 1, "slipway-vmm: it was saved with 0.0.1");
    let template = other(|saved| saved.identity.shown.template = "x86-64-v3".into());
    refused(&template, guest.copy(), 1, "--cpu-template: it was saved with x86-64-v3, and this");
    let flaws = other(|saved| saved.identity.shown.speculation.push('1'));
    refused(&flaws, guest.copy(), 1, "speculative execution (processor, microcode): it was saved");
    let processor = other(|saved| saved.identity.shown.processor = "another".into());
    refused(&processor, guest.copy(), 1, "the processor: it was saved with another");
    let features = other(|saved| saved.identity.shown.features.clear());
    refused(&features, guest.copy(), 1, "features of the CPUs");
    assert!(successor(&other(|_| ()), guest.copy(), 1).is_ok());
}
