//! CPUs that come and go while the guest runs.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use slipway_vmm::board::Board;
use slipway_vmm::cpus::Cpus;
use slipway_vmm::plug::Kind;

use crate::qmp;

/// The plugged CPUs: by their numbers, the names by which a client removes them.
#[derive(Default)]
pub struct HotCpus(BTreeMap<u8, String>);

impl HotCpus {
    /// Returns the CPUs of a saved machine, which `board` has as well.
    ///
    /// # Errors
    /// The reason why the machine cannot have had them.
    pub fn restore(saved: &[(u8, String)], board: &Board) -> Result<Self, String> {
        let all = Self(saved.iter().cloned().collect());
        let bit = |cpu: &u8| 1_u32.checked_shl((*cpu).into()).unwrap_or(0);
        let bits = all.0.keys().fold(0, |bits, cpu| bits | bit(cpu));
        match bits == board.taken(Kind::Cpu) && all.0.len() == bits.count_ones() as usize {
            true => Ok(all),
            false => Err("the saved state: names of CPUs that are not there".into()),
        }
    }

    /// Returns number and name of each CPU, for a successor.
    pub fn save(&self) -> Vec<(u8, String)> {
        self.0.iter().map(|(&cpu, name)| (cpu, name.clone())).collect()
    }

    /// Returns whether a CPU was plugged as `name` and has not left.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    fn find(&self, name: &str) -> Option<u8> {
        self.0.iter().find(|(_, taken)| *taken == name).map(|(&cpu, _)| cpu)
    }

    /// Plugs CPU `cpu` as `name`.
    ///
    /// # Errors
    /// The reason why it cannot be plugged.
    pub fn plug(
        &mut self,
        cpus: &Cpus,
        board: &Board,
        name: String,
        cpu: u8,
    ) -> Result<(), String> {
        let slots = &board.slots().cpus;
        if !slots.contains(&cpu) {
            let most = slots.end;
            return Err(format!("CPU {cpu} cannot be plugged: --max-cpus is {most}"));
        }
        if self.0.contains_key(&cpu) {
            return Err(format!("CPU {cpu} is there already"));
        }
        self.0.insert(cpu, name);
        cpus.plug(cpu);
        board.plugged(Kind::Cpu, cpu);
        Ok(())
    }

    /// Asks the guest to give up the CPU `name`. It is removed when the guest has ejected it.
    ///
    /// # Errors
    /// There is no such CPU.
    pub fn unplug(&self, board: &Board, name: &str) -> Result<(), String> {
        let cpu = self.find(name).ok_or_else(|| format!("there is no device {name:?}"))?;
        board.ask_for(Kind::Cpu, cpu);
        Ok(())
    }

    /// Stops CPU `cpu`, which the guest has ejected. Returns the line for the client.
    pub fn ejected(&mut self, cpus: &Cpus, cpu: u8) -> Option<Vec<u8>> {
        cpus.unplug(cpu);
        self.0.remove(&cpu).map(|name| qmp::device_deleted(&name))
    }

    /// Returns the answer to `query-hotpluggable-cpus`: those that are there have a path.
    pub fn list(&self, board: &Board) -> Value {
        let describe = |cpu: u8| {
            let mut all = json!({
                "type": qmp::CPU_DRIVER, "vcpus-count": 1, "props": { "core-id": cpu },
            });
            if cpu < board.slots().cpus.start {
                all["qom-path"] = format!("/machine/unattached/cpu{cpu}").into();
            } else if let Some(name) = self.0.get(&cpu) {
                all["qom-path"] = qmp::path(name).into();
            }
            all
        };
        (0..board.slots().cpus.end).rev().map(describe).collect()
    }
}
