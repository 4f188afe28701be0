//! The agent's calls, answered by the drivers of the functions.
//!
//! The container that a host creates has no process: it begins, and ends with the first signal. So
//! a measurement decides for how long hollow sandboxes live.

use std::collections::BTreeMap;
use std::future::Future;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context, Result};
use slipway_agent_protocol::v1::agent_server::{Agent, AgentServer};
use slipway_agent_protocol::v1::*;
use slipway_agent_protocol::{CONNECTION_WINDOW, PROTOCOL, STREAM_WINDOW};
use slipway_telemetry::monotonic_ns;
use tokio::sync::watch;
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status, Streaming};

use crate::disks::{Content, Disks};
use crate::functions::{Functions, number_of};
use crate::nic::Nic;

/// The process identifier that a host is told; there is no process.
const PID: u32 = 2;
/// The exit status of a process that a signal has ended, without the signal's number.
const BY_SIGNAL: u32 = 128;

/// A reply or the reason why there is none.
type Answer<T> = Result<Response<T>, Status>;

/// Serves the calls that come to the listening socket `agent`. `driven` is when drivers came into
/// place, from and to, CLOCK_MONOTONIC in ns. Returns when a host has asked for the end.
///
/// # Errors
/// The socket cannot be served.
pub fn serve(functions: Functions, agent: OwnedFd, driven: (u64, u64)) -> Result<()> {
    let Functions { disks, nic, map: _map } = functions;
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    runtime.block_on(async {
        let listener = UnixListener::from(agent);
        listener.set_nonblocking(true).context("the agent's socket")?;
        let incoming = UnixListenerStream::new(tokio::net::UnixListener::from_std(listener)?);
        let (exit, exits) = watch::channel(None);
        let (end, mut ends) = watch::channel(false);
        let hollow = Hollow {
            disks: Arc::new(Mutex::new(disks)),
            nic: Arc::new(Mutex::new(nic)),
            stages: Arc::new(Mutex::new(vec![stage("vf-driver", driven)])),
            exit,
            exits,
            end,
        };
        let server = tonic::transport::Server::builder()
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .add_service(AgentServer::new(hollow));
        let ended = async move { drop(ends.wait_for(|end| *end).await) };
        // The reply to the last call is sent before this returns.
        server.serve_with_incoming_shutdown(incoming, ended).await.context("serving the agent")
    })
}

fn stage(name: &str, (start_ns, end_ns): (u64, u64)) -> GuestStage {
    GuestStage { name: name.to_owned(), start_ns, end_ns }
}

/// The agent of a guest that there is not.
struct Hollow {
    disks: Arc<Mutex<BTreeMap<usize, Disks>>>,
    /// Apart from the disks: a guest's container does not wait for its network.
    nic: Arc<Mutex<Option<Nic>>>,
    /// The stages so far, CLOCK_MONOTONIC in ns.
    stages: Arc<Mutex<Vec<GuestStage>>>,
    /// The container's exit status; `None` until it has ended.
    exit: watch::Sender<Option<u32>>,
    exits: watch::Receiver<Option<u32>>,
    /// Set when the host has asked for the end.
    end: watch::Sender<bool>,
}

impl Hollow {
    /// Waits for the container's end.
    fn ended(&self) -> impl Future<Output = u32> + Send + use<> {
        let mut exits = self.exits.clone();
        async move {
            let exit = exits.wait_for(Option::is_some).await;
            exit.ok().and_then(|exit| *exit).unwrap_or(BY_SIGNAL)
        }
    }
}

/// Runs `drive` on `driven`, on a thread that may wait for a function.
async fn drive<D: Send + 'static, T: Send + 'static>(
    driven: &Arc<Mutex<D>>,
    drive: impl FnOnce(&mut D) -> Result<T> + Send + 'static,
) -> Result<T, Status> {
    let driven = Arc::clone(driven);
    let done = tokio::task::spawn_blocking(move || {
        drive(&mut driven.lock().unwrap_or_else(PoisonError::into_inner))
    });
    let done = done.await.map_err(|error| Status::internal(error.to_string()))?;
    done.map_err(|error| Status::internal(format!("{error:#}")))
}

/// Reads the first blocks of a container's root.
fn check_root(all: &mut BTreeMap<usize, Disks>, root: &RootFilesystem) -> Result<()> {
    let parts = [(&root.image, Content::Image), (&root.volatile_layer, Content::Volatile)];
    for (device, content) in parts {
        let Some(device) = device else { continue };
        let disks = all.get_mut(&number_of(&device.pci_address)?);
        let disks = disks.with_context(|| format!("no controller at {}", device.pci_address))?;
        disks.check(device.nsid, content)?;
    }
    Ok(())
}

fn none<T>() -> Answer<T> {
    Err(Status::unimplemented("a hollow sandbox runs no programs (--accel hollow)"))
}

#[tonic::async_trait]
impl Agent for Hollow {
    async fn hello(&self, request: Request<HelloRequest>) -> Answer<HelloReply> {
        let theirs = request.into_inner().protocol;
        if theirs != PROTOCOL {
            let what = format!("the host speaks protocol {theirs}, slipway-hollow {PROTOCOL}");
            return Err(Status::failed_precondition(what));
        }
        let stages = self.stages.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(Response::new(HelloReply {
            protocol: PROTOCOL,
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            kernel_release: "hollow".to_owned(),
            stages,
            // There is no guest whose clock could begin later than the host's.
            boottime_ns: monotonic_ns(),
            ambient_capabilities: true,
            empty_dirs: true,
            file_dirs: true,
            huge_pages: true,
            // Processes of containers are none that could be forked.
            zygotes: false,
            detached_execs: false,
            bounded_file_dirs: true,
        }))
    }

