//! The daemon's gRPC service for sandboxes.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::agent::{Agent, process};
use crate::log;
use crate::node::Node;
use crate::record::{Process, Record, State};
use crate::sandbox::Sandbox;
use crate::start::CONTAINER;
use crate::stdio::{self, Input};
use crate::v1::{self, run_in, run_out};
use crate::{Error, name, snoop, start};

/// Messages under way to a client.
const QUEUE: usize = 16;
/// How often a follower of a log looks for more.
const FOLLOW: Duration = Duration::from_millis(100);
/// Most bytes that are held to find the last lines of a log; output without lines is cut to this.
const MOST_TAIL: usize = 16 << 20;

/// The service.
pub struct Service {
    node: Arc<Node>,
    ends_when_idle: bool,
}

type Sender = mpsc::Sender<Result<v1::RunOut, Status>>;
type Output<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Reply<T> = Result<Response<T>, Status>;

impl Service {
    /// Serves the sandboxes of `node`.
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

/// Carries a client's messages to a process: what it types, its window, its signals.
async fn forward(
    mut messages: Streaming<v1::RunIn>,
    input: mpsc::Sender<Input>,
    agent: impl Fn() -> Option<Agent>,
    process: Option<agent_v1::ProcessRef>,
) {
    while let Ok(Some(message)) = messages.message().await {
        let process = process.clone();
        match message.kind {
            // Input for a process that has ended, or takes none, goes nowhere.
            Some(run_in::Kind::Stdin(data)) => drop(input.send(Input::Data(data)).await),
            Some(run_in::Kind::StdinClosed(_)) => drop(input.send(Input::Close).await),
            Some(run_in::Kind::Resize(size)) => {
                let v1::Size { rows, columns } = size;
                if let Some(agent) = agent() {
                    let resize = agent_v1::ResizeRequest { process, rows, columns };
                    // A process that has just ended has no window any more.
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
async fn report(sandbox: Arc<Sandbox>, until_started: bool, sender: Sender) {
    let output = sandbox.fanout.attach();
    let started = tell_start(&sandbox, &sender).await;
    if started && !until_started {
        tell_output(output, 0, &sender).await;
        sandbox.wait_state(|state| !state.is_live() && *state != State::Created).await;
    }
    if !started || !until_started {
        let _ = sender.send(out(run_out::Kind::Exit(exit_of(&sandbox.record())))).await;
    }
}

/// True when the container runs (or ran); false when the sandbox ended without it.
async fn tell_start(sandbox: &Sandbox, sender: &Sender) -> bool {
    let mut stages = sandbox.stages();
    let settled = sandbox.wait_state(|state| !matches!(state, State::Created | State::Starting));
    tokio::pin!(settled);
    loop {
        tokio::select! {
            biased;
            _ = &mut settled => break,
            changed = stages.changed() => {
                let stage = stages.borrow_and_update().to_string();
                if changed.is_err() || sender.send(out(run_out::Kind::Stage(stage))).await.is_err() {
                    break;
                }
            }
        }
    }
    // A container may have started and ended between two looks.
    let state = sandbox.wait_state(|s| !matches!(s, State::Created | State::Starting)).await;
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

/// Sends a client that lost its daemon the output that it has not had, and the end.
async fn report_rest(sandbox: Arc<Sandbox>, from: u64, sender: Sender) {
    // First, so that nothing falls between the log's end and the first piece.
    let output = sandbox.fanout.attach();
    let started = v1::Started { stages: Vec::new() };
    let _ = sender.send(out(run_out::Kind::Started(started))).await;
    let mut reader = log::Reader::open(&sandbox.store.log());
    let (mut position, mut failed) = (from, None);
    while let Some(record) = read(&mut reader, &mut failed) {
        let Some(record) = record.from(position) else { continue };
        position = record.end();
        if sender.send(out(output_of(record))).await.is_err() {
            return;
        }
    }
    if let Some(error) = failed {
        let _ = sender.send(Err(Status::data_loss(error))).await;
        return;
    }
    tell_output(output, position, &sender).await;
    sandbox.wait_state(|state| !state.is_live() && *state != State::Created).await;
    let _ = sender.send(out(run_out::Kind::Exit(exit_of(&sandbox.record())))).await;
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
        let reports = snoop::start(&agent, request.interval_ms).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(reports))))
    }

    async fn run(&self, request: Request<Streaming<v1::RunIn>>) -> Reply<Self::RunStream> {
        let mut messages = request.into_inner();
        let run_in::Kind::Run(spec) = first(&mut messages).await? else {
            return Err(Status::invalid_argument("Run begins with a RunSpec"));
        };
        let sandbox = self.node.create(&spec).await?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        let created = v1::Created { id: sandbox.id.clone(), name: sandbox.name.clone() };
        // Never waits, the queue being empty: a client that vanished here would leave a sandbox
        // that nobody starts.
        let _ = sender.try_send(out(run_out::Kind::Created(created)));
        let reported = Arc::clone(&sandbox);
        let reporter = tokio::spawn(report(reported, spec.detach, sender));
        join_input(&sandbox, messages, spec.stdin, Leaving::of_owner(&spec));
        self.node.start(&sandbox);
        drop(reporter);
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
        let (sender, receiver) = mpsc::channel(QUEUE);
        if let Some(from) = from {
            tokio::spawn(report_rest(Arc::clone(&sandbox), from, sender));
        } else if sandbox.state().is_live() {
            tokio::spawn(report(Arc::clone(&sandbox), false, sender));
        } else {
            return Err(sandbox.wrong_state("`slipway logs` prints what it wrote").into());
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
        let exec_id = name::new_id();
        let request = exec_request(&sandbox, &spec, &exec_id);
        let (input, input_end) = stdio::input();
        let reference = process(CONTAINER, &exec_id);
        let open = agent.clone();
        let (sender, receiver) = mpsc::channel(QUEUE);
        let started = agent.call(|mut client| async move { client.exec(request).await }).await;
        let opened = match started {
            Ok(_) => stdio::open(&open, reference.clone(), input_end).await,
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
        tokio::spawn(send_logs(sandbox, request, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn wait(&self, request: Request<v1::Name>) -> Reply<v1::Exit> {
        let sandbox = self.node.find(&request.into_inner().name)?;
        sandbox.wait_state(|state| !state.is_live() && *state != State::Created).await;
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
        let sandboxes = self.node.list().iter().map(|one| summary(&one.record())).collect();
        Ok(Response::new(v1::ListReply { sandboxes }))
    }

    async fn inspect(&self, request: Request<v1::Name>) -> Reply<v1::InspectReply> {
        let record = self.node.find(&request.into_inner().name)?.record();
        let json = serde_json::to_string_pretty(&record)
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(v1::InspectReply { sandbox: Some(summary(&record)), json }))
    }

    async fn stats(&self, request: Request<v1::Name>) -> Reply<v1::StatsReply> {
        let sandbox = self.node.find(&request.into_inner().name)?;
        let guest = sandbox
            .agent()?
            .call(|mut client| async move { client.stats(agent_v1::StatsRequest {}).await })
            .await?;
        let (vmm_cpu_ns, vmm_resident_bytes) =
            sandbox.vm().map_or((0, 0), |vm| crate::proc::usage(vm.record().pid));
        Ok(Response::new(v1::StatsReply {
            vmm_cpu_ns,
            vmm_resident_bytes,
            memory_total_bytes: guest.memory_total_bytes,
            memory_available_bytes: guest.memory_available_bytes,
            guest_cpu_busy_ns: guest.cpu_busy_ns,
            processes: guest.processes,
            read_bytes: guest.blocks.iter().map(|block| block.read_bytes).sum(),
            written_bytes: guest.blocks.iter().map(|block| block.written_bytes).sum(),
            reads: guest.blocks.iter().map(|block| block.reads).sum(),
            writes: guest.blocks.iter().map(|block| block.writes).sum(),
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

/// What a client's end means for the container's standard input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leaving {
    /// End of file: whoever fed a pipe is gone, and its reader must not wait for ever.
    EndsInput,
    /// Nothing: a terminal waits for the next one who attaches.
    KeepsInput,
}

impl Leaving {
    /// For the client that made the sandbox.
    fn of_owner(spec: &v1::RunSpec) -> Self {
        if spec.stdin && !spec.terminal { Self::EndsInput } else { Self::KeepsInput }
    }
}

/// Carries a client's input to the container's first process, when it takes any.
fn join_input(
    sandbox: &Arc<Sandbox>,
    messages: Streaming<v1::RunIn>,
    takes_input: bool,
    leaving: Leaving,
) {
    let target = Arc::clone(sandbox);
    let agent = move || target.agent().ok();
    // A process without input gets signals and window sizes all the same; its bytes go nowhere.
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

async fn carry_exec(
    mut output: Streaming<agent_v1::StdioOut>,
    agent: Agent,
    process: Option<agent_v1::ProcessRef>,
    sender: Sender,
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
        if sender.is_closed() {
            return;
        }
    }
    let waited = agent.client().wait(agent_v1::WaitRequest { process }).await;
    let last = waited.map(|reply| v1::RunOut {
        kind: Some(run_out::Kind::Exit(v1::Exit {
            status: reply.get_ref().exit_status,
            reason: String::new(),
        })),
    });
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

/// The stop signal, patience, SIGKILL, and at last the microVM itself.
async fn stop(sandbox: &Sandbox, patience: Duration) {
    let ended = || sandbox.wait_state(|state| !state.is_live());
    if sandbox.state() == State::Running {
        let signal = sandbox.record().stop_signal;
        for (signal, patience) in
            [(signal, patience), (libc::SIGKILL as u32, Duration::from_secs(5))]
        {
            if send_signal(sandbox, signal).await.is_ok()
                && tokio::time::timeout(patience, ended()).await.is_ok()
            {
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

async fn send_logs(sandbox: Arc<Sandbox>, request: v1::LogsRequest, sender: LogSender) {
    let v1::LogsRequest { follow, tail, position, .. } = request;
    let mut reader = log::Reader::open(&sandbox.store.log());
    let mut failed = None;
    if let Some(lines) = tail {
        let mut held = std::collections::VecDeque::new();
        let (mut newlines, mut bytes) = (0, 0);
        while let Some(record) = read(&mut reader, &mut failed) {
            newlines += count_lines(&record);
            bytes += record.data.len();
            held.push_back(record);
            while held
                .front()
                .is_some_and(|oldest| newlines - count_lines(oldest) >= lines || bytes > MOST_TAIL)
            {
                let oldest = held.pop_front();
                newlines -= oldest.as_ref().map_or(0, count_lines);
                bytes -= oldest.map_or(0, |oldest| oldest.data.len());
            }
            // Others are served by this thread too.
            tokio::task::consume_budget().await;
        }
        cut_lines(&mut held, newlines.saturating_sub(lines));
        for record in held {
            if send_log(&sender, record).await.is_err() {
                return;
            }
        }
    }
    loop {
        // The state is read before the log's end: what was written before the end is not missed.
        let over = !sandbox.state().is_live();
        while let Some(record) = read(&mut reader, &mut failed) {
            if let Some(record) = record.from(position)
                && send_log(&sender, record).await.is_err()
            {
                return;
            }
        }
        if let Some(error) = failed.take() {
            let _ = sender.send(Err(Status::data_loss(error))).await;
            return;
        }
        if over || !follow || sender.is_closed() {
            return;
        }
        tokio::time::sleep(FOLLOW).await;
    }
}

fn read(reader: &mut log::Reader, failed: &mut Option<String>) -> Option<log::Record> {
    reader.read().unwrap_or_else(|error| {
        *failed = Some(format!("the kept output cannot be read: {error}"));
        None
    })
}

fn count_lines(record: &log::Record) -> u64 {
    record.data.iter().filter(|byte| **byte == b'\n').count() as u64
}

/// Drops the first `lines` lines.
fn cut_lines(held: &mut std::collections::VecDeque<log::Record>, mut lines: u64) {
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

fn summary(record: &Record) -> v1::Sandbox {
    // What has ended has given its addresses back.
    let holds = record.state.is_live() || record.state == State::Created;
    let network = record.network.as_ref().filter(|_| holds);
    v1::Sandbox {
        id: record.id.clone(),
        name: record.name.clone(),
        image: record.image.clone(),
        command: record.process.args.join(" "),
        state: record.state.as_str().to_owned(),
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
