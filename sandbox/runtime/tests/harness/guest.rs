//! A guest that speaks the agent's protocol, honestly or not, on a thread of its own.

use std::future::pending;
use std::os::unix::net::UnixListener;
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use slipway_agent_protocol::v1::agent_server::{Agent, AgentServer};
use slipway_agent_protocol::{PROTOCOL, v1};
use tokio::sync::watch;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

type Reply<T> = Result<Response<T>, Status>;
type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A guest's behaviour and answers.
#[derive(Clone, Default)]
pub struct Guest {
    pub stages: Vec<v1::GuestStage>,
    /// Set if the guest answers no call but Hello, Stdio, Wait and Trace.
    pub silent: bool,
    /// The size of the pieces that the container's process prints for ever, without ending; 0: it
    /// prints nothing.
    pub prints: usize,
    /// The containers whose processes have ended; `None`: those that print nothing end at once.
    pub ended: Option<watch::Receiver<Vec<String>>>,
    /// The exit status of the container's process.
    pub exit_status: u32,
    /// The message with which the guest refuses to create the container.
    pub refuses: Option<String>,
    /// The bytes of its memory, of 1 GiB, that it calls available.
    pub available: u64,
    /// The counts of its container's control group.
    pub group: Option<v1::GroupStats>,
    /// The processes that it names.
    pub pids: Vec<u32>,
    /// The guest answers the request to shut down once this is `true`; `None`: at once.
    pub writes_back: Option<watch::Receiver<bool>>,
    /// The guest's answers to updates of limits; `None`: it makes each at once.
    pub limits: Option<Arc<LimitCalls>>,
    /// The guest refuses to stop its container once this is `true`; `None`: it stops it at once.
    pub refuses_to_stop: Option<watch::Receiver<bool>>,
    /// The guest's replies to a copy out of its container; empty: it knows no such call.
    pub copies: Vec<Copied>,
    /// The guest's notes of the calls that make and remove containers and change CPUs; `None`: it
    /// takes none.
    pub notes: Option<Arc<Mutex<Vec<String>>>>,
}

/// A reply of a guest to a copy out of its container.
#[derive(Clone)]
pub enum Copied {
    Found,
    /// So many bytes.
    Data(usize),
    /// The end, with the name of a file that was left out.
    End(String),
}

/// Updates of limits: those that came, and the one up to which they are answered. Those that ask
/// for [`REFUSED`] bytes of memory are refused.
#[derive(Default)]
pub struct LimitCalls {
    pub came: watch::Sender<u32>,
    pub answered: watch::Sender<u32>,
}

/// A limit of memory that the guest refuses, bytes.
pub const REFUSED: u64 = 300 << 20;

impl LimitCalls {
    async fn take(&self, request: &v1::UpdateContainerRequest) -> Result<(), Status> {
        self.came.send_modify(|count| *count += 1);
        let number = *self.came.borrow();
        let _ = self.answered.subscribe().wait_for(|most| *most >= number).await;
        let bytes = request.resources.as_ref().map_or(0, |limits| limits.memory_bytes);
        match bytes == REFUSED {
            true => Err(Status::failed_precondition("it uses more")),
            false => Ok(()),
        }
    }
}

pub fn stage(name: &str) -> v1::GuestStage {
    v1::GuestStage { name: name.to_owned(), start_ns: 1, end_ns: 2 }
}

impl Guest {
    /// Serves the agent's protocol at `listener` until the process ends.
    pub fn speak(self, listener: UnixListener) {
        std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                listener.set_nonblocking(true).unwrap();
                let listener = tokio::net::UnixListener::from_std(listener).unwrap();
                let service = AgentServer::from_arc(Arc::new(self));
                let incoming = UnixListenerStream::new(listener);
                let served = tonic::transport::Server::builder().add_service(service);
                let _ = served.serve_with_incoming(incoming).await;
            });
        });
    }

    fn note(&self, call: impl Into<String>) {
        if let Some(notes) = &self.notes {
            notes.lock().unwrap().push(call.into());
        }
    }

    async fn answer<T: Default>(&self) -> Reply<T> {
        if self.silent {
            pending::<()>().await;
        }
        Ok(Response::new(T::default()))
    }
}

