//! Model-specific registers (MSRs) of a CPU: which ones are saved, and how they are set.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// `IA32_TIME_STAMP_COUNTER`.
const TSC: u32 = 0x10;
/// `IA32_TSC_DEADLINE`.
const TSC_DEADLINE: u32 = 0x6e0;
/// Memory type range registers, which KVM's list of registers to save leaves out: variable ranges,
/// fixed ranges, the default type (Intel SDM, volume 4).
const MTRRS: [std::ops::RangeInclusive<u32>; 5] =
    [0x200..=0x20f, 0x250..=0x250, 0x258..=0x259, 0x268..=0x26f, 0x2ff..=0x2ff];
/// The most registers of one request: KVM's own limit, KVM_MAX_MSR_ENTRIES.
const MOST: usize = 256;

/// A register and its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Msr(u32, u64);

/// Returns the numbers of the registers that are saved, of those that KVM can save.
pub fn wanted(listed: &[u32]) -> Vec<u32> {
    let more = MTRRS.into_iter().flatten().filter(|msr| !listed.contains(msr));
    listed.iter().copied().chain(more).take(MOST).collect()
}

/// Reads registers. Those that the CPU does not have are left out.
///
/// # Errors
/// [`Error::Kvm`].
pub fn read(cpu: &VcpuFd, wanted: &[u32]) -> Result<Vec<Msr>> {
    let failed = || Error::kvm("tell the registers of a CPU");
    let mut wanted = wanted;
    let mut all = Vec::with_capacity(wanted.len());
    while !wanted.is_empty() {
        let mut entries = list(wanted.iter().map(|index| Msr(*index, 0)))?;
        // KVM stops at the first register that is not there.
        let count = cpu.get_msrs(&mut entries).map_err(failed())?.min(wanted.len());
        all.extend(entries.as_slice()[..count].iter().map(|entry| Msr(entry.index, entry.data)));
        wanted = wanted.get(count + 1..).unwrap_or_default();
    }
    Ok(all)
}

/// Sets registers. `deadline_interrupts` says whether the timer with a deadline is in use.
///
/// # Errors
/// [`Error::Kvm`]; [`Error::State`] if KVM refuses a value. A zero that is refused is left out: the
/// register is new, and may not exist here.
pub fn write(cpu: &VcpuFd, all: &[Msr], deadline_interrupts: bool) -> Result<()> {
    if all.len() > MOST {
        let what = format!("{} registers of a CPU; there are {MOST} at most", all.len());
        return Err(Error::State(what));
    }
    let ordered = in_order(all, deadline_interrupts);
    let mut rest = &ordered[..];
    while !rest.is_empty() {
        let entries = list(rest.iter().copied())?;
        let count = cpu.set_msrs(&entries).map_err(Error::kvm("set the registers of a CPU"))?;
        match rest.get(count) {
            Some(&Msr(index, value)) if value != 0 => {
                let what = format!("CPU register {index:#x} cannot be {value:#x} on this host");
                return Err(Error::State(what));
            }
            _ => rest = rest.get(count + 1..).unwrap_or_default(),
        }
    }
    Ok(())
}

/// Returns registers in the order in which they are set: the deadline of the timer last, since KVM
/// compares it with the time-stamp counter.
///
/// A deadline of zero may be that of a timer that has expired, whose interrupt KVM had not
/// delivered when the CPU was stopped, and tells nobody. It becomes the present time: the interrupt
/// comes at once, and one too many does no harm.
fn in_order(all: &[Msr], deadline_interrupts: bool) -> Vec<Msr> {
    let now = all.iter().find(|Msr(index, _)| *index == TSC).map_or(0, |Msr(_, value)| *value);
    let (mut last, mut first): (Vec<_>, Vec<_>) =
        all.iter().partition(|Msr(index, _)| *index == TSC_DEADLINE);
    for Msr(_, deadline) in &mut last {
        if *deadline == 0 && deadline_interrupts {
            *deadline = now;
        }
    }
    first.append(&mut last);
    first
}

fn list(all: impl Iterator<Item = Msr>) -> Result<Msrs> {
    let entry = |Msr(index, data)| kvm_msr_entry { index, data, ..Default::default() };
    let entries: Vec<_> = all.map(entry).collect();
    Msrs::from_entries(&entries).map_err(|_| Error::State("too many registers of a CPU".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_is_last_and_one_that_has_passed_interrupts() {
        let all = [Msr(TSC_DEADLINE, 0), Msr(0x174, 1), Msr(TSC, 500)];
        let expected = |deadline| vec![Msr(0x174, 1), Msr(TSC, 500), Msr(TSC_DEADLINE, deadline)];
        assert_eq!(in_order(&all, true), expected(500));
        assert_eq!(in_order(&all, false), expected(0));
        let future = [Msr(TSC_DEADLINE, 900), Msr(0x174, 1), Msr(TSC, 500)];
        assert_eq!(in_order(&future, true), expected(900));
    }

    #[test]
    fn ranges_are_saved_once_and_not_without_end() {
        assert!(wanted(&[0x10]).contains(&0x2ff));
        let twice = wanted(&[0x2ff]);
        assert_eq!(twice.iter().filter(|&&msr| msr == 0x2ff).count(), 1);
        let many: Vec<u32> = (0..10_000).collect();
        assert_eq!(wanted(&many).len(), MOST);
    }
}
