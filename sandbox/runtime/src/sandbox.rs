//! One sandbox in the daemon: its record, its state, and its handles while it is live.

mod rest;
mod returns;

use std::sync::{Arc, Mutex, OnceLock};

use slipway_hypervisor::{GuestMemory, Vm};
use slipway_peer::Bin;
use slipway_telemetry::trace::Parent;
use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit, Semaphore, watch};

use crate::agent::Agent;
use crate::container::{Container, OWN};
use crate::fetcher::Held;
use crate::files::Lane;
use crate::lock::lock;
use crate::look::Looks;
use crate::record::{PAUSED, Record, SandboxState, Store};
use crate::shared_root::SharedRoot;
use crate::templates::{Choice, Template};
use crate::{Error, Result};

pub(crate) use rest::Back;
use returns::Returns;

/// The most clients that read one sandbox's kept output at once.
const MOST_READERS: usize = 32;
/// The most updates of limits of one pod's containers at once, those that wait among them.
const MOST_UPDATES: usize = 16;
/// The most looks at the host's files for one sandbox at once.
const MOST_LOOKS: usize = 4;
/// The advice for a sandbox whose guest has not answered a restarted daemon.
const SILENT: &str = "its guest does not answer yet; try again later";

/// A sandbox, shared between the task that runs it and the calls that concern it.
pub struct Sandbox {
    /// The sandbox's id: 12 hexadecimal digits; constant.
    pub id: String,
    /// The sandbox's name; constant.
    pub name: String,
    /// The sandbox's persistent files.
    pub store: Store,
    /// The lane that runs operations on the sandbox's files.
    pub lane: Lane,
    /// The bin for descriptors and memory of the VMM, which must be closed without waiting.
    pub bin: Bin,
    /// The sandbox's own container, whose state is the sandbox's. In a pod it stands for the pod.
    pub own: Arc<Container>,
    /// The containers that were added to a pod.
    added: Mutex<Vec<Arc<Container>>>,
    record: Mutex<Versioned>,
    /// The version of the record that is on disk. The lock is held while a version is written.
    saved: tokio::sync::Mutex<u64>,
    stage: watch::Sender<&'static str>,
    /// The call that starts the sandbox, as the parent of the stages' spans.
    trace: OnceLock<Parent>,
    agent: watch::Sender<Option<Agent>>,
    vm: Mutex<Option<Arc<dyn Vm>>>,
    root: Mutex<Option<Arc<SharedRoot>>>,
    /// Keeps the fetcher running while an image may be incomplete.
    fetcher: Mutex<Option<Arc<Held>>>,
    /// The guest's memory, while a template is made of it.
    memory: Mutex<Option<GuestMemory>>,
    /// The way in which the template that it begins with is chosen. Not kept across a restart of
    /// the daemon: then it boots.
    choice: Mutex<Choice>,
    /// The name of the template that it would have begun with, had the node had that.
    wanted_template: OnceLock<String>,
    stopping: watch::Sender<bool>,
    /// Set once a pod is asked to end.
    ending: watch::Sender<bool>,
    readers: Arc<Semaphore>,
    updates: Arc<Semaphore>,
    /// Held while the agent configures the network interface.
    pub(crate) configuring: Arc<tokio::sync::Mutex<()>>,
    /// The snapshot that the sandbox begins with, until it has begun: another one may get its name.
    begins: Mutex<Option<Arc<Template>>>,
    /// Held while the number of CPUs or the memory is changed.
    size: Arc<tokio::sync::Mutex<()>>,
    /// The tasks that give memory of a pod back to the host.
    pub(crate) returns: Returns,
    /// The tasks that take CPUs from a pod whose containers have ended.
    pub(crate) cpu_returns: Returns,
    /// The tasks that have a pod's regions of ended containers given back.
    pub(crate) region_returns: Returns,
    /// Set while the memory is in a file and nothing of a VMM is left.
    rests: watch::Sender<bool>,
    /// The outcome of coming back from the file, until the task that runs the sandbox has it.
    back: Mutex<Option<Result<Back>>>,
    /// Held while shares of containers of a pod are mounted or unmounted.
    pub(crate) shares: tokio::sync::Mutex<()>,
    /// Held while a pod is given directories that its containers share by name, and their disk.
    pub(crate) empty_dirs: tokio::sync::Mutex<()>,
    /// Held while a pod takes functions of pools or gives them back.
    pub(crate) functions: tokio::sync::Mutex<()>,
    /// Held while the VMM is confined to CPUs and memory nodes, while its memory is limited, and
    /// while its control group is given back.
    pub(crate) placement: Arc<tokio::sync::Mutex<()>>,
    /// Looks at the host's files for the sandbox.
    pub(crate) looks: Looks,
}

