//! The session of a process: its start, its streams, its end, and the way through a restart of the
//! daemon, or of this process ([`resume`]).
//!
//! A session keeps the order of events: a process's exit is published after its start, and after
//! its output. A reader that does not read cannot hold the exit back:
//! - Output that fits into the FIFOs is written before the exit. If the reader takes it, the FIFOs
//!   are closed first. If the reader takes nothing for [`UNREAD`], the exit is published, and the
//!   FIFOs stay open until they are read, or for [`KEPT`] without progress ([`keep_unread`]).
//! - Full FIFOs stop the session before the daemon reports the exit. Beside it, [`report_end`]
//!   waits for the end of the container. After [`STUCK`] without progress it publishes the exit,
//!   and the output goes on.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use slipway_sandbox_api::SandboxClient;
use slipway_sandbox_api::v1::{self, RunIn, RunOut, run_in, run_out};
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tonic::{Code, Status, Streaming};

use crate::cursor::Stream;
use crate::daemon::{failure, is_lost};
use crate::io::{Output, Streams};
use crate::process::{Phase, Process, ProcessExit};
use crate::task::{ANSWER, KILLED, SIGKILL, Task};
use crate::ttrpc::Failure;
use crate::{checkpoint, logger};

/// The messages in flight to the daemon.
const QUEUE: usize = 4;
/// The largest piece of input, bytes.
const PIECE: usize = 16 << 10;
/// The longest time that the shim waits for the next daemon, if no keeper waits for it too.
pub const RETURN: Duration = Duration::from_secs(30);
/// The time between two attempts to reach the next daemon.
const LOOK: Duration = Duration::from_millis(200);
/// The time without progress after which the output of an ended container is no longer waited for.
const STUCK: Duration = Duration::from_secs(10);
/// The time without a reader's progress after which an exit is published although output is unread.
const UNREAD: Duration = Duration::from_millis(200);
/// The time without a reader's progress after which the unread output of an ended process is
/// dropped.
const KEPT: Duration = Duration::from_secs(60);
/// The shortest time between two looks at unread output.
const PEEK: Duration = Duration::from_millis(5);
/// The longest time between two looks at unread output.
const LONGEST_PEEK: Duration = Duration::from_millis(500);
/// The exit status of a process whose own status is not known.
const UNKNOWN: u32 = 255;

/// The reason for a session's early end.
enum Broken {
    /// The daemon went away, or is about to. The next one may go on.
    Lost(String),
    /// No daemon serves, and none came in the time that the shim waits for one.
    NoDaemon(String),
    /// The daemon refused.
    Refused(Status),
}

impl From<Status> for Broken {
    fn from(status: Status) -> Self {
        // A daemon that is ending refuses calls, and the next one may take them.
        if is_lost(&status) || status.code() == Code::Unavailable {
            Self::Lost(failure(&status).message)
        } else {
            Self::Refused(status)
        }
    }
}

impl Broken {
    /// Converts the failure to connect to a daemon.
    fn no_daemon(failed: Failure) -> Self {
        Self::NoDaemon(failed.message)
    }
}

/// Starts a process, and returns when it runs.
///
/// # Errors
/// It was started before, its start cannot be recorded, or it does not run, with the reason.
pub async fn start(task: &Arc<Task>, process: &Arc<Process>) -> Result<(), Failure> {
    if !process.begin().map_err(|error| Failure::unrecorded("the start", &error))? {
        return Err(Failure::new(Code::FailedPrecondition, "the process was started before"));
    }
    let streams = match logger::open(task, process).await {
        Ok(streams) => streams,
        Err(reason) => {
            task.finish(process, ProcessExit::now(UNKNOWN, reason.clone()));
            return Err(Failure::new(Code::InvalidArgument, reason));
        }
    };
    process.closed.send_replace(false);
    tokio::spawn(live(Arc::clone(task), Arc::clone(process), streams, false));
    let mut phase = process.phase.subscribe();
    let settled = phase.wait_for(|phase| *phase != Phase::Starting).await;
    match settled.as_deref() {
        // A process that ran and has ended already was started well.
        Ok(Phase::Stopped(end)) if !end.ran => {
            Err(Failure::new(Code::Unknown, format!("slipway: {}", end.reason)))
        }
        _ => {
            if process.is_init() {
                crate::forward::serve(task);
                crate::refresh::serve(task);
            }
            Ok(())
        }
    }
}

