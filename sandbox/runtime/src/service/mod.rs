//! The daemon's gRPC service for sandboxes.
//!
//! A new call is in `sandbox.proto` (`sandbox/api`), with its errors, and here; a call with much
//! code of its own has a file beside this one. A call that changes a sandbox is carried out by a
//! task of `Node::guests`, so that a client that leaves does not stop it half-way. Callers are
//! `front/cli` and `front/shim`; a daemon of an earlier build answers Unimplemented. Tests:
//! `sandbox/runtime/tests`, whose `harness` serves it with a guest of the test's own, and a script
//! of `tests/e2e`.

mod control;
mod exec;
mod groups;
mod list;
mod logs;
mod report;
mod size;
pub(crate) mod snapshots;
pub(crate) mod templates;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::v1 as agent_v1;
use slipway_plane_api::trace;
use slipway_telemetry::trace::Call;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use self::control::{Leaving, join_input, send_signal, stop};
use self::list::summary;
use self::logs::{KeptOutput, send_logs};
use self::report::{report, report_rest};
use crate::agent::{Agent, GuestStats};
use crate::node::Node;
use crate::pod::GivenBack;
use crate::stdio::Input;
use crate::target::Target;
use crate::v1::{self, copy_in_request, forward_in, run_in, run_out};
use crate::{
    Error, connect, copying, layers, pause, placement, pod, put_files, snoop, to_file, traces,
};

/// The most messages in flight to a client.
const QUEUE: usize = 16;
/// The names of the calls that are traced.
const RUN: &str = "slipway.sandbox.v1.Sandboxes/Run";
const EXEC: &str = "slipway.sandbox.v1.Sandboxes/Exec";

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

/// Runs `work` in a task of its own, so that it goes on to its end if the client leaves early.
async fn to_its_end<T: Send + 'static>(
    work: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<T, Status> {
    let done = tokio::spawn(work).await;
    Ok(done.map_err(|error| Status::internal(error.to_string()))??)
}

