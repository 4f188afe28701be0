//! The steps by which a machine is made.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvm_bindings::{CpuId, KVM_CAP_SPLIT_IRQCHIP, kvm_enable_cap};
use kvm_ioctls::{Cap, Kvm, VmFd};
use slipway_machine::{Host, HotRegion, Template};

use super::Start;
use super::save::Traits;
use crate::cpu::Cpu;
use crate::loader::{self, Kernel};
use crate::memory::GuestRam;
use crate::registers::Registers;
use crate::state::{Saved, Shown};
use crate::{Error, Result, acpi, layout, plug};

/// The API version of every KVM since Linux 2.6.22.
const KVM_API_VERSION: i32 = 12;

/// Words of the kernel's command line that belong to the machine: it has one serial port, nothing
/// that Linux would have to look for on the bus before ACPI tells where the bus is (two hundred
/// exits), and no firmware that Linux could restart by.
const MACHINE_WORDS: &str = "8250.nr_uarts=1 pci=noearly reboot=t";

/// Checks that the descriptor is a KVM that can run the machine.
pub(super) fn check(kvm: OwnedFd) -> Result<Kvm> {
    use std::os::fd::{FromRawFd, IntoRawFd};
    // SAFETY: the descriptor is open, and ownership passes to the object.
    let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
    match kvm.get_api_version() {
        KVM_API_VERSION => {}
        ..0 => return Err(Error::NoKvm("the descriptor is not that of /dev/kvm".into())),
        other => {
            let what = format!("it speaks API version {other}, not {KVM_API_VERSION}");
            return Err(Error::NoKvm(what));
        }
    }
    let needed = [
        (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
        (Cap::SplitIrqchip, "KVM_CAP_SPLIT_IRQCHIP"),
        (Cap::Irqfd, "KVM_CAP_IRQFD"),
        (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
        (Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI"),
        (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
        (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    ];
    match needed.into_iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        Some((_, name)) => Err(Error::KvmLacks(name)),
        None => Ok(kvm),
    }
}

/// Checks the numbers of CPUs at the start and at most, of slots for functions, and of `others`,
/// which take places at the end of the bus.
pub(super) fn check_counts(cpus: u32, max_cpus: u32, slots: u8, others: usize) -> Result<()> {
    if !(1..=layout::MAX_CPUS).contains(&cpus) || max_cpus > layout::MAX_CPUS {
        let (cpus, most) = (cpus.max(max_cpus), layout::MAX_CPUS);
        return Err(Error::Config(format!("{cpus} CPUs: a machine has 1 to {most}")));
    }
    if max_cpus < cpus {
        let what = format!("{cpus} CPUs at the start: at most {max_cpus} are wanted");
        return Err(Error::Config(what));
    }
    let most = usize::from(plug::MAX_FUNCTIONS).saturating_sub(others);
    if usize::from(slots) > most {
        return Err(Error::Config(format!("{slots} slots: the bus has room for {most}")));
    }
    Ok(())
}

/// Maps the guest's memory, which a pool may have given, and pages that it shares with others.
pub(super) fn make_ram(
    kvm: &Kvm,
    (memory, lease): (OwnedFd, Option<OwnedFd>),
    shared: Option<OwnedFd>,
    hot: &[HotRegion],
) -> Result<GuestRam> {
    let mut ram = match lease {
        Some(connection) => GuestRam::leased(memory, connection, hot)?,
        None => GuestRam::with_hot_memory(memory, hot)?,
    };
    if let Some(file) = shared {
        let able = kvm.check_extension(Cap::ReadonlyMem);
        able.then_some(()).ok_or(Error::KvmLacks("KVM_CAP_READONLY_MEM"))?;
        ram.share(file)?;
    }
    Ok(ram)
}

/// The state in which the CPUs of a new machine begin.
pub(super) enum Origin {
    /// At the entry of this kernel, which is in memory.
    Kernel(Kernel),
    /// As this state says, which this machine can go on from.
    Saved(Arc<Saved>),
}

/// Puts into memory what a guest finds at its start, or checks that this machine can go on from the
/// saved state.
pub(super) fn begin(
    start: Start,
    ram: &GuestRam,
    parts: &acpi::Parts,
    traits: &Traits,
) -> Result<Origin> {
    match start {
        Start::Kernel { kernel, initramfs, command_line } => {
            load(ram, kernel.into(), initramfs.map(File::from), &command_line, parts)
                .map(Origin::Kernel)
        }
        Start::Saved(saved) => {
            traits.identity(ram, Vec::new()).check(&saved.identity)?;
            if saved.machine.cpus.len() != parts.max_cpus as usize {
                return Err(Error::State("it has the state of too many or too few CPUs".into()));
            }
            Ok(Origin::Saved(saved))
        }
    }
}

/// The features that the CPUs of a machine are offered.
pub(super) struct Offer {
    host: Host,
    template: Template,
    max_cpus: u32,
}

impl Offer {
    pub fn new(kvm: &Kvm, template: Template, max_cpus: u32) -> Result<Self> {
        Ok(Self { host: Host::of(kvm)?, template, max_cpus })
    }

    pub fn to_cpu(&self, cpu: u32) -> Result<CpuId> {
        Ok(self.host.features(self.template, cpu, self.max_cpus)?)
    }

    /// Returns what CPU 0 is shown.
    pub fn shown(&self) -> Result<Shown> {
        let leaves = self.host.cpu(self.template, 0, self.max_cpus)?;
        let flaws = self.host.arch_capabilities(&leaves);
        Ok(Shown::new(self.template, &leaves, flaws))
    }
}

/// Makes the CPUs, in their first state.
pub(super) fn make_cpus(kvm: &Kvm, vm: &VmFd, offer: &Offer, origin: &Origin) -> Result<Vec<Cpu>> {
    let listed = kvm.get_msr_index_list().map_err(Error::kvm("tell which registers it saves"))?;
    let registers = Arc::new(Registers::new(vm, listed.as_slice()));
    let make = |number: u32| {
        let fd = vm.create_vcpu(number.into()).map_err(Error::kvm("make a CPU"))?;
        let (features, registers) = (offer.to_cpu(number)?, Arc::clone(&registers));
        match origin {
            Origin::Kernel(kernel) => Cpu::new(fd, number, &features, kernel.entry, registers),
            Origin::Saved(saved) => {
                let state = saved.machine.cpus.get(number as usize);
                let state = state.ok_or_else(|| Error::State("it lacks a CPU".into()))?;
                Cpu::restore(fd, number, &features, state, registers)
            }
        }
    };
    (0..offer.max_cpus).map(make).collect()
}

pub(super) fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(Error::system("getrandom"))?;
    Ok(bytes)
}

/// Puts all that the guest finds at its start into its memory. Returns the kernel's place.
fn load(
    ram: &GuestRam,
    kernel: File,
    initramfs: Option<File>,
    command_line: &str,
    parts: &acpi::Parts,
) -> Result<Kernel> {
    let kernel = loader::load_kernel(ram, &kernel)?;
    let initramfs = initramfs.map(|file| loader::load_initramfs(ram, &file, kernel)).transpose()?;
    loader::write_reset_vector(ram)?;
    let rsdp = acpi::write_tables(&ram.memory(), parts)?;
    let command_line = format!("{MACHINE_WORDS} {command_line}");
    loader::write_start_info(ram, &command_line, initramfs, rsdp)?;
    Ok(kernel)
}

/// Has the kernel emulate the local APICs alone: no IOAPIC, no PIC, no PIT.
pub(super) fn split_interrupt_controller(vm: &VmFd) -> Result<()> {
    let mut cap = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
    cap.args[0] = layout::PINS as u64;
    vm.enable_cap(&cap).map_err(Error::kvm("split its interrupt controller"))
}
