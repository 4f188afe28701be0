//! A daemon of the node that runs nothing: it answers as the real one does, and notes what it was
//! asked for. The real one needs root and a hypervisor; `tests/e2e/75-pods.sh` runs that.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use slipway_sandbox_api::v1::{self, run_in, run_out};
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

type Output<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;
type Reply<T> = Result<Response<T>, Status>;

/// The process of every sandbox's VMM.
pub const VMM: u32 = 4711;

/// The daemon, with everything that runs and that was asked for.
#[derive(Default)]
pub struct Fake {
    runs: Mutex<Vec<v1::RunSpec>>,
    calls: Arc<Mutex<Vec<String>>>,
    imports: Mutex<Vec<v1::ImportSnapshotRequest>>,
    /// Set while it does not answer when it is asked about a sandbox.
    pub is_silent: AtomicBool,
    /// Set if it is a daemon that knows functions of pools, and huge pages.
    pub gives_functions: AtomicBool,
    /// Set if it is a daemon that gives containers directories of the guest.
    pub makes_empty_dirs: AtomicBool,
    /// Set while it has not made the snapshots that are to be removed.
    pub makes_snapshots: AtomicBool,
    /// Set while it is at work on snapshots that are to be removed.
    pub removes_snapshots: AtomicBool,
    /// Set if it copies no snapshot into a directory.
    pub lacks_room: AtomicBool,
    /// Set while no container of a pod ends alone: the memory of each pod is in a file.
    pub in_file: AtomicBool,
    /// Set if what ends does so for want of memory.
    pub out_of_memory: Arc<AtomicBool>,
    /// The processes of every container; `None` if it is a daemon that lists none.
    pids: Mutex<Option<Vec<u32>>>,
    /// The output of everything that runs, at its end.
    last_words: Mutex<Vec<u8>>,
    /// The ends of all that was started, by name; `None` while it runs.
    ends: Mutex<BTreeMap<String, watch::Sender<Option<u32>>>>,
}

impl Fake {
    /// Serves in the run directory `dir`.
    pub fn serve(dir: &Path) -> Arc<Self> {
        let fake = Arc::new(Self::default());
        let listener = tokio::net::UnixListener::bind(dir.join("slipway.sock")).unwrap();
        let service = v1::sandboxes_server::SandboxesServer::from_arc(Arc::clone(&fake));
        let templates = v1::templates_server::TemplatesServer::new(Templates);
        let server = tonic::transport::Server::builder().add_service(service);
        let snapshots = Snapshots(Arc::clone(&fake));
        let snapshots = v1::snapshots_server::SnapshotsServer::new(snapshots);
        let server = server.add_service(templates).add_service(snapshots);
        tokio::spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
        fake
    }

    /// Returns what was to be run, in order.
    pub fn runs(&self) -> Vec<v1::RunSpec> {
        self.runs.lock().unwrap().clone()
    }

    /// Returns the other calls, in order.
    pub fn calls(&self) -> Vec<String> {
        self.calls.lock().unwrap().clone()
    }

    /// Returns the snapshots that were to be copied in, in order.
    pub fn imports(&self) -> Vec<v1::ImportSnapshotRequest> {
        self.imports.lock().unwrap().clone()
    }

    /// Ends `name`, and all that runs in it before.
    pub fn end(&self, name: &str, status: u32, within: u32) {
        let ends = self.ends.lock().unwrap();
        let inner = format!("{name}/");
        for (_, end) in ends.iter().filter(|(one, _)| one.starts_with(&inner)) {
            end.send_if_modified(|end| end.is_none() && end.replace(within).is_none());
        }
        if let Some(end) = ends.get(name) {
            end.send_if_modified(|end| end.is_none() && end.replace(status).is_none());
        }
    }

    /// Has everything that is started from here on print `words` at its end.
    pub fn prints(&self, words: &[u8]) {
        *self.last_words.lock().unwrap() = words.to_vec();
    }

    /// Has every container these processes from here on.
    pub fn lists(&self, pids: &[u32]) {
        *self.pids.lock().unwrap() = Some(pids.to_vec());
    }

    fn note(&self, call: String) {
        self.calls.lock().unwrap().push(call);
    }

