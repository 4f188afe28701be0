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
//! Over 500 lines: the saved state's format, its check and its way back belong together.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use slipway_nvme_spec::event::{Event, EventType};
use slipway_nvme_spec::log::ErrorEntry;
use slipway_nvme_spec::registers::{
    AdminQueueAttributes, Configuration, ControllerStatus, head_doorbell, tail_doorbell,
};
use slipway_nvme_spec::status::Status;
use slipway_pci::StateError;
use slipway_pci::state::{ConfigState, MsixState};

use crate::cell::{Cell, ShadowPages};
use crate::events::{EVENT_LIMIT, Events};
use crate::features::Features;
use crate::health::{Counters, ERROR_ENTRIES, Health};
use crate::home::Home;
use crate::parts::MAX_NSID;
use crate::phase::{Phase, Shutdown};
use crate::queue::{CompletionQueue, Queues, SubmissionQueue};
use crate::queue_state::{CompletionState, DoorbellState, QueueStates, SubmissionState};

/// The mark of an NVMe controller's state.
const KIND: &str = "slipway-nvme";
/// Version of the format. A state of another version is refused. Part of
/// [`JOURNAL_VERSION`](crate::JOURNAL_VERSION). A new field needs a new version or
/// `#[serde(default)]`; the head of `admin::logs` says what each costs.
pub(crate) const VERSION: u32 = 4;
/// Longest state that is parsed, in bytes. A full state has about half of this.
pub(crate) const MAX_LEN: usize = 1 << 20;

/// The part that is parsed first, so that another version is told from a damaged state.
#[derive(Deserialize)]
struct Head {
    kind: String,
    version: u32,
}

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

fn inconsistent(what: &str) -> StateError {
    StateError::Inconsistent(what.into())
}

/// Returns an error unless `fine`.
fn require(fine: bool, what: &str) -> Result<(), StateError> {
    if fine { Ok(()) } else { Err(inconsistent(what)) }
}

/// Returns the state of `controller`.
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

/// Returns the present state of `controller`, for a snapshot. The journal has the commands in
/// flight and the progress of the queues.
pub(crate) fn running(home: &Home) -> Vec<u8> {
    let mut queues = QueueStates::from(&home.engine.queues);
    queues.append(&home.fleet.present_queues(home.engine.shadow.is_some()));
    with_queues(home, queues)
}

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

/// Takes over the state in `bytes`; with `kept` it is the home's own, and so are the doorbell
/// cells. Returns the IDs of namespaces that have come, gone or changed their size since. After an
/// error the caller resets the home.
pub(crate) fn take_over(
    home: &mut Home,
    bytes: &[u8],
    kept: bool,
) -> Result<BTreeSet<u32>, StateError> {
    require(home.phase != Phase::Resetting, "the controller is being reset")?;
    let state = parse(bytes)?;
    let different = compare(&state.shape, &shape(home), kept)?;
    check_phase(&state)?;
    require(home.features.fits(&state.features), "features")?;
    let shadow = restore_shadow(home, &state)?;
    let queues = restore_queues(home, &state, shadow)?;
    let events = restore_events(&state)?;
    let health = restore_health(&state.health)?;
    let recovery = &state.error_recovery;
    require(recovery.len() == state.shape.namespaces.len(), "error recovery")?;
    home.pci.restore(&state.pci)?;
    home.msix.restore(&state.msix)?;
    // From here on nothing fails.
    for (saved, value) in state.shape.namespaces.iter().zip(recovery) {
        if let Some(namespace) = home.engine.namespaces.get_mut(saved.nsid) {
            namespace.error_recovery = *value;
        }
    }
    restore_registers(home, &state.registers);
    if !kept {
        restore_doorbells(home, &state);
    }
    let now = home.engine.clock.now();
    home.powered_since = now;
    home.keep_alive_since = now;
    home.features = state.features.started(now);
    home.engine.queues = queues;
    home.engine.shadow = shadow;
    if !kept {
        home.engine.record_queues();
    }
    home.events = events;
    home.health = health;
    home.engine.counters = Counters::default();
    home.phase = state.phase;
    home.shutdown = state.shutdown;
    home.tune();
    home.apply_phase();
    Ok(different)
}

