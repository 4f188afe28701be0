//! Creation of tasks. [`TaskMaker`] translates a bundle and containerd's request to one for the
//! daemon, makes the container's image, and has its files read. Nothing runs yet.
//!
//! Both ways to a task, [`TaskMaker::make_task`] and [`TaskMaker::make_sandbox`], lead through
//! [`TaskMaker::assemble`]. `translate` there has a function for each role ([`role`]): `pod`,
//! `member`, `alone`, `restored`. The module `content` adds what is made beside the configuration,
//! such as the image. [`spec`] translates the configuration itself.

mod content;

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};

use slipway_sandbox_api::v1::{self, run_in};
use tokio::sync::Semaphore;
use tonic::Code;

use self::content::Content;
use crate::args::{self, Args};
use crate::containerd as cd;
use crate::daemon::Daemon;
use crate::empty_dirs::{self, Volumes};
use crate::events::Events;
use crate::hold::Holder;
use crate::hooks::Subject;
use crate::io::Paths;
use crate::netns::Network;
use crate::process::{Phase, Process, timestamp};
use crate::reads::on_a_thread;
use crate::role::{self, Role};
use crate::spec::{self, Container, Oci, PodNamespaces};
use crate::task::{RESOLVER, Sandbox, Task, TaskFiles, TaskKind};
use crate::tasks::Tasks;
use crate::ttrpc::Failure;
use crate::{checkpoint, names, options, target};

/// The environment variable with the annotations of pods of the Sandbox API that count, as
/// [`spec::pod_of_sandbox`] takes them.
const ANNOTATIONS: &str = "SLIPWAY_POD_ANNOTATIONS";

/// The parts of the shim that a new task needs.
pub struct TaskMaker<'a> {
    /// The shim's command line.
    pub args: &'a Args,
    /// The daemon.
    pub daemon: &'a Daemon,
    /// containerd's events.
    pub events: &'a Arc<Events>,
    /// The shim's other tasks, among which a container's pod is.
    pub tasks: &'a Tasks,
    /// The places of reads of the host's files, as many as `MOST_READS`.
    pub reads: &'a Arc<Semaphore>,
    /// The holder, if there is one.
    pub holder: Option<&'a Arc<Holder>>,
}

/// The parts of a task that depend on its role, translated for the daemon.
struct Translated {
    kind: TaskKind,
    run: v1::RunSpec,
    content: Content,
}

