//! Saved state: everything that a successor needs to go on under a running guest.
//!
//! The format is JSON of the types below, which are separate from the live types. A state is taken
//! over whole or not at all. An unknown field, another version, another shape of the controller, or
//! a value that no controller can have reached is an error. Every byte counts as hostile.
//!
//! There are two ways back:
//! - After a kill, a controller goes on from its journal, with the predecessor's doorbell cells. It
//!   is the same controller, so its identity must be the same.
//! - Any other controller of the same size may take a state over, with the same content of guest
//!   memory: after a migration, or one of many from one snapshot. Serial number, model and NQN are
//!   its own, and its namespaces, too.
//!
//! In both cases namespaces may have come, gone or changed their size since, and the guest is told.
//! A namespace ID that names another disk is an error: the guest would write to the disk before it
//! heard of the change.
//!
//! No command is in flight in a saved state: the function is quiesced, so every fetched command has
//! its completion in guest memory. Commands that were not fetched are in guest memory anyway.
//!
//! Shadow doorbells: the state has the pages and the values seen last in them, but no event
//! indexes. A successor is awake at first, looks, and publishes its own event indexes before it
//! rests.
//!
//! Doorbells: a state has the values seen last, and those of the cells, which the guest may have
//! rung since. Cells that are all zero count as fresh and get the saved cells' values. Other cells
//! count as kept from before, with doorbells that were rung meanwhile. The keep alive timer starts
//! anew, since a restart is not the host's fault; the timestamp stands still between save and
//! restore.
//!
//! This file has the format and the way out; `restore` checks a state and takes it over.

mod restore;

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_nvme_spec::event::Event;
use slipway_pci::state::{ConfigState, MsixState};

pub(crate) use self::restore::{Origin, take_over};
use crate::cell::ShadowPages;
use crate::features::Features;
use crate::home::Home;
use crate::phase::{Phase, Shutdown};
use crate::queue_state::{CompletionState, QueueStates, SubmissionState};

/// The mark of an NVMe controller's state.
const KIND: &str = "slipway-nvme";
/// Version of the format. A state of another version is refused. Part of
/// [`JOURNAL_VERSION`](crate::JOURNAL_VERSION). A new field needs a new version or
/// `#[serde(default)]`; the head of `admin::logs` says what each costs.
pub(crate) const VERSION: u32 = 4;
/// Longest state that is parsed, in bytes. A full state has about half of this.
pub(crate) const MAX_LEN: usize = 1 << 20;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedState {
    kind: String,
    version: u32,
    shape: Shape,
    pci: ConfigState,
    msix: MsixState,
    registers: RegisterState,
    phase: Phase,
    shutdown: Shutdown,
    /// The shadow pages, if the host named any.
    shadow: Option<ShadowState>,
    submission_queues: Vec<SubmissionState>,
    completion_queues: Vec<CompletionState>,
    features: Features,
    /// Error Recovery of each namespace, in the order of the namespaces.
    error_recovery: Vec<u16>,
    event_requests: Vec<u16>,
    changed_namespaces: BTreeSet<u32>,
    events_waiting: Vec<EventState>,
    events_masked: u8,
    health: HealthState,
}

/// The properties that Identify told the host. A successor must share those that the host relies
/// on.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Shape {
    serial: String,
    model: String,
    nqn: String,
    vectors: u16,
    queue_pairs: u16,
    queue_entries: u16,
    transfer: u32,
    namespaces: Vec<NamespaceShape>,
}

#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NamespaceShape {
    nsid: u32,
    block_size: u32,
    blocks: u64,
    read_only: bool,
    nguid: [u8; 16],
    eui64: [u8; 8],
    uuid: [u8; 16],
    shared: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RegisterState {
    interrupt_mask: u32,
    configuration: u32,
    status: u32,
    admin_queues: u32,
    admin_submission: u64,
    admin_completion: u64,
}

