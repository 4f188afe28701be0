//! The way back: checks a saved state and makes a controller of it.

use std::collections::BTreeSet;

use serde::Deserialize;
use slipway_nvme_spec::event::{Event, EventType};
use slipway_nvme_spec::log::ErrorEntry;
use slipway_nvme_spec::registers::{
    AdminQueueAttributes, Configuration, ControllerStatus, head_doorbell, tail_doorbell,
};
use slipway_nvme_spec::status::Status;
use slipway_pci::StateError;

use super::{
    EventState, HealthState, KIND, MAX_LEN, NamespaceShape, RegisterState, SavedState, ShadowState,
    Shape, VERSION, shape,
};
use crate::cell::{Cell, ShadowPages};
use crate::events::{EVENT_LIMIT, Events};
use crate::health::{Counters, ERROR_ENTRIES, Health};
use crate::home::Home;
use crate::parts::MAX_NSID;
use crate::phase::{Phase, Shutdown};
use crate::queue::{CompletionQueue, Queues, SubmissionQueue};
use crate::queue_state::{CompletionState, DoorbellState, SubmissionState};

fn inconsistent(what: &str) -> StateError {
    StateError::Inconsistent(what.into())
}

/// Returns an error unless `fine`.
fn require(fine: bool, what: &str) -> Result<(), StateError> {
    if fine { Ok(()) } else { Err(inconsistent(what)) }
}

/// The part that is parsed first, so that another version is told from a damaged state.
#[derive(Deserialize)]
struct Head {
    kind: String,
    version: u32,
}

/// The controller whose state is taken over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// This controller, before its process was killed: the doorbell cells are its own, too.
    Journal,
    /// Another controller of the same size.
    Another,
}

/// Takes over the state in `bytes`. Returns the IDs of namespaces that have come, gone or changed
/// their size since. After an error the caller resets the home.
pub(crate) fn take_over(
    home: &mut Home,
    bytes: &[u8],
    origin: Origin,
) -> Result<BTreeSet<u32>, StateError> {
    require(home.phase != Phase::Resetting, "the controller is being reset")?;
    let state = parse(bytes)?;
    let parts = CheckedParts::of(home, &state, origin)?;
    home.pci.restore(&state.pci)?;
    home.msix.restore(&state.msix)?;
    // From here on nothing fails.
    Ok(parts.apply(home, &state, origin))
}

/// The parts of a valid state, as the live types.
struct CheckedParts {
    /// The namespaces that have come, gone or changed their size.
    different: BTreeSet<u32>,
    shadow: Option<ShadowPages>,
    queues: Queues,
    events: Events,
    health: Health,
}

impl CheckedParts {
    /// Checks everything of a state but the configuration space and MSI-X.
    fn of(home: &Home, state: &SavedState, origin: Origin) -> Result<Self, StateError> {
        let different = compare(&state.shape, &shape(home), origin)?;
        check_phase(state)?;
        require(home.features.fits(&state.features), "features")?;
        let shadow = restore_shadow(home, state)?;
        let queues = restore_queues(home, state, shadow)?;
        let events = restore_events(state)?;
        let health = restore_health(&state.health)?;
        let recovery = &state.error_recovery;
        require(recovery.len() == state.shape.namespaces.len(), "error recovery")?;
        Ok(Self { different, shadow, queues, events, health })
    }

    /// Makes `home` what the state says. Returns the namespaces that are different.
    fn apply(self, home: &mut Home, state: &SavedState, origin: Origin) -> BTreeSet<u32> {
        for (saved, value) in state.shape.namespaces.iter().zip(&state.error_recovery) {
            if let Some(namespace) = home.engine.namespaces.get_mut(saved.nsid) {
                namespace.error_recovery = *value;
            }
        }
        restore_registers(home, &state.registers);
        if origin == Origin::Another {
            restore_doorbells(home, state);
        }
        let now = home.engine.clock.now();
        home.powered_since = now;
        home.keep_alive_since = now;
        home.features = state.features.clone().started(now);
        home.engine.queues = self.queues;
        home.engine.shadow = self.shadow;
        if origin == Origin::Another {
            home.engine.record_queues();
        }
        home.events = self.events;
        home.health = self.health;
        home.engine.counters = Counters::default();
        home.phase = state.phase;
        home.shutdown = state.shutdown;
        home.tune();
        home.apply_phase();
        self.different
    }
}