/// Returns the namespaces that only one of the shapes has, or that differ in size. All else that
/// the guest relies on must be equal, and with `kept` the identity as well.
fn compare(saved: &Shape, own: &Shape, kept: bool) -> Result<BTreeSet<u32>, StateError> {
    let ids = |shape: &Shape| shape.namespaces.iter().map(|one| one.nsid).collect::<Vec<_>>();
    // Ascending numbers in the range are few, and are found quickly.
    let sound = ids(saved).is_sorted_by(|one, next| one < next)
        && ids(saved).iter().all(|nsid| (1..=MAX_NSID).contains(nsid));
    require(sound, "namespaces")?;
    let mut different = BTreeSet::new();
    for namespace in saved.namespaces.iter().chain(&own.namespaces) {
        let there = |shape: &Shape| {
            let at = shape.namespaces.binary_search_by_key(&namespace.nsid, |one| one.nsid).ok()?;
            shape.namespaces.get(at).cloned()
        };
        let (before, now) = (there(saved), there(own));
        if before == now {
            continue;
        }
        different.insert(namespace.nsid);
        if let (Some(before), Some(now)) = (before, now) {
            let resized = NamespaceShape { blocks: now.blocks, ..before };
            require(resized == now, "a namespace is another disk")?;
        }
    }
    let identity = |shape: &Shape| [&shape.serial, &shape.model, &shape.nqn].map(String::clone);
    require(!kept || identity(saved) == identity(own), "the controller has another identity")?;
    let size =
        |shape: &Shape| (shape.vectors, shape.queue_pairs, shape.queue_entries, shape.transfer);
    require(size(saved) == size(own), "the controller has another size")?;
    Ok(different)
}

fn parse(bytes: &[u8]) -> Result<SavedState, StateError> {
    if bytes.len() > MAX_LEN {
        return Err(StateError::Unknown("too long".into()));
    }
    let unknown = |error: serde_json::Error| StateError::Unknown(error.to_string());
    let head: Head = serde_json::from_slice(bytes).map_err(unknown)?;
    if head.kind != KIND || head.version != VERSION {
        let found = format!("{:.32} version {}", head.kind, head.version);
        return Err(StateError::Unknown(found));
    }
    serde_json::from_slice(bytes).map_err(|error| StateError::Inconsistent(error.to_string()))
}

/// Checks that phase, shutdown, registers and the presence of queues agree.
fn check_phase(state: &SavedState) -> Result<(), StateError> {
    let configuration = Configuration(state.registers.configuration);
    let status = ControllerStatus(state.registers.status);
    let queues = !state.submission_queues.is_empty() || !state.completion_queues.is_empty();
    let fine = match state.phase {
        Phase::Enabled => status.ready() && configuration.enabled() && queues,
        Phase::Disabled => !status.ready() && !queues,
        Phase::Refused => !status.ready() && status.fatal() && !queues,
        Phase::Resetting => !queues,
    };
    require(fine, "phase and registers")?;
    let shutdown = match state.shutdown {
        Shutdown::None => 0,
        Shutdown::Draining | Shutdown::Flushing => ControllerStatus::SHUTDOWN_OCCURRING,
        Shutdown::Complete => ControllerStatus::SHUTDOWN_COMPLETE,
    };
    // While the controller resets, CSTS shows the state before the reset.
    let fine =
        state.phase == Phase::Resetting || status.0 & ControllerStatus::SHUTDOWN_MASK == shutdown;
    require(fine, "shutdown and registers")?;
    let defined =
        ControllerStatus::READY | ControllerStatus::FATAL | ControllerStatus::SHUTDOWN_MASK;
    let reserved = status.0 & !defined | configuration.0 & !Configuration::DEFINED;
    let aqa = state.registers.admin_queues & !AdminQueueAttributes::DEFINED;
    let low = (state.registers.admin_submission | state.registers.admin_completion) & 0xfff;
    require(reserved == 0 && aqa == 0 && low == 0, "reserved register bits")
}

/// Returns the size of a memory page in bytes.
fn page_size(state: &SavedState) -> u64 {
    4096 << Configuration(state.registers.configuration).page_shift().min(4)
}

/// Returns the shadow pages, with the checks of Doorbell Buffer Config. Whether the pages are
/// mapped shows at the first poll.
fn restore_shadow(home: &Home, state: &SavedState) -> Result<Option<ShadowPages>, StateError> {
    let Some(ShadowState { doorbells, events, number }) = state.shadow else { return Ok(None) };
    let aligned = (doorbells | events) & (page_size(state) - 1) == 0;
    let offered = !home.engine.doorbells.is_shared() && state.phase == Phase::Enabled;
    require(aligned && doorbells != events && offered, "shadow doorbells")?;
    Ok(Some(ShadowPages { doorbells, events, number }))
}

fn restore_doorbell(
    home: &Home,
    index: usize,
    saved: &DoorbellState,
    shadow: Option<ShadowPages>,
) -> Result<Cell, StateError> {
    let mut cell = Cell::resumed(&home.engine.doorbells, index, saved.register);
    match (shadow, saved.shadow) {
        (Some(pages), Some((seen, moved))) => cell.resume_shadow(pages, seen, moved),
        (None, None) => {}
        _ => return Err(inconsistent("a queue's shadow doorbell")),
    }
    Ok(cell)
}