    fn begin(&self, spec: v1::RunSpec) -> (String, watch::Receiver<Option<u32>>) {
        let name = match spec.pod.as_str() {
            "" => spec.name.clone(),
            pod => format!("{pod}/{}", spec.name),
        };
        self.runs.lock().unwrap().push(spec);
        let end = watch::Sender::new(None);
        let ended = end.subscribe();
        self.ends.lock().unwrap().insert(name.clone(), end);
        (name, ended)
    }

    async fn ended(&self, name: &str) -> Result<v1::Exit, Status> {
        let end = self.ends.lock().unwrap().get(name).map(watch::Sender::subscribe);
        let mut end = end.ok_or_else(|| Status::not_found("no such sandbox"))?;
        let status = end.wait_for(Option::is_some).await.unwrap().unwrap();
        Ok(v1::Exit { status, ..Default::default() })
    }
}

fn out(kind: run_out::Kind) -> Result<v1::RunOut, Status> {
    Ok(v1::RunOut { kind: Some(kind) })
}

/// Notes the sizes that the terminal of `name` gets.
async fn note_sizes(
    mut messages: Streaming<v1::RunIn>,
    name: String,
    calls: Arc<Mutex<Vec<String>>>,
) {
    while let Some(Ok(message)) = messages.next().await {
        if let Some(run_in::Kind::Resize(v1::Size { rows, columns })) = message.kind {
            calls.lock().unwrap().push(format!("resize {name} {rows} {columns}"));
        }
    }
}

#[tonic::async_trait]
impl v1::sandboxes_server::Sandboxes for Fake {
    type RunStream = Output<v1::RunOut>;
    type AttachStream = Output<v1::RunOut>;
    type ExecStream = Output<v1::RunOut>;
    type LogsStream = Output<v1::LogRecord>;
    type ForwardStream = Output<v1::ForwardOut>;
    type SnoopGuestStream = Output<v1::GuestReport>;
    type CopyOutStream = Output<v1::CopyOutReply>;