/// A record and the number of changes to it.
#[derive(Clone)]
struct Versioned {
    record: Record,
    version: u64,
}

impl Sandbox {
    /// Makes a sandbox of its record. Nothing is started.
    pub fn new(record: Record, store: Store, lane: Lane) -> Arc<Self> {
        let own = Container::new(OWN, store.log(), record.state);
        let added = record.added.iter();
        let added =
            added.map(|one| Container::new(&one.name, store.added_log(&one.name), one.state));
        Arc::new(Self {
            id: record.id.clone(),
            name: record.name.clone(),
            lane,
            bin: Bin::new(),
            own,
            added: Mutex::new(added.collect()),
            store,
            stage: watch::Sender::new(""),
            trace: OnceLock::new(),
            agent: watch::Sender::new(None),
            vm: Mutex::new(None),
            root: Mutex::new(None),
            fetcher: Mutex::new(None),
            memory: Mutex::new(None),
            choice: Mutex::default(),
            wanted_template: OnceLock::new(),
            stopping: watch::Sender::new(false),
            ending: watch::Sender::new(false),
            readers: Arc::new(Semaphore::new(MOST_READERS)),
            updates: Arc::new(Semaphore::new(MOST_UPDATES)),
            configuring: Arc::default(),
            begins: Mutex::new(None),
            size: Arc::default(),
            returns: Returns::default(),
            cpu_returns: Returns::default(),
            region_returns: Returns::default(),
            rests: watch::Sender::new(false),
            back: Mutex::new(None),
            shares: tokio::sync::Mutex::default(),
            empty_dirs: tokio::sync::Mutex::default(),
            functions: tokio::sync::Mutex::default(),
            placement: Arc::default(),
            looks: Looks::new(MOST_LOOKS),
            record: Mutex::new(Versioned { record, version: 0 }),
            saved: tokio::sync::Mutex::new(0),
        })
    }

    /// Sets the way in which the template that the sandbox begins with is chosen.
    pub(crate) fn set_choice(&self, choice: Choice) {
        *lock(&self.choice) = choice;
    }

    /// Returns the way in which the template that the sandbox begins with is chosen.
    pub(crate) fn choice(&self) -> Choice {
        *lock(&self.choice)
    }

    /// Notes the name of the template that the sandbox would have begun with.
    pub(crate) fn want_template(&self, name: String) {
        // Noted once, when the sandbox starts.
        let _ = self.wanted_template.set(name);
    }

    /// Returns the name of the template that the sandbox would have begun with, or `None` if it has
    /// one, or can have none.
    pub(crate) fn wanted_template(&self) -> Option<&str> {
        self.wanted_template.get().map(String::as_str)
    }

    /// Notes the snapshot that the sandbox begins with.
    pub(crate) fn set_begins(&self, snapshot: Option<Arc<Template>>) {
        *lock(&self.begins) = snapshot;
    }

    /// Takes the snapshot that the sandbox begins with.
    pub(crate) fn take_begins(&self) -> Option<Arc<Template>> {
        lock(&self.begins).take()
    }

    /// Returns a copy of the record.
    pub fn record(&self) -> Record {
        self.look(Record::clone)
    }

    /// Returns the result of `look` on the record.
    pub fn look<T>(&self, look: impl FnOnce(&Record) -> T) -> T {
        look(&lock(&self.record).record)
    }

    /// Changes the record in memory only. The next [`update`](Self::update) saves the change; a
    /// daemon that is killed before that loses it. Returns the record's version.
    pub(crate) fn note(&self, change: impl FnOnce(&mut Record)) -> u64 {
        let mut record = lock(&self.record);
        change(&mut record.record);
        record.version += 1;
        record.version
    }

    /// Changes the record, saves it to disk, and then announces the states in it. When this
    /// returns, the change is on disk.
    ///
    /// Changes that arrive while the record is being written are written together. So at most one
    /// write of a sandbox's record is in flight, whatever happens in the sandbox.
    ///
    /// # Errors
    /// [`Error::File`], [`Error::TooLarge`]. The change holds in memory even so.
    pub async fn update(&self, change: impl FnOnce(&mut Record)) -> Result<()> {
        self.save(self.note(change)).await
    }

    /// Saves the record, as [`update`](Self::update) does, unless `version` of it or a later one is
    /// on disk.
    ///
    /// # Errors
    /// The errors of [`update`](Self::update).
    pub(crate) async fn save(&self, version: u64) -> Result<()> {
        let mut saved = self.saved.lock().await;
        if *saved >= version {
            return Ok(());
        }
        let Versioned { record, version } = lock(&self.record).clone();
        let store = self.store.clone();
        let (outcome, record) = self.lane.run(move || (store.save(&record), record)).await;
        if outcome.is_ok() {
            *saved = version;
        }
        self.announce(&record);
        outcome
    }

