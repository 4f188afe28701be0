//! The daemon's gRPC service for sandboxes.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::agent::{Agent, Ended, GuestStats, process};
use crate::files::Lane;
use crate::log;
use crate::node::Node;
use crate::record::{Process, Record, State};
use crate::sandbox::Sandbox;
use crate::start::CONTAINER;
use crate::stdio::{self, Input, Pieces};
use crate::v1::{self, run_in, run_out};
use crate::{Error, name, snoop, start};

/// The most messages in flight to a client.
const QUEUE: usize = 16;
/// The interval at which a follower of a log looks for more.
const FOLLOW: Duration = Duration::from_millis(100);
/// The most bytes that are held to find the last lines of a log. Output without line ends is cut to
/// this.
const MOST_TAIL: usize = 16 << 20;

/// The gRPC service for sandboxes.
pub struct Service {
    node: Arc<Node>,
    ends_when_idle: bool,
}

type Sender = mpsc::Sender<Result<v1::RunOut, Status>>;
type Output<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Reply<T> = Result<Response<T>, Status>;

impl Service {
    /// Makes the service for the sandboxes of `node`. `ends_when_idle` is reported by `status`.
    pub fn new(node: Arc<Node>, ends_when_idle: bool) -> Self {
        Self { node, ends_when_idle }
    }
}

fn out(kind: run_out::Kind) -> Result<v1::RunOut, Status> {
    Ok(v1::RunOut { kind: Some(kind) })
}

fn exit_of(record: &Record) -> v1::Exit {
    v1::Exit { status: record.exit_status.unwrap_or(125), reason: record.reason.clone() }
}

/// Carries a client's messages to a process: input, window sizes and signals.
async fn forward(
    mut messages: Streaming<v1::RunIn>,
    input: mpsc::Sender<Input>,
    agent: impl Fn() -> Option<Agent>,
    process: Option<agent_v1::ProcessRef>,
) {
    while let Ok(Some(message)) = messages.message().await {
        let process = process.clone();
        match message.kind {
            // Input for a process that has ended or takes no input is dropped.
            Some(run_in::Kind::Stdin(data)) => drop(input.send(Input::Data(data)).await),
            Some(run_in::Kind::StdinClosed(_)) => drop(input.send(Input::Close).await),
            Some(run_in::Kind::Resize(size)) => {
                let v1::Size { rows, columns } = size;
                if let Some(agent) = agent() {
                    let resize = agent_v1::ResizeRequest { process, rows, columns };
                    // A process that has just ended has no window.
                    let _ =
                        agent.call(|mut client| async move { client.resize(resize).await }).await;
                }
            }
            Some(run_in::Kind::Signal(signal)) => {
                if let Some(agent) = agent() {
                    let signal = agent_v1::SignalRequest { process, signal, all: false };
                    let _ =
                        agent.call(|mut client| async move { client.signal(signal).await }).await;
                }
            }
            _ => {}
        }
    }
}

/// Sends a sandbox's stages, start, output and end to one client.
async fn report(
    sandbox: Arc<Sandbox>,
    output: mpsc::Receiver<log::Record>,
    until_started: bool,
    sender: Sender,
) {
    let started = tell_start(&sandbox, &sender).await;
    if started && !until_started {
        tell_output(output, 0, &sender).await;
        sandbox.wait_state(|state| !state.is_live()).await;
    }
    if !started || !until_started {
        let _ = sender.send(out(run_out::Kind::Exit(exit_of(&sandbox.record())))).await;
    }
}

/// Sends the stages of a start to the client until the start ends. Returns `true` if the container
/// runs or ran, and `false` if the sandbox ended without it.
async fn tell_start(sandbox: &Sandbox, sender: &Sender) -> bool {
    let mut stages = sandbox.stages();
    // A start that failed is stopping, too, before it is known to have failed.
    let is_settled =
        |state: &State| !matches!(state, State::Created | State::Starting | State::Stopping);
    let settled = sandbox.wait_state(is_settled);
    tokio::pin!(settled);
    loop {
        tokio::select! {
            biased;
            _ = &mut settled => break,
            changed = stages.changed() => {
                let stage = stages.borrow_and_update().to_string();
                let told = sender.send(out(run_out::Kind::Stage(stage))).await;
                if changed.is_err() || told.is_err() {
                    break;
                }
            }
        }
    }
    // The container may have started and ended meanwhile.
    let state = sandbox.wait_state(is_settled).await;
    let timeline = sandbox.record().timeline;
    let ran = timeline.stage("container").is_some() && state != State::Failed;
    if ran {
        let stages = timeline.stages.into_iter().map(|stage| v1::Stage {
            name: stage.name,
            start_ns: stage.start_ns,
            end_ns: stage.end_ns,
        });
        let started = v1::Started { stages: stages.collect() };
        let _ = sender.send(out(run_out::Kind::Started(started))).await;
    } else {
        sandbox.wait_state(|state| !state.is_live()).await;
    }
    ran
}

