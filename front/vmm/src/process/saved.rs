//! The process of a machine that is saved, or goes on from a saved state.

use std::os::fd::OwnedFd;

use serde_json::{Value, json};
use slipway_vmm::state::{OwnState, Saved};
use slipway_vmm::{Machine, Parts};

use super::Process;
use crate::cpus::HotCpus;
use crate::functions::Functions;
use crate::memory::HotMemory;
use crate::ports::Ports;
use crate::qmp::{self, Command};
use crate::save::{self, Finished, SaveRequest};

/// Lets the parts of the machine outside of `slipway_vmm` go on as the saved ones.
pub(super) fn restore(
    machine: &Machine,
    ports: &Ports,
    memory: &mut HotMemory,
    sockets: Vec<OwnedFd>,
    saved: &Saved,
) -> Result<(Functions, HotCpus), String> {
    memory.restore(machine, &saved.machine.own.memory)?;
    ports.restore(machine, &saved.machine.own)?;
    let hot_cpus = HotCpus::restore(&saved.machine.plugged_cpus, &machine.board)?;
    Ok((Functions::restore(machine, sockets, &saved.machine.functions)?, hot_cpus))
}

impl Process {
    /// Checks that a command can be carried out while the machine is saved.
    pub(super) fn permits(&self, command: &Command) -> Result<(), String> {
        match command {
            Command::Save { .. } => self.saves.is_free().and(self.saves.copies_nothing()),
            Command::Continue | Command::Stop => self.saves.is_free(),
            Command::CopyAhead | Command::Plug { .. } if !self.saves.freezes() => {
                self.saves.copies_nothing()
            }
            Command::PowerDown
            | Command::Plug { .. }
            | Command::PlugCpu { .. }
            | Command::Unplug { .. }
            | Command::RequestMemory { .. }
            | Command::CopyAhead
                if self.saves.freezes() =>
            {
                Err("the machine was saved: let it go on before".into())
            }
            _ => Ok(()),
        }
    }

    /// Begins to save the machine into the first file, and its memory into the second, if there is
    /// one; with `rest` only what was written to since it was copied ahead.
    pub(super) fn save(
        &mut self,
        id: &Value,
        files: Vec<OwnedFd>,
        rest: bool,
    ) -> Result<(), String> {
        let rest = rest.then(|| self.saves.written()).transpose()?;
        let (file, pages) = save::check_files(files)?;
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
        self.saves.begin(id.clone(), SaveRequest { saver, functions, parts, file, pages, rest })
    }

    /// Begins to copy the memory into the pipe that came, while the guest runs.
    pub(super) fn copy_ahead(&mut self, id: &Value, files: Vec<OwnedFd>) -> Result<(), String> {
        let pages = save::check_pipe(files)?;
        self.functions.are_settled()?;
        let (chassis, functions) = (self.running.chassis.clone(), self.functions.named());
        self.saves.copy_ahead(id.clone(), chassis, functions, pages)
    }

    /// Uses what threads have copied, saved or let go on.
    pub(super) fn finish_save(&mut self) {
        while let Some(finished) = self.saves.take() {
            match finished {
                Finished::Copied(id, outcome) => {
                    let outcome = outcome.map(|(written, last)| {
                        self.saves.keep(written);
                        json!({ "last": last })
                    });
                    self.answer(&id, outcome);
                }
                Finished::Saved(id, outcome) => {
                    self.answer(&id, outcome.map(|bytes| json!({ "bytes": bytes })));
                }
                Finished::Started(id, Ok(())) => {
                    self.ports.go_on();
                    self.memory.go_on();
                    self.running.cpus.resume();
                    self.saves.forget();
                    self.answer(&id, Ok(json!({})));
                    self.tell(&qmp::event("RESUME", json!({})));
                }
                Finished::Started(id, Err(reason)) => self.answer(&id, Err(reason)),
            }
        }
    }
}
