//! Functions that come and go while the guest runs.
//!
//! A function's server may take its time, so a thread of its own connects each one that comes, and
//! one takes apart each one that goes. The guest decides when a function goes: one that never
//! ejects it keeps that function, and nothing else waits for it.

use std::collections::btree_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};

use serde_json::{Value, json};
use slipway_vmm::plug::{FIRST_FUNCTION, Kind};
use slipway_vmm::remote::Attached;

use super::{Function, Functions, Outcome};
use crate::qmp;

/// Returns the PCI device number of a function.
pub(super) fn device_of(number: usize) -> u8 {
    FIRST_FUNCTION + number as u8
}

/// A function that the guest has been asked to give up.
pub(super) struct Leaving {
    /// Lets the waiting thread take the function apart. Dropping it ends the thread.
    ejected: SyncSender<()>,
}

impl Functions {
    /// Returns the functions that are on the bus: number, name, whether the server is connected,
    /// and whether the guest has been asked to give the function up.
    pub fn list(&self) -> Value {
        let describe = |(number, function): (&usize, &Function)| {
            json!({
                "function": number,
                "id": function.name,
                "connected": function.attached.lost().is_none(),
                "leaving": function.leaving.is_some(),
            })
        };
        self.all.iter().map(describe).collect()
    }

    /// Returns whether there is a function `name`, or one that comes or goes.
    pub fn has(&self, name: &str) -> bool {
        let mut names = self.all.values().map(|function| &function.name);
        names.any(|taken| taken == name) || self.reserved.values().any(|taken| taken == name)
    }

    /// Connects the function behind `socket` and adds it to the bus as `name`, which no other
    /// device has, on a thread of its own.
    ///
    /// # Errors
    /// The reason why that cannot be tried.
    pub fn plug(&mut self, name: String, socket: Option<OwnedFd>, id: Value) -> Result<(), String> {
        let socket = socket.ok_or("device_add needs a descriptor with its message")?;
        let slots = self.board.slots().functions.len();
        let free =
            |number: &usize| !self.all.contains_key(number) && !self.reserved.contains_key(number);
        let number = (0..slots).find(free).ok_or_else(|| {
            format!("all {slots} slots for hot plug are taken; --slots sets their number")
        })?;
        let (chassis, given) = (self.chassis.clone(), name.clone());
        self.jobs.spawn("plug", move || {
            let attached = Attached::plug(&chassis, device_of(number), number, socket);
            let outcome = attached.map_err(|error| error.to_string());
            Some(Outcome::Plugged { number, name: given, id, outcome })
        })?;
        self.reserved.insert(number, name);
        Ok(())
    }

    /// Uses a function that a thread has connected. Returns the lines for the client.
    pub(super) fn plugged(
        &mut self,
        number: usize,
        name: String,
        id: &Value,
        outcome: Result<Attached, String>,
    ) -> Vec<Vec<u8>> {
        self.reserved.remove(&number);
        let outcome = outcome.map(|attached| {
            self.all.insert(number, Function::new(name, attached));
            self.board.plugged(Kind::Function, device_of(number));
            json!({ "function": number })
        });
        vec![qmp::answer(id, outcome)]
    }

    /// Asks the guest to give up the device `name`. It is removed when the guest has ejected it.
    ///
    /// # Errors
    /// The reason why it cannot be removed.
    pub fn unplug(&mut self, name: &str) -> Result<(), String> {
        let mut all = self.all.iter_mut();
        let found = all.find(|(_, function)| function.name == name);
        let (&number, function) = found.ok_or_else(|| format!("there is no device {name:?}"))?;
        let device = device_of(number);
        if !self.board.slots().functions.contains(&device) {
            return Err(format!("device {name:?} is in no slot for hot plug; see --slots"));
        }
        if function.leaving.is_none() {
            // The thread is made now, so that a failure is this command's.
            let (ejected, wait) = sync_channel(1);
            let (attached, chassis) = (Arc::clone(&function.attached), self.chassis.clone());
            let name = name.to_owned();
            self.jobs.spawn("unplug", move || {
                wait.recv().ok()?;
                attached.close(&chassis);
                drop(attached);
                Some(Outcome::Removed { number, name })
            })?;
            function.leaving = Some(Leaving { ejected });
        }
        self.board.ask_for(Kind::Function, device);
        Ok(())
    }

    /// Has a thread take apart the function that the guest has ejected as PCI device `device`.
    pub fn ejected(&mut self, device: u8) {
        let number = usize::from(device.saturating_sub(FIRST_FUNCTION));
        let Entry::Occupied(entry) = self.all.entry(number) else { return };
        let Function { name, attached, leaving, .. } = entry.remove();
        // The thread has another reference, and drops the last one.
        drop(attached);
        self.reserved.insert(number, name);
        // Only what was asked for is ejected, so the thread is there.
        if let Some(Leaving { ejected }) = leaving {
            let _ = ejected.send(());
        }
    }

    /// Frees the number of a function that has been taken apart. Returns the line for the client.
    pub(super) fn removed(&mut self, number: usize, name: &str) -> Vec<u8> {
        self.reserved.remove(&number);
        qmp::device_deleted(name)
    }
}
