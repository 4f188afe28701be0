//! A virtual CPU: its first state, and the thread that runs it.
//!
//! An exit of another kind is an arm of `run_once`. It is counted as an `Exit` of `board`, whose
//! table `Exit::NAMES` gives it its name in `slipway-statistics` (`docs/vmm.md`, "Control"). An
//! exit that no arm names ends the machine, with its name as the reason. A triple fault
//! (`VcpuExit::Shutdown`) is a reset (`Board::reset`), as on a real machine. An exit that KVM has
//! to be asked for is asked for where the machine is made (`machine::make`), by an ioctl that
//! `filter` of `front/vmm` admits. Tests: `hostile.rs` of `tests/guests`.

use std::io;
use std::sync::Arc;

use kvm_bindings::{CpuId, Msrs, kvm_msr_entry, kvm_regs, kvm_run, kvm_segment};
use kvm_ioctls::{VcpuExit, VcpuFd};

use crate::board::{Board, End, Exit};
use crate::registers::{CpuState, Registers};
use crate::seat::Seats;
use crate::{Error, Result, kick, layout};

/// `CR0.PE`: protected mode. The PVH boot protocol starts in it, with paging off.
const CR0_PROTECTED: u64 = 1;
/// `RFLAGS`: bit 1 is always set.
const FLAGS: u64 = 1 << 1;

/// `IA32_MISC_ENABLE`, with fast strings (Intel SDM, volume 4).
const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
/// `IA32_MTRR_DEF_TYPE`: memory is write-back (type 6), and the ranges are enabled (bit 11).
const MSR_MTRR_DEFAULT: u32 = 0x2ff;
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// A CPU that has not run yet.
pub struct Cpu {
    fd: VcpuFd,
    number: u32,
    registers: Arc<Registers>,
}

/// The way in which a CPU has left the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestExit {
    /// By an exit, which was served. KVM completes the guest's instruction when it is entered next.
    Served,
    /// By a request to stop, or since the guest has not started the CPU. Nothing is incomplete.
    Interrupted,
}

impl Cpu {
    /// Gives a new CPU its features. CPU 0 starts at `entry`, by the PVH boot protocol; the others
    /// wait until the guest starts them (INIT and SIPI, in the kernel).
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn new(
        fd: VcpuFd,
        number: u32,
        features: &CpuId,
        entry: u64,
        registers: Arc<Registers>,
    ) -> Result<Self> {
        fd.set_cpuid2(features).map_err(Error::kvm("set a CPU's features"))?;
        let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
        let msrs =
            [msr(MSR_MISC_ENABLE, MISC_ENABLE_FAST_STRING), msr(MSR_MTRR_DEFAULT, MTRR_WRITE_BACK)];
        let msrs = Msrs::from_entries(&msrs).expect("two registers fit");
        // A KVM without one of them gives the guest its own default, which Linux copes with.
        fd.set_msrs(&msrs).map_err(Error::kvm("set a CPU's registers"))?;
        if number == 0 {
            start_at(&fd, entry)?;
        }
        Ok(Self { fd, number, registers })
    }

    /// Gives a new CPU its features, and the state of a predecessor.
    ///
    /// # Errors
    /// [`Error::Kvm`], [`Error::State`].
    pub fn restore(
        fd: VcpuFd,
        number: u32,
        features: &CpuId,
        state: &CpuState,
        registers: Arc<Registers>,
    ) -> Result<Self> {
        fd.set_cpuid2(features).map_err(Error::kvm("set a CPU's features"))?;
        registers.restore(&fd, state)?;
        Ok(Self { fd, number, registers })
    }

    /// Runs the CPU on this thread until the machine ends.
    pub fn run(mut self, board: &Arc<Board>, seats: &Seats) {
        let run: *mut kvm_run = self.fd.get_kvm_run();
        // The structure stays mapped until `self` is dropped, behind the guard.
        let _guard = kick::Target::new(run);
        while seats.may_run(self.number, || self.registers.save(&self.fd)) {
            if let Err(end) = self.stay(board, seats) {
                board.end(end);
                return;
            }
        }
    }

    /// Runs the guest until the CPU is to leave it.
    fn stay(&mut self, board: &Arc<Board>, seats: &Seats) -> Result<(), End> {
        loop {
            self.fd.set_kvm_immediate_exit(0);
            // A request that came before the line above has set the state that is read here; one
            // that comes later makes `run` return at once.
            if !seats.is_running(self.number) {
                return self.complete(board);
            }
            self.run_once(board)?;
        }
    }