impl TaskMaker<'_> {
    /// Makes the task of a container or of a pod's sandbox, as containerd's task service asks for
    /// it, and runs the container's hooks that come before it.
    ///
    /// # Errors
    /// One line that says what cannot be honoured, or what failed. An image or a snapshot may have
    /// been made, which the notes in the bundle name.
    pub async fn make_task(&self, request: &cd::CreateTaskRequest) -> Result<Task, Failure> {
        check_id(&request.id)?;
        options::check(request).map_err(Failure::invalid)?;
        let oci = Oci::load(Path::new(&request.bundle)).map_err(Failure::invalid)?;
        let (id, bundle, holder) = (&request.id, Path::new(&request.bundle), self.holder);
        let hooked = Subject { id, bundle, oci: &oci, holder };
        // Of a container that is refused, no hook runs.
        if !hooked.begins() || !self.accepts(request, &oci) {
            return self.assemble(request, &oci, None, None).await;
        }
        let network = hooked.begin().await?;
        let made = self.assemble(request, &oci, None, Some(network)).await;
        if made.is_err() {
            hooked.end().await;
        }
        made
    }

    /// Makes a pod's sandbox as containerd's Sandbox API asks for it.
    ///
    /// # Errors
    /// One line that says what cannot be honoured, or what failed.
    pub async fn make_sandbox(&self, request: &cd::CreateSandboxRequest) -> Result<Task, Failure> {
        check_id(&request.sandbox_id)?;
        let allowed = std::env::var(ANNOTATIONS).unwrap_or_else(|_| spec::ALLOWED.to_owned());
        let asked = spec::pod_of_sandbox(request, &allowed).map_err(Failure::invalid)?;
        let resolver = match asked.resolver {
            Some(text) => text.into_bytes(),
            None => on_a_thread(self.reads, hosts_resolver).await?,
        };
        let sandbox = Sandbox { created_at: timestamp(), resolver };
        let (id, bundle) = (request.sandbox_id.clone(), request.bundle_path.clone());
        let request = cd::CreateTaskRequest { id, bundle, ..Default::default() };
        self.assemble(&request, &asked.oci, Some(sandbox), None).await
    }

    /// Translates a configuration by its role and puts the task together; with `sandbox`, that of
    /// a pod of the Sandbox API. `network` is the network namespace that a container's hooks were
    /// run with.
    async fn assemble(
        &self,
        request: &cd::CreateTaskRequest,
        oci: &Oci,
        sandbox: Option<Sandbox>,
        network: Option<Network>,
    ) -> Result<Task, Failure> {
        let id = request.id.as_str();
        let role = Role::of(&oci.annotations).map_err(Failure::invalid)?;
        self.check_group(id, oci)?;
        let events = match &sandbox {
            // containerd hears of a sandbox by the answers to its calls.
            Some(_) => Arc::new(Events::new(&self.args.namespace, None)),
            None => Arc::clone(self.events),
        };
        let name = names::container(self.args, id, &role);
        let restores = !request.checkpoint.is_empty();
        // A container of a pod has the pod's.
        let has_sockets = !matches!(role, Role::Member(_))
            && spec::wants_sockets(oci, restores).map_err(Failure::invalid)?;
        let mut parts = self.translate(request, oci, &role, &name, sandbox).await?;
        let run = &mut parts.run;
        if let Some(network) = &network {
            network.give(run);
        }
        if has_sockets {
            spec::add_sockets(run, self.daemon.socket_engine()).map_err(Failure::invalid)?;
        }
        let boots = run.pod.is_empty() && !restores;
        if let (Some(name), true) = (oci.annotations.get(spec::TEMPLATE), boots) {
            self.begin_with(name, run).await?;
        }
        run.labels = spec::labels(&self.args.namespace, id, &oci.annotations);
        // A container of a pod has its name within the pod.
        run.name = if run.pod.is_empty() { name.clone() } else { id.to_owned() };
        let task = self.task(request, name, events, parts);
        task.kept.network.fill(network);
        Ok(task)
    }

    /// Translates what depends on the role, and makes the container's image. `sandbox` is that of a
    /// pod of the Sandbox API.
    async fn translate(
        &self,
        request: &cd::CreateTaskRequest,
        oci: &Oci,
        role: &Role,
        name: &str,
        sandbox: Option<Sandbox>,
    ) -> Result<Translated, Failure> {
        let restores = !request.checkpoint.is_empty();
        match role {
            Role::Alone if restores => self.restored(request, oci, name).await,
            Role::Pod | Role::Member(_) if restores => {
                let message = "a pod and its containers cannot begin with a checkpoint";
                Err(Failure::new(Code::Unimplemented, message))
            }
            Role::Pod => self.pod(&request.id, oci, sandbox).await,
            Role::Member(pod) => self.member(request, oci, pod, name).await,
            Role::Alone => self.alone(request, oci, name).await,
        }
    }

    /// Puts the task together of its parts. Nothing of it runs yet.
    fn task(
        &self,
        request: &cd::CreateTaskRequest,
        name: String,
        events: Arc<Events>,
        parts: Translated,
    ) -> Task {
        let Translated { kind, run, content } = parts;
        let init = Process::new(String::new(), paths(request), run_in::Kind::Run(run));
        Task {
            id: request.id.clone(),
            bundle: PathBuf::from(&request.bundle),
            name,
            kind,
            daemon: self.daemon.clone(),
            events,
            init: Arc::new(init),
            execs: Mutex::new(HashMap::new()),
            vmm: AtomicU32::new(0),
            paused: AtomicBool::new(false),
            private: content.private,
            copies: Mutex::new(content.copies),
            copied: content.copied,
            snapshot: Mutex::new(content.snapshot),
            message: content.message,
            kept: TaskFiles::default(),
            deleting: tokio::sync::Mutex::default(),
        }
    }

    /// Has a sandbox begin with a template of the node's, or with the one that the node makes for
    /// such sandboxes.
    async fn begin_with(&self, template: &str, run: &mut v1::RunSpec) -> Result<(), Failure> {
        if template == spec::AUTO {
            run.template = spec::AUTO.to_owned();
            return Ok(());
        }
        let template = self.daemon.template(template).await?;
        spec::begin_with(run, &template).map_err(Failure::invalid)
    }

    /// Checks that the container belongs to the group that this shim serves, so that `delete` finds
    /// what is its.
    fn check_group(&self, id: &str, oci: &Oci) -> Result<(), Failure> {
        let (group, own) =
            (role::group(id, &oci.annotations).map_err(Failure::invalid)?, &self.args.id);
        if group == *own {
            return Ok(());
        }
        Err(Failure::invalid(format!(
            "this shim serves {own}, and container {id} belongs to {group}"
        )))
    }

    /// Translates the configuration of a pod's sandbox.
    async fn pod(
        &self,
        id: &str,
        oci: &Oci,
        sandbox: Option<Sandbox>,
    ) -> Result<Translated, Failure> {
        let node = self.daemon.status().await?;
        let default_group = format!("/{}/{id}", self.args.namespace);
        let run = spec::pod_spec(oci, &node, &default_group).map_err(Failure::invalid)?;
        let network = run.network_namespace.clone();
        let kind = TaskKind::Pod { network, sandbox, empty_dirs: Arc::default() };
        Ok(Translated { kind, run, content: Content::default() })
    }

    /// Translates the configuration of a container of the pod `pod`, and makes its image.
    async fn member(
        &self,
        request: &cd::CreateTaskRequest,
        oci: &Oci,
        pod: &str,
        name: &str,
    ) -> Result<Translated, Failure> {
        let task = self.tasks.find(pod).map_err(|_| no_pod(pod))?;
        let TaskKind::Pod { network, sandbox, empty_dirs } = &task.kind else {
            return Err(no_pod(pod));
        };
        if matches!(task.init.phase(), Phase::Stopped(_)) {
            let message = format!("the pod {pod} has ended");
            return Err(Failure::new(Code::FailedPrecondition, message));
        }
        let read_only = oci.root.readonly;
        let functions = &self.daemon.functions();
        let container = Container { id: &request.id, in_pod: true, read_only, functions };
        let processes = [task.pid(), std::process::id()];
        let namespaces = PodNamespaces { network, processes };
        let mut run = spec::member_spec(oci, container, namespaces).map_err(Failure::invalid)?;
        self.give_functions(oci, &mut run).await?;
        self.keep_in_guest(oci, empty_dirs, &mut run).await?;
        self.check_huge_pages(&run).await?;
        run.pod = task.name.clone();
        if run.shares_processes {
            run.processes_of = self.target(request, oci, pod).await?;
        }
        let content = self.content(request, oci, container, name, &mut run).await?;
        if let Some(sandbox) = sandbox {
            sandbox.add_resolver(&mut run.files);
        }
        Ok(Translated { kind: TaskKind::Member(Arc::clone(&task)), run, content })
    }

    /// Gives a container of a pod the socket function if it asks for that. Refuses the container if
    /// it needs functions and the daemon adds none to pods.
    async fn give_functions(&self, oci: &Oci, run: &mut v1::RunSpec) -> Result<(), Failure> {
        let has_sockets = spec::asks_for_sockets(&oci.mounts);
        if has_sockets {
            run.socket_engine = self.daemon.socket_engine().to_string_lossy().into_owned();
        }
        match has_sockets || !run.functions.is_empty() {
            true => self.daemon.check_functions().await,
            false => Ok(()),
        }
    }

    /// Returns the id of the container of the pod whose processes a container shares; an empty one
    /// if it shares those of the pod.
    async fn target(
        &self,
        request: &cd::CreateTaskRequest,
        oci: &Oci,
        pod: &str,
    ) -> Result<String, Failure> {
        let Some(target) = target::of(self.args, &request.id, &oci.annotations).await? else {
            return Ok(String::new());
        };
        let task = self.tasks.find(&target).ok();
        let is_member = |task: &Task| matches!(&task.kind, TaskKind::Member(its) if its.id == pod);
        if task.is_some_and(|task| is_member(&task)) {
            return Ok(target);
        }
        let message = format!(
            "there is no container {target} in the pod {pod}, whose processes {} is to share",
            request.id
        );
        Err(Failure::new(Code::NotFound, message))
    }

    /// Has the `emptyDir` volumes among what a container shares with the host be directories of the
    /// guest, unless the pod's annotation or the daemon keeps them on the host.
    async fn keep_in_guest(
        &self,
        oci: &Oci,
        volumes: &Arc<Volumes>,
        run: &mut v1::RunSpec,
    ) -> Result<(), Failure> {
        let in_guest = empty_dirs::in_guest(&oci.annotations).map_err(Failure::invalid)?;
        let has_some = run.shares.iter().any(|share| empty_dirs::may_be_one(&share.source));
        if !in_guest || !has_some || !self.daemon.makes_empty_dirs().await? {
            return Ok(());
        }
        let (shares, volumes) = (std::mem::take(&mut run.shares), Arc::clone(volumes));
        let parted = on_a_thread(self.reads, move || empty_dirs::part(shares, &volumes));
        (run.empty_dirs, run.shares) = parted.await?.map_err(Failure::invalid)?;
        Ok(())
    }

    /// Refuses a container that needs huge pages if the daemon gives none.
    async fn check_huge_pages(&self, run: &v1::RunSpec) -> Result<(), Failure> {
        match spec::needs_huge_pages(run) {
            true => self.daemon.check_huge_pages().await,
            false => Ok(()),
        }
    }

    /// Translates the configuration of a container with a sandbox of its own, and makes its image.
    async fn alone(
        &self,
        request: &cd::CreateTaskRequest,
        oci: &Oci,
        name: &str,
    ) -> Result<Translated, Failure> {
        let functions = &self.daemon.functions();
        let container = alone(request, oci, functions);
        let mut run = spec::run_spec(oci, container).map_err(Failure::invalid)?;
        self.check_huge_pages(&run).await?;
        let content = self.content(request, oci, container, name, &mut run).await?;
        Ok(Translated { kind: TaskKind::Alone, run, content })
    }

    /// Returns whether a container has a sandbox of its own, and can be as its configuration says.
    fn accepts(&self, request: &cd::CreateTaskRequest, oci: &Oci) -> bool {
        let functions = self.daemon.functions();
        let spec = match request.checkpoint.is_empty() {
            true => spec::run_spec(oci, alone(request, oci, &functions)),
            false => spec::restored_spec(oci),
        };
        let is_alone = Role::of(&oci.annotations) == Ok(Role::Alone);
        is_alone && spec.is_ok() && self.check_group(&request.id, oci).is_ok()
    }

    /// Makes a container that begins with a checkpoint. What its configuration asks for of the
    /// machine and of the container, the checkpoint has.
    async fn restored(
        &self,
        request: &cd::CreateTaskRequest,
        oci: &Oci,
        name: &str,
    ) -> Result<Translated, Failure> {
        let mut run = spec::restored_spec(oci).map_err(Failure::invalid)?;
        // The checkpoint's author may name any image of the node: its container gets its own.
        let root = self.root(request, oci, name).await?;
        let path = request.checkpoint.clone();
        let wanted = checkpoint::CheckpointRequest { path, image_digest: root.digest };
        let bundle = Path::new(&request.bundle);
        let taken = checkpoint::take(self.daemon, bundle, name, wanted).await?;
        spec::check_restored(oci, &taken).map_err(Failure::invalid)?;
        run.template.clone_from(&taken.name);
        let private = root.is_private.then_some(root.image);
        let content = Content { private, snapshot: Some(taken.name), ..Content::default() };
        Ok(Translated { kind: TaskKind::Alone, run, content })
    }
}

/// Reads the host's resolver configuration. Without one that can be read, it is empty.
fn hosts_resolver() -> Vec<u8> {
    let mut content = Vec::new();
    if let Ok(file) = File::open(RESOLVER) {
        let _ = file.take(spec::MOST_RESOLVER as u64).read_to_end(&mut content);
    }
    content
}

/// Returns a container with a sandbox of its own.
fn alone<'a>(request: &'a cd::CreateTaskRequest, oci: &Oci, functions: &'a str) -> Container<'a> {
    Container { id: &request.id, in_pod: false, read_only: oci.root.readonly, functions }
}

fn no_pod(pod: &str) -> Failure {
    Failure::new(Code::NotFound, format!("there is no pod {pod}: its sandbox comes first"))
}

fn check_id(id: &str) -> Result<(), Failure> {
    match args::is_id(id) {
        true => Ok(()),
        false => Err(Failure::invalid(format!("{id:?} is no container's id"))),
    }
}

fn paths(request: &cd::CreateTaskRequest) -> Paths {
    Paths {
        stdin: request.stdin.clone(),
        stdout: request.stdout.clone(),
        stderr: request.stderr.clone(),
        terminal: request.terminal,
    }
}