#[tonic::async_trait]
impl Agent for Guest {
    type StdioStream = Messages<v1::StdioOut>;
    type ForwardStream = Messages<v1::ForwardOut>;
    type CopyOutStream = Messages<v1::CopyOutReply>;
    type TraceStream = Messages<v1::TraceReply>;

    async fn hello(&self, _: Request<v1::HelloRequest>) -> Reply<v1::HelloReply> {
        Ok(Response::new(v1::HelloReply {
            protocol: PROTOCOL,
            stages: self.stages.clone(),
            huge_pages: true,
            ..Default::default()
        }))
    }

    async fn prepare(&self, _: Request<v1::PrepareRequest>) -> Reply<v1::PrepareReply> {
        self.answer().await
    }

    async fn configure(&self, _: Request<v1::ConfigureRequest>) -> Reply<v1::ConfigureReply> {
        self.answer().await
    }

    async fn configure_network(
        &self,
        _: Request<v1::ConfigureNetworkRequest>,
    ) -> Reply<v1::ConfigureNetworkReply> {
        self.answer().await
    }

    async fn restart_interface(
        &self,
        _: Request<v1::RestartInterfaceRequest>,
    ) -> Reply<v1::RestartInterfaceReply> {
        self.answer().await
    }

    async fn start_sockets(
        &self,
        _: Request<v1::StartSocketsRequest>,
    ) -> Reply<v1::StartSocketsReply> {
        self.answer().await
    }

    async fn create_container(
        &self,
        _: Request<v1::CreateContainerRequest>,
    ) -> Reply<v1::CreateContainerReply> {
        if let Some(words) = &self.refuses {
            return Err(Status::internal(words.clone()));
        }
        self.note("create");
        self.answer().await
    }

    async fn start_container(
        &self,
        _: Request<v1::StartContainerRequest>,
    ) -> Reply<v1::StartContainerReply> {
        self.answer().await
    }

    async fn remove_container(
        &self,
        _: Request<v1::RemoveContainerRequest>,
    ) -> Reply<v1::RemoveContainerReply> {
        self.note("remove");
        self.answer().await
    }

    async fn exec(&self, _: Request<v1::ExecRequest>) -> Reply<v1::ExecReply> {
        self.answer().await
    }

    async fn stdio(&self, _: Request<Streaming<v1::StdioIn>>) -> Reply<Self::StdioStream> {
        let message = |kind| Ok(v1::StdioOut { kind: Some(kind) });
        let attached = v1::stdio_out::Kind::Attached(v1::Attached { position: 0 });
        let attached = tokio_stream::once(message(attached));
        if self.prints == 0 {
            return Ok(Response::new(Box::pin(attached)));
        }
        let data = vec![b'x'; self.prints];
        let piece = move |()| message(v1::stdio_out::Kind::Stdout(data.clone()));
        let pieces = tokio_stream::iter(std::iter::repeat(())).map(piece);
        Ok(Response::new(Box::pin(attached.chain(pieces))))
    }

    async fn recorded(&self, _: Request<v1::RecordedRequest>) -> Reply<v1::RecordedReply> {
        self.answer().await
    }

    async fn wait(&self, request: Request<v1::WaitRequest>) -> Reply<v1::WaitReply> {
        if let Some(mut ended) = self.ended.clone() {
            let process = request.into_inner().process.unwrap_or_default();
            let has_ended = |all: &Vec<String>| all.contains(&process.container_id);
            let _ = ended.wait_for(has_ended).await;
        }
        if self.prints > 0 {
            pending::<()>().await;
        }
        let exit_status = self.exit_status;
        Ok(Response::new(v1::WaitReply { exit_status, ..Default::default() }))
    }

