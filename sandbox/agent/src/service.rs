//! The gRPC service, which maps requests to calls on [`Agent`].
//!
//! A new call is in `agent.proto` (`sandbox/agent-protocol`), here, in the host's `agent.rs`
//! (`sandbox/runtime`), and in two stand-ins for a guest: `slipway-hollow` (`front/hollow`,
//! `service`) and `tests/harness/guest.rs` of the runtime. A sandbox that outlived its daemon has
//! an older agent, which answers Unimplemented to a call that it does not know, and ignores a field
//! that it does not know. If ignoring the field does harm, a flag of `HelloReply` says that the
//! agent knows it. The runtime reads the flag into `Abilities` (`agent/abilities.rs`), and refuses
//! the field, or does without it, if the flag is not set. Both stand-ins answer the flag, the one
//! of the tests if a test needs it. `PROTOCOL` is raised only where no flag helps, since the next
//! daemon ends sandboxes of another number. Tests: `sandbox/agent/tests`, and
//! `sandbox/runtime/tests`, of which `hostile_guest.rs` has an agent that answers wrongly.

use std::sync::Arc;
use std::time::Duration;

use slipway_agent_protocol::PROTOCOL;
use slipway_agent_protocol::v1::agent_server::Agent as AgentService;
use slipway_agent_protocol::v1::*;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use crate::agent::Agent;
use crate::connect::Connection;
use crate::copying::{self, Copied, Outgoing};
use crate::log;
use crate::statuses::{internal, invalid, precondition, status};
use crate::stdio::Attachment;

/// The time for the reply to a shutdown to be sent before the sandbox ends.
const FAREWELL: Duration = Duration::from_millis(100);
/// The most traces in flight to a host that reads slowly.
const TRACES: usize = 4;

/// The outcome of a call.
type Reply<T> = Result<Response<T>, Status>;

/// The gRPC service of one agent.
#[derive(Clone)]
pub struct Service(pub Arc<Agent>);

impl Service {
    /// Runs `work` to its end even if the host disconnects meanwhile, so that nothing is left half
    /// made.
    async fn complete<T, F>(&self, work: impl FnOnce(Arc<Agent>) -> F) -> Result<T, Status>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, Status>> + Send + 'static,
    {
        tokio::spawn(work(self.0.clone()))
            .await
            .map_err(|error| Status::internal(error.to_string()))?
    }
}

fn reference(reference: Option<ProcessRef>) -> Result<ProcessRef, Status> {
    reference.ok_or_else(|| Status::invalid_argument("no process named"))
}

#[tonic::async_trait]
impl AgentService for Service {
    async fn hello(&self, request: Request<HelloRequest>) -> Reply<HelloReply> {
        let theirs = request.into_inner().protocol;
        if theirs != PROTOCOL {
            return Err(Status::failed_precondition(format!(
                "the host speaks version {theirs} of the protocol, the agent {PROTOCOL}"
            )));
        }
        self.0.stages.serving();
        Ok(Response::new(HelloReply {
            protocol: PROTOCOL,
            agent_version: env!("CARGO_PKG_VERSION").into(),
            kernel_release: rustix::system::uname().release().to_string_lossy().into_owned(),
            stages: self.0.stages.list(),
            boottime_ns: crate::stages::now(),
            ambient_capabilities: true,
            empty_dirs: true,
            file_dirs: true,
            huge_pages: true,
            zygotes: true,
            detached_execs: true,
            bounded_file_dirs: true,
        }))
    }

    async fn prepare(&self, request: Request<PrepareRequest>) -> Reply<PrepareReply> {
        let request = request.into_inner();
        self.complete(|agent| async move { agent.prepare(&request).await }).await?;
        Ok(Response::new(PrepareReply {}))
    }

    async fn configure(&self, request: Request<ConfigureRequest>) -> Reply<ConfigureReply> {
        let request = request.into_inner();
        crate::machine::configure(&request).map_err(internal)?;
        self.0.configured(request);
        Ok(Response::new(ConfigureReply {}))
    }

    async fn configure_network(
        &self,
        request: Request<ConfigureNetworkRequest>,
    ) -> Reply<ConfigureNetworkReply> {
        let request = request.into_inner();
        let wanted = crate::network::InterfaceSettings::parse(&request).map_err(invalid)?;
        let interface = self.complete(|agent| async move { agent.network(wanted).await }).await?;
        let (stage, boottime_ns) = (self.0.stages.network(), crate::stages::now());
        Ok(Response::new(ConfigureNetworkReply { interface, stage, boottime_ns }))
    }

    async fn restart_interface(
        &self,
        request: Request<RestartInterfaceRequest>,
    ) -> Reply<RestartInterfaceReply> {
        let mac = request.into_inner().mac;
        // The driver talks to its device meanwhile, which must not hold up the thread that serves
        // the host.
        let restarted = tokio::task::spawn_blocking(move || crate::network::restart(&mac)).await;
        let restarted = restarted.map_err(|error| Status::internal(error.to_string()))?;
        restarted.map_err(internal)?;
        Ok(Response::new(RestartInterfaceReply {}))
    }

