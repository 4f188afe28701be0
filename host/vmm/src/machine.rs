//! Makes a machine of its configuration, and holds it together.

mod save;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use kvm_bindings::{KVM_CAP_SPLIT_IRQCHIP, kvm_enable_cap};
use kvm_ioctls::{Cap, Kvm, VmFd};

use crate::ahead::Ahead;
use crate::board::{Board, Slots};
use crate::cpu::Cpu;
use crate::cpu::state::Registers;
use crate::cpus::Cpus;
use crate::interrupts::Interrupts;
use crate::loader::Kernel;
use crate::memory::GuestRam;
use crate::output::Output;
use crate::pci::Bus;
use crate::routes::Routes;
use crate::state::Saved;
use crate::{Error, Result, acpi, cpuid, layout, loader, plug, seat};
use save::Traits;
pub use save::{Parts, Saver};

/// The API version of every KVM since Linux 2.6.22.
const KVM_API_VERSION: i32 = 12;

/// Words of the kernel's command line that belong to the machine: it has one serial port, nothing
/// that Linux would have to look for on the bus before ACPI tells where the bus is (two hundred
/// exits), and no firmware that Linux could restart by.
const MACHINE_WORDS: &str = "8250.nr_uarts=1 pci=noearly reboot=t";

/// The configuration of a machine. Everything that it uses is an open descriptor.
#[derive(Debug)]
pub struct Config {
    /// The number of virtual CPUs at the start: 1 to `max_cpus`.
    pub cpus: u32,
    /// The largest number of virtual CPUs: up to [`layout::MAX_CPUS`]. Those behind the first ones
    /// can be plugged and removed while the guest runs.
    pub max_cpus: u32,
    /// The number of PCI devices, from [`plug::FIRST_FUNCTION`] on, that can be plugged and removed
    /// while the guest runs: 0 to [`plug::MAX_FUNCTIONS`].
    pub slots: u8,
    /// The KVM device.
    pub kvm: OwnedFd,
    /// The guest's memory: a memfd that is sealed against shrinking; its size is the size of the
    /// memory.
    pub memory: OwnedFd,
    /// The connection to the pool that gave the memory, if a pool did.
    pub lease: Option<OwnedFd>,
    /// A file whose pages the guest reads and shares with other guests ([`crate::shared`]).
    pub shared: Option<OwnedFd>,
    /// The state in which the guest begins.
    pub start: Start,
    /// The destination of what the guest prints, by the serial port and its first console.
    pub console: OwnedFd,
}

/// The state in which a guest begins.
#[derive(Debug)]
pub enum Start {
    /// At the entry of a kernel.
    Kernel {
        /// The kernel: an uncompressed ELF with a PVH entry.
        kernel: OwnedFd,
        /// The initial RAM file system.
        initramfs: Option<OwnedFd>,
        /// The kernel's command line; words of the machine's own come before it.
        command_line: String,
    },
    /// Where a saved machine was stopped. The guest's memory is a copy of that machine's.
    Saved(Arc<Saved>),
}

/// The parts of a machine that a function is attached to. Clones are of the same machine.
#[derive(Clone)]
pub struct Chassis {
    vm: Arc<VmFd>,
    ram: Arc<GuestRam>,
    interrupts: Arc<Interrupts>,
    pci: Arc<Bus>,
}

impl Chassis {
    /// Returns KVM's handle of the machine.
    pub fn vm(&self) -> &Arc<VmFd> {
        &self.vm
    }

    /// Returns the guest's memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Returns the bytes of the guest's memory that somebody has touched: the file has no pages for
    /// the others.
    pub fn touched(&self) -> u64 {
        /// Bytes of a block of stat(2).
        const BLOCK: u64 = 512;
        let stat = rustix::fs::fstat(self.ram.file());
        stat.map_or(0, |stat| stat.st_blocks.cast_unsigned() * BLOCK)
    }

    /// Returns the interrupt lines.
    pub fn interrupts(&self) -> &Arc<Interrupts> {
        &self.interrupts
    }

    /// Returns the PCI bus.
    pub fn pci(&self) -> &Arc<Bus> {
        &self.pci
    }
}

/// A machine whose CPUs have not run yet.
pub struct Machine {
    chassis: Chassis,
    board: Arc<Board>,
    output: Arc<Output>,
    cpus: Vec<Cpu>,
    /// The CPUs that are there from the start, a bit each.
    present: u32,
    /// The kernel that the guest begins with, if it begins with one.
    kernel: Option<Kernel>,
    /// The guest reads configuration space without leaving it, if KVM can.
    shows_configuration: bool,
    /// The machine goes on from a saved state.
    is_copy: bool,
    traits: Traits,
}

