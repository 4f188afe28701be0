//! The CPUs of a microVM whose VMM is hostile, or not.

use std::collections::BTreeSet;
use std::sync::Mutex;

use slipway_hypervisor::{CpuSlot, Error, Result};

/// The number of CPUs that a machine was made for.
pub const MOST: u32 = 8;

/// A VMM with room for CPUs, which lies about them or not, chosen by the name of its sandbox. It
/// begins with one.
#[derive(Debug)]
pub struct Liar {
    kind: CpuGuestKind,
    state: Mutex<CpuGuestState>,
}

#[derive(Debug, PartialEq, Eq)]
enum CpuGuestKind {
    /// Adds no CPU, and lists all of them as there from the first change on.
    ListsAll,
    /// Adds no CPU, and answers nothing more from the first change on.
    FallsSilent,
    /// Lists more CPUs than the machine was made for, and removes any.
    ListsMany,
    /// Adds and removes the CPUs that it is asked to, and lists those that are there.
    Obeys,
}

#[derive(Debug, Default)]
struct CpuGuestState {
    changed: bool,
    added: BTreeSet<u32>,
    removed: BTreeSet<String>,
}

impl Liar {
    /// Returns the VMM of the sandbox with this name, or `None` if it has no room for CPUs.
    pub fn of(name: &str) -> Option<Self> {
        let kind = match name {
            "lists-all" => CpuGuestKind::ListsAll,
            "falls-silent" => CpuGuestKind::FallsSilent,
            "lists-many" => CpuGuestKind::ListsMany,
            "obeys" | "chosen" => CpuGuestKind::Obeys,
            _ => return None,
        };
        Some(Self { kind, state: Mutex::default() })
    }

    pub fn list(&self) -> Result<Vec<CpuSlot>> {
        let state = self.state.lock().unwrap();
        let slots = |count, there: &dyn Fn(u32) -> bool| {
            (0..count).map(|cpu| CpuSlot { cpu, present: there(cpu) }).collect()
        };
        match self.kind {
            CpuGuestKind::FallsSilent if state.changed => Err(Error::Control("no answer".into())),
            CpuGuestKind::ListsMany => Ok(slots(255, &|cpu| !state.removed.contains(&name(cpu)))),
            CpuGuestKind::Obeys => Ok(slots(MOST, &|cpu| cpu == 0 || state.added.contains(&cpu))),
            _ => Ok(slots(MOST, &|cpu| state.changed || cpu == 0)),
        }
    }

    pub fn plug(&self, cpu: u32) -> Result<()> {
        let mut state = self.state.lock().unwrap();
        state.changed = true;
        if self.kind == CpuGuestKind::Obeys {
            state.added.insert(cpu);
            return Ok(());
        }
        Err(Error::Control("no CPU is added".into()))
    }

    /// Removes a CPU if that is one that the sandbox can have.
    pub fn unplug(&self, cpu: &str) -> Result<()> {
        let known = (1..MOST).any(|one| name(one) == cpu);
        if self.kind == CpuGuestKind::Obeys {
            self.state.lock().unwrap().added.retain(|one| name(*one) != cpu);
            return Ok(());
        }
        if self.kind != CpuGuestKind::ListsMany || !known {
            return Err(Error::Control(format!("{cpu} is not removed")));
        }
        self.state.lock().unwrap().removed.insert(cpu.to_owned());
        Ok(())
    }
}

fn name(cpu: u32) -> String {
    format!("cpu-{cpu}")
}
