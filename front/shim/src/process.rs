//! A process of a task as containerd sees it: created, running, stopped.
//!
//! A [`Process`] is the state that `service` and `session` share: the [`Phase`], which goes one way
//! ([`Process::begin`], [`Process::step`], [`Process::stop`]), the channel for messages to the
//! daemon while there is a session, and what is kept for the next serving process ([`Record`]).

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use prost::Message;
use serde::{Deserialize, Serialize};
use slipway_sandbox_api::v1::{self, RunIn, run_in};
use tokio::sync::{mpsc, watch};
use tonic::Code;

use crate::containerd as cd;
use crate::cursor::{self, Cursor};
use crate::io::{HeldFifos, Paths};
use crate::store::{RestartStore, Store, name};
use crate::ttrpc::Failure;

/// The longest time that a signal may take to reach its process.
pub const DELIVERY: Duration = Duration::from_secs(5);

/// The state of a process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Phase {
    /// Not started.
    Created,
    /// Start was called, and the process does not run yet.
    Starting,
    /// It runs.
    Running,
    /// It has ended, or never ran.
    Stopped(ProcessExit),
}

/// How a process ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// The exit status; 128 + n for signal n.
    pub status: u32,
    /// The reason, if the status is not the process's own; else empty.
    pub reason: String,
    /// Set if the guest's kernel ended it for want of memory.
    pub out_of_memory: bool,
    /// The container's termination message.
    pub message: String,
    /// The time of the end.
    pub at: cd::Timestamp,
    /// Set if the process ever ran.
    pub ran: bool,
}

impl ProcessExit {
    /// Makes the end of a process that ended now.
    pub fn now(status: u32, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        let (message, at) = (String::new(), timestamp());
        Self { status, reason, out_of_memory: false, message, at, ran: false }
    }

    /// Makes the end of a process whose exit the daemon reports now.
    pub fn reported(exit: v1::Exit) -> Self {
        let v1::Exit { status, reason, out_of_memory, termination_message: message } = exit;
        Self { out_of_memory, message, ..Self::now(status, reason) }
    }
}

/// A process.
pub struct Process {
    /// Its id; empty for the container's first process.
    pub exec_id: String,
    /// Its streams as containerd named them.
    pub paths: Paths,
    /// The first message of its session, which may have secrets; `None` once the session has it.
    first: Mutex<Option<run_in::Kind>>,
    /// Its state.
    pub phase: watch::Sender<Phase>,
    /// The ends of its FIFOs that are only held.
    pub held: HeldFifos,
    /// The position in its output.
    pub cursor: Cursor,
    /// Set once SIGKILL was asked for.
    pub killed: AtomicBool,
    /// Set once its standard input has ended.
    pub input_ended: AtomicBool,
    /// The messages to the daemon; `None` without a session.
    pub requests: watch::Sender<Option<mpsc::Sender<RunIn>>>,
    /// Set while no session has its streams.
    pub closed: watch::Sender<bool>,
    size: Mutex<Option<v1::Size>>,
    /// The time that a stop gives a pod's containers, seconds, once one was asked for.
    stop: Mutex<Option<u32>>,
    kept: OnceLock<ProcessFiles>,
}

/// The files of a process in the store.
struct ProcessFiles {
    store: Store,
    task: String,
    record: String,
    first: String,
    cursor: String,
}

/// A process as the next serving process finds it.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The container's id.
    pub task: String,
    exec_id: String,
    paths: Paths,
    phase: Phase,
    killed: bool,
    input_ended: bool,
    stdin_is_closed: bool,
    size: Option<(u32, u32)>,
    stop: Option<u32>,
}

/// The kind of the files with the records of processes.
pub const RECORDS: &str = "process";

impl Record {
    /// Removes the files of a process whose task is gone.
    pub fn forget(&self, keep: &RestartStore) {
        ProcessFiles::of(keep, &self.task, &self.exec_id).forget();
    }
}

