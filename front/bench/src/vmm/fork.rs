//! Forks: VMs that begin with the state and the memory of one that was saved, through the driver
//! that starts sandboxes' VMMs; without functions, or with those of a plane in this process.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use slipway_hypervisor::native::SlipwayVmm;
use slipway_hypervisor::{
    Accel, AccelChoice, Cage, CpuTemplate, Credentials, FreePages, GuestMemory, Hypervisor,
    TemplateName, Topology, Vm, VmSpec,
};
use slipway_plane_api::{PlaneClient, v1};
use slipway_pool::{Pool, Server, Settings, Template};
use tempfile::TempDir;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::functions::{Functions, Role};
use super::process::private_bytes;
use super::{VmmLoad, VmmMeasured, stub};
use crate::cpu_time::{own_time, process_cpu_ns};
use crate::keeping::Keeping;
use crate::measurement::Subject;

/// The longest time from the start of a VMM to its guest's byte.
const PATIENCE: Duration = Duration::from_secs(60);
/// The user that a VMM runs as if this process is root: nobody.
const NOBODY: Credentials = Credentials { uid: 65534, gid: 65534 };

/// Forks of a VM whose guest waits until it is a fork. The time is from asking for memory to the
/// guest's first byte, and with functions until the VM has its disks; the processor time is that of
/// the VMM, the driver, the pool and the plane.
pub struct Fork {
    vmm: SlipwayVmm,
    source: Source,
    /// Makes the functions of VMs, if they have some.
    functions: Option<Functions>,
    topology: Topology,
    /// The machines that were saved, one for each load met so far.
    saved: HashMap<VmmLoad, Saved>,
    /// Serves the plane's calls, if there is a plane.
    runtime: tokio::runtime::Runtime,
    /// Has the guest's files, and those of a plane.
    folder: TempDir,
}

/// A plane in this process, for the functions of forks.
pub struct ForkPlane {
    /// The client of the plane, which has nothing else to serve.
    pub client: PlaneClient,
    /// The socket of the plane's pool, and its server. `None` if this host serves no pool.
    pub pool: Option<(PathBuf, Server)>,
}

/// The source of a fork's memory.
enum Source {
    /// A pool, which copies pages late. The server ends before the pool, and the pool before its
    /// keeper.
    Pool { _server: Server, pool: Pool, socket: PathBuf, _keeping: Keeping },
    /// The pool of a plane.
    Plane { _server: Server, socket: PathBuf, plane: PlaneClient },
    /// A file that is copied before the fork begins, since this host serves no pool.
    Plain,
}

/// A machine that was saved.
struct Saved {
    state: Arc<File>,
    name: TemplateName,
    /// The memory, if no pool has it.
    memory: Option<Template>,
}

impl Fork {
    /// Makes a subject of `slipway-vmm` at `path`, whose VMs have no functions.
    ///
    /// # Errors
    /// If there is no place for the guest's files, or no keeper for a pool.
    pub fn new(path: &Path) -> Result<Self> {
        Self::of(path, Source::new()?)
    }

    /// Makes a subject of `slipway-vmm` at `path`, whose VMs have an NVMe controller and a network
    /// interface. `start` starts the plane that serves them; it gets a folder for the plane's
    /// files, which lasts as long as the subject, and may have tasks of its own run.
    ///
    /// # Errors
    /// If there is no place for the guest's files, or the plane cannot be started.
    pub fn with_functions<P>(path: &Path, start: impl FnOnce(PathBuf) -> P) -> Result<Self>
    where
        P: Future<Output = Result<ForkPlane>>,
    {
        let mut fork = Self::of(path, Source::Plain)?;
        let folder = fork.folder.path();
        let ForkPlane { client, pool } = fork.runtime.block_on(start(folder.to_owned()))?;
        let functions = fork.runtime.block_on(Functions::new(client.clone(), folder))?;
        if let Some((socket, server)) = pool {
            fork.source = Source::Plane { _server: server, socket, plane: client };
        }
        fork.functions = Some(functions);
        Ok(fork)
    }