    async fn run(&self, request: Request<Streaming<v1::RunIn>>) -> Reply<Self::RunStream> {
        let mut messages = request.into_inner();
        let first = messages.next().await.unwrap()?;
        let Some(run_in::Kind::Run(spec)) = first.kind else { panic!("{first:?}") };
        let (name, mut ended) = self.begin(spec);
        tokio::spawn(note_sizes(messages, name.clone(), Arc::clone(&self.calls)));
        let out_of_memory = Arc::clone(&self.out_of_memory);
        let words = self.last_words.lock().unwrap().clone();
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(async move {
            let created = v1::Created { id: "0".into(), name };
            sender.send(out(run_out::Kind::Created(created))).await.unwrap();
            sender.send(out(run_out::Kind::Started(v1::Started::default()))).await.unwrap();
            let status = ended.wait_for(Option::is_some).await.unwrap().unwrap();
            let termination_message = "said".to_owned();
            let out_of_memory = out_of_memory.load(Ordering::Relaxed);
            let exit =
                v1::Exit { status, termination_message, out_of_memory, ..Default::default() };
            // The test may be over.
            let _ = sender.send(out(run_out::Kind::Stdout(words))).await;
            let _ = sender.send(out(run_out::Kind::Exit(exit))).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn wait(&self, request: Request<v1::Name>) -> Reply<v1::Exit> {
        self.ended(&request.into_inner().name).await.map(Response::new)
    }

    async fn signal(&self, request: Request<v1::SignalRequest>) -> Reply<v1::Empty> {
        let v1::SignalRequest { name, signal } = request.into_inner();
        self.note(format!("signal {name} {signal}"));
        self.end(&name, 128 + signal, 0);
        Ok(Response::new(v1::Empty {}))
    }

    async fn stop(&self, request: Request<v1::StopRequest>) -> Reply<v1::Exit> {
        let v1::StopRequest { name, timeout_s } = request.into_inner();
        self.note(format!("stop {name} {timeout_s}"));
        if name.contains('/') && self.in_file.load(Ordering::Relaxed) {
            return Err(Status::failed_precondition("its memory is in a file"));
        }
        self.end(&name, 0, 143);
        self.ended(&name).await.map(Response::new)
    }

    async fn remove(&self, request: Request<v1::RemoveRequest>) -> Reply<v1::Empty> {
        self.note(format!("remove {}", request.into_inner().name));
        Ok(Response::new(v1::Empty {}))
    }

    async fn stats(&self, request: Request<v1::Name>) -> Reply<v1::StatsReply> {
        self.note(format!("stats {}", request.into_inner().name));
        Ok(Response::new(v1::StatsReply {
            vmm_cpu_ns: 2000,
            guest_cpu_busy_ns: 1000,
            memory_total_bytes: 1 << 28,
            memory_available_bytes: 1 << 27,
            ..Default::default()
        }))
    }

    async fn pids(&self, _: Request<v1::Name>) -> Reply<v1::PidsReply> {
        match self.pids.lock().unwrap().clone() {
            Some(pids) => Ok(Response::new(v1::PidsReply { pids })),
            None => Err(Status::unimplemented("pids")),
        }
    }

    async fn status(&self, _: Request<v1::Empty>) -> Reply<v1::StatusReply> {
        Ok(Response::new(v1::StatusReply {
            memory_bytes: 256 << 20,
            cpus: 1,
            version: "0.0.1".to_owned(),
            gives_functions: self.gives_functions.load(Ordering::Relaxed),
            gives_huge_pages: self.gives_functions.load(Ordering::Relaxed),
            makes_empty_dirs: self.makes_empty_dirs.load(Ordering::Relaxed),
            makes_file_dirs: self.makes_empty_dirs.load(Ordering::Relaxed),
            ..Default::default()
        }))
    }

    async fn attach(&self, request: Request<Streaming<v1::RunIn>>) -> Reply<Self::AttachStream> {
        let mut messages = request.into_inner();
        let first = messages.next().await.unwrap()?;
        let Some(run_in::Kind::Rejoin(v1::Rejoin { name, position })) = first.kind else {
            panic!("{first:?}")
        };
        self.note(format!("rejoin {name} {position}"));
        let end = self.ends.lock().unwrap().get(&name).map(watch::Sender::subscribe);
        let mut end = end.ok_or_else(|| Status::not_found("no such sandbox"))?;
        tokio::spawn(note_sizes(messages, name, Arc::clone(&self.calls)));
        let (sender, receiver) = mpsc::channel(4);
        tokio::spawn(async move {
            // The test may be over.
            let _ = sender.send(out(run_out::Kind::Started(v1::Started::default()))).await;
            let status = end.wait_for(Option::is_some).await.unwrap().unwrap();
            let exit = v1::Exit { status, ..Default::default() };
            let _ = sender.send(out(run_out::Kind::Exit(exit))).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn exec(&self, _: Request<Streaming<v1::RunIn>>) -> Reply<Self::ExecStream> {
        Err(Status::unimplemented("exec"))
    }

    async fn forward(&self, _: Request<Streaming<v1::ForwardIn>>) -> Reply<Self::ForwardStream> {
        Err(Status::unimplemented("forward"))
    }

    async fn logs(&self, _: Request<v1::LogsRequest>) -> Reply<Self::LogsStream> {
        Err(Status::unimplemented("logs"))
    }

    async fn figures(&self, _: Request<v1::Empty>) -> Reply<v1::FiguresReply> {
        Err(Status::unimplemented("figures"))
    }

    async fn list(&self, _: Request<v1::Empty>) -> Reply<v1::ListReply> {
        Err(Status::unimplemented("list"))
    }

    async fn inspect(&self, _: Request<v1::Name>) -> Reply<v1::InspectReply> {
        if self.is_silent.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
        let sandbox = Some(v1::Sandbox { vmm_pid: VMM, ..Default::default() });
        Ok(Response::new(v1::InspectReply { sandbox, ..Default::default() }))
    }

    async fn update(&self, request: Request<v1::UpdateRequest>) -> Reply<v1::UpdateReply> {
        let request = request.into_inner();
        let v1::UpdateRequest { name, cpus, resources, memory_bytes, placement } = request;
        let memory = resources.map_or(memory_bytes, |resources| resources.memory_bytes);
        let placed = placement.map_or_else(String::new, |one| format!(" on {}", one.cpus));
        self.note(format!("update {name} {cpus} {memory}{placed}"));
        Ok(Response::new(v1::UpdateReply::default()))
    }

    async fn pause(&self, request: Request<v1::Name>) -> Reply<v1::Empty> {
        self.note(format!("pause {}", request.into_inner().name));
        Ok(Response::new(v1::Empty {}))
    }

    async fn pause_to_file(&self, request: Request<v1::Name>) -> Reply<v1::Empty> {
        self.note(format!("pause {} to a file", request.into_inner().name));
        Ok(Response::new(v1::Empty {}))
    }

    async fn resume(&self, request: Request<v1::Name>) -> Reply<v1::ResumeReply> {
        self.note(format!("resume {}", request.into_inner().name));
        Ok(Response::new(v1::ResumeReply::default()))
    }

    async fn put_files(&self, request: Request<v1::PutFilesRequest>) -> Reply<v1::Empty> {
        let v1::PutFilesRequest { name, files, removed } = request.into_inner();
        self.note(format!("put {name} {} {}", files.len(), removed.len()));
        Ok(Response::new(v1::Empty {}))
    }

    async fn copy_out(&self, _: Request<v1::CopyOutRequest>) -> Reply<Self::CopyOutStream> {
        Err(Status::unimplemented("copy"))
    }

    async fn copy_in(&self, _: Request<Streaming<v1::CopyInRequest>>) -> Reply<v1::CopyInReply> {
        Err(Status::unimplemented("copy"))
    }

    async fn snoop_guest(
        &self,
        _: Request<v1::SnoopGuestRequest>,
    ) -> Reply<Self::SnoopGuestStream> {
        Err(Status::unimplemented("snoop"))
    }
}

/// The snapshots of the daemon, which notes the calls among the others.
struct Snapshots(Arc<Fake>);

#[tonic::async_trait]
impl v1::snapshots_server::Snapshots for Snapshots {
    async fn create(&self, request: Request<v1::CreateSnapshotRequest>) -> Reply<v1::Snapshot> {
        let v1::CreateSnapshotRequest { sandbox, name } = request.into_inner();
        self.0.note(format!("save {sandbox} {name}"));
        Ok(Response::new(v1::Snapshot { name, sandbox, ..Default::default() }))
    }

    async fn list(&self, _: Request<v1::Empty>) -> Reply<v1::SnapshotList> {
        Err(Status::unimplemented("list"))
    }

    async fn remove(&self, request: Request<v1::Name>) -> Reply<v1::Empty> {
        self.0.note(format!("forget {}", request.into_inner().name));
        while self.0.removes_snapshots.load(Ordering::Relaxed) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        match self.0.makes_snapshots.load(Ordering::Relaxed) {
            true => Err(Status::failed_precondition("it is being made")),
            false => Ok(Response::new(v1::Empty {})),
        }
    }

    async fn export(&self, request: Request<v1::ExportSnapshotRequest>) -> Reply<v1::Empty> {
        let v1::ExportSnapshotRequest { name, path } = request.into_inner();
        self.0.note(format!("export {name} {path}"));
        match self.0.lacks_room.load(Ordering::Relaxed) {
            true => Err(Status::internal("no space left")),
            false => Ok(Response::new(v1::Empty {})),
        }
    }

    async fn import(&self, request: Request<v1::ImportSnapshotRequest>) -> Reply<v1::Snapshot> {
        let request = request.into_inner();
        self.0.imports.lock().unwrap().push(request.clone());
        let v1::ImportSnapshotRequest { path, name, .. } = request;
        self.0.note(format!("import {path} {name}"));
        if !Path::new(&path).is_dir() {
            return Err(Status::invalid_argument("there is no snapshot"));
        }
        let (memory_bytes, cpus) = (256 << 20, 1);
        Ok(Response::new(v1::Snapshot { name, memory_bytes, cpus, ..Default::default() }))
    }
}

/// A node with one template.
struct Templates;

#[tonic::async_trait]
impl v1::templates_server::Templates for Templates {
    async fn create(&self, _: Request<v1::CreateTemplateRequest>) -> Reply<v1::Template> {
        Err(Status::unimplemented("create"))
    }

    async fn list(&self, _: Request<v1::Empty>) -> Reply<v1::TemplateList> {
        let name = "warm".to_owned();
        let (memory_bytes, cpus, max_cpus) = (640 << 20, 1, 1);
        let warm = v1::Template { name, memory_bytes, cpus, max_cpus, ..Default::default() };
        Ok(Response::new(v1::TemplateList { templates: vec![warm] }))
    }

    async fn remove(&self, _: Request<v1::Name>) -> Reply<v1::Empty> {
        Err(Status::unimplemented("remove"))
    }
}