impl ProcessFiles {
    fn of(keep: &RestartStore, task: &str, exec_id: &str) -> Self {
        let parts = [task, exec_id];
        Self {
            store: keep.store.clone(),
            task: task.to_owned(),
            record: name(RECORDS, &parts),
            first: name("first", &parts),
            cursor: name("cursor", &parts),
        }
    }

    fn forget(&self) {
        let Self { store, record, first, cursor, .. } = self;
        // By the record, the next process finds what is left of them.
        [first, cursor, record].into_iter().for_each(|name| store.remove(name));
    }
}

impl Process {
    /// Makes a process that is not started.
    pub fn new(exec_id: String, paths: Paths, first: run_in::Kind) -> Self {
        Self {
            exec_id,
            paths,
            first: Mutex::new(Some(first)),
            phase: watch::Sender::new(Phase::Created),
            held: HeldFifos::default(),
            cursor: Cursor::default(),
            killed: AtomicBool::new(false),
            input_ended: AtomicBool::new(false),
            requests: watch::Sender::new(None),
            closed: watch::Sender::new(true),
            size: Mutex::new(None),
            stop: Mutex::new(None),
            kept: OnceLock::new(),
        }
    }

    /// Makes the process that an earlier serving process has left, and keeps it on. Its records are
    /// there already.
    pub fn left(record: Record, keep: &RestartStore) -> Self {
        let Record { task, exec_id, paths, .. } = record;
        let size = record.size.map(|(rows, columns)| v1::Size { rows, columns });
        let first = keep.store.get(&name("first", &[&task, &exec_id]));
        let first = first.and_then(|bytes| RunIn::decode(bytes.as_slice()).ok()?.kind);
        let process = Self {
            first: Mutex::new(first),
            phase: watch::Sender::new(record.phase),
            killed: AtomicBool::new(record.killed),
            input_ended: AtomicBool::new(record.input_ended),
            size: Mutex::new(size),
            stop: Mutex::new(record.stop),
            // The session is lost, and so is what it begins with.
            ..Self::new(exec_id, paths, run_in::Kind::StdinClosed(true))
        };
        if record.stdin_is_closed {
            process.held.close_stdin();
        }
        if let Err(error) = process.keep_cursor(process.kept_in(keep, &task)) {
            crate::log::warn(&format!("the output of {task} has no record: {error}"));
        }
        process
    }

    /// Keeps the process of the container `task` from here on, for the next serving process.
    ///
    /// # Errors
    /// A record cannot be written. Others may be there ([`forget`](Self::forget)).
    pub fn keep_in(&self, keep: &RestartStore, task: &str) -> io::Result<()> {
        let kept = self.kept_in(keep, task);
        let first = RunIn { kind: lock(&self.first).clone() };
        if first.kind.is_some() {
            kept.store.try_put(&kept.first, &first.encode_to_vec())?;
        }
        // That of an earlier process by this name has its position.
        kept.store.remove(&kept.cursor);
        self.keep_cursor(kept)?;
        kept.store.try_put_json(&kept.record, &self.record(kept))
    }

    /// Gives the process its files in the store, and its names in the holder.
    fn kept_in(&self, keep: &RestartStore, task: &str) -> &ProcessFiles {
        if let Some(holder) = &keep.holder {
            self.held.keep_in(holder, name("io", &[task, &self.exec_id]));
        }
        self.kept.get_or_init(|| ProcessFiles::of(keep, task, &self.exec_id))
    }

    /// Opens the record of the position in the output. That of a further process cannot be joined
    /// again.
    fn keep_cursor(&self, kept: &ProcessFiles) -> io::Result<()> {
        if self.is_init()
            && let Some(file) = kept.store.fixed(&kept.cursor, cursor::RECORD)?
        {
            self.cursor.keep(file);
        }
        Ok(())
    }

    /// Writes what the next serving process is to know.
    pub fn keep(&self) {
        if let Some(kept) = self.kept.get() {
            kept.store.put_json(&kept.record, &self.record(kept));
        }
    }