/// Returns the namespaces that only one of the shapes has, or that differ in size. All else that
/// the guest relies on must be equal, and the same controller's identity as well.
fn compare(saved: &Shape, own: &Shape, origin: Origin) -> Result<BTreeSet<u32>, StateError> {
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
    let is_fitting = origin == Origin::Another || identity(saved) == identity(own);
    require(is_fitting, "the controller has another identity")?;
    let size =
        |shape: &Shape| (shape.vectors, shape.queue_pairs, shape.queue_entries, shape.transfer);
    require(size(saved) == size(own), "the controller has another size")?;
    Ok(different)
}

/// Parses a state of this version.
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

/// Returns the cell of a queue's doorbell.
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

/// A saved queue's place in guest memory, and how far its two sides came.
struct Ring {
    id: u16,
    base: u64,
    size: u32,
    head: u32,
    tail: u32,
}

impl Ring {
    fn check(self, home: &Home, state: &SavedState) -> Result<(), StateError> {
        let Self { id, base, size, head, tail } = self;
        let limits = &home.engine.limits;
        let most = if id == 0 { 4096 } else { limits.queue_entries.into() };
        let inside = head < size && tail < size && (2..=most).contains(&size);
        let aligned = base & (page_size(state) - 1) == 0;
        require(id <= limits.queue_pairs && inside && aligned, "a queue")
    }
}

/// Returns the queues. Completion queues come first, since submission queues refer to them.
fn restore_queues(
    home: &Home,
    state: &SavedState,
    shadow: Option<ShadowPages>,
) -> Result<Queues, StateError> {
    let mut queues = Queues::default();
    for saved in &state.completion_queues {
        let CompletionState { id, base, size, head, tail, .. } = *saved;
        Ring { id, base, size, head, tail }.check(home, state)?;
        let vector = saved.vector.is_none_or(|vector| vector < state.shape.vectors);
        require(vector && queues.completion(id).is_none(), "a completion queue")?;
        let cell = restore_doorbell(home, head_doorbell(id), &saved.doorbell, shadow)?;
        queues.add_completion(completion_queue(saved, cell));
    }
    for saved in &state.submission_queues {
        let SubmissionState { id, base, size, head, tail, .. } = *saved;
        Ring { id, base, size, head, tail }.check(home, state)?;
        let kinds = (id == 0) == (saved.completion == 0);
        let there = queues.completion(saved.completion).is_some();
        require(kinds && there && queues.submission(id).is_none(), "a submission queue")?;
        let cell = restore_doorbell(home, tail_doorbell(id), &saved.doorbell, shadow)?;
        let mut queue = SubmissionQueue::new(id, saved.completion, base, size, cell);
        (queue.head, queue.tail) = (head, tail);
        queues.add_submission(queue);
    }
    let admin = queues.pair(0).is_some();
    require(admin == (state.phase == Phase::Enabled), "admin queues")?;
    Ok(queues)
}

/// Returns the completion queue of a checked state.
fn completion_queue(saved: &CompletionState, cell: Cell) -> CompletionQueue {
    let mut queue = CompletionQueue::new(saved.id, saved.base, saved.size, saved.vector, cell);
    (queue.head, queue.tail, queue.phase) = (saved.head, saved.tail, saved.phase);
    // The guest may not have been interrupted for these entries. One interrupt more does no harm.
    queue.fresh = queue.posted().min(1);
    queue
}

/// Returns the events that wait for the host, and its requests for events.
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

/// Returns the health information and the error log.
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

/// Gives fresh doorbell cells the saved values.
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