    async fn start_sockets(&self, _: Request<StartSocketsRequest>) -> Reply<StartSocketsReply> {
        self.complete(|agent| async move { agent.start_sockets().await }).await?;
        Ok(Response::new(StartSocketsReply {}))
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Reply<CreateContainerReply> {
        let request = request.into_inner();
        self.complete(|agent| async move { agent.create(request).await }).await?;
        Ok(Response::new(CreateContainerReply {}))
    }

    async fn start_container(
        &self,
        request: Request<StartContainerRequest>,
    ) -> Reply<StartContainerReply> {
        let id = request.into_inner().id;
        let pid = self.complete(|agent| async move { agent.start(&id).await }).await?;
        Ok(Response::new(StartContainerReply { pid }))
    }

    async fn remove_container(
        &self,
        request: Request<RemoveContainerRequest>,
    ) -> Reply<RemoveContainerReply> {
        let id = request.into_inner().id;
        self.complete(|agent| async move { agent.remove(&id).await }).await?;
        Ok(Response::new(RemoveContainerReply {}))
    }

    async fn exec(&self, request: Request<ExecRequest>) -> Reply<ExecReply> {
        let request = request.into_inner();
        // Dropped with this call, as when the host gives it up.
        let call = Arc::new(());
        let waits = Arc::downgrade(&call);
        let exec = |agent: Arc<Agent>| async move { agent.exec(request, &waits).await };
        let reply = self.complete(exec).await?;
        Ok(Response::new(reply))
    }

    type StdioStream = Attachment;

    async fn stdio(&self, request: Request<Streaming<StdioIn>>) -> Reply<Attachment> {
        let mut input = request.into_inner();
        let first = input.message().await?.and_then(|message| message.kind);
        let (process, from) = match first {
            Some(stdio_in::Kind::Attach(process)) => (Some(process), None),
            Some(stdio_in::Kind::Resume(resume)) => (resume.process, Some(resume.position)),
            _ => return Err(Status::invalid_argument("the first message must name the process")),
        };
        let reference = reference(process)?;
        let process = self.0.process(&reference)?;
        let attachment = Attachment::new(process.clone(), from, input).await?;
        if !reference.exec_id.is_empty() {
            self.complete(
                |_| async move { process.start().await.map_err(|failure| status(&failure)) },
            )
            .await?;
        }
        Ok(Response::new(attachment))
    }

    async fn recorded(&self, request: Request<RecordedRequest>) -> Reply<RecordedReply> {
        let request = request.into_inner();
        let process = self.0.process(&reference(request.process)?)?;
        process.kept().recorded(request.position);
        Ok(Response::new(RecordedReply {}))
    }

    async fn wait(&self, request: Request<WaitRequest>) -> Reply<WaitReply> {
        let reference = reference(request.into_inner().process)?;
        let container = self.0.container(&reference.container_id)?;
        let process = self.0.process(&reference)?;
        let exit_status = process.ended().await;
        if reference.exec_id.is_empty() {
            // With a PID namespace of its own, a container's processes end with the first one.
            // In a shared one they go on.
            let _ = container.signal_all(libc::SIGKILL as u32);
        }
        // An attached stream holds the lock until it has sent everything.
        drop(process.outputs.lock().await);
        process.note_told();
        let killed = exit_status == 128 + libc::SIGKILL as u32;
        let oom = container.cgroup.as_ref().is_some_and(|cgroup| cgroup.out_of_memory());
        let is_first = reference.exec_id.is_empty();
        let termination_message = if is_first { container.message() } else { Vec::new() };
        let out_of_memory = killed && oom;
        Ok(Response::new(WaitReply { exit_status, out_of_memory, termination_message }))
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Reply<SignalReply> {
        let request = request.into_inner();
        let reference = reference(request.process)?;
        let sent = match request.all {
            true => self.0.container(&reference.container_id)?.signal_all(request.signal),
            false => self.0.process(&reference)?.signal(request.signal),
        };
        sent.map_err(|error| Status::invalid_argument(error.to_string()))?;
        Ok(Response::new(SignalReply {}))
    }

    async fn resize(&self, request: Request<ResizeRequest>) -> Reply<ResizeReply> {
        let request = request.into_inner();
        let process = self.0.process(&reference(request.process)?)?;
        let terminal = process
            .terminal()
            .ok_or_else(|| Status::failed_precondition("the process has no terminal"))?;
        let size = crate::init::window_size(request.rows, request.columns);
        rustix::termios::tcsetwinsize(terminal, size)
            .map_err(|error| Status::internal(error.to_string()))?;
        Ok(Response::new(ResizeReply {}))
    }

    async fn stats(&self, request: Request<StatsRequest>) -> Reply<StatsReply> {
        Ok(Response::new(self.0.stats(&request.into_inner().container_id)?))
    }

    async fn processes(&self, request: Request<ProcessesRequest>) -> Reply<ProcessesReply> {
        let pids = self.0.processes(&request.into_inner().container_id)?;
        Ok(Response::new(ProcessesReply { pids }))
    }

    async fn update_container(
        &self,
        request: Request<UpdateContainerRequest>,
    ) -> Reply<UpdateContainerReply> {
        let request = request.into_inner();
        // Reclaiming memory waits for the kernel.
        self.complete(|agent| async move {
            let updated = tokio::task::spawn_blocking(move || agent.update(&request)).await;
            updated.map_err(|error| Status::internal(error.to_string()))?
        })
        .await?;
        Ok(Response::new(UpdateContainerReply {}))
    }

    async fn freeze(&self, request: Request<FreezeRequest>) -> Reply<FreezeReply> {
        let FreezeRequest { id, frozen } = request.into_inner();
        self.complete(|agent| async move { agent.freeze(&id, frozen).await }).await?;
        Ok(Response::new(FreezeReply {}))
    }

    async fn rejoin(&self, request: Request<RejoinRequest>) -> Reply<RejoinReply> {
        let request = request.into_inner();
        let position = self.complete(|agent| async move { agent.rejoin(request).await }).await?;
        Ok(Response::new(RejoinReply { position }))
    }

    async fn put_files(&self, request: Request<PutFilesRequest>) -> Reply<PutFilesReply> {
        let request = request.into_inner();
        self.complete(|agent| async move { agent.put_files(request).await }).await?;
        Ok(Response::new(PutFilesReply {}))
    }

    async fn set_cpus(&self, request: Request<SetCpusRequest>) -> Reply<SetCpusReply> {
        let count = request.into_inner().cpus;
        self.complete(|agent| async move {
            let sysfs = agent.places.sysfs.clone();
            crate::cpus::set(&sysfs, count).await.map_err(precondition)?;
            // A driver waits for its device, which the thread that serves the host must not.
            let follow = move || crate::ethtool::follow_cpus(&sysfs, count);
            let followed = tokio::task::spawn_blocking(follow).await;
            followed.map_err(|error| Status::internal(error.to_string()))
        })
        .await?;
        Ok(Response::new(SetCpusReply {}))
    }

    type ForwardStream = Connection;

    async fn forward(&self, request: Request<Streaming<ForwardIn>>) -> Reply<Connection> {
        let mut input = request.into_inner();
        match input.message().await?.and_then(|message| message.kind) {
            Some(forward_in::Kind::Port(port)) => {
                Ok(Response::new(crate::connect::connect(port, input).await?))
            }
            _ => Err(Status::invalid_argument("the first message must name the port")),
        }
    }

    type CopyOutStream = Outgoing;

    async fn copy_out(&self, request: Request<CopyOutRequest>) -> Reply<Outgoing> {
        let request = request.into_inner();
        let container = self.0.container(&request.container_id)?;
        let container = Copied::of(&container).map_err(precondition)?;
        Ok(Response::new(copying::copy_out(container, request)))
    }

    async fn copy_in(&self, request: Request<Streaming<CopyInRequest>>) -> Reply<CopyInReply> {
        let mut input = request.into_inner();
        let first = input.message().await?.and_then(|message| message.kind);
        let Some(copy_in_request::Kind::To(to)) = first else {
            return Err(Status::invalid_argument("the first message must name the place"));
        };
        let container = self.0.container(&to.container_id)?;
        let container = Copied::of(&container).map_err(precondition)?;
        let left_out = copying::copy_in(container, to, input).await.map_err(precondition)?;
        Ok(Response::new(CopyInReply { left_out: Some(left_out) }))
    }

    type TraceStream = ReceiverStream<Result<TraceReply, Status>>;

    async fn trace(&self, request: Request<TraceRequest>) -> Reply<Self::TraceStream> {
        let interval = Duration::from_millis(request.into_inner().interval_ms.max(10).into());
        let (sender, replies) = mpsc::channel(TRACES);
        let begun = crate::trace::start(&self.0.places.sysfs, interval, sender).await;
        begun.map_err(|error| precondition(error.context("tracing the guest")))?;
        Ok(Response::new(ReceiverStream::new(replies)))
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Reply<ShutdownReply> {
        log!("shutting down");
        self.complete(|agent| async move {
            agent.shutdown().await;
            Ok(())
        })
        .await?;
        let agent = self.0.clone();
        tokio::spawn(async move {
            tokio::time::sleep(FAREWELL).await;
            agent.power_off();
        });
        Ok(Response::new(ShutdownReply {}))
    }
}