/// Goes on with a process that an earlier serving process has left. A process that was being
/// started is removed. The container's own process is joined again at the position that its output
/// had. A further process that runs cannot be joined again, so it is told as ended.
pub fn resume(task: &Arc<Task>, process: &Arc<Process>) {
    let phase = process.phase();
    match phase {
        Phase::Created => return,
        Phase::Starting => {
            // Readers see the end.
            drop(process.held.left());
            tokio::spawn(undo(Arc::clone(task), Arc::clone(process)));
            return;
        }
        Phase::Stopped(_) if !process.held.has_left() => return,
        Phase::Running | Phase::Stopped(_) => {}
    }
    let streams = crate::io::open_again(&process.paths, &process.held);
    if process.killed.load(Ordering::Relaxed) {
        process.held.release_outputs();
    }
    if phase != Phase::Running {
        // Its exit may have been told while its output was stuck, with the input still open.
        process.held.close_stdin();
        let Streams { stdout, stderr, .. } = streams;
        tokio::spawn(keep_unread(Arc::clone(process), stdout, stderr));
        return;
    }
    process.cursor.resume(&process.position(), |stream| match stream {
        Stream::Out => streams.stdout.metadata(),
        Stream::Err => streams.stderr.metadata(),
    });
    process.closed.send_replace(false);
    tokio::spawn(live(Arc::clone(task), Arc::clone(process), streams, true));
    if process.is_init() {
        let its = Arc::clone(task);
        tokio::spawn(async move { its.learn_pid(ANSWER).await });
        crate::forward::serve(task);
        crate::refresh::serve(task);
        if let Some(timeout_s) = process.stop_asked() {
            task.stop(timeout_s);
        }
    }
}

/// Ends a process that an earlier serving process was starting, so that nothing is left of it.
async fn undo(task: Arc<Task>, process: Arc<Process>) {
    if process.is_init()
        && let Err(failed) = task.daemon.remove(&task.name, RETURN).await
    {
        crate::log::warn(&format!("{} may be left: {failed}", task.name));
    }
    task.finish(&process, ProcessExit::now(UNKNOWN, "the shim was killed while it started"));
}

/// Runs a process from its start to its end, with its open streams. With `joins` it runs already,
/// and the streams have what was carried before.
async fn live(task: Arc<Task>, process: Arc<Process>, streams: Streams, joins: bool) {
    let Streams { stdin, mut stdout, mut stderr } = streams;
    // A pod's sandbox has no process that could read.
    let input = stdin
        .filter(|_| !task.is_pod())
        .map(|stdin| tokio::spawn(forward_input(Arc::clone(&process), stdin)));
    let mut session =
        Session { task: &task, process: &process, stdout: &mut stdout, stderr: &mut stderr };
    let end = tokio::select! {
        end = session.run(joins) => end,
        end = end_with_pod(&task, &process) => end,
    };
    process.requests.send_replace(None);
    if let Some(input) = input {
        input.abort();
    }
    process.held.close_stdin();
    // Readers see the end of the output before anybody hears of the process's end, unless they are
    // slow, or none is there now: containerd may be away.
    let is_read = was_read(&process, UNREAD).await;
    if is_read {
        drop((stdout, stderr));
        process.held.release_outputs();
    } else {
        tokio::spawn(keep_unread(Arc::clone(&process), stdout, stderr));
    }
    task.tell(&process, &end.message).await;
    task.finish(&process, end);
    if is_read {
        // After the exit: loggers may wait for that.
        logger::end(&process).await;
    }
    process.closed.send_replace(true);
}

/// Returns the time until the next look at output that nobody has read for `waited`: a tenth of
/// that, so that neither a quick reader waits long nor a stuck one costs many looks.
fn next_look(waited: Duration) -> Duration {
    (waited / 10).clamp(PEEK, LONGEST_PEEK)
}

/// Waits until readers have taken what was written to the FIFOs. Returns `false` if they take
/// nothing for `patience`.
async fn was_read(process: &Process, patience: Duration) -> bool {
    let (mut left, mut since) = (process.held.unread(), Instant::now());
    while left > 0 && since.elapsed() < patience {
        tokio::time::sleep(next_look(since.elapsed())).await;
        let now = process.held.unread();
        if now != left {
            (left, since) = (now, Instant::now());
        }
    }
    left == 0
}

/// Keeps the FIFOs of an ended process open until their content was read: what is in a FIFO that
/// nobody has open is lost. The write ends are kept too, since a reader waits for one.
async fn keep_unread(process: Arc<Process>, stdout: Output, stderr: Output) {
    was_read(&process, KEPT).await;
    drop((stdout, stderr));
    process.held.release_outputs();
    logger::end(&process).await;
}

/// Returns the end of a process of a pod that has ended, if the daemon does not report it soon: the
/// microVM is gone, and so is whatever ran in it.
async fn end_with_pod(task: &Task, process: &Process) -> ProcessExit {
    task.pod_ended().await;
    let end = ProcessExit::now(KILLED, "its pod has ended");
    process.held.release_outputs();
    stuck(process).await;
    end
}