    fn record(&self, kept: &ProcessFiles) -> Record {
        Record {
            task: kept.task.clone(),
            exec_id: self.exec_id.clone(),
            paths: self.paths.clone(),
            phase: self.phase(),
            killed: self.killed.load(Ordering::Relaxed),
            input_ended: self.input_ended.load(Ordering::Relaxed),
            stdin_is_closed: self.held.is_stdin_closed(),
            size: lock(&self.size).map(|size| (size.rows, size.columns)),
            stop: *lock(&self.stop),
        }
    }

    /// Returns the path of a file of its own of this kind in the store, if anything is kept.
    pub fn place(&self, kind: &str) -> Option<PathBuf> {
        let kept = self.kept.get()?;
        kept.store.path(&name(kind, &[&kept.task, &self.exec_id]))
    }

    /// Returns the record of the position in its output.
    pub fn position(&self) -> Vec<u8> {
        let read = self.kept.get().and_then(|kept| kept.store.get(&kept.cursor));
        read.unwrap_or_default()
    }

    /// Removes what was kept.
    pub fn forget(&self) {
        if let Some(kept) = self.kept.get() {
            kept.forget();
        }
    }

    /// Notes that it is to be stopped, with the time that a stop gives its containers, seconds.
    pub fn note_stop(&self, timeout_s: u32) {
        *lock(&self.stop) = Some(timeout_s);
        self.keep();
    }

    /// Returns the time that a stop gives, seconds, if one was asked for.
    pub fn stop_asked(&self) -> Option<u32> {
        *lock(&self.stop)
    }

    /// Returns whether it is the container's first process.
    pub fn is_init(&self) -> bool {
        self.exec_id.is_empty()
    }

    /// Takes the first message of its session, once. A size that the terminal was given before the
    /// start is in it, since a program may ask for the size before it hears of a change.
    pub fn take_first(&self) -> Option<run_in::Kind> {
        let mut first = lock(&self.first).take()?;
        if let Some(ProcessFiles { store, first, .. }) = self.kept.get() {
            store.remove(first);
        }
        if let Some(size) = *lock(&self.size) {
            match &mut first {
                run_in::Kind::Run(run) => (run.rows, run.columns) = (size.rows, size.columns),
                run_in::Kind::Exec(exec) => (exec.rows, exec.columns) = (size.rows, size.columns),
                _ => {}
            }
        }
        Some(first)
    }

    /// Returns the state.
    pub fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// Returns its end once it has ended.
    pub async fn ended(&self) -> ProcessExit {
        let mut phase = self.phase.subscribe();
        // The sender is in `self`.
        let ended = phase.wait_for(|phase| matches!(phase, Phase::Stopped(_))).await;
        match ended.as_deref() {
            Ok(Phase::Stopped(end)) => end.clone(),
            _ => ProcessExit::now(255, "the shim ends"),
        }
    }

    /// Goes from created to starting, which is recorded before it begins. Returns whether it was
    /// created and not started.
    ///
    /// # Errors
    /// There is no record, and the process stays as it was.
    pub fn begin(&self) -> io::Result<bool> {
        if !self.change(&Phase::Created, Phase::Starting) {
            return Ok(false);
        }
        let Some(kept) = self.kept.get() else { return Ok(true) };
        let recorded = kept.store.try_put_json(&kept.record, &self.record(kept));
        if recorded.is_err() {
            self.change(&Phase::Starting, Phase::Created);
        }
        recorded.map(|()| true)
    }

    /// Goes from `from` to `to`. Returns whether the state was `from`.
    pub fn step(&self, from: &Phase, to: Phase) -> bool {
        let stepped = self.change(from, to);
        if stepped {
            self.keep();
        }
        stepped
    }

    fn change(&self, from: &Phase, to: Phase) -> bool {
        self.phase.send_if_modified(|phase| {
            let fits = phase == from;
            if fits {
                *phase = to;
            }
            fits
        })
    }