    /// Announces the states in `record`: those of the containers before the sandbox's, so that an
    /// ended pod has no container that seems to run.
    fn announce(&self, record: &Record) {
        for container in &*lock(&self.added) {
            if let Some(added) = record.added(&container.name) {
                container.announce(added.state);
            }
        }
        self.own.announce(record.state);
    }

    /// Announces that a sandbox that was not started has failed. The record on disk is gone.
    pub(crate) fn give_up(&self) {
        self.note(|record| record.state = SandboxState::Failed);
        self.own.announce(SandboxState::Failed);
        self.close_outputs();
    }

    /// Ends the streams of all clients that are attached to outputs.
    pub(crate) fn close_outputs(&self) {
        self.own.fanout.close();
        self.added().iter().for_each(|container| container.fanout.close());
    }

    /// Returns the state that was announced last.
    pub fn state(&self) -> SandboxState {
        self.own.state()
    }

    /// Waits until `done` holds for the state, and returns that state.
    pub async fn wait_state(&self, done: impl FnMut(&SandboxState) -> bool) -> SandboxState {
        self.own.wait_state(done).await
    }

    /// Returns the containers that were added to a pod, in the order of their creation.
    pub(crate) fn added(&self) -> Vec<Arc<Container>> {
        lock(&self.added).clone()
    }

    /// Returns the container `name` that was added to a pod.
    pub(crate) fn find_added(&self, name: &str) -> Option<Arc<Container>> {
        lock(&self.added).iter().find(|one| one.name == name).cloned()
    }

    /// Adds the handles of a container to a pod.
    pub(crate) fn insert_added(&self, container: Arc<Container>) {
        lock(&self.added).push(container);
    }

    /// Takes a container out of its pod and, in memory, out of the pod's record, unless that was
    /// done before: then the name may be another container's. Its last record stays with its
    /// handles.
    pub(crate) fn forget_added(&self, container: &Arc<Container>) {
        {
            let mut added = lock(&self.added);
            let before = added.len();
            added.retain(|one| !Arc::ptr_eq(one, container));
            if added.len() == before {
                return;
            }
        }
        self.note(|record| {
            if let Some(at) = record.added.iter().position(|one| one.name == container.name) {
                let _ = container.removed.set(record.added.remove(at));
            }
        });
    }

    /// Has the stages of the start be parts of a call's trace.
    pub(crate) fn set_trace(&self, call: Parent) {
        // A sandbox starts once.
        let _ = self.trace.set(call);
    }

    /// Adds a stage that is over to the trace of the call that starts the sandbox, if there is one.
    /// Times are those of CLOCK_MONOTONIC, nanoseconds.
    pub(crate) fn trace_stage(&self, name: &str, times: (u64, u64), failure: Option<&Error>) {
        if let Some(call) = self.trace.get().filter(|call| call.is_recorded()) {
            call.add(name, times.0, times.1, failure.map(Error::to_string).as_deref());
        }
    }

    /// Records a stage of the start in memory; the record's next update saves it. Adds the stage to
    /// the trace as well.
    pub(crate) fn record_stage(&self, name: &str, times: (u64, u64), failure: Option<&Error>) {
        self.note(|record| record.timeline.record(name, times.0, times.1));
        self.trace_stage(name, times, failure);
    }

    /// Announces that a stage of the start has begun.
    pub(crate) fn enter(&self, stage: &'static str) {
        self.stage.send_replace(stage);
    }

