//! Counts of the operations of CNI plugins since the daemon began, for monitoring.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use slipway_plane_api::network_v1 as v1;
use slipway_telemetry::{BOUNDS_NS, Durations};

/// The commands of CNI that are calls of the daemon.
#[derive(Clone, Copy, Debug)]
pub enum Command {
    Add,
    Del,
    Check,
    Gc,
}

/// The names of the commands, in their order.
const NAMES: [&str; 4] = ["ADD", "DEL", "CHECK", "GC"];

/// The counts.
#[derive(Debug, Default)]
pub struct Operations(Mutex<[Counts; NAMES.len()]>);

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    failed: u64,
    succeeded: Durations,
}

impl Operations {
    /// Counts an operation that has ended.
    pub fn record(&self, command: Command, took: Duration, succeeded: bool) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = &mut all[command as usize];
        if succeeded {
            counts.succeeded.record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        } else {
            counts.failed += 1;
        }
    }

    /// Returns the counts for the interface.
    pub fn describe(&self) -> v1::Operations {
        let all = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let operations = NAMES.iter().zip(all).map(|(name, counts)| v1::Operation {
            command: (*name).to_owned(),
            failed: counts.failed,
            counts: counts.succeeded.counts().to_vec(),
            sum_ns: counts.succeeded.sum_ns(),
        });
        v1::Operations { bounds_ns: BOUNDS_NS.to_vec(), operations: operations.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_counted_by_command_and_outcome() {
        let operations = Operations::default();
        operations.record(Command::Add, Duration::from_millis(1), true);
        operations.record(Command::Gc, Duration::ZERO, false);
        let described = operations.describe();
        let of = |name: &str| described.operations.iter().find(|one| one.command == name).unwrap();
        assert_eq!((of("ADD").counts[1], of("ADD").failed, of("ADD").sum_ns), (1, 0, 1_000_000));
        assert_eq!((of("GC").counts.iter().sum::<u64>(), of("GC").failed), (0, 1));
        assert_eq!(of("DEL").counts.len(), described.bounds_ns.len() + 1);
    }
}