/// Returns when no output was carried for a while.
async fn stuck(process: &Process) {
    loop {
        let before = process.cursor.carried();
        tokio::time::sleep(STUCK).await;
        if process.cursor.carried() == before {
            return;
        }
    }
}

/// The session of one process with the daemon, or with several daemons in turn.
struct Session<'a> {
    task: &'a Arc<Task>,
    process: &'a Arc<Process>,
    stdout: &'a mut Output,
    stderr: &'a mut Output,
}

impl Session<'_> {
    /// Starts the process, unless it `joins` one that runs, and carries its output until it ends. A
    /// container whose daemon goes away is joined again through the next one. Returns the end of
    /// the process.
    async fn run(&mut self, joins: bool) -> ProcessExit {
        let mut outcome = match joins {
            true => Err(Broken::Lost("the shim was killed, and this process was lost".to_owned())),
            false => self.begin().await,
        };
        loop {
            let reason = match outcome {
                Ok(exit) => return ProcessExit::reported(exit),
                Err(Broken::Refused(status)) if self.goes_on(&status) => {
                    let lost = failure(&status).message;
                    crate::log::warn(&format!("output is lost from here on: {lost}"));
                    return self.wait().await;
                }
                Err(Broken::Refused(status)) => {
                    return ProcessExit::now(UNKNOWN, failure(&status).message);
                }
                Err(Broken::NoDaemon(reason)) => return ProcessExit::now(UNKNOWN, reason),
                Err(Broken::Lost(reason)) => reason,
            };
            if self.process.phase() != Phase::Running || !self.process.is_init() {
                return ProcessExit::now(UNKNOWN, reason);
            }
            // A pod's sandbox has no streams to join.
            if self.task.is_pod() {
                return self.wait().await;
            }
            outcome = self.rejoin().await;
        }
    }

    /// Returns whether a container runs whose streams the daemon has refused to join again.
    fn goes_on(&self, refused: &Status) -> bool {
        let runs = self.process.phase() == Phase::Running && self.process.is_init();
        runs && refused.code() != Code::NotFound
    }

    /// Waits for the end of a container without its output, or for that of a pod.
    async fn wait(&self) -> ProcessExit {
        loop {
            let mut client = match self.next_daemon().await {
                Ok(client) => client,
                Err(failed) => return ProcessExit::now(UNKNOWN, failed.message),
            };
            let name = v1::Name { name: self.task.name.clone() };
            match client.wait(name).await.map_err(Broken::from) {
                Ok(exit) => return ProcessExit::reported(exit.into_inner()),
                Err(Broken::Refused(status)) => {
                    return ProcessExit::now(UNKNOWN, failure(&status).message);
                }
                Err(Broken::Lost(_) | Broken::NoDaemon(_)) => {}
            }
        }
    }

    /// Starts the process.
    async fn begin(&mut self) -> Result<v1::Exit, Broken> {
        let mut client = self.task.daemon.connect().await.map_err(Broken::no_daemon)?;
        let first = self.process.take_first();
        let first = first.ok_or_else(|| Status::internal("the process was started before"))?;
        let stream = self.requests(first);
        let replies = match self.process.is_init() {
            true => client.run(stream).await?,
            false => client.exec(stream).await?,
        };
        self.carry(replies.into_inner()).await
    }

    /// Joins the container again through the next daemon, where the output of the last session
    /// ended.
    async fn rejoin(&mut self) -> Result<v1::Exit, Broken> {
        self.process.requests.send_replace(None);
        let mut client = self.next_daemon().await.map_err(Broken::no_daemon)?;
        let position = self.process.cursor.carried();
        let rejoin = v1::Rejoin { name: self.task.name.clone(), position };
        let stream = self.requests(run_in::Kind::Rejoin(rejoin));
        self.carry(client.attach(stream).await?.into_inner()).await
    }

    /// Connects to the next daemon.
    ///
    /// # Errors
    /// [`Code::Unavailable`]: there is none after a while, and no keeper waits for one.
    async fn next_daemon(&self) -> Result<SandboxClient, Failure> {
        let begun = Instant::now();
        loop {
            // Also after a connection that broke at once: a daemon that ends accepts for a moment.
            tokio::time::sleep(LOOK).await;
            match self.task.daemon.connect().await {
                Ok(client) => return Ok(client),
                Err(_) if begun.elapsed() < RETURN || self.task.daemon.is_kept() => {}
                Err(failed) => return Err(failed),
            }
        }
    }

    /// Makes the stream of messages to the daemon, which begins with `first`.
    fn requests(
        &self,
        first: run_in::Kind,
    ) -> impl tokio_stream::Stream<Item = RunIn> + Send + 'static {
        let (sender, receiver) = mpsc::channel(QUEUE);
        self.process.requests.send_replace(Some(sender));
        let first = tokio_stream::once(RunIn { kind: Some(first) });
        first.chain(tokio_stream::wrappers::ReceiverStream::new(receiver))
    }

    /// Kills a process that was to be killed while it started, or while no daemon served.
    async fn kill_late(&self) {
        if !self.process.killed.load(Ordering::Relaxed) {
            return;
        }
        if self.process.is_init() {
            return self.task.stop(0);
        }
        let requests = self.process.requests.borrow().clone();
        if let Some(requests) = requests {
            // Fails if the session is over, and then so is the process.
            let _ = requests.send(RunIn { kind: Some(run_in::Kind::Signal(SIGKILL)) }).await;
        }
    }

    /// Carries what the daemon reports of the process until the process ends. Returns its exit.
    ///
    /// # Errors
    /// The daemon refuses, or the session ends before the process does.
    async fn carry(&mut self, mut replies: Streaming<RunOut>) -> Result<v1::Exit, Broken> {
        let mut watch = None;
        loop {
            let Some(message) = replies.message().await? else {
                return Err(Broken::Lost("the session ended early".to_owned()));
            };
            match message.kind {
                Some(run_out::Kind::Created(_)) => self.kill_late().await,
                Some(run_out::Kind::Started(_)) => {
                    if self.process.is_init() {
                        self.task.learn_pid(ANSWER).await;
                        checkpoint::begun(self.task).await;
                    }
                    self.task.running(self.process);
                    self.process.tell_size();
                    self.process.tell_input_end();
                    self.kill_late().await;
                    watch.get_or_insert_with(|| Watch::begin(self.task, self.process));
                }
                Some(run_out::Kind::Stdout(data)) => {
                    self.stdout.write(&data, Stream::Out, &self.process.cursor).await;
                }
                Some(run_out::Kind::Stderr(data)) => {
                    self.stderr.write(&data, Stream::Err, &self.process.cursor).await;
                }
                Some(run_out::Kind::Exit(exit)) => return Ok(exit),
                Some(run_out::Kind::Stage(_)) | None => {}
            }
        }
    }
}

