//! The sandboxes of a measurement of density: they are started, found on the host, and removed.

use anyhow::{Result, anyhow, ensure};
use futures_util::future::join_all;
use slipway_bench::density::{PoolMemory, Processes, Starts, Taken};
use slipway_plane_api::{PlaneClient, v1 as plane_v1};
use slipway_runtime::{SandboxClient, TemplateClient, v1};
use slipway_telemetry::monotonic_ns;

use crate::bench::arms::timeline;
use crate::bench::removal::{remove, remove_all};
use crate::bench::start_at_once;
use crate::client::{answer, record, refused};
use crate::manage::{list, named};

/// How many are started at once while nothing is timed.
const AT_ONCE: usize = 8;
/// The most guests that are asked what they use.
const ASKED: usize = 16;

/// The clients of the daemon that a measurement needs.
pub struct Clients {
    pub sandboxes: SandboxClient,
    pub plane: PlaneClient,
    pub templates: TemplateClient,
}

/// The sandboxes of a measurement, whose names begin alike.
pub struct Fleet {
    clients: Clients,
    /// The daemon's process.
    daemon: u32,
    /// The request for a sandbox with a container, without its name.
    spec: v1::RunSpec,
    /// The names of the sandboxes that idle.
    names: Vec<String>,
    /// How many names were made up.
    named: u32,
    /// A template was made, or may have been.
    has_template: bool,
}

/// Returns how the names of all sandboxes of this process begin.
fn beginning() -> String {
    format!("bench-density-{}-", std::process::id())
}

/// Returns the name of the template of this process.
fn template_name() -> String {
    format!("{}template", beginning())
}

impl Fleet {
    /// Makes a fleet without sandboxes.
    pub fn new(clients: Clients, daemon: u32, spec: v1::RunSpec) -> Self {
        Self { clients, daemon, spec, names: Vec::new(), named: 0, has_template: false }
    }

    /// Returns the number of those that idle.
    pub fn count(&self) -> u32 {
        self.names.len() as u32
    }

    /// Makes a template, with which all sandboxes begin from now on.
    pub async fn make_template(&mut self) -> Result<()> {
        self.has_template = true;
        let (name, machine) = (template_name(), Some(self.machine()));
        let request = v1::CreateTemplateRequest { name: name.clone(), machine, mtu: 0 };
        self.clients.templates.create(request).await.map_err(refused)?;
        self.spec.template = name;
        Ok(())
    }

    /// Returns the machine of a sandbox, without a container.
    fn machine(&self) -> v1::RunSpec {
        v1::RunSpec {
            image: String::new(),
            image_digest: String::new(),
            command: Vec::new(),
            entrypoint: None,
            detach: false,
            ..self.spec.clone()
        }
    }

    fn name(&mut self) -> String {
        self.named += 1;
        format!("{}{}", beginning(), self.named)
    }

    /// Starts sandboxes with a container, until so many idle.
    pub async fn grow(&mut self, count: u32) -> Result<()> {
        while self.names.len() < count as usize {
            let more = (count as usize - self.names.len()).min(AT_ONCE);
            let names: Vec<String> = (0..more).map(|_| self.name()).collect();
            self.start(self.with_names(&names)).await?;
            self.names.extend(names);
        }
        Ok(())
    }

    /// Starts `count` sandboxes at once, and removes them when all have run. Returns the times from
    /// the common request until each ran, ns, in ascending order.
    pub async fn burst(&mut self, count: u32) -> Result<Vec<u64>> {
        let names: Vec<String> = (0..count).map(|_| self.name()).collect();
        let times = self.start(self.with_names(&names)).await?;
        let removed = names.into_iter().map(|name| remove(self.clients.sandboxes.clone(), name));
        join_all(removed).await.into_iter().collect::<Result<()>>()?;
        Ok(times)
    }

    /// Starts a pod without containers, and returns its name.
    pub async fn pod(&mut self) -> Result<String> {
        let name = self.name();
        let machine = v1::RunSpec { makes_pod: true, detach: true, ..self.machine() };
        self.start(vec![v1::RunSpec { name: name.clone(), ..machine }]).await?;
        self.names.push(name.clone());
        Ok(name)
    }

