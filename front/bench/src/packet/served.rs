//! Network functions in another process, and memory for the drivers of this one.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use super::Source;
use crate::block::native::{Cpus, pin};

/// The longest wait for a function, or for an interrupt that must come.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of each driver's memory.
pub(super) const MEMORY: u64 = 8 << 20;

/// The model of the functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Model {
    /// virtio-net.
    Virtio,
    /// Intel's 82540EM.
    E1000,
    /// The same with a communication status block.
    E1000Csb,
}

/// The process that a subject needs.
pub struct Wanted<'a> {
    /// The folder of the sockets: `1` and `2`, of functions with the MAC addresses of
    /// [`Devices::mac`](super::Devices::mac).
    pub directory: &'a Path,
    /// The processors: the process runs on the target's.
    pub cpus: &'a Cpus,
    /// The model of both functions.
    pub model: Model,
    /// The source at the switch that sends to the second function, if there is one.
    pub source: Option<Source>,
}

/// A running process with functions. Dropping it ends the process.
pub trait Served: Send {
    /// Returns the present counts.
    ///
    /// # Errors
    /// If the process does not answer.
    fn counts(&mut self) -> Result<TargetCounts>;
}

/// Starts a process with functions.
pub type Serve = dyn FnMut(&Wanted<'_>) -> Result<Box<dyn Served>>;

/// The counts of a process with functions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetCounts {
    /// The counts of each e1000 function, in the order of the sockets; empty for other models.
    pub functions: Vec<FunctionCounts>,
    /// Frames that the source has sent.
    pub offered: u64,
}

/// The counts of an e1000 function, by the function itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCounts {
    /// Reads and writes of registers, by the manual's names.
    pub registers: BTreeMap<String, (u64, u64)>,
    /// Writes of the transmit tail that woke the device.
    pub kicks: u64,
    /// Times that the interrupt pin was asserted.
    pub interrupts: u64,
    /// Frames that the driver sent.
    pub sent: u64,
    /// Frames that the driver received.
    pub received: u64,
}

impl FunctionCounts {
    /// Returns the counts since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let earlier = |name: &String| before.registers.get(name).copied().unwrap_or_default();
        let registers = self.registers.iter().map(|(name, &(reads, writes))| {
            let (read, written) = earlier(name);
            (name.clone(), (reads - read, writes - written))
        });
        Self {
            registers: registers.filter(|(_, counts)| *counts != (0, 0)).collect(),
            kicks: self.kicks - before.kicks,
            interrupts: self.interrupts - before.interrupts,
            sent: self.sent - before.sent,
            received: self.received - before.received,
        }
    }

    /// Adds the counts of another turn.
    pub fn add(&mut self, other: &Self) {
        for (name, (reads, writes)) in &other.registers {
            let sum = self.registers.entry(name.clone()).or_default();
            *sum = (sum.0 + reads, sum.1 + writes);
        }
        self.kicks += other.kicks;
        self.interrupts += other.interrupts;
        self.sent += other.sent;
        self.received += other.received;
    }

    /// Returns reads and writes of a register, together.
    pub fn accesses(&self, register: &str) -> u64 {
        self.registers.get(register).map_or(0, |(reads, writes)| reads + writes)
    }

    /// Returns reads and writes of all registers: each is an exit of a guest.
    pub fn exits(&self) -> u64 {
        self.registers.values().map(|(reads, writes)| reads + writes).sum()
    }

    /// Returns the frames in both directions.
    pub fn frames(&self) -> u64 {
        self.sent + self.received
    }
}

/// Runs `drive` on the client's processors, in a thread of its own, since another subject may have
/// bound this one to other processors.
pub(super) fn drive_apart<R: Send>(
    cpus: &Cpus,
    drive: impl FnOnce() -> Result<R> + Send,
) -> Result<R> {
    std::thread::scope(|scope| {
        let driving = scope.spawn(|| {
            pin(&cpus.client)?;
            drive()
        });
        driving.join().unwrap_or_else(|_| bail!("the drivers' thread panicked"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_of_the_measured_time() {
        let counts = |tdt, icr, sent| FunctionCounts {
            registers: [("TDT".to_owned(), (0, tdt)), ("ICR".to_owned(), (icr, 0))].into(),
            kicks: tdt,
            interrupts: icr,
            sent,
            received: 0,
        };
        let mut during = counts(10, 3, 10).since(&counts(4, 3, 5));
        assert_eq!((during.accesses("TDT"), during.accesses("ICR"), during.sent), (6, 0, 5));
        during.add(&counts(1, 1, 1));
        assert_eq!((during.exits(), during.frames(), during.kicks), (8, 6, 7));
    }
}
