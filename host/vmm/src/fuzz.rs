//! Bodies of the fuzz targets.

use std::cell::RefCell;
use std::fs::File;
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, SealFlags};

use crate::ioapic::Ioapic;
use crate::layout::MIB;
use crate::loader::{load_initramfs, load_kernel};
use crate::memory::GuestRam;
use crate::plug::Bank;
use crate::power::Power;
use crate::state::Saved;

fn memfd() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    rustix::fs::memfd_create(c"fuzz", flags).expect("a file in memory")
}

/// A guest's memory, and the file that a kernel is read from. Both are made once.
struct FuzzedGuest {
    ram: GuestRam,
    kernel: File,
}

impl FuzzedGuest {
    fn new() -> Self {
        let file = memfd();
        rustix::fs::ftruncate(&file, 64 * MIB).expect("room");
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).expect("a seal");
        let ram = GuestRam::new(file).expect("memory of a possible size");
        Self { ram, kernel: memfd().into() }
    }
}

thread_local! {
    static PLACE: RefCell<FuzzedGuest> = RefCell::new(FuzzedGuest::new());
}

/// Takes `data` for a kernel, and for an initramfs behind it.
pub fn loader(data: &[u8]) {
    PLACE.with_borrow_mut(|FuzzedGuest { ram, kernel }| {
        rustix::fs::ftruncate(&*kernel, 0).expect("an empty file");
        let mut offset = 0;
        while offset < data.len() {
            let written = rustix::io::pwrite(&*kernel, &data[offset..], offset as u64);
            offset += written.expect("memory for the file");
        }
        if let Ok(found) = load_kernel(ram, kernel) {
            assert!(found.end <= ram.bytes(), "a kernel outside of memory");
            if let Ok(at) = load_initramfs(ram, kernel, found) {
                assert!(at.start >= found.end && at.start + at.len <= ram.bytes());
            }
        }
    });
}

/// Takes `data` for accesses of a guest to the IOAPIC, the power management and the slots for hot
/// plug, four bytes each: kind, register, and a value of 16 bits.
pub fn registers(data: &[u8]) {
    let (mut ioapic, mut power) = (Ioapic::default(), Power::default());
    let mut bank = Bank::default();
    for access in data.chunks_exact(4) {
        let [kind, register, low, high] = access.try_into().expect("four bytes");
        let value = u32::from_le_bytes([low, high, low, high]).to_le_bytes();
        let mut into = [0; 8];
        let len = usize::from(kind >> 4 & 7) + 1;
        match kind & 7 {
            0 => drop(ioapic.write(0, &[register])),
            1 => drop(ioapic.write(u64::from(register), &value[..len.min(4)])),
            2 => ioapic.read(u64::from(register), &mut into[..len]),
            3 => drop(ioapic.set(register, low & 1 != 0)),
            4 => drop(ioapic.end(register)),
            5 => drop(power.write(register.into(), &value[..len.min(4)])),
            6 => power.read(register.into(), &mut into[..len]),
            _ => power.announce(low),
        }
        match kind >> 7 {
            0 => bank.read(register.into(), &mut into[..len]),
            _ => {
                bank.plug(low);
                assert_eq!(bank.write(register.into(), &value[..len.min(4)]), bank.take_ejected());
                bank.ask(high);
            }
        }
        let _ = ioapic.route(high.into());
        let _ = ioapic.level_pins(low).count();
    }
}

/// Takes `data` for a file with a saved state, and for the content of one behind the right header.
pub fn state(data: &[u8]) {
    drop(Saved::decode(data));
    let Ok(saved) = Saved::parse(data) else { return };
    let file = saved.encode().expect("a state as small as the one that was read");
    let again = Saved::decode(&file).expect("what was written can be read");
    assert_eq!(again.encode().expect("the same size"), file);
    let (interrupts, board) = (saved.machine.interrupts, saved.machine.board);
    if let Some(mut ioapic) = interrupts.into_sound() {
        for number in 0..=u8::MAX {
            let _ = ioapic.end(number);
            let _ = ioapic.set(number, number & 1 != 0);
            let _ = ioapic.route(number.into());
        }
    }
    let _ = (board.plugged_cpus(), board.is_sound(&(4..8), &(1..4)));
}
