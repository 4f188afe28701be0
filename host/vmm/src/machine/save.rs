//! Saves a machine whose guest is stopped, and makes successors of it.

use std::io::{self, Write};
use std::sync::Arc;

use kvm_bindings::kvm_clock_data;
use slipway_machine::pages::END;

use super::{Chassis, Machine, Running};
use crate::board::Board;
use crate::cpus::CpuSaver;
use crate::loader::put;
use crate::memory::GuestRam;
use crate::pages::Zeros;
use crate::state::{FunctionState, Identity, MachineState, OwnState, Saved, Shown};
use crate::{Error, Result, layout, pages};

/// The parts of a machine's identity beside its memory and its functions.
#[derive(Clone)]
pub(super) struct Traits {
    /// The processor that CPU 0 shows the guest.
    pub shown: Arc<Shown>,
    /// CPUs at the start, the most CPUs, and slots for hot plug.
    pub cpus: [u32; 3],
}

impl Traits {
    /// Returns the identity of a machine with this memory, and functions of these numbers.
    pub fn identity(&self, ram: &GuestRam, functions: Vec<usize>) -> Identity {
        Identity::new(ram, &self.shown, self.cpus, functions)
    }
}

/// Saves a machine, on any thread. The guest is stopped, and the functions are as well.
pub struct Saver {
    cpus: CpuSaver,
    board: Arc<Board>,
    chassis: Chassis,
    traits: Traits,
}

/// The parts of a state that the machine's functions and the program have.
pub struct Parts {
    /// The machine's own functions.
    pub own: OwnState,
    /// The functions behind sockets, ascending by their numbers.
    pub functions: Vec<FunctionState>,
    /// The names of plugged CPUs, by their numbers.
    pub plugged_cpus: Vec<(u8, String)>,
}

impl Running {
    /// Returns what saves the machine.
    pub fn saver(&self) -> Saver {
        let (board, chassis) = (Arc::clone(&self.board), self.chassis.clone());
        Saver { cpus: self.cpus.saver(), board, chassis, traits: self.traits.clone() }
    }
}

impl Saver {
    /// Returns the state of the machine, as a file. Waits for the CPUs' threads.
    ///
    /// # Errors
    /// [`Error::State`] if the guest is not stopped, or is told to run meanwhile; [`Error::Kvm`].
    pub fn save(&self, parts: Parts) -> Result<Vec<u8>> {
        let Parts { own, functions, plugged_cpus } = parts;
        // The functions' last interrupts have come: the local APICs are saved with them.
        let cpus = self.cpus.save()?;
        let clock = self.chassis.vm.get_clock().map_err(Error::kvm("tell its clock"))?;
        let numbers = functions.iter().map(|function| function.number).collect();
        let machine = MachineState {
            clock: clock.clock,
            cpus,
            interrupts: self.chassis.interrupts.save(),
            board: self.board.save(),
            shows_configuration: self.chassis.pci.is_shown(),
            own,
            functions,
            plugged_cpus,
        };
        let identity = self.traits.identity(&self.chassis.ram, numbers);
        Saved { identity, machine }.encode()
    }

    /// Writes the guest's memory to `to`: the stream of [`slipway_machine::pages`]. Nothing changes
    /// the memory of a machine that was saved.
    ///
    /// # Errors
    /// The error of writing, or of a system call.
    pub fn write_pages(&self, to: &mut impl Write) -> io::Result<()> {
        pages::write(&self.chassis.ram, Zeros::Skip, to, &END)
    }
}

impl Machine {
    /// Lets the new machine, whose CPUs have their state, go on as the saved one: interrupts,
    /// board, clock, and a VM generation ID of its own. Functions are restored afterwards, and then
    /// interrupts are routed ([`Machine::route_interrupts`]).
    pub(super) fn take_over(&mut self, saved: &MachineState, generation: &[u8; 16]) -> Result<()> {
        let routes = self.chassis.interrupts.routes();
        routes.collect();
        self.chassis.interrupts.restore(&saved.interrupts)?;
        self.board.restore(&saved.board, Arc::clone(&self.output))?;
        self.present |= saved.board.plugged_cpus();
        (self.shows_configuration, self.is_copy) = (saved.shows_configuration, true);
        put(&self.chassis.ram.memory(), layout::GENERATION_ID, generation)?;
        // Without flags the clock goes on from this value, whatever time has passed meanwhile.
        let clock = kvm_clock_data { clock: saved.clock, ..Default::default() };
        self.chassis.vm.set_clock(&clock).map_err(Error::kvm("set its clock"))
    }

    /// Tells KVM of all interrupt routes of a machine that goes on from a saved state, in one
    /// request. Called once its functions are attached, and before they run.
    ///
    /// # Errors
    /// [`Error::Kvm`].
    pub fn route_interrupts(&self) -> Result<()> {
        self.chassis.interrupts.routes().tell()
    }
}