    /// Returns a receiver of the stages as they begin.
    pub fn stages(&self) -> watch::Receiver<&'static str> {
        self.stage.subscribe()
    }

    /// Sets or clears the handle of the microVM.
    pub(crate) fn set_vm(&self, vm: Option<Arc<dyn Vm>>) {
        *lock(&self.vm) = vm;
    }

    /// Holds the root that the sandbox shares with others in place of the one before, if any. The
    /// bin drops that one, since freeing a root takes a while.
    pub(crate) fn hold_root(&self, root: Option<Arc<SharedRoot>>) {
        if let Some(old) = std::mem::replace(&mut *lock(&self.root), root) {
            self.bin.discard_value(old);
        }
    }

    /// Has the fetcher of lazily pulled images run for the sandbox, or no longer.
    pub(crate) fn hold_fetcher(&self, held: Option<Arc<Held>>) {
        *lock(&self.fetcher) = held;
    }

    /// Holds the guest's memory in place of what it held before. The bin drops that, since freeing
    /// memory takes a while.
    pub(crate) fn hold_memory(&self, memory: Option<GuestMemory>) {
        if let Some(old) = std::mem::replace(&mut *lock(&self.memory), memory) {
            self.bin.discard_value(old);
        }
    }

    /// Returns the guest's memory if it is [held](Self::hold_memory).
    pub(crate) fn memory(&self) -> Option<GuestMemory> {
        lock(&self.memory).clone()
    }

    pub(crate) fn set_agent(&self, agent: Option<Agent>) {
        self.agent.send_replace(agent);
    }

    /// Returns the microVM while there is one.
    pub fn vm(&self) -> Option<Arc<dyn Vm>> {
        lock(&self.vm).clone()
    }

    /// Returns the sandbox's microVM, which answers and has not ended.
    ///
    /// # Errors
    /// [`Error::WrongState`] if it has ended, or has not answered a restarted daemon yet.
    pub(crate) fn live_vm(&self) -> Result<Arc<dyn Vm>> {
        self.vm().ok_or_else(|| match self.state() {
            SandboxState::Running if !self.is_in_file() => self.wrong_state(SILENT),
            _ => self.wrong_state("its microVM has ended"),
        })
    }

    /// Returns the connection to the sandbox's agent.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the container does not run.
    pub fn agent(&self) -> Result<Agent> {
        let agent = self.agent.borrow().clone();
        agent.filter(|_| self.state() == SandboxState::Running).ok_or_else(|| {
            self.wrong_state(match self.state() {
                _ if self.is_in_file() => rest::IN_FILE,
                SandboxState::Running => SILENT,
                _ => "its container does not run; `slipway run` starts a new one",
            })
        })
    }

    /// Returns once the agent has answered, which a restarted daemon may wait for.
    pub(crate) async fn answers(&self) {
        let _ = self.agent.subscribe().wait_for(Option::is_some).await;
    }

    pub(crate) fn wrong_state(&self, advice: &str) -> Error {
        let state = if self.is_in_file() { PAUSED } else { self.state().as_str() };
        Error::WrongState {
            name: self.name.clone(),
            state: state.to_owned(),
            advice: advice.to_owned(),
        }
    }

    /// Returns a permit for one more reader of the kept output, to be held while it reads.
    ///
    /// # Errors
    /// [`Error::Busy`] if the sandbox has as many readers as it may have.
    pub(crate) fn reader(&self) -> Result<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.readers).try_acquire_owned();
        place.map_err(|_| Error::Busy {
            name: self.name.clone(),
            what: "readers of its kept output",
            most: MOST_READERS,
        })
    }

    /// Returns a permit for one more update of limits, to be held until all of it is done. Its
    /// guest may have it last for minutes, and its caller may ask anew meanwhile.
    ///
    /// # Errors
    /// [`Error::Busy`] if the pod has as many as it may have.
    pub(crate) fn update_of_limits(&self) -> Result<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.updates).try_acquire_owned();
        place.map_err(|_| Error::Busy {
            name: self.name.clone(),
            what: "updates of limits",
            most: MOST_UPDATES,
        })
    }

    /// Returns the number of updates of limits that hold a permit of
    /// [`update_of_limits`](Self::update_of_limits).
    pub(crate) fn updates_of_limits(&self) -> usize {
        MOST_UPDATES.saturating_sub(self.updates.available_permits())
    }

    /// Returns a permit to change the number of CPUs or the memory, to be held until that is done.
    ///
    /// # Errors
    /// [`Error::WrongState`] if another call changes them.
    pub(crate) fn change_size(&self) -> Result<OwnedMutexGuard<()>> {
        let permit = Arc::clone(&self.size).try_lock_owned();
        permit.map_err(|_| self.wrong_state("its CPUs or memory are being changed; try again"))
    }

    /// Waits for the permit of [`change_size`](Self::change_size).
    pub(crate) async fn wait_to_change_size(&self) -> OwnedMutexGuard<()> {
        Arc::clone(&self.size).lock_owned().await
    }

    /// Asks a pod to end once its containers have ended.
    pub(crate) fn end_pod(&self) {
        self.ending.send_replace(true);
    }

    /// Returns once a pod is asked to end.
    pub(crate) async fn pod_ends(&self) {
        // The sender is in `self`.
        let _ = self.ending.subscribe().wait_for(|ending| *ending).await;
    }

    /// Returns whether the sandbox was asked to end.
    pub fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Returns once the sandbox is asked to end.
    pub(crate) async fn stopped(&self) {
        // The sender is in `self`.
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }

    /// Asks the sandbox to end at once: its microVM is killed, and a start in progress gives up.
    pub fn kill(&self) {
        self.stopping.send_replace(true);
        if let Some(vm) = self.vm()
            && let Err(error) = vm.kill()
        {
            tracing::warn!(sandbox = self.name, %error, "its VMM could not be killed");
        }
    }
}

#[cfg(test)]
mod tests;
