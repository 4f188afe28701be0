//! The node that runs the guests: sandboxes that end with the process that started them.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures_util::future::try_join_all;
use slipway_plane_api::PlaneClient;
use slipway_plane_api::v1 as plane_v1;
use slipway_runtime::v1::{self, RunIn, RunOut, run_in, run_out};
use slipway_runtime::{Config, SandboxClient};
use tokio::sync::mpsc;
use tonic::Streaming;

use super::{host, image};
use crate::args::{BlockArgs, NodeArgs};
use crate::client::{config, connect, connect_plane, refused};
use crate::session::requests;

/// Memory of a guest that runs a database, bytes.
const DATABASE_MEMORY: u64 = 1 << 30;
/// The most output of fio or RocksDB that is accepted, bytes.
const LONGEST_OUTPUT: usize = 16 << 20;

/// The node's daemon, and the settings that its guests share.
pub struct Node {
    runtime: tokio::runtime::Runtime,
    sandboxes: RefCell<SandboxClient>,
    plane: RefCell<PlaneClient>,
    template: v1::RunSpec,
    /// The program that guests must have.
    program: &'static str,
    config: Config,
}

impl Node {
    /// Connects to the daemon, starts one if none runs, and gets the image.
    pub fn open(node: &NodeArgs, args: &BlockArgs, threads: u32) -> Result<Self> {
        let config: Config = config(node)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (sandboxes, plane, (name, image)) = runtime.block_on(async {
            let image = image::ready(&config, args.image.as_deref()).await?;
            let sandboxes = connect(node, &config).await?;
            Ok::<_, anyhow::Error>((sandboxes, connect_plane(node, &config).await?, image))
        })?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
        let memory = if args.rocksdb { DATABASE_MEMORY } else { 0 };
        let kernel = args.machine.kernel.as_deref().map(std::path::absolute).transpose()?;
        let template = v1::RunSpec {
            image: name,
            image_digest: image.digest.to_string(),
            memory_bytes: args.machine.memory.unwrap_or(memory),
            cpus: args.machine.cpus.unwrap_or(threads.clamp(1, cores)),
            max_cpus: args.machine.max_cpus.unwrap_or(0),
            kernel: kernel.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
            accelerator: args.machine.accel.clone().unwrap_or_default(),
            // `cat` ends with its input, which ends with this process, in whatever way that ends.
            command: vec!["cat".to_owned()],
            // No entry point, whatever the image's is.
            entrypoint: Some(String::new()),
            user: "0".to_owned(),
            stdin: true,
            remove: true,
            // Needed to make file systems and device nodes.
            privileged: true,
            network: "none".to_owned(),
            ..v1::RunSpec::default()
        };
        let (sandboxes, plane) = (RefCell::new(sandboxes), RefCell::new(plane));
        let program = if args.rocksdb { "db_bench" } else { "fio" };
        Ok(Self { runtime, sandboxes, plane, template, program, config })
    }

    fn sandboxes(&self) -> SandboxClient {
        self.sandboxes.borrow().clone()
    }

    pub fn plane(&self) -> PlaneClient {
        self.plane.borrow().clone()
    }

    /// Returns the bytes of a static program that is installed with this one and runs in guests.
    pub fn guest_program(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.config.find_program(name)?;
        std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
    }

    /// Blocks until a call to the daemon completes.
    pub fn wait<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }
}

/// A running sandbox. Dropping it removes it.
pub struct Guest {
    node: Rc<Node>,
    name: String,
    /// The id of the sandbox and of its endpoint.
    pub id: String,
    /// The session that owns the sandbox, which ends when these are dropped.
    _session: (mpsc::Sender<RunIn>, Streaming<RunOut>),
}

impl Guest {
    /// Starts a sandbox named after `configuration`.
    pub fn start(
        node: &Rc<Node>,
        configuration: &str,
        volumes: Vec<v1::VolumeSpec>,
    ) -> Result<Self> {
        let name = format!("bench-{configuration}-{}", std::process::id());
        let spec = v1::RunSpec { name, volumes, ..node.template.clone() };
        let guest = node.wait(started(node, spec))?;
        let program = node.program;
        let there = format!("command -v {program} >/dev/null || echo missing");
        ensure!(
            node.wait(guest.shell(&there, Duration::ZERO))?.trim().is_empty(),
            "the image {} has no {program}: it needs Debian's package {}",
            node.template.image,
            host::package(program)
        );
        Ok(guest)
    }

    /// Runs a script and returns its standard output. Fails if the script takes longer than `time`
    /// and an allowance for slow starts.
    pub async fn shell(&self, script: &str, time: Duration) -> Result<String> {
        self.within(time, self.run(script, None)).await
    }

    /// Runs a script with `input` as its standard input.
    pub async fn feed(&self, script: &str, input: Vec<u8>) -> Result<String> {
        self.within(Duration::ZERO, self.run(script, Some(input))).await
    }

    async fn within(
        &self,
        time: Duration,
        run: impl Future<Output = Result<String>>,
    ) -> Result<String> {
        const SLOW: Duration = Duration::from_secs(300);
        let limit = time + SLOW;
        let run = tokio::time::timeout(limit, run);
        run.await.map_err(|_| anyhow!("{} does nothing since {limit:?}", self.name))?
    }