    /// Ends it, and calls `told` with the state before. Returns whether it had not ended before.
    /// Nobody sees the end before `told` returns.
    pub fn stop(&self, mut end: ProcessExit, told: impl FnOnce(&Phase)) -> bool {
        let stopped = self.phase.send_if_modified(|phase| {
            if matches!(phase, Phase::Stopped(_)) {
                return false;
            }
            end.ran = *phase == Phase::Running;
            told(phase);
            *phase = Phase::Stopped(end);
            true
        });
        if stopped {
            self.keep();
        }
        stopped
    }

    /// Notes the size of its terminal, which a process that does not run yet gets at its start.
    pub fn resize(&self, size: v1::Size) {
        *lock(&self.size) = Some(size);
        self.keep();
        if self.phase() == Phase::Running {
            self.tell_size();
        }
    }

    /// Tells the daemon the size of the terminal, if it is known.
    pub fn tell_size(&self) {
        if let Some(size) = *lock(&self.size) {
            self.tell(run_in::Kind::Resize(size));
        }
    }

    /// Tells the daemon again that the input has ended, if it has: the session may be a new one.
    pub fn tell_input_end(&self) {
        if self.input_ended.load(Ordering::Relaxed) {
            self.tell(run_in::Kind::StdinClosed(true));
        }
    }

    /// Sends a message to the daemon without waiting. It is lost if the session has ended, or if
    /// the daemon takes none for now.
    fn tell(&self, kind: run_in::Kind) {
        if let Some(requests) = &*self.requests.borrow() {
            let _ = requests.try_send(RunIn { kind: Some(kind) });
        }
    }

    /// Sends a signal to a process of a container that is not its first.
    ///
    /// # Errors
    /// [`Code::NotFound`] if the process has ended; [`Code::DeadlineExceeded`].
    pub async fn signal(&self, signal: u32) -> Result<(), Failure> {
        let gone = || Failure::new(Code::NotFound, "the process has ended");
        let requests = self.requests.borrow().clone().ok_or_else(gone)?;
        let message = RunIn { kind: Some(run_in::Kind::Signal(signal)) };
        match tokio::time::timeout(DELIVERY, requests.send(message)).await {
            Ok(sent) => sent.map_err(|_| gone()),
            Err(_) => Err(Failure::new(
                Code::DeadlineExceeded,
                "the process reads no input, and signals to it wait behind that",
            )),
        }
    }

    /// Waits until all output of a process that was started is written, for at most `patience`.
    pub async fn finish_output(&self, patience: Duration) {
        let mut closed = self.closed.subscribe();
        let _ = tokio::time::timeout(patience, closed.wait_for(|closed| *closed)).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // The values are valid after any panic: they are replaced whole.
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Returns the time, CLOCK_REALTIME.
pub fn timestamp() -> cd::Timestamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or(i64::MAX);
    cd::Timestamp { seconds, nanos: since.subsec_nanos() as i32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_begins_with_the_size_that_its_terminal_was_given() {
        let exec = run_in::Kind::Exec(v1::ExecSpec { rows: 1, ..Default::default() });
        let process = Process::new("more".into(), Paths::default(), exec);
        process.resize(v1::Size { rows: 40, columns: 120 });
        let Some(run_in::Kind::Exec(exec)) = process.take_first() else { panic!("no process") };
        assert_eq!((exec.rows, exec.columns), (40, 120));
        assert!(process.take_first().is_none());
    }

    #[tokio::test]
    async fn a_process_ends_once() {
        let first = run_in::Kind::StdinClosed(true);
        let process = Process::new(String::new(), Paths::default(), first);
        assert!(process.step(&Phase::Created, Phase::Starting));
        assert!(!process.step(&Phase::Created, Phase::Starting));
        assert!(process.step(&Phase::Starting, Phase::Running));
        assert!(
            process.stop(ProcessExit::now(3, ""), |before| assert_eq!(*before, Phase::Running))
        );
        assert!(!process.stop(ProcessExit::now(4, ""), |_| unreachable!()));
        let end = process.ended().await;
        assert_eq!((end.status, end.ran), (3, true));
    }
}
