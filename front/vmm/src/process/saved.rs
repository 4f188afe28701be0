//! The process of a machine that is saved, or goes on from a saved state.

use std::os::fd::OwnedFd;

use serde_json::{Value, json};
use slipway_vmm::state::{OwnState, Saved};
use slipway_vmm::{Machine, Parts};

use super::Process;
use crate::cpus::HotCpus;
use crate::functions::Functions;
use crate::ports::Ports;
use crate::qmp::{self, Command};
use crate::save::{self, Finished, Job};

/// Lets the parts of the machine outside of `slipway_vmm` go on as the saved ones.
pub(super) fn restore(
    machine: &Machine,
    ports: &Ports,
    sockets: Vec<OwnedFd>,
    saved: &Saved,
) -> Result<(Functions, HotCpus), String> {
    ports.restore(machine, &saved.machine.own)?;
    let hot_cpus = HotCpus::restore(&saved.machine.plugged_cpus, machine.board())?;
    Ok((Functions::restore(machine, sockets, &saved.machine.functions)?, hot_cpus))
}

impl Process {
    /// Checks that a command can be carried out while the machine is saved.
    pub(super) fn permits(&self, command: &Command) -> Result<(), String> {
        match command {
            Command::Save | Command::Continue | Command::Stop => self.saves.is_free(),
            Command::PowerDown
            | Command::Plug { .. }
            | Command::PlugCpu { .. }
            | Command::Unplug { .. }
            | Command::RequestMemory { .. }
                if self.saves.freezes() =>
            {
                Err("the machine was saved: let it go on before".into())
            }
            _ => Ok(()),
        }
    }

    /// Begins to save the machine into `file`.
    pub(super) fn save(&mut self, id: &Value, file: Option<OwnedFd>) -> Result<(), String> {
        let file = save::check_file(file)?;
        if self.running.cpus.is_running() || !self.running.cpus.are_parked() {
            return Err("the guest runs: stop it before it is saved".into());
        }
        self.look_at_slots();
        self.functions.are_settled()?;
        let parts = Parts {
            own: OwnState { memory: self.memory.save(), ..self.ports.save() },
            functions: Vec::new(),
            plugged_cpus: self.hot_cpus.save(),
        };
        let (saver, functions) = (self.running.saver(), self.functions.named());
        self.saves.begin(id.clone(), Job { saver, functions, parts, file })
    }

    /// Uses what a thread has saved or let go on.
    pub(super) fn finish_save(&mut self) {
        match self.saves.take() {
            Some(Finished::Saved(id, outcome)) => {
                self.answer(&id, outcome.map(|bytes| json!({ "bytes": bytes })));
            }
            Some(Finished::Started(id, Ok(()))) => {
                self.ports.go_on();
                self.memory.go_on();
                self.running.cpus.resume();
                self.answer(&id, Ok(json!({})));
                self.tell(&qmp::event("RESUME", json!({})));
            }
            Some(Finished::Started(id, Err(reason))) => self.answer(&id, Err(reason)),
            None => {}
        }
    }
}