    async fn run(&self, script: &str, input: Option<Vec<u8>>) -> Result<String> {
        let spec = v1::ExecSpec {
            name: self.name.clone(),
            command: ["sh", "-c", script].map(str::to_owned).to_vec(),
            user: "0".to_owned(),
            privileged: true,
            stdin: input.is_some(),
            ..v1::ExecSpec::default()
        };
        let (sender, stream) = requests(run_in::Kind::Exec(spec));
        let _fed = input.map(|input| tokio::spawn(fed(sender.clone(), input)));
        let replies = self.node.sandboxes().exec(stream).await;
        let mut replies = replies.map_err(|status| refused(&status))?.into_inner();
        let (mut out, mut errors) = (Vec::new(), Vec::new());
        loop {
            let kind = next(&mut replies).await?;
            match kind.with_context(|| format!("the daemon left {}", self.name))? {
                run_out::Kind::Stdout(data) => out.extend(data),
                run_out::Kind::Stderr(data) => errors.extend(data),
                run_out::Kind::Exit(exit) if exit.status == 0 => break,
                run_out::Kind::Exit(exit) => {
                    let errors = String::from_utf8_lossy(&errors);
                    let why = if exit.reason.is_empty() { errors.trim() } else { &exit.reason };
                    let why = crate::table::printable(why);
                    bail!("in {}: status {}: {why}", self.name, exit.status);
                }
                _ => {}
            }
            ensure!(out.len() + errors.len() < LONGEST_OUTPUT, "{} prints too much", self.name);
        }
        Ok(String::from_utf8_lossy(&out).into_owned())
    }
}

/// Runs `script` in all `guests` at once.
pub async fn shells(guests: &[Guest], script: &str, time: Duration) -> Result<Vec<String>> {
    try_join_all(guests.iter().map(|guest| guest.shell(script, time))).await
}

/// Sends `input` and then end-of-file.
async fn fed(sender: mpsc::Sender<RunIn>, input: Vec<u8>) {
    const PIECE: usize = 64 << 10;
    let pieces = input.chunks(PIECE).map(|piece| run_in::Kind::Stdin(piece.to_vec()));
    for kind in pieces.chain([run_in::Kind::StdinClosed(true)]) {
        // The receiver has ended, and reports that elsewhere.
        if sender.send(RunIn { kind: Some(kind) }).await.is_err() {
            return;
        }
    }
}

async fn next(replies: &mut Streaming<RunOut>) -> Result<Option<run_out::Kind>> {
    let message = replies.message().await.map_err(|status| refused(&status))?;
    Ok(message.and_then(|message| message.kind))
}

async fn started(node: &Rc<Node>, spec: v1::RunSpec) -> Result<Guest> {
    let (sender, stream) = requests(run_in::Kind::Run(spec));
    let replies = node.sandboxes().run(stream).await.map_err(|status| refused(&status))?;
    let mut replies = replies.into_inner();
    let (mut name, mut id) = Default::default();
    loop {
        match next(&mut replies).await? {
            Some(run_out::Kind::Created(created)) => (name, id) = (created.name, created.id),
            Some(run_out::Kind::Started(_)) => break,
            Some(run_out::Kind::Exit(exit)) => bail!("the guest did not start: {}", exit.reason),
            Some(_) => {}
            None => bail!("the daemon closed the session of sandbox {name}"),
        }
    }
    Ok(Guest { node: Rc::clone(node), name, id, _session: (sender, replies) })
}

impl Drop for Guest {
    fn drop(&mut self) {
        let request = v1::RemoveRequest { name: self.name.clone(), force: true };
        let removed = self.node.wait(self.node.sandboxes().remove(request));
        if let Err(status) = removed {
            crate::complain(&anyhow::anyhow!("{}: {}", self.name, status.message()));
        }
    }
}

/// A named disk on a file, for several guests. Dropping it, after the guests, removes it.
pub struct SharedDisk {
    node: Rc<Node>,
    name: String,
}

impl SharedDisk {
    pub fn create(node: &Rc<Node>, path: &std::path::Path) -> Result<Self> {
        let name = format!("bench-{}", std::process::id());
        let path = path.to_string_lossy().into_owned();
        let file =
            plane_v1::disk::Kind::File(plane_v1::FileDisk { path, read_only: false, pin: false });
        let disk = Some(plane_v1::Disk { block_size: 0, kind: Some(file) });
        let request = plane_v1::CreateDiskRequest { name: name.clone(), disk };
        node.wait(node.plane().create_disk(request)).map_err(|status| refused(&status))?;
        Ok(Self { node: Rc::clone(node), name })
    }

    /// Attaches the disk to a guest, as the device node `device`.
    pub fn attach(&self, guest: &Guest, device: &str) -> Result<()> {
        let named = plane_v1::NamedDiskReference { name: self.name.clone(), ..Default::default() };
        let kind = Some(plane_v1::disk::Kind::Named(named));
        let request = plane_v1::AttachDiskRequest {
            endpoint_id: guest.id.clone(),
            disk: Some(plane_v1::Disk { block_size: 0, kind }),
            nsid: 0,
        };
        let attached = self.node.wait(self.node.plane().attach_disk(request));
        let nsid = attached.map_err(|status| refused(&status))?.into_inner().nsid;
        let script = format!(
            "for try in $(seq 300); do for d in /sys/class/nvme/nvme*/nvme*n*; do \
             if [ \"$(cat $d/nsid 2>/dev/null)\" = {nsid} ]; then \
             mknod -m 600 {device} b $(tr : ' ' <$d/dev); exit; fi; done; sleep 0.1; done; exit 1"
        );
        self.node.wait(guest.shell(&script, Duration::ZERO)).context("the shared disk")?;
        Ok(())
    }
}

impl Drop for SharedDisk {
    fn drop(&mut self) {
        let request = plane_v1::RemoveDiskRequest { name: self.name.clone() };
        if let Err(status) = self.node.wait(self.node.plane().remove_disk(request)) {
            crate::complain(&anyhow::anyhow!("disk {}: {}", self.name, status.message()));
        }
    }
}