    fn of(path: &Path, source: Source) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("slipway-bench").tempdir()?;
        std::fs::write(folder.path().join("kernel"), stub::waiting_elf())?;
        std::fs::write(folder.path().join("initramfs"), [0; 4096])?;
        let vmm = SlipwayVmm::new(std::path::absolute(path)?, folder.path());
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (topology, saved) = (Topology::of_host(), HashMap::new());
        Ok(Self { vmm, source, functions: None, topology, saved, runtime, folder })
    }

    /// Boots a VM with the load's memory, saves it, and keeps its memory as a template.
    fn save(&mut self, load: &VmmLoad) -> Result<()> {
        let memory = GuestMemory::new(load.memory)?;
        let booted = self.runtime.block_on(self.boot_and_save(memory.clone()));
        let bytes = self.without_functions(booted)?;
        let mut state = tempfile::tempfile_in(self.folder.path())?;
        state.write_all(&bytes)?;
        let name = TemplateName::new(&load.to_string()).context("a template's name")?;
        let kept = self.source.keep(name, memory.descriptor()?, self.folder.path());
        let memory = self.runtime.block_on(kept)?;
        self.saved.insert(*load, Saved { state: Arc::new(state), name, memory });
        Ok(())
    }

    /// Boots a VM with this memory. Returns its state.
    async fn boot_and_save(&self, memory: GuestMemory) -> Result<Vec<u8>> {
        let mut spec = self.spec(memory, None);
        spec.vfio_user_sockets = self.serve(&spec, Role::Saved).await?;
        let (vm, _) = start(&self.vmm, &spec, stub::BYTE).await?;
        vm.pause().await?;
        let bytes = vm.save().await?;
        end(&*vm).await?;
        Ok(bytes)
    }

    /// Has the functions of a VM served, if the subject has some. Returns their sockets.
    async fn serve(&self, spec: &VmSpec, role: Role) -> Result<Vec<PathBuf>> {
        match &self.functions {
            Some(functions) => functions.serve(&spec.memory, spec.credentials, role).await,
            None => Ok(Vec::new()),
        }
    }

    /// Removes the functions of a VM that has ended, or has failed. Returns `outcome`, unless that
    /// fails.
    fn without_functions<T>(&self, outcome: Result<T>) -> Result<T> {
        let removed = match &self.functions {
            Some(functions) => self.runtime.block_on(functions.remove()),
            None => Ok(()),
        };
        let outcome = outcome?;
        removed.map(|()| outcome)
    }

    fn spec(&self, memory: GuestMemory, restore: Option<Arc<File>>) -> VmSpec {
        let folder = self.folder.path();
        VmSpec {
            name: "bench".into(),
            memory,
            shared: None,
            restore,
            cpus: 1,
            cpu_template: CpuTemplate::Host,
            hot_memory: Vec::new(),
            free_pages: FreePages::Unreported,
            kernel: folder.join("kernel"),
            initramfs: folder.join("initramfs"),
            cmdline: Vec::new(),
            agent_socket: folder.join("agent"),
            vfio_user_sockets: Vec::new(),
            plug_slots: 0,
            plug_cpus: 0,
            disks: Vec::new(),
            nic: None,
            assigned: None,
            console_log: folder.join("console"),
            run_dir: folder.to_owned(),
            credentials: Cage::of_launcher().map(|_| NOBODY),
            cgroup_procs: Vec::new(),
            accel: AccelChoice::Only(Accel::Kvm),
        }
    }

    /// Starts a fork, and ends it when it has been measured.
    fn turn(&self, load: &VmmLoad, saved: &Saved) -> Result<VmmMeasured> {
        let measured = self.runtime.block_on(self.measure(load, saved));
        self.without_functions(measured)
    }

    async fn measure(&self, load: &VmmLoad, saved: &Saved) -> Result<VmmMeasured> {
        let (begun, before) = (Instant::now(), own_time());
        let memory = self.source.memory(load.memory, saved, &self.topology)?;
        let mut spec = self.spec(memory, Some(Arc::clone(&saved.state)));
        spec.vfio_user_sockets = self.serve(&spec, Role::Fork).await?;
        let (vm, byte) = start(&self.vmm, &spec, stub::FORK_BYTE).await?;
        let at = match &self.functions {
            // A guest looks at its disks once it has answered.
            Some(functions) => {
                functions.attach().await?;
                Instant::now()
            }
            None => byte,
        };
        let byte_ns = at.duration_since(begun).as_nanos() as u64;
        let pid = vm.record().pid.unsigned_abs();
        let own_ns = (own_time() - before).as_nanos() as u64;
        let cpu_ns = Some(own_ns + process_cpu_ns(pid)?);
        let private_bytes = Some(private_bytes(pid, load.memory)?);
        let end_ns = end(&*vm).await?;
        Ok(VmmMeasured { byte_ns, end_ns, private_bytes, cpu_ns, slot_ns: None })
    }
}

impl Source {
    fn new() -> Result<Self> {
        let keeping = Keeping::start()?;
        let shelves = Some(keeping.shelves());
        let Ok(pool) = Pool::new(Settings { shelves, ..Settings::default() }) else {
            return Ok(Self::Plain);
        };
        let socket = keeping.socket();
        let server = pool.listen(&socket).context("a pool's socket")?;
        Ok(Self::Pool { _server: server, pool, socket, _keeping: keeping })
    }