fn restore_queues(
    home: &Home,
    state: &SavedState,
    shadow: Option<ShadowPages>,
) -> Result<Queues, StateError> {
    let limits = &home.engine.limits;
    let page = page_size(state);
    let ring = |id: u16, base: u64, size: u32, head: u32, tail: u32| {
        let most = if id == 0 { 4096 } else { limits.queue_entries.into() };
        let inside = head < size && tail < size && (2..=most).contains(&size);
        require(id <= limits.queue_pairs && inside && base & (page - 1) == 0, "a queue")
    };
    let mut queues = Queues::default();
    for saved in &state.completion_queues {
        ring(saved.id, saved.base, saved.size, saved.head, saved.tail)?;
        let vector = saved.vector.is_none_or(|vector| vector < state.shape.vectors);
        require(vector && queues.completion(saved.id).is_none(), "a completion queue")?;
        let index = head_doorbell(saved.id);
        let cell = restore_doorbell(home, index, &saved.doorbell, shadow)?;
        let mut queue = CompletionQueue::new(saved.id, saved.base, saved.size, saved.vector, cell);
        (queue.head, queue.tail, queue.phase) = (saved.head, saved.tail, saved.phase);
        // The guest may not have been interrupted for these entries. One interrupt more does no
        // harm.
        queue.fresh = queue.posted().min(1);
        queues.add_completion(queue);
    }
    for saved in &state.submission_queues {
        ring(saved.id, saved.base, saved.size, saved.head, saved.tail)?;
        let kinds = (saved.id == 0) == (saved.completion == 0);
        let there = queues.completion(saved.completion).is_some();
        let fresh = queues.submission(saved.id).is_none();
        require(kinds && there && fresh, "a submission queue")?;
        let index = tail_doorbell(saved.id);
        let cell = restore_doorbell(home, index, &saved.doorbell, shadow)?;
        let (base, size) = (saved.base, saved.size);
        let mut queue = SubmissionQueue::new(saved.id, saved.completion, base, size, cell);
        (queue.head, queue.tail) = (saved.head, saved.tail);
        queues.add_submission(queue);
    }
    let admin = queues.pair(0).is_some();
    require(admin == (state.phase == Phase::Enabled), "admin queues")?;
    Ok(queues)
}

fn restore_events(state: &SavedState) -> Result<Events, StateError> {
    let mut events = Events::default();
    for event in &state.events_waiting {
        let EventState { kind, information, log } = *event;
        let event = Event { kind: EventType(kind), information, log };
        require(Events::KNOWN.contains(&event), "an event")?;
        events.raise(event);
    }
    require(state.event_requests.len() <= EVENT_LIMIT, "event requests")?;
    let enabled = state.phase == Phase::Enabled;
    require(enabled || state.event_requests.is_empty(), "event requests")?;
    events.requests.extend(&state.event_requests);
    events.masked = state.events_masked;
    let changed = &state.changed_namespaces;
    require(changed.iter().all(|nsid| (1..=MAX_NSID).contains(nsid)), "changed namespaces")?;
    events.changed.clone_from(changed);
    Ok(events)
}

fn restore_health(saved: &HealthState) -> Result<Health, StateError> {
    // Counters that no device lives long enough to reach would overflow later.
    let counters = [
        saved.sectors_read,
        saved.sectors_written,
        saved.reads,
        saved.writes,
        saved.unsafe_shutdowns,
        saved.media_errors,
        saved.errors,
        saved.powered.as_secs(),
    ];
    require(counters.iter().all(|counter| *counter < 1 << 60), "health counters")?;
    let kept = saved.errors.min(ERROR_ENTRIES as u64);
    require(saved.entries.len() as u64 == kept, "error log")?;
    let entries = saved.entries.iter().map(|error| {
        let mut entry = ErrorEntry::new(error.queue, error.command, Status::SUCCESS);
        entry.status.set(error.status);
        entry.count.set(error.count);
        entry.lba.set(error.lba);
        entry.nsid.set(error.nsid);
        entry
    });
    Ok(Health {
        counted_before: Counters {
            sectors_read: saved.sectors_read,
            sectors_written: saved.sectors_written,
            reads: saved.reads,
            writes: saved.writes,
            media_errors: saved.media_errors,
        },
        unsafe_shutdowns: saved.unsafe_shutdowns,
        errors: saved.errors,
        entries: entries.collect(),
        powered_before: saved.powered,
    })
}

fn restore_registers(home: &mut Home, saved: &RegisterState) {
    let registers = &mut home.registers;
    registers.interrupt_mask = saved.interrupt_mask;
    registers.configuration = Configuration(saved.configuration);
    registers.status = ControllerStatus(saved.status);
    registers.admin_queues = AdminQueueAttributes(saved.admin_queues);
    registers.admin_submission = saved.admin_submission;
    registers.admin_completion = saved.admin_completion;
}

fn restore_doorbells(home: &Home, state: &SavedState) {
    let doorbells = &home.engine.doorbells;
    if (0..doorbells.len()).any(|index| doorbells.load(index) != 0) {
        return;
    }
    for queue in &state.submission_queues {
        doorbells.store(tail_doorbell(queue.id), queue.doorbell.rung);
    }
    for queue in &state.completion_queues {
        doorbells.store(head_doorbell(queue.id), queue.doorbell.rung);
    }
}
