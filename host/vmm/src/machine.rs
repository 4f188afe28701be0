//! Makes a machine of its configuration, and holds it together.

mod empty;
mod make;
mod save;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvm_ioctls::VmFd;
use slipway_machine::{HotRegion, Template};

use crate::ahead::Ahead;
use crate::board::{Board, Slots};
use crate::cpu::Cpu;
use crate::cpus::Cpus;
use crate::interrupts::Interrupts;
use crate::loader::Kernel;
use crate::memory::{GuestRam, MemorySlots};
use crate::output::Output;
use crate::pci::Bus;
use crate::routes::Routes;
use crate::state::Saved;
use crate::{Result, acpi, layout, plug, seat};
pub use empty::EmptyVm;
use make::{Offer, Origin, begin, check_counts, make_cpus, make_ram, random};
use save::Traits;
pub use save::{Parts, Saver};

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
    /// The processor that the guest sees.
    pub template: Template,
    /// KVM's virtual machine, which this one is made of.
    pub vm: EmptyVm,
    /// The guest's memory: a memfd that is sealed against shrinking; its size is the size of the
    /// RAM and of the regions of hot-plug memory.
    pub memory: OwnedFd,
    /// The connection to the pool that gave the memory, if a pool did.
    pub lease: Option<OwnedFd>,
    /// A file whose pages the guest reads and shares with other guests ([`crate::shared`]).
    pub shared: Option<OwnedFd>,
    /// The regions of hot-plug memory ([`crate::hot_memory`]), up to
    /// [`slipway_machine::MAX_HOT_REGIONS`]. Their bytes are the last ones of `memory`, which is no
    /// recycled memory of a pool.
    pub hot_memory: Vec<HotRegion>,
    /// The guest has a device to report free pages to ([`crate::own::balloon`]).
    pub free_page_reporting: bool,
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
    /// KVM's handle of the machine.
    pub vm: Arc<VmFd>,
    /// The guest's memory.
    pub ram: Arc<GuestRam>,
    /// The interrupt lines.
    pub interrupts: Arc<Interrupts>,
    /// The PCI bus.
    pub pci: Arc<Bus>,
}

impl Chassis {
    /// Returns the bytes of the guest's memory that somebody has touched: the file has no pages for
    /// the others.
    pub fn touched(&self) -> u64 {
        /// Bytes of a block of stat(2).
        const BLOCK: u64 = 512;
        let stat = rustix::fs::fstat(self.ram.file());
        stat.map_or(0, |stat| stat.st_blocks.cast_unsigned() * BLOCK)
    }
}

/// A machine whose CPUs have not run yet.
pub struct Machine {
    /// The parts that functions are attached to.
    pub chassis: Chassis,
    /// The board.
    pub board: Arc<Board>,
    /// The destination of what the guest prints.
    pub output: Arc<Output>,
    memory_slots: MemorySlots,
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
    /// [`crate::Error`]; nothing is left.
    pub fn new(config: Config) -> Result<Self> {
        let Config { cpus, max_cpus, slots, template, vm, console, start, .. } = config;
        let hot = &config.hot_memory;
        let reports = config.free_page_reporting;
        check_counts(cpus, max_cpus, slots, hot.len() + usize::from(reports))?;
        let EmptyVm { kvm, vm } = vm;
        let source = (config.memory, config.lease);
        let ram = Arc::new(make_ram(&kvm, source, config.shared, hot)?);
        let vm = Arc::new(vm);
        let mut memory_slots = MemorySlots::begin(&vm, &ram)?;
        let offer = Offer::new(&kvm, template, max_cpus)?;
        let counts = [cpus, max_cpus, slots.into()];
        let traits = Traits { shown: Arc::new(offer.shown()?), cpus: counts };
        let generation = random()?;
        let nodes = acpi::ranges(&ram);
        let parts = acpi::Parts { cpus, max_cpus, slots, generation, nodes };
        let origin = begin(start, &ram, &parts, &traits)?;
        if let Origin::Saved(_) = &origin {
            // KVM looks for pages at addresses of saved registers.
            memory_slots.finish()?;
        }
        let all = make_cpus(&kvm, &vm, &offer, &origin)?;
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
            memory_slots,
            cpus: all,
            present: seat::first(cpus),
            kernel: None,
            shows_configuration: true,
            is_copy: false,
            traits,
        };
        match origin {
            Origin::Kernel(kernel) => machine.kernel = Some(kernel),
            Origin::Saved(saved) => machine.take_over(&saved.machine, &generation)?,
        }
        Ok(machine)
    }

    /// Returns the memory that the guest will touch soon, if that is known: the guest is Linux,
    /// whose kernel has several MiB, and its memory is not a pool's. (A fork, whose memory is a
    /// pool's, too, begins at no kernel.)
    pub fn ahead(&self) -> Option<Ahead> {
        let ram = &self.chassis.ram;
        let end = self.kernel.as_ref()?.end;
        let known = end > layout::HIGH_MEMORY + layout::HUGE_PAGE && !ram.is_recycled();
        known.then(|| Ahead::new(Arc::clone(ram), end))
    }

    /// Starts the CPUs' threads, paused. Each thread calls `begin` first, for example to give up
    /// rights. A guest that goes on from a saved state is told that it is in a copy.
    ///
    /// # Errors
    /// [`crate::Error::System`], [`crate::Error::Kvm`].
    pub fn start(mut self, begin: impl Fn() + Clone + Send + 'static) -> Result<Running> {
        if self.is_copy {
            self.board.generation_changed();
        }
        let cpus = Cpus::start(self.cpus, self.present, &self.board, begin)?;
        self.memory_slots.finish()?;
        let Self { board, chassis, traits, .. } = self;
        if self.shows_configuration {
            chassis.pci.show(&chassis.vm, layout::OWN_DEVICES)?;
        }
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
