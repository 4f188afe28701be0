//! The state of a CPU: all that KVM can tell of it, read on the CPU's own thread while it is
//! outside of the guest, and set on a new CPU before it runs.
//!
//! The order of requests is that of their dependencies (Linux, *Documentation/virt/kvm/api.rst*).
//! `mp_state` is read first, since KVM takes waiting INIT and SIPI signals then. Features are set
//! before everything, the mode and address of the local APIC (`sregs`) before its registers, the
//! time-stamp counter before the deadline of its timer.

mod msrs;

use kvm_bindings::{
    Xsave, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_regs, kvm_sregs, kvm_vcpu_events,
    kvm_xcrs, kvm_xsave, kvm_xsave2,
};
use kvm_ioctls::{Cap, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};
use msrs::Msr;

/// The saved state of a CPU.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    /// Registers of the FPU and of its extensions, in the format of the XSAVE instruction.
    #[serde(with = "hex")]
    xsave: Vec<u8>,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    lapic: kvm_lapic_state,
    msrs: Vec<Msr>,
    events: kvm_vcpu_events,
    /// The frequency of the time-stamp counter in kHz; 0 if KVM does not know it.
    tsc_khz: u32,
}

/// The requests by which a host's KVM tells the state of a CPU.
pub struct Registers {
    /// The model-specific registers that KVM can save.
    msrs: Vec<u32>,
    /// Words of the extended state behind the first 4096 bytes. `None` if KVM has the older request
    /// alone, for 4096 bytes.
    extra: Option<usize>,
    /// KVM can scale a CPU's time-stamp counter.
    scales: bool,
}

const SAVE: &str = "tell the state of a CPU";
const RESTORE: &str = "set the state of a CPU";

impl Registers {
    /// Returns the requests of `vm`'s KVM, which can save the registers of `msrs`.
    pub fn new(vm: &VmFd, msrs: &[u32]) -> Self {
        let bytes = usize::try_from(vm.check_extension_int(Cap::Xsave2)).unwrap_or(0);
        let extra = bytes.saturating_sub(size_of::<kvm_xsave>()).div_ceil(size_of::<u32>());
        let scales = vm.check_extension(Cap::TscControl);
        Self { msrs: msrs::wanted(msrs), extra: (bytes > 0).then_some(extra), scales }
    }

    /// Returns the state of `cpu`, which is outside of the guest, with no exit that waits for its
    /// completion.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn save(&self, cpu: &VcpuFd) -> Result<CpuState> {
        let failed = || Error::kvm(SAVE);
        Ok(CpuState {
            mp_state: cpu.get_mp_state().map_err(failed())?,
            regs: cpu.get_regs().map_err(failed())?,
            sregs: cpu.get_sregs().map_err(failed())?,
            xsave: self.read_xsave(cpu)?,
            xcrs: cpu.get_xcrs().map_err(failed())?,
            debugregs: cpu.get_debug_regs().map_err(failed())?,
            lapic: cpu.get_lapic().map_err(failed())?,
            msrs: msrs::read(cpu, &self.msrs)?,
            events: cpu.get_vcpu_events().map_err(failed())?,
            tsc_khz: cpu.get_tsc_khz().unwrap_or(0),
        })
    }

    /// Sets the state of `cpu`, which is new and has its features.
    ///
    /// # Errors
    /// [`Error::Kvm`], or [`Error::State`] if this host cannot run such a CPU.
    pub fn restore(&self, cpu: &VcpuFd, state: &CpuState) -> Result<()> {
        let failed = || Error::kvm(RESTORE);
        set_frequency(cpu, state.tsc_khz, self.scales)?;
        cpu.set_mp_state(state.mp_state).map_err(failed())?;
        cpu.set_regs(&state.regs).map_err(failed())?;
        cpu.set_sregs(&state.sregs).map_err(failed())?;
        self.write_xsave(cpu, &state.xsave)?;
        cpu.set_xcrs(&state.xcrs).map_err(failed())?;
        cpu.set_debug_regs(&state.debugregs).map_err(failed())?;
        cpu.set_lapic(&state.lapic).map_err(failed())?;
        msrs::write(cpu, &state.msrs, deadline_interrupts(&state.lapic))?;
        cpu.set_vcpu_events(&state.events).map_err(failed())?;
        // Tells the guest's watchdogs that it was stopped. Refused if the guest does not use
        // kvm-clock, and so has no page to be told by.
        let _ = cpu.kvmclock_ctrl();
        Ok(())
    }

    /// Makes room for extended state of the size that KVM has.
    fn room(&self) -> Result<Xsave> {
        let room = Xsave::new(self.extra.unwrap_or(0));
        room.map_err(|_| Error::State("the CPUs' extended state is too large".into()))
    }

    fn read_xsave(&self, cpu: &VcpuFd) -> Result<Vec<u8>> {
        let failed = || Error::kvm(SAVE);
        let mut room = self.room()?;
        let read: &kvm_xsave2 = match self.extra {
            // SAFETY: the room is as large as KVM has said, and the process asks for no features
            // that would enlarge the state.
            Some(_) => unsafe {
                cpu.get_xsave2(&mut room).map_err(failed())?;
                room.as_fam_struct_ref()
            },
            None => &kvm_xsave2::from(cpu.get_xsave().map_err(failed())?),
        };
        let words = read.xsave.region.iter().chain(room.as_slice());
        Ok(words.flat_map(|word| word.to_le_bytes()).collect())
    }

    fn write_xsave(&self, cpu: &VcpuFd, bytes: &[u8]) -> Result<()> {
        let mut room = self.room()?;
        let (words, rest) = bytes.as_chunks::<{ size_of::<u32>() }>();
        let extra = room.as_slice().len();
        if !rest.is_empty() || words.len() != size_of::<kvm_xsave>() / size_of::<u32>() + extra {
            let what = "the CPUs' extended state has another size on this host";
            return Err(Error::State(what.into()));
        }
        let words = words.iter().map(|word| u32::from_le_bytes(*word));
        // SAFETY: the length of the flexible part does not change.
        let first = unsafe { &mut room.as_mut_fam_struct().xsave.region };
        first.iter_mut().zip(words.clone()).for_each(|(place, word)| *place = word);
        let behind = words.skip(first.len());
        room.as_mut_slice().iter_mut().zip(behind).for_each(|(place, word)| *place = word);
        // SAFETY: the room is as large as KVM has said.
        unsafe { cpu.set_xsave2(&room) }.map_err(Error::kvm(RESTORE))
    }
}