    async fn prepare(&self, _: Request<PrepareRequest>) -> Answer<PrepareReply> {
        none()
    }

    async fn configure(&self, _: Request<ConfigureRequest>) -> Answer<ConfigureReply> {
        Ok(Response::new(ConfigureReply {}))
    }

    async fn configure_network(
        &self,
        request: Request<ConfigureNetworkRequest>,
    ) -> Answer<ConfigureNetworkReply> {
        let (request, begun) = (request.into_inner(), monotonic_ns());
        let configure = move |nic: &mut Option<Nic>| {
            nic.as_mut().context("there is no interface")?.configure(&request)
        };
        drive(&self.nic, configure).await?;
        let network = stage("network", (begun, monotonic_ns()));
        self.stages.lock().unwrap_or_else(PoisonError::into_inner).push(network.clone());
        Ok(Response::new(ConfigureNetworkReply {
            interface: "hollow".to_owned(),
            stage: Some(network),
            boottime_ns: monotonic_ns(),
        }))
    }

    async fn restart_interface(
        &self,
        _: Request<RestartInterfaceRequest>,
    ) -> Answer<RestartInterfaceReply> {
        none()
    }

    async fn start_sockets(&self, _: Request<StartSocketsRequest>) -> Answer<StartSocketsReply> {
        none()
    }

    async fn create_container(
        &self,
        request: Request<CreateContainerRequest>,
    ) -> Answer<CreateContainerReply> {
        let root = request.into_inner().root.unwrap_or_default();
        drive(&self.disks, move |disks| check_root(disks, &root)).await?;
        Ok(Response::new(CreateContainerReply {}))
    }

    async fn start_container(
        &self,
        _: Request<StartContainerRequest>,
    ) -> Answer<StartContainerReply> {
        Ok(Response::new(StartContainerReply { pid: PID }))
    }

    async fn remove_container(
        &self,
        _: Request<RemoveContainerRequest>,
    ) -> Answer<RemoveContainerReply> {
        Ok(Response::new(RemoveContainerReply {}))
    }

    async fn exec(&self, _: Request<ExecRequest>) -> Answer<ExecReply> {
        none()
    }

    type StdioStream = ReceiverStream<Result<StdioOut, Status>>;

    /// Attaches the streams of the container, which stay empty until it ends.
    async fn stdio(&self, request: Request<Streaming<StdioIn>>) -> Answer<Self::StdioStream> {
        let mut input = request.into_inner();
        let position = match input.message().await?.and_then(|first| first.kind) {
            Some(stdio_in::Kind::Resume(resume)) => resume.position,
            _ => 0,
        };
        let (sender, replies) = tokio::sync::mpsc::channel(1);
        let attached = stdio_out::Kind::Attached(Attached { position });
        // The channel has room for one message.
        let _ = sender.try_send(Ok(StdioOut { kind: Some(attached) }));
        let ended = self.ended();
        tokio::spawn(async move {
            ended.await;
            drop(sender);
        });
        Ok(Response::new(ReceiverStream::new(replies)))
    }

    async fn recorded(&self, _: Request<RecordedRequest>) -> Answer<RecordedReply> {
        Ok(Response::new(RecordedReply {}))
    }

    async fn wait(&self, _: Request<WaitRequest>) -> Answer<WaitReply> {
        let exit_status = self.ended().await;
        Ok(Response::new(WaitReply { exit_status, ..WaitReply::default() }))
    }

    type ForwardStream = ReceiverStream<Result<ForwardOut, Status>>;

    async fn forward(&self, _: Request<Streaming<ForwardIn>>) -> Answer<Self::ForwardStream> {
        none()
    }

    async fn signal(&self, request: Request<SignalRequest>) -> Answer<SignalReply> {
        let signal = request.into_inner().signal;
        self.exit.send_if_modified(|exit| {
            let ends = exit.is_none() && signal > 0;
            if ends {
                *exit = Some(BY_SIGNAL.saturating_add(signal));
            }
            ends
        });
        Ok(Response::new(SignalReply {}))
    }

    async fn resize(&self, _: Request<ResizeRequest>) -> Answer<ResizeReply> {
        none()
    }

    async fn stats(&self, _: Request<StatsRequest>) -> Answer<StatsReply> {
        none()
    }

    async fn processes(&self, _: Request<ProcessesRequest>) -> Answer<ProcessesReply> {
        none()
    }

    async fn set_cpus(&self, _: Request<SetCpusRequest>) -> Answer<SetCpusReply> {
        none()
    }

    async fn update_container(
        &self,
        _: Request<UpdateContainerRequest>,
    ) -> Answer<UpdateContainerReply> {
        none()
    }

    async fn freeze(&self, _: Request<FreezeRequest>) -> Answer<FreezeReply> {
        none()
    }

    async fn rejoin(&self, _: Request<RejoinRequest>) -> Answer<RejoinReply> {
        none()
    }

    async fn put_files(&self, _: Request<PutFilesRequest>) -> Answer<PutFilesReply> {
        none()
    }

    type CopyOutStream = ReceiverStream<Result<CopyOutReply, Status>>;

    async fn copy_out(&self, _: Request<CopyOutRequest>) -> Answer<Self::CopyOutStream> {
        none()
    }

    async fn copy_in(&self, _: Request<Streaming<CopyInRequest>>) -> Answer<CopyInReply> {
        none()
    }

    type TraceStream = ReceiverStream<Result<TraceReply, Status>>;

    async fn trace(&self, _: Request<TraceRequest>) -> Answer<Self::TraceStream> {
        none()
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Answer<ShutdownReply> {
        self.exit.send_if_modified(|exit| exit.replace(exit.unwrap_or(BY_SIGNAL)).is_none());
        let _ = self.end.send(true);
        Ok(Response::new(ShutdownReply {}))
    }
}