    /// Has KVM complete the instruction that the last exit belongs to, so that the CPU's registers
    /// are those behind it (Linux, *Documentation/virt/kvm/api.rst*, 5, `immediate_exit`). An
    /// instruction that is repeated may exit again; KVM interrupts it after 1024 times.
    fn complete(&mut self, board: &Arc<Board>) -> Result<(), End> {
        loop {
            self.fd.set_kvm_immediate_exit(1);
            if self.run_once(board)? == GuestExit::Interrupted {
                return Ok(());
            }
        }
    }

    /// Runs the guest until its next exit, and serves the exit.
    fn run_once(&mut self, board: &Arc<Board>) -> Result<GuestExit, End> {
        let number = self.number;
        let broken = |what: String| End::Failed(format!("CPU {number}: {what}"));
        match self.fd.run() {
            Ok(VcpuExit::IoOut(port, data)) => {
                board.count(Exit::PortWrite);
                board.port_write(port, data).map(|()| GuestExit::Served)
            }
            Ok(VcpuExit::IoIn(port, data)) => {
                board.count(Exit::PortRead);
                board.port_read(port, data);
                Ok(GuestExit::Served)
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                board.count(Exit::MemoryRead);
                board.memory_read(address, data);
                Ok(GuestExit::Served)
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                board.count(Exit::MemoryWrite);
                board.memory_write(address, data).map(|()| GuestExit::Served)
            }
            Ok(VcpuExit::IoapicEoi(vector)) => {
                board.count(Exit::EndOfInterrupt);
                board.end_of_interrupt(vector);
                Ok(GuestExit::Served)
            }
            // A triple fault: the way of a kernel without another one to reset the machine.
            Ok(VcpuExit::Shutdown) => Err(board.reset()),
            Ok(VcpuExit::Intr) => Ok(GuestExit::Interrupted),
            Ok(VcpuExit::InternalError) => {
                let at = self.fd.get_regs().map_or(0, |regs| regs.rip);
                Err(broken(format!("KVM cannot emulate the guest's instruction at {at:#x}")))
            }
            Ok(VcpuExit::FailEntry(reason, _)) => {
                Err(broken(format!("the processor refused the guest's state ({reason:#x})")))
            }
            Ok(VcpuExit::MemoryFault { gpa, .. }) => Err(broken(no_memory(Some(gpa)))),
            Ok(other) => Err(broken(format!("an exit that is not served: {other:?}"))),
            Err(error) => match io::Error::from_raw_os_error(error.errno()) {
                // A request to stop, or a CPU that the guest has not started yet.
                error if error.kind() == io::ErrorKind::Interrupted => Ok(GuestExit::Interrupted),
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(GuestExit::Interrupted),
                error if error.raw_os_error() == Some(libc::EFAULT) => Err(broken(no_memory(None))),
                error => Err(broken(format!("KVM cannot run it: {error}"))),
            },
        }
    }
}

/// Returns the text for a guest that KVM cannot give a page, at this guest-physical address if KVM
/// says so.
fn no_memory(address: Option<u64>) -> String {
    let place = address.map_or(String::new(), |address| format!(" at {address:#x}"));
    let why = "hot-plug memory that it has not plugged, or the host has none left";
    format!("the guest touched memory that is not there{place}: {why}")
}

/// Sets the registers of the PVH boot protocol: 32-bit protected mode, flat segments, the address
/// of the start information in EBX.
fn start_at(fd: &VcpuFd, entry: u64) -> Result<()> {
    let set = || Error::kvm("set a CPU's registers");
    let mut special = fd.get_sregs().map_err(set())?;
    let flat = |kind, selector| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_: kind,
        present: 1,
        s: 1,
        db: 1,
        g: 1,
        ..Default::default()
    };
    /// Execute and read, accessed.
    const CODE: u8 = 0xb;
    /// Read and write, accessed.
    const DATA: u8 = 0x3;
    /// 32-bit TSS, busy.
    const TASK: u8 = 0xb;
    special.cs = flat(CODE, 0x10);
    let data = flat(DATA, 0x18);
    (special.ds, special.es, special.ss) = (data, data, data);
    (special.fs, special.gs) = (data, data);
    special.tr = kvm_segment { limit: 0x67, s: 0, db: 0, g: 0, ..flat(TASK, 0x20) };
    special.cr0 |= CR0_PROTECTED;
    fd.set_sregs(&special).map_err(set())?;
    let regs =
        kvm_regs { rip: entry, rbx: layout::START_INFO, rflags: FLAGS, ..Default::default() };
    fd.set_regs(&regs).map_err(set())
}
