//! Functions of a machine that is saved, and of its successors.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_vmm::Machine;
use slipway_vmm::plug::{Kind, MAX_FUNCTIONS};
use slipway_vmm::remote::Attached;
use slipway_vmm::state::FunctionState;

use super::{Function, Functions, device_of};

/// A function, with its number and the name by which it is removed.
pub struct NamedFunction {
    /// The number, from 0.
    pub number: usize,
    /// The name.
    pub name: String,
    /// The function.
    pub attached: Arc<Attached>,
}

impl Functions {
    /// Returns all functions, for a thread that stops or starts them.
    pub fn named(&self) -> Vec<NamedFunction> {
        let named = |(&number, function): (&usize, &Function)| {
            let (name, attached) = (function.name.clone(), Arc::clone(&function.attached));
            NamedFunction { number, name, attached }
        };
        self.all.iter().map(named).collect()
    }

    /// Checks that no function comes, goes, or has lost its server.
    ///
    /// # Errors
    /// The reason why the machine cannot be saved.
    pub fn are_settled(&self) -> Result<(), String> {
        if let Some(name) = self.reserved.values().next() {
            return Err(format!("the device {name:?} comes or goes; save the machine afterwards"));
        }
        for (number, function) in &self.all {
            let name = &function.name;
            if function.leaving.is_some() {
                return Err(format!("the guest was asked to give up the device {name:?}"));
            }
            if function.reconnecting || function.attached.lost().is_some() {
                return Err(format!("function {number} has no connection to its server"));
            }
        }
        Ok(())
    }

    /// Connects the functions of a saved machine to `sockets`, one each, and lets them go on.
    ///
    /// # Errors
    /// The reason why one cannot go on, in one line.
    pub fn restore(
        machine: &Machine,
        sockets: Vec<OwnedFd>,
        saved: &[FunctionState],
    ) -> Result<Self, String> {
        check(machine, saved, sockets.len())?;
        let mut all = BTreeMap::new();
        for (FunctionState { number, name, state }, socket) in saved.iter().zip(sockets) {
            let attached = Attached::succeed(machine, device_of(*number), *number, socket, state);
            all.insert(*number, Function::new(name.clone(), attached?));
        }
        machine.route_interrupts()?;
        // Each has its interrupts from here on.
        for (FunctionState { number, state, .. }, function) in saved.iter().zip(all.values()) {
            function.attached.load(*number, state)?;
        }
        Self::of(machine, all)
    }
}

/// Checks that a machine can have had these functions, and that as many sockets are given.
fn check(machine: &Machine, saved: &[FunctionState], given: usize) -> Result<(), String> {
    let refused = |what: &str| Err(format!("the saved state: {what}"));
    if saved.len() != given {
        let count = saved.len();
        return refused(&format!("it has {count} functions; --function is given {given} times"));
    }
    let numbers = saved.iter().map(|function| function.number);
    let ascends = numbers.clone().is_sorted_by(|before, after| before < after);
    if !ascends || numbers.clone().any(|number| number >= usize::from(MAX_FUNCTIONS)) {
        return refused("functions that cannot be");
    }
    let slots = &machine.board.slots().functions;
    let devices = numbers.map(device_of).filter(|device| slots.contains(device));
    let bits = devices.fold(0, |bits, device| bits | 1u32 << device);
    if bits != machine.board.taken(Kind::Function) {
        return refused("slots for hot plug whose functions are not there");
    }
    Ok(())
}
