//! One sandbox in the daemon: its record, its state, and the handles to it while it lives.

use std::sync::{Arc, Mutex, MutexGuard};

use slipway_hypervisor::Vm;
use tokio::sync::{mpsc, watch};

use crate::agent::Agent;
use crate::record::{Record, State, Store};
use crate::stdio::{Fanout, Input, input};
use crate::{Error, Result};

/// A sandbox. Shared between its life's task and the calls that concern it.
pub struct Sandbox {
    /// 12 hexadecimal digits; constant.
    pub id: String,
    /// Constant.
    pub name: String,
    /// Where its files lie.
    pub store: Store,
    /// Who listens to its output.
    pub fanout: Fanout,
    /// Goes to the first process's standard input.
    pub input: mpsc::Sender<Input>,
    pub(crate) input_end: Mutex<Option<mpsc::Receiver<Input>>>,
    record: Mutex<Record>,
    state: watch::Sender<State>,
    stage: watch::Sender<&'static str>,
    agent: watch::Sender<Option<Agent>>,
    vm: Mutex<Option<Arc<dyn Vm>>>,
    stopping: watch::Sender<bool>,
}

impl Sandbox {
    /// Brings a record to life; nothing is started.
    pub fn new(record: Record, store: Store) -> Arc<Self> {
        let (input, input_end) = input();
        Arc::new(Self {
            id: record.id.clone(),
            name: record.name.clone(),
            store,
            fanout: Fanout::default(),
            input,
            input_end: Mutex::new(Some(input_end)),
            state: watch::Sender::new(record.state),
            stage: watch::Sender::new(""),
            agent: watch::Sender::new(None),
            vm: Mutex::new(None),
            stopping: watch::Sender::new(false),
            record: Mutex::new(record),
        })
    }

    /// A copy of the record.
    pub fn record(&self) -> Record {
        lock(&self.record).clone()
    }

    /// Changes the record and keeps it on disk.
    ///
    /// # Errors
    /// [`Error::File`]; the change holds in memory all the same.
    pub fn update(&self, change: impl FnOnce(&mut Record)) -> Result<()> {
        let mut record = lock(&self.record);
        change(&mut record);
        let saved = self.store.save(&record);
        let state = record.state;
        drop(record);
        self.state.send_if_modified(|old| std::mem::replace(old, state) != state);
        saved
    }

    /// Where it is in its life.
    pub fn state(&self) -> State {
        *self.state.borrow()
    }

    /// Waits until `done` holds for the state.
    pub async fn wait_state(&self, done: impl FnMut(&State) -> bool) -> State {
        let mut watcher = self.state.subscribe();
        // The sender lives as long as `self`: the wait cannot fail.
        watcher.wait_for(done).await.map_or(State::Lost, |state| *state)
    }

    /// Says which stage of its start has begun.
    pub(crate) fn enter(&self, stage: &'static str) {
        self.stage.send_replace(stage);
    }

    /// The stages as they begin.
    pub fn stages(&self) -> watch::Receiver<&'static str> {
        self.stage.subscribe()
    }

    /// Sets or clears the handles of a running sandbox.
    pub(crate) fn set_vm(&self, vm: Option<Arc<dyn Vm>>) {
        *lock(&self.vm) = vm;
    }

    pub(crate) fn set_agent(&self, agent: Option<Agent>) {
        self.agent.send_replace(agent);
    }

    /// Its microVM, while there is one.
    pub fn vm(&self) -> Option<Arc<dyn Vm>> {
        lock(&self.vm).clone()
    }

    /// Its agent.
    ///
    /// # Errors
    /// [`Error::WrongState`] when its container does not run.
    pub fn agent(&self) -> Result<Agent> {
        let agent = self.agent.borrow().clone();
        agent.filter(|_| self.state() == State::Running).ok_or_else(|| {
            self.wrong_state("its container does not run; `slipway run` starts a new one")
        })
    }

    pub(crate) fn wrong_state(&self, advice: &str) -> Error {
        Error::WrongState {
            name: self.name.clone(),
            state: self.state().as_str().to_owned(),
            advice: advice.to_owned(),
        }
    }

    /// Whether somebody asked it to end.
    pub fn is_stopping(&self) -> bool {
        *self.stopping.borrow()
    }

    /// Asks it to end at once: a microVM that is there dies, a start that goes on gives up.
    pub fn kill(&self) {
        self.stopping.send_replace(true);
        if let Some(vm) = self.vm()
            && let Err(error) = vm.kill()
        {
            tracing::warn!(sandbox = self.name, %error, "its VMM could not be killed");
        }
    }
}

/// A panic while a lock was held leaves plain data behind: it can still be used.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