/// Watches for the container's end beside its output, which may be stuck. Ends on drop.
struct Watch(tokio::task::JoinHandle<()>);

impl Watch {
    fn begin(task: &Arc<Task>, process: &Arc<Process>) -> Self {
        Self(tokio::spawn(report_end(Arc::clone(task), Arc::clone(process))))
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Reports the end of a process whose session is stuck in its output, once the container has ended.
async fn report_end(task: Arc<Task>, process: Arc<Process>) {
    let init = Arc::clone(&task.init);
    let status = if process.is_init() {
        let Ok(mut client) = task.daemon.connect().await else { return };
        let request = v1::Name { name: task.name.clone() };
        // Without an answer the session breaks too, and begins a new watch when it rejoins.
        let Ok(exit) = client.wait(request).await else { return };
        ProcessExit::reported(exit.into_inner())
    } else {
        init.ended().await;
        ProcessExit::now(UNKNOWN, "the container ended")
    };
    // The session passes on what is left, and then the exit. A reader that has gone may come back.
    stuck(&process).await;
    process.held.release_outputs();
    task.finish(&process, status);
}

/// Carries input to whatever session there is, until the input ends.
async fn forward_input(process: Arc<Process>, mut stdin: pipe::Receiver) {
    let mut sessions = process.requests.subscribe();
    let mut started = process.phase.subscribe();
    // Input that is sent before the process runs would have nobody to hold it back.
    if started.wait_for(|phase| *phase == Phase::Running).await.is_err() {
        return;
    }
    let mut buffer = vec![0; PIECE];
    loop {
        let kind = match stdin.read(&mut buffer).await {
            Ok(0) | Err(_) => run_in::Kind::StdinClosed(true),
            Ok(count) => run_in::Kind::Stdin(buffer[..count].to_vec()),
        };
        let last = matches!(kind, run_in::Kind::StdinClosed(_));
        let mut message = RunIn { kind: Some(kind) };
        loop {
            let session = match sessions.wait_for(Option::is_some).await.as_deref() {
                Ok(Some(session)) => session.clone(),
                _ => return,
            };
            // Before the message is sent: a session that takes it may break at once.
            process.input_ended.store(last, Ordering::Relaxed);
            if last {
                process.keep();
            }
            match session.send(message).await {
                Ok(()) => break,
                // The session broke: the piece goes to the next one.
                Err(unsent) => message = unsent.0,
            }
            if sessions.changed().await.is_err() {
                return;
            }
        }
        if last {
            return;
        }
    }
}