async fn tell_output(mut output: mpsc::Receiver<log::Record>, from: u64, sender: &Sender) {
    while let Some(record) = output.recv().await {
        if let Some(record) = record.from(from)
            && sender.send(out(output_of(record))).await.is_err()
        {
            return;
        }
    }
}

fn output_of(record: log::Record) -> run_out::Kind {
    match record.stream {
        log::Stream::Out => run_out::Kind::Stdout(record.data),
        log::Stream::Err => run_out::Kind::Stderr(record.data),
    }
}

/// Sends a client that lost its daemon the output that it has not received, and the exit. The
/// caller attached `output` before the log is read here, so that no output is lost between the
/// log's end and the first piece of `output`.
async fn report_rest(
    sandbox: Arc<Sandbox>,
    output: mpsc::Receiver<log::Record>,
    from: u64,
    sender: Sender,
) {
    let started = v1::Started { stages: Vec::new() };
    let _ = sender.send(out(run_out::Kind::Started(started))).await;
    let mut position = from;
    let mut reader = match KeptOutput::open(&sandbox) {
        Ok(reader) => reader,
        Err(error) => return drop(sender.send(Err(error.into())).await),
    };
    loop {
        let records = match reader.read().await {
            Ok(records) if records.is_empty() => break,
            Ok(records) => records,
            Err(status) => return drop(sender.send(Err(status)).await),
        };
        for record in records {
            let Some(record) = record.from(position) else { continue };
            position = record.end();
            if sender.send(out(output_of(record))).await.is_err() {
                return;
            }
        }
    }
    drop(reader);
    tell_output(output, position, &sender).await;
    sandbox.wait_state(|state| !state.is_live()).await;
    let _ = sender.send(out(run_out::Kind::Exit(exit_of(&sandbox.record())))).await;
}