    /// Starts one more container of a pod. Returns the time until it ran, ns.
    pub async fn replica(&mut self, pod: &str) -> Result<u64> {
        let v1::RunSpec { image, image_digest, command, entrypoint, .. } = self.spec.clone();
        self.named += 1;
        let spec = v1::RunSpec {
            name: format!("replica-{}", self.named),
            pod: pod.to_owned(),
            image,
            image_digest,
            command,
            entrypoint,
            detach: true,
            ..v1::RunSpec::default()
        };
        let times = self.start(vec![spec]).await?;
        Ok(times.last().copied().unwrap_or(0))
    }

    fn with_names(&self, names: &[String]) -> Vec<v1::RunSpec> {
        let spec = |name: &String| v1::RunSpec { name: name.clone(), ..self.spec.clone() };
        names.iter().map(spec).collect()
    }

    /// Starts all at once. Returns the times from the common request until each ran, ns, in
    /// ascending order.
    async fn start(&self, specs: Vec<v1::RunSpec>) -> Result<Vec<u64>> {
        let began = monotonic_ns();
        let started = start_at_once(&self.clients.sandboxes, specs, |_| {}).await;
        let timelines = started.into_iter().map(|start| timeline(start?));
        let timelines = timelines.collect::<Result<Vec<_>>>()?;
        Ok(Starts::times_of(&slipway_bench::aligned(timelines, began)))
    }

    /// Returns the name of the VMM of a sandbox that idles.
    pub async fn engine(&mut self) -> Result<String> {
        let name = self.names.first().cloned().unwrap_or_default();
        let record = record(&mut self.clients.sandboxes, &name).await?;
        record.vm.map(|vm| vm.hypervisor).ok_or_else(|| anyhow!("sandbox {name} does not run"))
    }

    /// Finds Slipway's processes on the host.
    pub async fn processes(&mut self) -> Result<Processes> {
        let all = list(&mut self.clients.sandboxes).await?;
        let own = all.into_iter().filter(|one| self.names.contains(&one.name));
        let vmms: Vec<u32> = own.map(|one| one.vmm_pid).filter(|id| *id > 0).collect();
        let (found, all) = (vmms.len(), self.names.len());
        ensure!(found == all, "of {all} sandboxes {found} run: the daemon's log says why");
        Processes::find(self.daemon, vmms)
    }

    /// Reads the memory that is taken now.
    pub async fn memory(&mut self, processes: &Processes) -> Result<Taken> {
        let mut taken = processes.memory()?;
        let pool = answer(self.clients.plane.get_pool(plane_v1::GetPoolRequest {}).await)?.pool;
        taken.pool = pool.map(|pool| PoolMemory { lent: pool.lent_bytes, given: pool.clean_bytes });
        Ok(taken)
    }

    /// Returns the memory that guests count as used, mean of some, bytes. Returns `None` if none of
    /// them tells.
    pub async fn guest_used(&mut self) -> Option<u64> {
        let mut used = Vec::new();
        for name in self.names.iter().take(ASKED) {
            let Ok(stats) = self.clients.sandboxes.stats(named(name)).await else { continue };
            let stats = stats.into_inner();
            if stats.memory_total_bytes > 0 {
                used.push(stats.memory_total_bytes.saturating_sub(stats.memory_available_bytes));
            }
        }
        let count = used.len() as u64;
        used.into_iter().sum::<u64>().checked_div(count)
    }

    /// Removes all sandboxes of this process.
    ///
    /// # Errors
    /// Some are left.
    pub async fn clear(&mut self) -> Result<()> {
        self.names.clear();
        remove_all(&self.clients.sandboxes, &beginning()).await
    }

    /// Removes everything that was made for the measurement.
    ///
    /// # Errors
    /// Something is left.
    pub async fn end(mut self) -> Result<()> {
        let cleared = self.clear().await;
        if self.has_template {
            let removed = self.clients.templates.remove(named(&template_name())).await;
            // A template that could not be made is not found.
            if let Err(status) = removed
                && status.code() != tonic::Code::NotFound
            {
                cleared?;
                return Err(refused(status).context("the template of the measurement is left"));
            }
        }
        cleared
    }
}