impl Machine {
    /// Makes the machine: memory with the kernel in it, interrupt controllers, CPUs, an empty PCI
    /// bus; or all of these as they were saved.
    ///
    /// # Errors
    /// [`Error`]; nothing is left.
    pub fn new(config: Config) -> Result<Self> {
        let Config { cpus, max_cpus, slots, kvm, memory, lease, console, start, shared } = config;
        check_counts(cpus, max_cpus, slots)?;
        let kvm = check(kvm)?;
        let ram = Arc::new(make_ram(&kvm, memory, lease, shared)?);
        let features = cpuid::supported(&kvm)?;
        let deadline_timer = kvm.check_extension(Cap::TscDeadlineTimer);
        let features = |cpu| cpuid::of_cpu(&features, cpu, max_cpus, deadline_timer);
        let counts = [cpus, max_cpus, slots.into()];
        let traits = Traits { features: Arc::new(features(0)?), cpus: counts };
        let generation = random()?;
        let parts = acpi::Parts { cpus, max_cpus, slots, generation };
        let (kernel, saved) = begin(start, &ram, &parts, &traits)?;
        let vm = Arc::new(kvm.create_vm().map_err(Error::kvm("make a virtual machine"))?);
        split_interrupt_controller(&vm)?;
        ram.give_to(&vm)?;
        let registers = registers(&kvm, &vm)?;
        let make_cpu = |number: u32| {
            let fd = vm.create_vcpu(number.into()).map_err(Error::kvm("make a CPU"))?;
            let (features, registers) = (features(number)?, Arc::clone(&registers));
            match saved.as_ref().and_then(|saved| saved.machine.cpus.get(number as usize)) {
                Some(state) => Cpu::restore(fd, number, &features, state, registers),
                None => {
                    let entry = kernel.map_or(0, |kernel| kernel.entry);
                    Cpu::new(fd, number, &features, entry, registers)
                }
            }
        };
        let all = (0..max_cpus).map(make_cpu).collect::<Result<Vec<_>>>()?;
        let slots = Slots {
            functions: plug::FIRST_FUNCTION..plug::FIRST_FUNCTION + slots,
            cpus: cpus as u8..max_cpus as u8,
        };
        let interrupts = Arc::new(Interrupts::new(Arc::new(Routes::new(Arc::clone(&vm)))));
        let pci = Arc::new(Bus::default());
        let output = Arc::new(Output::new(console));
        let (its_interrupts, its_pci) = (Arc::clone(&interrupts), Arc::clone(&pci));
        let board = Board::new(its_interrupts, its_pci, slots, Arc::clone(&output))?;
        let mut machine = Self {
            chassis: Chassis { vm, ram, interrupts, pci },
            board: Arc::new(board),
            output,
            cpus: all,
            present: seat::first(cpus),
            kernel,
            shows_configuration: true,
            is_copy: false,
            traits,
        };
        if let Some(saved) = saved {
            machine.take_over(&saved.machine, &generation)?;
        }
        Ok(machine)
    }

    /// Returns the parts that functions are attached to.
    pub fn chassis(&self) -> &Chassis {
        &self.chassis
    }

    /// Returns KVM's handle of the machine.
    pub fn vm(&self) -> &Arc<VmFd> {
        self.chassis.vm()
    }

    /// Returns the guest's memory.
    pub fn ram(&self) -> &Arc<GuestRam> {
        self.chassis.ram()
    }

    /// Returns the interrupt lines.
    pub fn interrupts(&self) -> &Arc<Interrupts> {
        self.chassis.interrupts()
    }

    /// Returns the PCI bus.
    pub fn pci(&self) -> &Arc<Bus> {
        self.chassis.pci()
    }

    /// Returns the destination of what the guest prints.
    pub fn output(&self) -> &Arc<Output> {
        &self.output
    }

    /// Returns the board.
    pub fn board(&self) -> &Arc<Board> {
        &self.board
    }

    /// Returns the memory that the guest will touch soon, if that is known: the guest is Linux,
    /// whose kernel has several MiB, and its memory is not a pool's.
    pub fn ahead(&self) -> Option<Ahead> {
        let ram = self.ram();
        let end = self.kernel.as_ref()?.end;
        let known = end > layout::HIGH_MEMORY + layout::HUGE_PAGE && !ram.is_leased();
        known.then(|| Ahead::new(Arc::clone(ram), end))
    }

    /// Starts the CPUs' threads, paused. Each thread calls `begin` first, for example to give up
    /// rights. A guest that goes on from a saved state is told that it is in a copy.
    ///
    /// # Errors
    /// [`Error::System`], [`Error::Kvm`].
    pub fn start(self, begin: impl Fn() + Clone + Send + 'static) -> Result<Running> {
        if self.shows_configuration {
            self.pci().show(self.vm(), layout::OWN_DEVICES)?;
        }
        if self.is_copy {
            self.board.generation_changed();
        }
        let cpus = Cpus::start(self.cpus, self.present, &self.board, begin)?;
        let Self { board, chassis, traits, .. } = self;
        Ok(Running { cpus, board, chassis, traits })
    }
}