fn out(kind: run_out::Kind) -> Result<v1::RunOut, Status> {
    Ok(v1::RunOut { kind: Some(kind) })
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

/// Creates and starts a sandbox or a container of a pod. Returns the messages for its client.
/// `client` is closed when the client leaves; what its client left before hearing its name is not
/// started. The span `call` ends with the start.
async fn begin(
    node: Arc<Node>,
    spec: v1::RunSpec,
    messages: Streaming<v1::RunIn>,
    client: oneshot::Sender<()>,
    mut call: Call,
) -> Result<mpsc::Receiver<Result<v1::RunOut, Status>>, Error> {
    let created = match spec.pod.is_empty() {
        true => node.create(&spec).await.map(Target::own),
        false => node.add(&spec).await,
    };
    let target = created.inspect_err(|error| traces::end(&mut call, Some(error)))?;
    target.describe(&mut call);
    if client.is_closed() {
        match target.is_own() {
            true => node.abandon(&target.sandbox).await,
            false => node.abandon_added(&target).await,
        }
        return Err(Error::Stopped);
    }
    let (sender, receiver) = mpsc::channel(QUEUE);
    let created = v1::Created { id: target.sandbox.id.clone(), name: target.name() };
    // The queue is empty, so this never fails for lack of room.
    let _ = sender.try_send(out(run_out::Kind::Created(created)));
    let output = target.container.fanout.attach(&target.name())?;
    tokio::spawn(report(target.clone(), output, spec.detach, sender));
    join_input(&target, messages, spec.stdin, Leaving::of_owner(&spec));
    match target.is_own() {
        true => node.start(&target.sandbox, call),
        false => node.start_added(&target, call),
    }
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
    type ForwardStream = Output<v1::ForwardOut>;
    type SnoopGuestStream = Output<v1::GuestReport>;
    type CopyOutStream = Output<v1::CopyOutReply>;

    async fn forward(
        &self,
        request: Request<Streaming<v1::ForwardIn>>,
    ) -> Reply<Self::ForwardStream> {
        let mut messages = request.into_inner();
        let kind = messages.message().await?.and_then(|message| message.kind);
        let Some(forward_in::Kind::To(to)) = kind else {
            return Err(Status::invalid_argument("Forward begins with a sandbox and a port"));
        };
        let target = self.node.target(&to.name)?;
        let replies = connect::start(&target, to.port, messages).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

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
        let call = trace::call(&self.node.tracer, RUN, &request);
        let mut messages = request.into_inner();
        let run_in::Kind::Run(spec) = first(&mut messages).await? else {
            return Err(Status::invalid_argument("Run begins with a RunSpec"));
        };
        // The sandbox is created in a task of its own, so that a client that vanishes leaves no
        // half-made sandbox. `_here` is dropped with this call when the client leaves.
        let (client, _here) = oneshot::channel();
        let begun = begin(Arc::clone(&self.node), spec, messages, client, call);
        Ok(stream(to_its_end(begun).await?))
    }

    async fn attach(&self, request: Request<Streaming<v1::RunIn>>) -> Reply<Self::AttachStream> {
        let mut messages = request.into_inner();
        let (named, from) = match first(&mut messages).await? {
            run_in::Kind::Attach(named) => (named.name, None),
            run_in::Kind::Rejoin(rejoin) => (rejoin.name, Some(rejoin.position)),
            _ => return Err(Status::invalid_argument("Attach begins with a name")),
        };
        let target = self.node.target(&named)?;
        if from.is_none() {
            target.has_process()?;
            if !target.container.state().is_live() {
                return Err(target.wrong_state("`slipway logs` prints what it wrote").into());
            }
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        let output = target.container.fanout.attach(&target.name())?;
        if let Some(from) = from {
            tokio::spawn(report_rest(target.clone(), output, from, sender));
        } else {
            tokio::spawn(report(target.clone(), output, false, sender));
        }
        let takes_input = target.look(|settings| settings.process.stdin);
        join_input(&target, messages, takes_input, Leaving::KeepsInput);
        Ok(stream(receiver))
    }

    async fn exec(&self, request: Request<Streaming<v1::RunIn>>) -> Reply<Self::ExecStream> {
        let mut call = trace::call(&self.node.tracer, EXEC, &request);
        let begun = exec::begin(&self.node, request.into_inner(), &mut call).await;
        trace::end(&mut call, begun.as_ref().err());
        begun.map(stream)
    }

    async fn logs(&self, request: Request<v1::LogsRequest>) -> Reply<Self::LogsStream> {
        let request = request.into_inner();
        let target = self.node.target(&request.name)?;
        target.has_process()?;
        let (sender, receiver) = mpsc::channel(QUEUE);
        let reader = KeptOutput::open(&target)?;
        tokio::spawn(send_logs(target, reader, request, sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn wait(&self, request: Request<v1::Name>) -> Reply<v1::Exit> {
        let target = self.node.target(&request.into_inner().name)?;
        target.container.wait_state(|state| !state.is_live()).await;
        Ok(Response::new(target.exit()))
    }

    async fn signal(&self, request: Request<v1::SignalRequest>) -> Reply<v1::Empty> {
        let request = request.into_inner();
        let target = self.node.target(&request.name)?;
        send_signal(&target, request.signal).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn pause(&self, request: Request<v1::Name>) -> Reply<v1::Empty> {
        pause::pause(&self.node.target(&request.into_inner().name)?).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn pause_to_file(&self, request: Request<v1::Name>) -> Reply<v1::Empty> {
        let (node, target) =
            (Arc::clone(&self.node), self.node.target(&request.into_inner().name)?);
        // A task of its own: a client that leaves early leaves no sandbox that stands still.
        let paused = self.node.guests.spawn(async move { to_file::pause(&node, &target).await });
        paused.await.unwrap_or(Err(Error::Closed))?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn resume(&self, request: Request<v1::Name>) -> Reply<v1::ResumeReply> {
        let target = self.node.target(&request.into_inner().name)?;
        if !target.is_own() || !target.sandbox.is_in_file() {
            pause::resume(&target).await?;
            return Ok(Response::new(v1::ResumeReply::default()));
        }
        let node = Arc::clone(&self.node);
        let resumed = async move {
            let returned = to_file::come_back(&node, &target.sandbox).await;
            pod::settle_returned(&node, &target.sandbox);
            returned
        };
        let moments = self.node.guests.spawn(resumed).await.unwrap_or(Err(Error::Closed))?;
        Ok(Response::new(moments))
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Reply<v1::Exit> {
        let request = request.into_inner();
        let target = self.node.target(&request.name)?;
        stop(&target, Duration::from_secs(request.timeout_s.into())).await?;
        Ok(Response::new(target.exit()))
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Reply<v1::Empty> {
        let request = request.into_inner();
        let (node, target) = (Arc::clone(&self.node), self.node.target(&request.name)?);
        let removed = async move {
            match target.is_own() {
                true => node.remove(&target.sandbox.id, request.force).await,
                false if request.returns_memory => {
                    node.remove_with_memory(&target, request.force).await
                }
                false => node.remove_added(&target, request.force).await,
            }
        };
        to_its_end(removed).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn list(&self, _: Request<v1::Empty>) -> Reply<v1::ListReply> {
        let sandboxes = self.node.list().iter().map(|one| summary(one)).collect();
        Ok(Response::new(v1::ListReply { sandboxes }))
    }

    async fn inspect(&self, request: Request<v1::Name>) -> Reply<v1::InspectReply> {
        let sandbox = self.node.target(&request.into_inner().name)?.sandbox;
        let mut record = sandbox.record();
        record.state = sandbox.state();
        let figures = layers::figures(&self.node.plane, &record.id).await;
        let json = layers::described(&record, figures.as_ref());
        let json = json.map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(v1::InspectReply { sandbox: Some(summary(&sandbox)), json }))
    }

    async fn update(&self, request: Request<v1::UpdateRequest>) -> Reply<v1::UpdateReply> {
        let request = request.into_inner();
        let target = self.node.target(&request.name)?;
        let placed = placement::of_new(request.placement.as_ref(), &target.sandbox.lane).await?;
        let sandbox = Arc::clone(&target.sandbox);
        let service = Self { node: Arc::clone(&self.node), ends_when_idle: self.ends_when_idle };
        let updated = async move {
            let changed = match request.placement {
                Some(_) => Some(placement::change(&target, placed).await?),
                None => None,
            };
            let limited = service.limit(&target, &request).await;
            // An update is made as a whole or not at all.
            if let Some(changed) = changed.filter(|_| limited.is_err()) {
                placement::undo(&target, changed).await;
            }
            limited
        };
        let GivenBack { bytes, kept } = to_its_end(updated).await?;
        let sandbox = Some(summary(&sandbox));
        Ok(Response::new(v1::UpdateReply { sandbox, given_back_bytes: bytes, kept }))
    }

    async fn put_files(&self, request: Request<v1::PutFilesRequest>) -> Reply<v1::Empty> {
        let request = request.into_inner();
        put_files::put(&self.node.target(&request.name)?, &request).await?;
        Ok(Response::new(v1::Empty {}))
    }

    async fn copy_out(&self, request: Request<v1::CopyOutRequest>) -> Reply<Self::CopyOutStream> {
        let request = request.into_inner();
        let replies = copying::copy_out(&self.node.target(&request.name)?, request).await?;
        Ok(Response::new(Box::pin(ReceiverStream::new(replies))))
    }

    async fn copy_in(
        &self,
        request: Request<Streaming<v1::CopyInRequest>>,
    ) -> Reply<v1::CopyInReply> {
        let mut messages = request.into_inner();
        let kind = messages.message().await?.and_then(|message| message.kind);
        let Some(copy_in_request::Kind::To(to)) = kind else {
            return Err(Status::invalid_argument("CopyIn begins with a place"));
        };
        let target = self.node.target(&to.name)?;
        Ok(Response::new(copying::copy_in(&target, to, messages).await?))
    }

    async fn stats(&self, request: Request<v1::Name>) -> Reply<v1::StatsReply> {
        let target = self.node.target(&request.into_inner().name)?;
        let container = if target.is_own() { "" } else { &target.container.name };
        let sandbox = &target.sandbox;
        let agent = sandbox.agent()?;
        let mut guest = agent.stats(container).await?;
        if target.is_own() && target.has_process().is_ok() {
            // Earlier agents and guests without control groups have no counts of the container's.
            let of_container = agent.stats(&target.container.name).await;
            guest.machine.group = of_container.ok().and_then(|stats| stats.machine.group);
        }
        let pid = sandbox.vm().map(|vm| vm.record().pid);
        let usage = sandbox.lane.run(move || pid.map_or((0, 0), crate::proc::usage));
        let (vmm_cpu_ns, vmm_resident_bytes) = usage.await;
        let GuestStats { machine, blocks } = guest;
        let layers = match target.is_own() {
            true => layers::figures(&self.node.plane, &sandbox.id).await.unwrap_or_default(),
            false => Default::default(),
        };
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
            layers_bytes: layers.held_bytes,
            layers_limit_bytes: layers.limit_bytes,
            layers_refused_writes: layers.refused_writes,
            group: machine.group.map(groups::group),
        }))
    }

    async fn pids(&self, request: Request<v1::Name>) -> Reply<v1::PidsReply> {
        let target = self.node.target(&request.into_inner().name)?;
        target.has_process()?;
        let listed = target.sandbox.agent()?.processes(&target.container.name).await?;
        match listed {
            Some(pids) => Ok(Response::new(v1::PidsReply { pids })),
            None => Err(Status::unimplemented(
                "the sandbox's agent is of an earlier version, which lists no processes: start \
                 the sandbox anew",
            )),
        }
    }

    async fn figures(&self, _: Request<v1::Empty>) -> Reply<v1::FiguresReply> {
        let groups = self.node.cgroups.counts();
        let groups = v1::ControlGroups {
            ready: groups.ready,
            returning: groups.returning,
            taken: groups.taken,
            missed: groups.missed,
            made: groups.made,
            reused: groups.reused,
            removed: groups.removed,
        };
        let traces = traces::figures(&self.node.tracer);
        let saved = self.node.templates.sizes().await;
        let control_groups = Some(groups);
        let spare_vmms = Some(self.node.spares.figures());
        let mut reply =
            v1::FiguresReply { control_groups, spare_vmms, traces, saved, ..Default::default() };
        self.node.starts.fill(&mut reply);
        Ok(Response::new(reply))
    }

    async fn status(&self, _: Request<v1::Empty>) -> Reply<v1::StatusReply> {
        Ok(Response::new(v1::StatusReply {
            version: crate::VERSION.to_owned(),
            pid: std::process::id(),
            ends_when_idle: self.ends_when_idle,
            sandboxes: u32::try_from(self.node.live()).unwrap_or(u32::MAX),
            data_dir: self.node.config.data_dir.display().to_string(),
            memory_bytes: self.node.config.memory_bytes,
            cpus: self.node.config.cpus,
            gives_functions: true,
            makes_empty_dirs: true,
            makes_file_dirs: true,
            bounds_file_dirs: true,
            gives_huge_pages: true,
            places_pods: self.node.config.pod_cgroups != Some(false),
        }))
    }
}