/// Sets the frequency of the time-stamp counter, if it is another one than the host's. A host whose
/// processor cannot scale its counter gives its own frequency, and those that KVM takes for the
/// same, since each boot of a host measures another one.
fn set_frequency(cpu: &VcpuFd, khz: u32, scales: bool) -> Result<()> {
    let own = cpu.get_tsc_khz().unwrap_or(0);
    if khz == 0 || own == khz {
        return Ok(());
    }
    let refused = || {
        let what = format!(
            "a time-stamp counter of {khz} kHz, and this host's has {own} kHz and cannot be scaled"
        );
        Error::State(what)
    };
    if !scales && !is_close(khz, own) {
        return Err(refused());
    }
    cpu.set_tsc_khz(khz).map_err(|_| refused())
}

/// Returns whether KVM takes two frequencies for the same: they differ by at most 250 parts per
/// million (its parameter `tsc_tolerance_ppm`).
fn is_close(khz: u32, own: u32) -> bool {
    u64::from(khz.abs_diff(own)) * 1_000_000 <= u64::from(own) * 250
}

/// Returns whether the local APIC's timer interrupts at a deadline of the time-stamp counter: its
/// entry in the local vector table is in this mode, and not masked (Intel SDM, volume 3, *Local
/// Vector Table*).
fn deadline_interrupts(lapic: &kvm_lapic_state) -> bool {
    const TIMER: usize = 0x320;
    const MASKED: u32 = 1 << 16;
    const MODE: u32 = 0b11 << 17;
    const DEADLINE: u32 = 0b10 << 17;
    let entry = std::array::from_fn(|byte| lapic.regs[TIMER + byte] as u8);
    u32::from_le_bytes(entry) & (MODE | MASKED) == DEADLINE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_that_two_boots_measure_are_the_same() {
        assert!(is_close(2_596_130, 2_596_131) && is_close(2_596_131, 2_596_130));
        assert!(is_close(2_000_500, 2_000_000) && !is_close(2_000_501, 2_000_000));
        assert!(!is_close(1, 0) && !is_close(3_000_000, 2_000_000));
    }

    #[test]
    fn only_an_unmasked_timer_with_a_deadline_interrupts() {
        let lapic = |entry: u32| {
            let mut lapic = kvm_lapic_state::default();
            for (place, byte) in lapic.regs[0x320..].iter_mut().zip(entry.to_le_bytes()) {
                *place = byte as _;
            }
            lapic
        };
        assert!(deadline_interrupts(&lapic(0x0004_00ec)));
        for other in [0x0001_0000, 0x0005_00ec, 0x0000_00ec, 0x0002_00ec] {
            assert!(!deadline_interrupts(&lapic(other)));
        }
    }
}