/// A machine with running or paused CPUs. Dropping it ends them.
pub struct Running {
    /// The CPUs.
    pub cpus: Cpus,
    /// The board.
    pub board: Arc<Board>,
    /// The parts that functions are attached to. The memory stays mapped for as long as the CPUs
    /// run: it is dropped after them.
    pub chassis: Chassis,
    traits: Traits,
}

/// Checks that the descriptor is a KVM that can run the machine.
fn check(kvm: OwnedFd) -> Result<Kvm> {
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

/// Checks the numbers of CPUs at the start and at most, and of slots for functions.
fn check_counts(cpus: u32, max_cpus: u32, slots: u8) -> Result<()> {
    if !(1..=layout::MAX_CPUS).contains(&cpus) || max_cpus > layout::MAX_CPUS {
        let (cpus, most) = (cpus.max(max_cpus), layout::MAX_CPUS);
        return Err(Error::Config(format!("{cpus} CPUs: a machine has 1 to {most}")));
    }
    if max_cpus < cpus {
        let what = format!("{cpus} CPUs at the start: at most {max_cpus} are wanted");
        return Err(Error::Config(what));
    }
    if slots > plug::MAX_FUNCTIONS {
        let most = plug::MAX_FUNCTIONS;
        return Err(Error::Config(format!("{slots} slots: the bus has room for {most}")));
    }
    Ok(())
}

/// Maps the guest's memory, and pages that it shares with others.
fn make_ram(
    kvm: &Kvm,
    memory: OwnedFd,
    lease: Option<OwnedFd>,
    shared: Option<OwnedFd>,
) -> Result<GuestRam> {
    let mut ram = match lease {
        Some(connection) => GuestRam::leased(memory, connection)?,
        None => GuestRam::new(memory)?,
    };
    if let Some(file) = shared {
        let able = kvm.check_extension(Cap::ReadonlyMem);
        able.then_some(()).ok_or(Error::KvmLacks("KVM_CAP_READONLY_MEM"))?;
        ram.share(file)?;
    }
    Ok(ram)
}

/// Puts into memory what a guest finds at its start, or checks that this machine can go on from the
/// saved state. Returns the kernel's place, or the state.
fn begin(
    start: Start,
    ram: &GuestRam,
    parts: &acpi::Parts,
    traits: &Traits,
) -> Result<(Option<Kernel>, Option<Arc<Saved>>)> {
    match start {
        Start::Kernel { kernel, initramfs, command_line } => {
            let kernel = load(ram, &kernel, initramfs.as_ref(), &command_line, parts)?;
            Ok((Some(kernel), None))
        }
        Start::Saved(saved) => {
            traits.identity(ram, Vec::new()).check(&saved.identity)?;
            if saved.machine.cpus.len() != parts.max_cpus as usize {
                return Err(Error::State("it has the state of too many or too few CPUs".into()));
            }
            Ok((None, Some(saved)))
        }
    }
}

/// Returns the requests by which KVM tells the state of a CPU.
fn registers(kvm: &Kvm, vm: &VmFd) -> Result<Arc<Registers>> {
    let listed = kvm.get_msr_index_list().map_err(Error::kvm("tell which registers it saves"))?;
    Ok(Arc::new(Registers::new(vm, listed.as_slice())))
}

fn random() -> Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(Error::system("getrandom"))?;
    Ok(bytes)
}

/// Puts all that the guest finds at its start into its memory. Returns the kernel's place.
fn load(
    ram: &GuestRam,
    kernel: &OwnedFd,
    initramfs: Option<&OwnedFd>,
    command_line: &str,
    parts: &acpi::Parts,
) -> Result<Kernel> {
    let kernel = loader::load_kernel(ram, kernel.as_fd())?;
    let initramfs = match initramfs {
        Some(file) => Some(loader::load_initramfs(ram, file.as_fd(), kernel)?),
        None => None,
    };
    loader::write_reset_vector(ram)?;
    let rsdp = acpi::write_tables(&ram.memory(), parts)?;
    let command_line = format!("{MACHINE_WORDS} {command_line}");
    loader::write_start_info(ram, &command_line, initramfs, rsdp)?;
    Ok(kernel)
}

/// Has the kernel emulate the local APICs alone: no IOAPIC, no PIC, no PIT.
fn split_interrupt_controller(vm: &VmFd) -> Result<()> {
    let mut cap = kvm_enable_cap { cap: KVM_CAP_SPLIT_IRQCHIP, ..Default::default() };
    cap.args[0] = layout::PINS as u64;
    vm.enable_cap(&cap).map_err(Error::kvm("split its interrupt controller"))
}