    /// Keeps the memory of a VM that was saved under this name. Returns it if no pool has it.
    /// `folder` is for a file that the plane reads it from.
    async fn keep(
        &self,
        name: TemplateName,
        memory: OwnedFd,
        folder: &Path,
    ) -> Result<Option<Template>> {
        match self {
            Self::Pool { pool, .. } => {
                pool.add_template(name, pool.freeze(memory.as_fd())?)?;
                Ok(None)
            }
            Self::Plane { plane, .. } => {
                let file = folder.join("memory");
                slipway_pool::save(&Template::copy_of(memory.as_fd())?, &file)?;
                let (name, path) = (name.to_string(), file.to_string_lossy().into_owned());
                let request = v1::AddTemplateRequest { name, path, ..Default::default() };
                plane.clone().add_template(request).await.context("the template of forks")?;
                Ok(None)
            }
            Self::Plain => Ok(Some(Template::copy_of(memory.as_fd())?)),
        }
    }

    fn memory(&self, bytes: u64, saved: &Saved, topology: &Topology) -> Result<GuestMemory> {
        match (self, &saved.memory) {
            (Self::Pool { socket, .. } | Self::Plane { socket, .. }, _) => {
                Ok(GuestMemory::of_template(socket, bytes, saved.name, topology)?)
            }
            (Self::Plain, template) => {
                let memory = GuestMemory::new(bytes)?;
                let template = template.as_ref().context("the memory that was saved")?;
                template.write(memory.descriptor()?.as_fd())?;
                Ok(memory)
            }
        }
    }
}

impl Subject for Fork {
    type Load = VmmLoad;
    type Measured = VmmMeasured;

    fn name(&self) -> &str {
        if self.functions.is_some() { "fork-functions" } else { "fork" }
    }

    fn about(&self) -> String {
        let memory = match self.source {
            Source::Pool { .. } | Source::Plane { .. } => "a pool copies late",
            Source::Plain => "is copied before",
        };
        let functions = match self.functions {
            Some(_) => ", with an NVMe controller and an interface of a plane",
            None => "",
        };
        let path = self.vmm.path().display();
        format!(
            "{path}, beginning with a saved machine, whose memory {memory}{functions}; started by \
                 the driver, in a cage if this is root"
        )
    }

    fn run(&mut self, load: &VmmLoad) -> Result<VmmMeasured> {
        if !self.saved.contains_key(load) {
            self.save(load)?;
            // Its files are in the page cache then.
            self.turn(load, self.saved.get(load).context("a saved machine")?)?;
        }
        self.turn(load, self.saved.get(load).context("a saved machine")?)
    }
}

/// Starts a VM. Returns it with the time of the guest's byte.
async fn start(vmm: &SlipwayVmm, spec: &VmSpec, byte: u8) -> Result<(Box<dyn Vm>, Instant)> {
    File::create(&spec.console_log)?;
    let watch = Watch::new(&spec.console_log)?;
    let vm = vmm.launch(spec).await?;
    match tokio::time::timeout(PATIENCE, watch.byte(&spec.console_log, byte)).await {
        Ok(at) => Ok((vm, at?)),
        Err(_) => {
            end(&*vm).await?;
            anyhow::bail!("the guest sent nothing within {PATIENCE:?}")
        }
    }
}

/// Kills a VM. Returns the time in nanoseconds until nothing is left of it.
async fn end(vm: &dyn Vm) -> Result<u64> {
    let begun = Instant::now();
    vm.kill()?;
    vm.wait().await;
    Ok(begun.elapsed().as_nanos() as u64)
}

/// Waits for changes of the guest's log, into which the driver copies what the guest writes.
struct Watch(AsyncFd<OwnedFd>);

impl Watch {
    fn new(log: &Path) -> Result<Self> {
        let events = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        inotify::add_watch(&events, log, WatchFlags::MODIFY)?;
        #[allow(unsafe_code)] // the driver of asynchronous I/O polls it as long as this has it
        // SAFETY: the descriptor moves into the object, which hands out shared references only, so
        // it stays open and the same until the object is dropped.
        let events = unsafe { AsyncFd::register_with_interest(events, Interest::READABLE) };
        Ok(Self(events?))
    }

    /// Waits for `byte` in the log. Returns the time at which it was seen.
    async fn byte(&self, log: &Path, byte: u8) -> Result<Instant> {
        loop {
            if std::fs::read(log)?.contains(&byte) {
                return Ok(Instant::now());
            }
            let mut guard = self.0.readable().await?;
            let mut events = [0; 4096];
            let read = rustix::io::read(self.0.get_ref(), &mut events);
            ensure!(read != Ok(0), "the log of the guest is gone");
            guard.clear_ready();
        }
    }
}
