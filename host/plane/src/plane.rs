//! The plane: reactors and the endpoints on them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Duration;

use slipway_plane_api::v1;
use slipway_plane_api::v1::plane_server::PlaneServer;
use slipway_reactor::Reactor;
use slipway_telemetry::{Clock, stamp_clock};

use crate::endpoint::Served;
use crate::{Error, Service, snoop};

/// How long an endpoint may take to end its I/O and go. A disk that hangs longer is reported, and
/// its endpoint goes when the disk lets go.
const CLOSE: Duration = Duration::from_secs(30);

/// How a plane is set up.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Threads that serve devices, at least 1.
    pub reactors: u32,
}

/// The node's devices. Clones share it.
#[derive(Clone)]
pub struct Plane {
    shared: Arc<Shared>,
}

struct Shared {
    /// For stamps of traced commands; made when it is first needed.
    stamps: OnceLock<Arc<dyn Clock>>,
    endpoints: Mutex<BTreeMap<String, Slot>>,
    reactors: Vec<Reactor>,
}

/// An id is taken while its endpoint is made and while it goes.
enum Slot {
    Reserved,
    Served(Served),
}

impl Plane {
    /// Starts the reactors; there is no endpoint.
    ///
    /// # Errors
    /// No threads or descriptors left.
    pub fn new(settings: Settings) -> std::io::Result<Self> {
        let reactors = (0..settings.reactors.max(1)).map(|number| {
            let name = format!("reactor-{number}");
            let on_panic = Arc::new(|what: &str| tracing::error!(what, "a device was dropped"));
            Reactor::spawn(slipway_reactor::Settings { name, on_panic, ..Default::default() })
        });
        let reactors = reactors.collect::<Result<_, _>>()?;
        let (stamps, endpoints) = (OnceLock::new(), Mutex::default());
        Ok(Self { shared: Arc::new(Shared { stamps, endpoints, reactors }) })
    }

    /// The gRPC service in front of it.
    pub fn service(&self) -> Service {
        Service::new(self.clone())
    }

    /// A channel to the service within this process.
    ///
    /// # Errors
    /// No descriptors left.
    pub async fn connect(&self) -> Result<tonic::transport::Channel, tonic::transport::Error> {
        let (ours, theirs) = tokio::io::duplex(64 << 10);
        let router =
            tonic::transport::Server::builder().add_service(PlaneServer::new(self.service()));
        let incoming = tokio_stream::once(Ok::<_, std::io::Error>(theirs));
        tokio::spawn(router.serve_with_incoming(incoming));
        slipway_plane_api::over(ours).await
    }

    /// Makes an endpoint; blocks while disks are opened.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub fn create(&self, request: &v1::CreateEndpointRequest) -> Result<v1::Endpoint, Error> {
        let id = request.id.clone();
        let index = {
            let mut endpoints = self.lock();
            if endpoints.contains_key(&id) {
                return Err(Error::Exists(id));
            }
            endpoints.insert(id.clone(), Slot::Reserved);
            endpoints.len() % self.shared.reactors.len()
        };
        // Endpoints take turns on the reactors.
        match Served::create(request, &self.shared.reactors[index].handle()) {
            Ok(served) => {
                let described = served.describe();
                self.lock().insert(id, Slot::Served(served));
                Ok(described)
            }
            Err(error) => {
                self.lock().remove(&id);
                Err(error)
            }
        }
    }

    /// Ends an endpoint and waits until nothing of it is left; blocks.
    ///
    /// # Errors
    /// [`Error::Unknown`]; [`Error::Resources`] when a disk does not let go.
    pub fn remove(&self, id: &str) -> Result<(), Error> {
        let control = {
            let mut endpoints = self.lock();
            match endpoints.insert(id.to_owned(), Slot::Reserved) {
                Some(Slot::Served(served)) => served.control(),
                // Somebody else makes or ends it just now: theirs to finish.
                Some(Slot::Reserved) => return Err(Error::Unknown(id.to_owned())),
                None => {
                    endpoints.remove(id);
                    return Err(Error::Unknown(id.to_owned()));
                }
            }
        };
        control.close();
        let closed = control.wait_closed(CLOSE);
        self.lock().remove(id);
        if closed {
            return Ok(());
        }
        Err(Error::Resources(format!("endpoint {id} still waits for its disks")))
    }

    /// The endpoint `id` as it is now.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn get(&self, id: &str) -> Result<v1::Endpoint, Error> {
        match self.lock().get(id) {
            Some(Slot::Served(served)) => Ok(served.describe()),
            _ => Err(Error::Unknown(id.to_owned())),
        }
    }

    /// Has an endpoint traced: reports come each interval until they are dropped.
    ///
    /// # Errors
    /// [`Error::Unknown`]; [`Error::Snooped`]; [`Error::Invalid`] for an interval that makes none.
    pub(crate) async fn snoop(&self, request: &v1::SnoopRequest) -> Result<snoop::Reports, Error> {
        let target = match self.lock().get(&request.id) {
            Some(Slot::Served(served)) => served.snoop(),
            _ => return Err(Error::Unknown(request.id.clone())),
        };
        let shared = Arc::clone(&self.shared);
        let clock =
            tokio::task::spawn_blocking(move || Arc::clone(shared.stamps.get_or_init(stamp_clock)));
        let clock = clock.await.map_err(|error| Error::Resources(error.to_string()))?;
        snoop::start(target, clock, request).await
    }

    /// All endpoints, by id.
    pub fn list(&self) -> Vec<v1::Endpoint> {
        let endpoints = self.lock();
        let served = endpoints.values().filter_map(|slot| match slot {
            Slot::Served(served) => Some(served.describe()),
            Slot::Reserved => None,
        });
        served.collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Slot>> {
        // The map is changed in single calls: a panic leaves it whole.
        self.shared.endpoints.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