    async fn signal(&self, _: Request<v1::SignalRequest>) -> Reply<v1::SignalReply> {
        self.answer().await
    }

    async fn resize(&self, _: Request<v1::ResizeRequest>) -> Reply<v1::ResizeReply> {
        self.answer().await
    }

    async fn stats(&self, request: Request<v1::StatsRequest>) -> Reply<v1::StatsReply> {
        let of_container = !request.into_inner().container_id.is_empty();
        let mut reply = self.answer::<v1::StatsReply>().await?;
        reply.get_mut().memory_total_bytes = 1 << 30;
        reply.get_mut().memory_available_bytes = self.available;
        reply.get_mut().group = self.group.clone().filter(|_| of_container);
        Ok(reply)
    }

    async fn processes(&self, _: Request<v1::ProcessesRequest>) -> Reply<v1::ProcessesReply> {
        let mut reply = self.answer::<v1::ProcessesReply>().await?;
        reply.get_mut().pids = self.pids.clone();
        Ok(reply)
    }

    async fn set_cpus(&self, request: Request<v1::SetCpusRequest>) -> Reply<v1::SetCpusReply> {
        self.note(format!("{} CPUs", request.get_ref().cpus));
        self.answer().await
    }

    async fn update_container(
        &self,
        request: Request<v1::UpdateContainerRequest>,
    ) -> Reply<v1::UpdateContainerReply> {
        if let Some(limits) = &self.limits {
            limits.take(request.get_ref()).await?;
        }
        self.answer().await
    }

    async fn freeze(&self, _: Request<v1::FreezeRequest>) -> Reply<v1::FreezeReply> {
        if let Some(mut refuses) = self.refuses_to_stop.clone() {
            let _ = refuses.wait_for(|refuses| *refuses).await;
            return Err(Status::failed_precondition("it does not stop"));
        }
        self.answer().await
    }

    async fn rejoin(&self, _: Request<v1::RejoinRequest>) -> Reply<v1::RejoinReply> {
        self.answer().await
    }

    async fn put_files(&self, _: Request<v1::PutFilesRequest>) -> Reply<v1::PutFilesReply> {
        self.answer().await
    }

    async fn copy_out(&self, _: Request<v1::CopyOutRequest>) -> Reply<Self::CopyOutStream> {
        use v1::copy_out_reply::Kind;
        if self.copies.is_empty() {
            return Err(Status::unimplemented("an earlier version"));
        }
        let kinds = self.copies.clone().into_iter().map(|copied| match copied {
            Copied::Found => Kind::Found(v1::CopyFound { directory: true }),
            Copied::Data(bytes) => Kind::Data(vec![b'x'; bytes]),
            Copied::End(first) => Kind::End(v1::LeftOut { count: 1, first }),
        });
        let replies = kinds.map(|kind| Ok(v1::CopyOutReply { kind: Some(kind) }));
        Ok(Response::new(Box::pin(tokio_stream::iter(replies))))
    }

    async fn copy_in(&self, _: Request<Streaming<v1::CopyInRequest>>) -> Reply<v1::CopyInReply> {
        Err(Status::unimplemented("an earlier version"))
    }

    async fn forward(&self, _: Request<Streaming<v1::ForwardIn>>) -> Reply<Self::ForwardStream> {
        Ok(Response::new(Box::pin(tokio_stream::empty())))
    }

    async fn trace(&self, _: Request<v1::TraceRequest>) -> Reply<Self::TraceStream> {
        Ok(Response::new(Box::pin(tokio_stream::empty())))
    }

    async fn shutdown(&self, _: Request<v1::ShutdownRequest>) -> Reply<v1::ShutdownReply> {
        if let Some(mut done) = self.writes_back.clone() {
            let _ = done.wait_for(|done| *done).await;
        }
        self.answer().await
    }
}