/// The pages of Doorbell Buffer Config.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ShadowState {
    doorbells: u64,
    events: u64,
    /// See [`ShadowPages::number`].
    number: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct EventState {
    kind: u8,
    information: u8,
    log: u8,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HealthState {
    sectors_read: u64,
    sectors_written: u64,
    reads: u64,
    writes: u64,
    unsafe_shutdowns: u64,
    media_errors: u64,
    powered: Duration,
    errors: u64,
    /// The error log, by place in its ring.
    entries: Vec<ErrorState>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ErrorState {
    count: u64,
    queue: u16,
    command: u16,
    status: u16,
    lba: u64,
    nsid: u32,
}

/// Returns the state of a quiesced controller.
///
/// # Panics
/// If commands are in flight: the host did not quiesce, a programmer's error.
pub(crate) fn save(home: &Home) -> Vec<u8> {
    assert!(home.engine.inflight.is_empty(), "a controller is quiesced before it is saved");
    let mut queues = QueueStates::from(&home.engine.queues);
    queues.append(&home.fleet.saved_queues());
    queues.note_rung(&home.engine.doorbells);
    with_queues(home, queues)
}

/// Returns the present state of a controller, for a snapshot. The journal has the commands in
/// flight and the progress of the queues.
pub(crate) fn running(home: &Home) -> Vec<u8> {
    let mut queues = QueueStates::from(&home.engine.queues);
    queues.append(&home.fleet.present_queues(home.engine.shadow.is_some()));
    with_queues(home, queues)
}

/// Returns the state of a controller with these queues.
fn with_queues(home: &Home, queues: QueueStates) -> Vec<u8> {
    let state = SavedState {
        kind: KIND.into(),
        version: VERSION,
        shape: shape(home),
        pci: home.pci.save(),
        msix: home.msix.save(),
        registers: save_registers(home),
        phase: home.phase,
        shutdown: home.shutdown,
        shadow: home.engine.shadow.map(save_shadow),
        submission_queues: queues.submission,
        completion_queues: queues.completion,
        features: home.features.stopped(home.engine.clock.now()),
        error_recovery: home.engine.namespaces.iter().map(|one| one.error_recovery).collect(),
        event_requests: home.events.requests.iter().copied().collect(),
        changed_namespaces: home.events.changed.clone(),
        events_waiting: home.events.waiting.iter().map(save_event).collect(),
        events_masked: home.events.masked,
        health: save_health(home),
    };
    // The types hold nothing that JSON cannot express. If that fails, `restore` refuses the empty
    // state.
    serde_json::to_vec(&state).unwrap_or_default()
}

/// Returns the properties that Identify tells the host.
fn shape(home: &Home) -> Shape {
    let namespaces = home.engine.namespaces.iter().map(|one| NamespaceShape {
        nsid: one.nsid,
        block_size: one.geometry.block_size,
        blocks: one.geometry.blocks,
        read_only: one.geometry.read_only,
        nguid: one.nguid,
        eui64: one.eui64,
        uuid: one.uuid,
        shared: one.shared,
    });
    // The firmware revision may differ, as it does after an upgrade.
    Shape {
        serial: home.identity.serial.clone(),
        model: home.identity.model.clone(),
        nqn: home.identity.nqn.clone(),
        vectors: home.engine.interrupts.len() as u16,
        queue_pairs: home.engine.limits.queue_pairs,
        queue_entries: home.engine.limits.queue_entries,
        transfer: home.engine.limits.transfer,
        namespaces: namespaces.collect(),
    }
}

fn save_registers(home: &Home) -> RegisterState {
    let registers = &home.registers;
    RegisterState {
        interrupt_mask: registers.interrupt_mask,
        configuration: registers.configuration.0,
        status: registers.status.0,
        admin_queues: registers.admin_queues.0,
        admin_submission: registers.admin_submission,
        admin_completion: registers.admin_completion,
    }
}

fn save_shadow(pages: ShadowPages) -> ShadowState {
    ShadowState { doorbells: pages.doorbells, events: pages.events, number: pages.number }
}

fn save_event(event: &Event) -> EventState {
    EventState { kind: event.kind.0, information: event.information, log: event.log }
}

fn save_health(home: &Home) -> HealthState {
    let (health, counters) = (&home.health, home.counters());
    let entries = health.entries.iter().map(|entry| ErrorState {
        count: entry.count.get(),
        queue: entry.queue.get(),
        command: entry.command.get(),
        status: entry.status.get(),
        lba: entry.lba.get(),
        nsid: entry.nsid.get(),
    });
    HealthState {
        sectors_read: counters.sectors_read,
        sectors_written: counters.sectors_written,
        reads: counters.reads,
        writes: counters.writes,
        unsafe_shutdowns: health.unsafe_shutdowns,
        media_errors: counters.media_errors,
        powered: home.powered(),
        errors: health.errors,
        entries: entries.collect(),
    }
}
