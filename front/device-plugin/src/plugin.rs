//! Kubelet's interface for the functions of one pool.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Weak;

use slipway_plane_api::functions::MOUNTS;
use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use crate::pools::{Device, Devices};
use crate::v1beta1 as v1;

/// The outcome of a call of kubelet.
type Reply<T> = Result<Response<T>, Status>;

const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// The options of each plugin.
pub(crate) const OPTIONS: v1::DevicePluginOptions =
    v1::DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };

/// The functions of one pool.
pub(crate) struct Plugin {
    pub(crate) pool: String,
    pub(crate) devices: watch::Receiver<Devices>,
    /// The directory of the files that stand for functions.
    pub(crate) files: PathBuf,
    /// Each list that kubelet is being told holds a strong reference.
    pub(crate) lists: Weak<()>,
}

impl Plugin {
    /// Returns the numbers of functions that kubelet names.
    ///
    /// # Errors
    /// Invalid argument: a name that is no function's, or is there twice.
    fn numbers(&self, ids: &[String]) -> Result<BTreeSet<u32>, Status> {
        let devices = self.devices.borrow();
        let known = devices.get(&self.pool);
        let mut numbers = BTreeSet::new();
        for id in ids {
            let number = self
                .number(id)
                .filter(|number| known.is_some_and(|functions| functions.contains_key(number)));
            let unknown = || {
                // Names are kubelet's, and may be of any length.
                let id: String = id.chars().take(64).collect();
                Status::invalid_argument(format!("{id:?} is no function of pool {}", self.pool))
            };
            if !numbers.insert(number.ok_or_else(unknown)?) {
                return Err(Status::invalid_argument(format!("{id} is there twice")));
            }
        }
        Ok(numbers)
    }

    fn number(&self, id: &str) -> Option<u32> {
        let number = id.strip_prefix(&self.pool)?.strip_prefix('.')?;
        number.parse().ok().filter(|parsed: &u32| parsed.to_string() == number)
    }

    /// Returns the mount that stands for a function.
    fn mount(&self, number: u32) -> Result<v1::Mount, Status> {
        let name = id(&self.pool, number);
        let path = self.files.join(&name);
        // containerd makes a directory where there is nothing, which would do as well.
        match File::create_new(&path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                let path = path.display();
                Err(Status::internal(format!("cannot create {path}: {error}")))
            }
            _ => Ok(v1::Mount {
                container_path: format!("{MOUNTS}{name}"),
                host_path: path.to_string_lossy().into_owned(),
                read_only: true,
            }),
        }
    }

    /// Chooses functions: those that must be among them, then those that need no wait for a reset.
    fn prefer(
        &self,
        asked: &v1::ContainerPreferredAllocationRequest,
    ) -> Result<v1::ContainerPreferredAllocationResponse, Status> {
        let size = usize::try_from(asked.size).unwrap_or(0);
        let must = self.numbers(&asked.must_include_ids)?;
        let available = self.numbers(&asked.available_ids)?;
        let devices = self.devices.borrow();
        let known = devices.get(&self.pool);
        let is_ready = |number: &u32| {
            known.and_then(|functions| functions.get(number)).is_some_and(|one| one.is_ready)
        };
        let free = || available.difference(&must).copied();
        let ready = free().filter(is_ready);
        let rest = free().filter(|number| !is_ready(number));
        let chosen = must.iter().copied().chain(ready).chain(rest).take(size);
        let ids = chosen.map(|number| id(&self.pool, number)).collect();
        Ok(v1::ContainerPreferredAllocationResponse { ids })
    }
}

/// Returns kubelet's name of a function.
fn id(pool: &str, number: u32) -> String {
    format!("{pool}.{number}")
}

/// Returns the devices of a pool as kubelet is told of them.
fn list(devices: &Devices, pool: &str) -> v1::ListAndWatchResponse {
    let device = |(number, Device { is_healthy, .. }): (&u32, &Device)| {
        let health = if *is_healthy { HEALTHY } else { UNHEALTHY };
        v1::Device { id: id(pool, *number), health: health.to_owned() }
    };
    let devices = devices.get(pool).into_iter().flatten().map(device).collect();
    v1::ListAndWatchResponse { devices }
}

#[tonic::async_trait]
impl v1::device_plugin_server::DevicePlugin for Plugin {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<v1::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<v1::Empty>,
    ) -> Reply<v1::DevicePluginOptions> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(&self, _: Request<v1::Empty>) -> Reply<Self::ListAndWatchStream> {
        let (pool, held) = (self.pool.clone(), self.lists.upgrade());
        let mut told: Option<v1::ListAndWatchResponse> = None;
        // The list ends when the pool is forgotten, and kubelet forgets the resource then.
        let name = self.pool.clone();
        let known = WatchStream::new(self.devices.clone())
            .take_while(move |devices| devices.contains_key(&name));
        // A change of another pool, or of what kubelet is not told, is none here.
        let lists = known.filter_map(move |devices| {
            let _held = &held;
            let now = list(&devices, &pool);
            let is_new = told.as_ref() != Some(&now);
            told = Some(now.clone());
            is_new.then_some(Ok::<_, Status>(now))
        });
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<v1::PreferredAllocationRequest>,
    ) -> Reply<v1::PreferredAllocationResponse> {
        let requests = &request.get_ref().container_requests;
        let chosen = requests.iter().map(|asked| self.prefer(asked));
        let container_responses = chosen.collect::<Result<_, Status>>()?;
        Ok(Response::new(v1::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(&self, request: Request<v1::AllocateRequest>) -> Reply<v1::AllocateResponse> {
        let requests = request.into_inner().container_requests;
        let ids: Vec<String> = requests.iter().flat_map(|one| one.ids.iter().cloned()).collect();
        // Of all containers together: no function is given twice.
        let all = self.numbers(&ids)?;
        let mut container_responses = Vec::new();
        for container in &requests {
            let numbers = self.numbers(&container.ids)?;
            let mounts = numbers.iter().map(|number| self.mount(*number));
            let mounts = mounts.collect::<Result<_, Status>>()?;
            container_responses.push(v1::ContainerAllocateResponse { mounts });
        }
        tracing::info!(pool = self.pool, functions = ?all, "given to a pod");
        Ok(Response::new(v1::AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<v1::PreStartContainerRequest>,
    ) -> Reply<v1::PreStartContainerResponse> {
        Err(Status::unimplemented("the options do not ask for this call"))
    }
}
