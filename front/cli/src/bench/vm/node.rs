//! The node that runs the guests: sandboxes that end with the process that started them.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use futures_util::future::try_join_all;
use slipway_bench::nic::Times;
use slipway_plane_api::v1 as plane_v1;
use slipway_plane_api::{NetworkClient, PlaneClient, VfClient};
use slipway_runtime::v1::{self, RunIn, RunOut, run_in, run_out};
use slipway_runtime::{Config, SandboxClient};
use tokio::sync::{mpsc, oneshot};
use tonic::Streaming;

use super::host::package;
use super::image;
use crate::args::{MachineArgs, NodeArgs, Switched};
use crate::client::{
    answer, config, connect, connect_functions, connect_networks, connect_plane, refused,
};
use crate::session::requests;
use crate::size::CpuCount;

/// The static program of loads, which is installed beside the agent; and its path in a guest.
const LOAD: &str = "slipway-load";
pub const LOAD_PLACE: &str = "/run/slipway-load";
/// The most output of a load that is accepted, bytes.
const LONGEST_OUTPUT: usize = 16 << 20;

/// The settings that all guests of a measurement share.
pub struct GuestSettings<'a> {
    /// The image, unless it is our own.
    pub image: Option<&'a str>,
    /// Their machine, as the user asked for it.
    pub machine: &'a MachineArgs,
    /// Memory, bytes, unless the user asked for some; 0: a sandbox's usual memory.
    pub memory: u64,
    /// CPUs, unless the user asked for some.
    pub cpus: u32,
    /// The program that the image must have.
    pub program: &'static str,
}

/// The node's daemon, and the settings that its guests share.
pub struct Node {
    runtime: tokio::runtime::Runtime,
    sandboxes: RefCell<SandboxClient>,
    plane: RefCell<PlaneClient>,
    networks: RefCell<NetworkClient>,
    functions: RefCell<VfClient>,
    template: v1::RunSpec,
    /// The program that guests must have.
    program: &'static str,
    config: Config,
}

impl Node {
    /// Connects to the daemon, starts one if none runs, and gets the image.
    pub fn open(node: &NodeArgs, wishes: &GuestSettings<'_>) -> Result<Self> {
        let config: Config = config(node)?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (sandboxes, plane, networks, functions, (name, image)) = runtime.block_on(async {
            let image = image::ready(&config, wishes.image).await?;
            let sandboxes = connect(node, &config).await?;
            let plane = connect_plane(node, &config).await?;
            let networks = connect_networks(node, &config).await?;
            let functions = connect_functions(node, &config).await?;
            Ok::<_, anyhow::Error>((sandboxes, plane, networks, functions, image))
        })?;
        let machine = wishes.machine;
        let cpus = machine.cpus.map(CpuCount::whole).transpose()?;
        let kernel = machine.kernel.as_deref().map(std::path::absolute).transpose()?;
        let template = v1::RunSpec {
            image: name,
            image_digest: image.digest.to_string(),
            memory_bytes: machine.memory.unwrap_or(wishes.memory),
            cpus: cpus.unwrap_or(wishes.cpus),
            max_cpus: machine.max_cpus.unwrap_or(0),
            free_page_reporting: machine.free_page_reporting.map(Switched::is_on),
            kernel: kernel.map(|path| path.to_string_lossy().into_owned()).unwrap_or_default(),
            accelerator: machine.accel.clone().unwrap_or_default(),
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
            boots: true,
            ..v1::RunSpec::default()
        };
        Ok(Self {
            runtime,
            sandboxes: RefCell::new(sandboxes),
            plane: RefCell::new(plane),
            networks: RefCell::new(networks),
            functions: RefCell::new(functions),
            template,
            program: wishes.program,
            config,
        })
    }

    /// Returns what a guest is started with, unless its configuration differs.
    pub fn template(&self) -> v1::RunSpec {
        self.template.clone()
    }

