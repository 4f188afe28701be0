//! The parts of a controller.
//!
//! A new bound of a controller is a field of `Limits` with its default and its range in
//! `Limits::check`. One that Identify or CAP tells the host is in `Shape` of `persist::state` as
//! well: a successor with another one is refused. One that changes the length of the journal
//! (`journal`) changes what the next daemon finds with the keeper: `JOURNAL_VERSION`. The plane
//! decides in `bounds` (`host/plane`, `controller.rs`). Tests: `parts` and `saved` of `src/tests`.
//! A limit of commands or bytes per second is none of these: `limiter` has it.

use std::collections::BTreeSet;
use std::sync::Arc;

use slipway_doorbells::Doorbells;
use slipway_pci::Interrupt;
use slipway_ram::{Lasting, Memory};
use slipway_telemetry::Clock;

use crate::doorbell_count;
use crate::namespace::Namespace;
use crate::registers::MAX_VECTORS;

/// The parts that a host hands to [`Controller::new`](crate::Controller::new).
pub struct Parts {
    /// The guest's memory.
    pub memory: Memory,
    /// One handle per MSI-X vector, in order, 1 to 256. 65 handles give every queue of the default
    /// limits a vector of its own.
    pub interrupts: Vec<Interrupt>,
    /// Doorbell cells, at least [`doorbell_count`].
    pub doorbells: Doorbells,
    /// The namespaces; there may be none.
    pub namespaces: Vec<Namespace>,
    /// The clock for the keep alive timer, the timestamp and power-on hours.
    pub clock: Arc<dyn Clock>,
    /// The identity that Identify Controller reports.
    pub identity: Identity,
    /// Bounds of queues, transfers and requests in flight.
    pub limits: Limits,
    /// Memory of [`journal_len`](crate::journal_len) bytes that outlives the process, if a
    /// successor shall be able to [`recover`](crate::Controller::recover) the controller. The
    /// doorbell cells must lie in such memory too.
    pub journal: Option<Lasting>,
}

/// Serial number and names of a controller (section 5.15.2.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// SN: 1 to 20 printable ASCII characters.
    pub serial: String,
    /// MN: 1 to 40 printable ASCII characters.
    pub model: String,
    /// FR: 1 to 8 printable ASCII characters.
    pub firmware: String,
    /// SUBNQN: an NVMe qualified name of at most 223 bytes (section 7.9).
    pub nqn: String,
}

impl Identity {
    /// Returns the identity of a Slipway controller with this serial number.
    pub fn new(serial: &str) -> Self {
        Self {
            serial: serial.into(),
            model: "Slipway NVMe controller".into(),
            firmware: env!("CARGO_PKG_VERSION").into(),
            nqn: format!("nqn.2026-01.dev.slipway:nvme:{serial}"),
        }
    }
}

/// Bounds of a controller's queues, transfers and requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// I/O queue pairs, 1 to 64.
    pub queue_pairs: u16,
    /// Entries of an I/O queue (CAP.MQES, section 3.1.1), 2 to 1,024.
    pub queue_entries: u16,
    /// Most bytes of one transfer (MDTS), a power of two, 4 KiB to 16 MiB.
    pub transfer: u32,
    /// Most disk requests in flight on one thread, at least 1. Further commands wait in their
    /// queues.
    pub in_flight: u32,
    /// Threads that the I/O queues are spread over, the controller's own included, 1 to 64. A
    /// controller with more than one thread gives its host a [`Lane`](slipway_pci::Lane) for each
    /// of the others.
    pub lanes: u16,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            queue_pairs: 64,
            queue_entries: 1024,
            transfer: 1 << 20,
            in_flight: 16_384,
            lanes: 1,
        }
    }
}

/// A mistake in the parts, made by the program or its configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    /// A text of the identity does not fit.
    #[error("{0} must be 1 to {1} printable ASCII characters")]
    Text(&'static str, usize),
    /// A limit is out of its range.
    #[error("limit {0} is out of range")]
    Limit(&'static str),
    /// There is no interrupt, or there are more than the MSI-X table has room for.
    #[error("an NVMe controller needs 1 to 256 interrupts")]
    Interrupts,
    /// Too few doorbell cells.
    #[error("{0} doorbell cells are needed")]
    Doorbells(usize),
    /// The journal's memory is too short or of another version.
    #[error("the journal is too short or of another version")]
    Journal,
    /// A namespace ID is used twice, 0, or above 1,024.
    #[error("namespace ID {0} is taken or not within 1 to 1024")]
    NamespaceId(u32),
    /// A disk's block size or size is not possible.
    #[error("the disk of namespace {0} has an impossible shape")]
    Geometry(u32),
    /// A namespace has fewer disks than threads.
    #[error("namespace {0} needs its disk once more for each lane")]
    Lanes(u32),
}

/// The highest namespace ID (NN, section 5.15.2.2). It is constant, whichever namespaces exist. One
/// Identify list and one Changed Namespace List hold that many.
pub(crate) const MAX_NSID: u32 = 1024;

impl Parts {
    pub(crate) fn check(&self) -> Result<(), PartsError> {
        self.identity.check()?;
        self.limits.check()?;
        if !(1..=MAX_VECTORS).contains(&self.interrupts.len()) {
            return Err(PartsError::Interrupts);
        }
        let cells = doorbell_count(self.limits.queue_pairs);
        if self.doorbells.len() < cells {
            return Err(PartsError::Doorbells(cells));
        }
        let mut seen = BTreeSet::new();
        for namespace in &self.namespaces {
            let nsid = namespace.nsid;
            if !(1..=MAX_NSID).contains(&nsid) || !seen.insert(nsid) {
                return Err(PartsError::NamespaceId(nsid));
            }
            if !namespace.has_shape() {
                return Err(PartsError::Geometry(nsid));
            }
            if namespace.lanes.len() + 1 < usize::from(self.limits.lanes) {
                return Err(PartsError::Lanes(nsid));
            }
        }
        Ok(())
    }
}

impl Identity {
    fn check(&self) -> Result<(), PartsError> {
        let texts = [
            ("serial", &self.serial, 20),
            ("model", &self.model, 40),
            ("firmware", &self.firmware, 8),
            ("nqn", &self.nqn, 223),
        ];
        for (name, text, most) in texts {
            let printable = text.bytes().all(|byte| (0x20..0x7f).contains(&byte));
            if !printable || text.is_empty() || text.len() > most {
                return Err(PartsError::Text(name, most));
            }
        }
        Ok(())
    }
}

impl Limits {
    fn check(&self) -> Result<(), PartsError> {
        let ranges = [
            ("queue_pairs", (1..=64).contains(&self.queue_pairs)),
            ("queue_entries", (2..=1024).contains(&self.queue_entries)),
            (
                "transfer",
                self.transfer.is_power_of_two() && (1 << 12..=1 << 24).contains(&self.transfer),
            ),
            ("in_flight", self.in_flight > 0),
            ("lanes", (1..=64).contains(&self.lanes)),
        ];
        match ranges.into_iter().find(|(_, fine)| !fine) {
            Some((name, _)) => Err(PartsError::Limit(name)),
            None => Ok(()),
        }
    }
}