/// Creates and starts a sandbox. Returns the messages for its client. `client` is closed when the
/// client leaves; a sandbox that its client left before hearing its name is not started.
async fn begin(
    node: Arc<Node>,
    spec: v1::RunSpec,
    messages: Streaming<v1::RunIn>,
    client: oneshot::Sender<()>,
) -> Result<mpsc::Receiver<Result<v1::RunOut, Status>>, Error> {
    let sandbox = node.create(&spec).await?;
    if client.is_closed() {
        node.abandon(&sandbox).await;
        return Err(Error::Stopped);
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let created = v1::Created { id: sandbox.id.clone(), name: sandbox.name.clone() };
    // The queue is empty, so this never fails for lack of room.
    let _ = sender.try_send(out(run_out::Kind::Created(created)));
    let output = sandbox.fanout.attach(&sandbox.name)?;
    tokio::spawn(report(Arc::clone(&sandbox), output, spec.detach, sender));
    join_input(&sandbox, messages, spec.stdin, Leaving::of_owner(&spec));
    node.start(&sandbox);
    Ok(receiver)
}

fn stream(receiver: mpsc::Receiver<Result<v1::RunOut, Status>>) -> Response<Output<v1::RunOut>> {
    Response::new(Box::pin(ReceiverStream::new(receiver)))
}

async fn first(messages: &mut Streaming<v1::RunIn>) -> Result<run_in::Kind, Status> {
    let message = messages.message().await?;
    let kind = message.and_then(|message| message.kind);
    kind.ok_or_else(|| Status::invalid_argument("the first message says what to do"))
}

#[tonic::async_trait]
impl v1::sandboxes_server::Sandboxes for Service {
    type RunStream = Output<v1::RunOut>;
    type AttachStream = Output<v1::RunOut>;
    type ExecStream = Output<v1::RunOut>;
    type LogsStream = Output<v1::LogRecord>;
    type SnoopGuestStream = Output<v1::GuestReport>;

    async fn snoop_guest(
        &self,
        request: Request<v1::SnoopGuestRequest>,
    ) -> Reply<Self::SnoopGuestStream> {
        let request = request.into_inner();
        let agent = self.node.find(&request.name)?.agent()?;
        let reports = snoop::start(&agent, &request.name, request.interval_ms).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(reports))))
    }

    async fn run(&self, request: Request<Streaming<v1::RunIn>>) -> Reply<Self::RunStream> {
        let mut messages = request.into_inner();
        let run_in::Kind::Run(spec) = first(&mut messages).await? else {
            return Err(Status::invalid_argument("Run begins with a RunSpec"));
        };
        // The sandbox is created in a task of its own, so that a client that vanishes leaves no
        // half-made sandbox. `_here` is dropped with this call when the client leaves.
        let (client, _here) = oneshot::channel();
        let begun = tokio::spawn(begin(Arc::clone(&self.node), spec, messages, client)).await;
        let receiver = begun.map_err(|error| Status::internal(error.to_string()))??;
        Ok(stream(receiver))
    }

    async fn attach(&self, request: Request<Streaming<v1::RunIn>>) -> Reply<Self::AttachStream> {
        let mut messages = request.into_inner();
        let (named, from) = match first(&mut messages).await? {
            run_in::Kind::Attach(named) => (named.name, None),
            run_in::Kind::Rejoin(rejoin) => (rejoin.name, Some(rejoin.position)),
            _ => return Err(Status::invalid_argument("Attach begins with a name")),
        };
        let sandbox = self.node.find(&named)?;
        if from.is_none() && !sandbox.state().is_live() {
            return Err(sandbox.wrong_state("`slipway logs` prints what it wrote").into());
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        let output = sandbox.fanout.attach(&sandbox.name)?;
        if let Some(from) = from {
            tokio::spawn(report_rest(Arc::clone(&sandbox), output, from, sender));
        } else {
            tokio::spawn(report(Arc::clone(&sandbox), output, false, sender));
        }
        let takes_input = sandbox.record().process.stdin;
        join_input(&sandbox, messages, takes_input, Leaving::KeepsInput);
        Ok(stream(receiver))
    }

    async fn exec(&self, request: Request<Streaming<v1::RunIn>>) -> Reply<Self::ExecStream> {
        let mut messages = request.into_inner();
        let run_in::Kind::Exec(spec) = first(&mut messages).await? else {
            return Err(Status::invalid_argument("Exec begins with an ExecSpec"));
        };
        let sandbox = self.node.find(&spec.name)?;
        let agent = sandbox.agent()?;
        let session = agent.session(&sandbox.name)?;
        let exec_id = name::new_id();
        let request = exec_request(&sandbox, &spec, &exec_id);
        let (input, input_end) = stdio::input();
        let reference = process(CONTAINER, &exec_id);
        let open = agent.clone();
        let (sender, receiver) = mpsc::channel(QUEUE);
        let started = agent.call(|mut client| async move { client.exec(request).await }).await;
        let opened = match started {
            Ok(_) => stdio::open(&open, reference.clone(), input_end, session).await,
            Err(error) => Err(error),
        };
        let output = match opened {
            Ok(output) => output,
            Err(Error::Exec { status, reason }) => {
                let _ = sender.send(out(run_out::Kind::Exit(v1::Exit { status, reason }))).await;
                return Ok(stream(receiver));
            }
            Err(error) => return Err(error.into()),
        };
        let waiting = agent.clone();
        let process = reference.clone();
        tokio::spawn(forward(messages, input, move || Some(open.clone()), reference));
        tokio::spawn(async move {
            carry_exec(output, waiting, process, sender).await;
        });
        Ok(stream(receiver))
    }

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Reply<Self::LogsStream> {
        let request = request.into_inner();
        let sandbox = self.node.find(&request.name)?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        let reader = KeptOutput::open(&sandbox)?;
        tokio::spawn(send_logs(sandbox, reader, request, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn wait(&self, request: Request<v1::Name>) -> Reply<v1::Exit> {
        let sandbox = self.node.find(&request.into_inner().name)?;
        sandbox.wait_state(|state| !state.is_live()).await;
        Ok(Response::new(exit_of(&sandbox.record())))
    }

    async fn signal(&self, request: Request<v1::SignalRequest>) -> Reply<v1::Empty> {
        let request = request.into_inner();
        let sandbox = self.node.find(&request.name)?;
        send_signal(&sandbox, request.signal).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Reply<v1::Exit> {
        let request = request.into_inner();
        let sandbox = self.node.find(&request.name)?;
        stop(&sandbox, Duration::from_secs(request.timeout_s.into())).await;
        Ok(Response::new(exit_of(&sandbox.record())))
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Reply<v1::Empty> {
        let request = request.into_inner();
        self.node.remove(&request.name, request.force).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn list(&self, _: Request<v1::Empty>) -> Reply<v1::ListReply> {
        let sandboxes = self.node.list().iter().map(|one| summary(one)).collect();
        Ok(Response::new(v1::ListReply { sandboxes }))
    }

    async fn inspect(&self, request: Request<v1::Name>) -> Reply<v1::InspectReply> {
        let sandbox = self.node.find(&request.into_inner().name)?;
        let mut record = sandbox.record();
        record.state = sandbox.state();
        let json = serde_json::to_string_pretty(&record)
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(v1::InspectReply { sandbox: Some(summary(&sandbox)), json }))
    }

    async fn stats(&self, request: Request<v1::Name>) -> Reply<v1::StatsReply> {
        let sandbox = self.node.find(&request.into_inner().name)?;
        let guest = sandbox.agent()?.stats().await?;
        let pid = sandbox.vm().map(|vm| vm.record().pid);
        let usage = sandbox.lane.run(move || pid.map_or((0, 0), crate::proc::usage));
        let (vmm_cpu_ns, vmm_resident_bytes) = usage.await;
        let GuestStats { machine, blocks } = guest;
        Ok(Response::new(v1::StatsReply {
            vmm_cpu_ns,
            vmm_resident_bytes,
            memory_total_bytes: machine.memory_total_bytes,
            memory_available_bytes: machine.memory_available_bytes,
            guest_cpu_busy_ns: machine.cpu_busy_ns,
            processes: machine.processes,
            read_bytes: blocks.read_bytes,
            written_bytes: blocks.written_bytes,
            reads: blocks.reads,
            writes: blocks.writes,
        }))
    }

    async fn status(&self, _: Request<v1::Empty>) -> Reply<v1::StatusReply> {
        Ok(Response::new(v1::StatusReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            ends_when_idle: self.ends_when_idle,
            sandboxes: u32::try_from(self.node.live()).unwrap_or(u32::MAX),
            data_dir: self.node.config.data_dir.display().to_string(),
        }))
    }
}

/// The effect of a client's leaving on the container's standard input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leaving {
    /// The input ends: the client that fed a pipe is gone, and the pipe's reader must not wait for
    /// ever.
    EndsInput,
    /// The input stays open: a terminal waits for the next client.
    KeepsInput,
}

impl Leaving {
    /// Returns the effect for the client that created the sandbox.
    fn of_owner(spec: &v1::RunSpec) -> Self {
        if spec.stdin && !spec.terminal { Self::EndsInput } else { Self::KeepsInput }
    }
}

/// Carries a client's input to the container's first process, if the process takes any.
fn join_input(
    sandbox: &Arc<Sandbox>,
    messages: Streaming<v1::RunIn>,
    takes_input: bool,
    leaving: Leaving,
) {
    let target = Arc::clone(sandbox);
    let agent = move || target.agent().ok();
    // A process without input still gets signals and window sizes; bytes are dropped.
    let input = if takes_input { sandbox.input.clone() } else { stdio::input().0 };
    tokio::spawn(async move {
        forward(messages, input.clone(), agent, process(CONTAINER, "")).await;
        if leaving == Leaving::EndsInput {
            let _ = input.send(Input::Close).await;
        }
    });
}

fn exec_request(sandbox: &Sandbox, spec: &v1::ExecSpec, exec_id: &str) -> agent_v1::ExecRequest {
    let record = sandbox.record();
    let asked = Process {
        args: spec.command.clone(),
        env: record.process.env.iter().chain(&spec.env).cloned().collect(),
        cwd: crate::process::or(&spec.cwd, &record.process.cwd),
        user: crate::process::or(&spec.user, &record.process.user),
        terminal: spec.terminal,
        rows: spec.rows,
        columns: spec.columns,
        stdin: spec.stdin,
        limits: record.process.limits,
    };
    agent_v1::ExecRequest {
        process: process(CONTAINER, exec_id),
        spec: Some(start::process_spec(&asked)),
        privileged: spec.privileged || record.privileged,
    }
}

/// Carries the output of a process to its client, then its exit, until the client leaves.
async fn carry_exec(
    output: Pieces,
    agent: Agent,
    process: Option<agent_v1::ProcessRef>,
    sender: Sender,
) {
    tokio::select! {
        () = sender.closed() => {}
        () = tell_exec(output, agent, process, &sender) => {}
    }
}

async fn tell_exec(
    mut output: Pieces,
    agent: Agent,
    process: Option<agent_v1::ProcessRef>,
    sender: &Sender,
) {
    let started = v1::Started { stages: Vec::new() };
    let _ = sender.send(out(run_out::Kind::Started(started))).await;
    loop {
        match stdio::next(&mut output).await {
            Ok(Some((log::Stream::Out, data))) => {
                let _ = sender.send(out(run_out::Kind::Stdout(data))).await;
            }
            Ok(Some((log::Stream::Err, data))) => {
                let _ = sender.send(out(run_out::Kind::Stderr(data))).await;
            }
            Ok(None) => break,
            Err(error) => {
                let _ = sender.send(Err(error.into())).await;
                return;
            }
        }
    }
    let last = match agent.wait(process).await {
        Ok(Ended { status, .. }) => {
            out(run_out::Kind::Exit(v1::Exit { status, reason: String::new() }))
        }
        Err(error) => Err(error.into()),
    };
    let _ = sender.send(last).await;
}

async fn send_signal(sandbox: &Sandbox, signal: u32) -> Result<(), Error> {
    if sandbox.state() == State::Starting && signal == libc::SIGKILL as u32 {
        sandbox.kill();
        return Ok(());
    }
    let request = agent_v1::SignalRequest { process: process(CONTAINER, ""), signal, all: false };
    sandbox.agent()?.call(|mut client| async move { client.signal(request).await }).await?;
    Ok(())
}

/// Ends a sandbox: sends the stop signal, waits for `patience`, sends SIGKILL, and at last kills
/// the microVM. A guest that does not answer has no more time than one whose container does not
/// end.
async fn stop(sandbox: &Sandbox, patience: Duration) {
    let ended = || sandbox.wait_state(|state| !state.is_live());
    if sandbox.state() == State::Running {
        let signal = sandbox.record().stop_signal;
        for (signal, patience) in
            [(signal, patience), (libc::SIGKILL as u32, Duration::from_secs(5))]
        {
            let asked = async {
                send_signal(sandbox, signal).await?;
                ended().await;
                Ok::<_, Error>(())
            };
            if let Ok(Ok(())) = tokio::time::timeout(patience, asked).await {
                return;
            }
        }
    }
    if sandbox.state().is_live() {
        sandbox.kill();
        ended().await;
    }
}

type LogSender = mpsc::Sender<Result<v1::LogRecord, Status>>;

/// The kept output of a sandbox, read in the sandbox's lane.
struct KeptOutput {
    lane: Lane,
    path: PathBuf,
    reader: Option<log::Reader>,
    _place: OwnedSemaphorePermit,
}

impl KeptOutput {
    /// The number of bytes that are read at once.
    const BYTES: usize = 256 << 10;

    /// Makes the reader. The file is opened at the first read.
    ///
    /// # Errors
    /// [`Error::Busy`] if there are too many readers.
    fn open(sandbox: &Sandbox) -> Result<Self, Error> {
        let (lane, path) = (sandbox.lane.clone(), sandbox.store.log());
        Ok(Self { lane, path, reader: None, _place: sandbox.reader()? })
    }

    /// Returns the next records. Returns no records at the end of the log.
    async fn read(&mut self) -> Result<Vec<log::Record>, Status> {
        let (reader, path) = (self.reader.take(), self.path.clone());
        let read = self.lane.run(move || {
            let mut reader = reader.unwrap_or_else(|| log::Reader::open(&path));
            (reader.read_some(Self::BYTES), reader)
        });
        let (records, reader) = read.await;
        self.reader = Some(reader);
        let lost = |error| Status::data_loss(format!("the kept output cannot be read: {error}"));
        records.map_err(lost)
    }
}

async fn send_logs(
    sandbox: Arc<Sandbox>,
    mut reader: KeptOutput,
    request: v1::LogsRequest,
    sender: LogSender,
) {
    if let Err(status) = tell_logs(&sandbox, &mut reader, &request, &sender).await {
        let _ = sender.send(Err(status)).await;
    }
}

async fn tell_logs(
    sandbox: &Sandbox,
    reader: &mut KeptOutput,
    request: &v1::LogsRequest,
    sender: &LogSender,
) -> Result<(), Status> {
    if let Some(lines) = request.tail {
        let (held, failed) = read_tail(reader, lines).await;
        for record in held {
            if send_log(sender, record).await.is_err() {
                return Ok(());
            }
        }
        failed?;
    }
    loop {
        // The state is read before the log's end, so that no output before the sandbox's end is
        // missed.
        let over = !sandbox.state().is_live();
        loop {
            let records = reader.read().await?;
            if records.is_empty() {
                break;
            }
            for record in records.into_iter().filter_map(|record| record.from(request.position)) {
                if send_log(sender, record).await.is_err() {
                    return Ok(());
                }
            }
        }
        if over || !request.follow || sender.is_closed() {
            return Ok(());
        }
        tokio::time::sleep(FOLLOW).await;
    }
}

/// Returns the last `lines` lines of the log, as far as it can be read.
async fn read_tail(
    reader: &mut KeptOutput,
    lines: u64,
) -> (VecDeque<log::Record>, Result<(), Status>) {
    let mut held = VecDeque::new();
    let (mut newlines, mut bytes) = (0, 0);
    let failed = loop {
        match reader.read().await {
            Ok(records) if records.is_empty() => break Ok(()),
            Err(status) => break Err(status),
            Ok(records) => {
                for record in records {
                    newlines += count_lines(&record);
                    bytes += record.data.len();
                    held.push_back(record);
                    drop_oldest(&mut held, lines, &mut newlines, &mut bytes);
                }
            }
        }
    };
    cut_lines(&mut held, newlines.saturating_sub(lines));
    (held, failed)
}

/// Drops the oldest records: those before the last `lines` lines, and those beyond the bytes that
/// may be held.
fn drop_oldest(
    held: &mut VecDeque<log::Record>,
    lines: u64,
    newlines: &mut u64,
    bytes: &mut usize,
) {
    let enough = |oldest: &log::Record, newlines: u64, bytes: usize| {
        newlines - count_lines(oldest) >= lines || bytes > MOST_TAIL
    };
    while held.front().is_some_and(|oldest| enough(oldest, *newlines, *bytes)) {
        let oldest = held.pop_front();
        *newlines -= oldest.as_ref().map_or(0, count_lines);
        *bytes -= oldest.map_or(0, |oldest| oldest.data.len());
    }
}

fn count_lines(record: &log::Record) -> u64 {
    record.data.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// Drops the first `lines` lines.
fn cut_lines(held: &mut VecDeque<log::Record>, mut lines: u64) {
    while let Some(record) = held.front_mut().filter(|_| lines > 0) {
        match record.data.iter().position(|byte| *byte == b'\n') {
            Some(end) => {
                record.data.drain(..=end);
                record.position += end as u64 + 1;
                lines -= 1;
            }
            None => {
                held.pop_front();
            }
        }
    }
}

async fn send_log(sender: &LogSender, record: log::Record) -> Result<(), ()> {
    let log::Record { position, stream, time_ns, data } = record;
    let record = v1::LogRecord { stream: stream as u32, time_ns, data, position };
    sender.send(Ok(record)).await.map_err(|_| ())
}

/// Returns the command line, cut to 512 characters, since a list has many of them in one message.
fn command(record: &Record) -> String {
    const MOST: usize = 512;
    let mut command = String::new();
    for (number, arg) in record.process.args.iter().enumerate() {
        command.extend((number > 0).then_some(' ').into_iter().chain(arg.chars().take(MOST + 1)));
        if let Some((end, _)) = command.char_indices().nth(MOST) {
            command.truncate(end);
            command.push('…');
            break;
        }
    }
    command
}

/// Returns a sandbox's entry in the list. Its state is the announced one, which decides whether
/// calls are allowed.
fn summary(sandbox: &Sandbox) -> v1::Sandbox {
    sandbox.look(|record| summary_of(record, sandbox.state()))
}

fn summary_of(record: &Record, state: State) -> v1::Sandbox {
    // A sandbox that has ended has released its addresses.
    let holds = state.is_live();
    let network = record.network.as_ref().filter(|_| holds);
    v1::Sandbox {
        id: record.id.clone(),
        name: record.name.clone(),
        image: record.image.clone(),
        command: command(record),
        state: state.as_str().to_owned(),
        created_ns: record.created_ns,
        exit_status: record.exit_status.unwrap_or(0),
        reason: record.reason.clone(),
        vmm_pid: record.vm.as_ref().map_or(0, |vm| vm.pid as u32),
        network: network.map(|one| one.name.clone()).unwrap_or_default(),
        mac: network.map(|one| one.mac.clone()).unwrap_or_default(),
        addresses: network.map(|one| vec![one.ipv4.clone(), one.ipv6.clone()]).unwrap_or_default(),
        published: network.map(|one| one.published.clone()).unwrap_or_default(),
        sockets: record.sockets.is_some(),
    }
}