    /// Returns the node's settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    pub fn sandboxes(&self) -> SandboxClient {
        self.sandboxes.borrow().clone()
    }

    pub fn networks(&self) -> NetworkClient {
        self.networks.borrow().clone()
    }

    pub fn functions(&self) -> VfClient {
        self.functions.borrow().clone()
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
    /// Starts a sandbox named after `configuration`, with `volumes`.
    pub fn start(
        node: &Rc<Node>,
        configuration: &str,
        volumes: Vec<v1::VolumeSpec>,
    ) -> Result<Self> {
        Self::start_as(node, configuration, v1::RunSpec { volumes, ..node.template() })
    }

    /// Starts a sandbox named after `configuration`, as `spec` has it but for the name.
    pub fn start_as(node: &Rc<Node>, configuration: &str, spec: v1::RunSpec) -> Result<Self> {
        let name = format!("bench-{configuration}-{}", std::process::id());
        let spec = v1::RunSpec { name, ..spec };
        let guest = node.wait(started(node, spec))?;
        let program = node.program;
        let there = format!("command -v {program} >/dev/null || echo missing");
        ensure!(
            node.wait(guest.shell(&there, Duration::ZERO))?.trim().is_empty(),
            "the image {} has no {program}: it needs Debian's package {}",
            node.template.image,
            package(program)
        );
        Ok(guest)
    }

    /// Brings `slipway-load` into the guest.
    pub fn install_load(&self) -> Result<()> {
        let program = self.node.guest_program(LOAD)?;
        let install = format!("mkdir -p /run && cat >{LOAD_PLACE} && chmod 700 {LOAD_PLACE}");
        self.node.wait(self.feed(&install, program)).context("bringing the load into the guest")?;
        Ok(())
    }

    /// Returns a script that runs `slipway-load` with `words` and then the times.
    pub fn load_script(words: &str, times: Times) -> String {
        let (warm_up, time) = (times.warm_up.as_millis(), times.time.as_millis().max(1));
        format!("{LOAD_PLACE} {words} {warm_up} {time}")
    }

    /// Runs a script and returns its standard output. Fails if the script takes longer than `time`
    /// and an allowance for slow starts.
    pub async fn shell(&self, script: &str, time: Duration) -> Result<String> {
        self.within(time, self.run(script, None)).await
    }

    /// Runs a script whose standard input ends when `stop` is sent or dropped.
    pub async fn until(
        &self,
        script: &str,
        time: Duration,
        stop: oneshot::Receiver<()>,
    ) -> Result<String> {
        self.within(time, self.run(script, Some((Vec::new(), Some(stop))))).await
    }

    /// Runs a script with `input` as its standard input.
    pub async fn feed(&self, script: &str, input: Vec<u8>) -> Result<String> {
        self.within(Duration::ZERO, self.run(script, Some((input, None)))).await
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

    async fn run(&self, script: &str, input: Option<Input>) -> Result<String> {
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
        let mut replies = answer(self.node.sandboxes().exec(stream).await)?;
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

/// Bytes for a script's standard input, and what its end waits for.
type Input = (Vec<u8>, Option<oneshot::Receiver<()>>);

/// Sends `input` and then end-of-file.
async fn fed(sender: mpsc::Sender<RunIn>, (input, end): Input) {
    const PIECE: usize = 64 << 10;
    for piece in input.chunks(PIECE) {
        let kind = Some(run_in::Kind::Stdin(piece.to_vec()));
        // The receiver has ended, and reports that elsewhere.
        if sender.send(RunIn { kind }).await.is_err() {
            return;
        }
    }
    if let Some(end) = end {
        // A sender that is dropped ends it, too.
        let _ = end.await;
    }
    let _ = sender.send(RunIn { kind: Some(run_in::Kind::StdinClosed(true)) }).await;
}

async fn next(replies: &mut Streaming<RunOut>) -> Result<Option<run_out::Kind>> {
    let message = replies.message().await.map_err(refused)?;
    Ok(message.and_then(|message| message.kind))
}

async fn started(node: &Rc<Node>, spec: v1::RunSpec) -> Result<Guest> {
    let (sender, stream) = requests(run_in::Kind::Run(spec));
    let mut replies = answer(node.sandboxes().run(stream).await)?;
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
        let request =
            v1::RemoveRequest { name: self.name.clone(), force: true, ..Default::default() };
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
        let file = plane_v1::disk::Kind::File(plane_v1::FileDisk { path, ..Default::default() });
        let disk = Some(plane_v1::Disk { block_size: 0, kind: Some(file) });
        let request = plane_v1::CreateDiskRequest { name: name.clone(), disk };
        node.wait(node.plane().create_disk(request)).map_err(refused)?;
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
        let nsid = answer(attached)?.nsid;
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
