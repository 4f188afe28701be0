//! The device behind its vfio-user socket.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use slipway_pci::Interrupt;
use slipway_ram::{LateFiles, LateMemory};
use slipway_reactor::Handle;
use slipway_vfio_user::{Config, Control, Endpoint, EndpointParts, MemoryFile};
use slipway_virtio_fs::{Fs, Parts, VECTORS};

use crate::pool::{Pool, Teller};

/// The client that is served.
#[derive(Debug)]
pub struct Client {
    pub user: u32,
    /// The most memory that it may map, in bytes.
    pub memory_bytes: u64,
    /// The file that its memory is of.
    pub memory: MemoryFile,
    /// That file, if the client's own descriptor of it only names it.
    pub named: Option<PoolMemory>,
    /// The file of the pages that it shares with others.
    pub pages: Option<MemoryFile>,
}

/// The memory of a client that has no descriptor of it to map: of a pool, all of which has the
/// bytes that the client sees.
#[derive(Debug)]
pub struct PoolMemory {
    files: LateFiles,
    /// Known to `files` as long as it is here.
    _memory: Arc<LateMemory>,
}

impl PoolMemory {
    /// Takes the file.
    ///
    /// # Errors
    /// The error in one line: it is no memory of a pool, or no descriptor is left.
    pub fn new(file: OwnedFd) -> Result<Self, String> {
        let memory = LateMemory::given(file).map_err(|error| format!("--file: {error}"))?;
        let (memory, files) = (Arc::new(memory), LateFiles::default());
        files.add(&memory);
        Ok(Self { files, _memory: memory })
    }
}

/// Serves the device on `reactor`, to a client that lasts as long as the process.
///
/// # Errors
/// The error in one line: `socket` is no listening Unix socket, the tag is wrong, or no descriptors
/// are left.
pub fn serve(
    client: &Client,
    tag: String,
    socket: OwnedFd,
    (pool, teller): (Pool, Teller),
    reactor: &Handle,
) -> Result<Control, String> {
    // The path of the socket belongs to the process that made it.
    let config = Config {
        allowed_uid: Some(client.user),
        max_dma_bytes: client.memory_bytes,
        memory_file: Some(client.memory),
        shared_file: client.pages,
        late: client.named.as_ref().map(|named| named.files.clone()).unwrap_or_default(),
        one_connection: true,
        ..Config::at("")
    };
    let parts = EndpointParts::new(&config);
    let sink = parts.interrupts();
    let device = Fs::new(Parts {
        memory: parts.memory(),
        interrupts: (0..VECTORS).map(|vector| Interrupt::new(sink.clone(), vector)).collect(),
        tag,
        server: Box::new(pool),
        session: RandomState::new().build_hasher().finish(),
    });
    let device = device.map_err(|error| error.to_string())?;
    let endpoint = Endpoint::on(socket, config, parts, Box::new(device), reactor);
    let endpoint = endpoint.map_err(|error| error.to_string())?;
    let control = endpoint.control();
    teller.tell(control.clone());
    reactor.add(Box::new(endpoint)).map_err(|_| "the reactor has ended".to_owned())?;
    Ok(control)
}

/// Returns whether a VMM has connected and gone.
pub fn is_over(control: &Control) -> bool {
    let stats = control.stats();
    stats.connections > 0 && stats.client.is_none()
}
