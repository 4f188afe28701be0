//! What an endpoint tells of itself to other threads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use slipway_ram::DmaMap;
use slipway_telemetry::monotonic_ns;

/// The client that is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientInfo {
    /// Process that connected (`SO_PEERCRED`); 0 when it is of another PID namespace.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Whether it is served on a thread of its own because of message-only memory.
    pub private: bool,
}

/// How a region of client memory is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// Mapped, by plain copies.
    Mapped,
    /// Mapped, and its owner may take pages away, since its file may shrink.
    Guarded,
    /// By messages.
    Remote,
}

/// A DMA map of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionStats {
    /// First DMA address.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// How it is reached.
    pub kind: RegionKind,
}

/// A snapshot of an endpoint. Times are nanoseconds of `CLOCK_MONOTONIC`, which all processes of a
/// machine share; those of a client are of the current or else the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// The client that is connected.
    pub client: Option<ClientInfo>,
    /// Clients served so far, the current one included.
    pub connections: u64,
    /// Connections hung up on: the wrong user, or another client was there.
    pub refused: u64,
    /// Why the last client's connection ended.
    pub last_disconnect: Option<String>,
    /// DMA maps, ascending.
    pub regions: Vec<RegionStats>,
    /// Messages received, of all clients.
    pub messages: u64,
    /// Error replies by errno, of all clients.
    pub errors: Vec<(i32, u64)>,
    /// Register reads.
    pub region_reads: u64,
    /// Register writes.
    pub region_writes: u64,
    /// Descriptors that were refused: too many with a message, not expected, no memory, no eventfd.
    pub refused_files: u64,
    /// Descriptors, connections and mappings of clients that are still to be closed or unmapped. With more
    /// than [`MAX_HELD`](crate::MAX_HELD) the client has to wait, and then to go.
    pub held: usize,
    /// How often the endpoint, or a lane of it, slept in a step, as a client can make it by punching holes into
    /// its memory. Each of them has a thread of its own since then.
    pub stalls: u64,
    /// Time spent in mapping memory, in nanoseconds.
    pub dma_map_ns: u64,
    /// When the client connected.
    pub connected_at: Option<u64>,
    /// When version and capabilities were agreed on.
    pub negotiated_at: Option<u64>,
    /// When the client took the device (its first `VFIO_USER_DEVICE_GET_INFO`).
    pub attached_at: Option<u64>,
    /// When its first DMA map was done.
    pub first_dma_map_at: Option<u64>,
    /// When its last DMA map so far was done.
    pub last_dma_map_at: Option<u64>,
    /// When it first routed an MSI-X vector: a driver in its guest took the function.
    pub first_route_at: Option<u64>,
}

/// Errnos counted by number; larger ones are counted as the last.
const ERRNOS: usize = 160;

/// The live figures: written by the endpoint's thread alone, but for `stalls`, and read by any.
pub(crate) struct Live {
    pub(crate) stalls: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) messages: AtomicU64,
    pub(crate) region_reads: AtomicU64,
    pub(crate) region_writes: AtomicU64,
    pub(crate) refused_files: AtomicU64,
    pub(crate) dma_map_ns: AtomicU64,
    /// Zero: has not happened.
    pub(crate) connected_at: AtomicU64,
    pub(crate) negotiated_at: AtomicU64,
    pub(crate) attached_at: AtomicU64,
    pub(crate) first_dma_map_at: AtomicU64,
    pub(crate) last_dma_map_at: AtomicU64,
    pub(crate) first_route_at: AtomicU64,
    errors: [AtomicU64; ERRNOS],
    regions: ArcSwap<Vec<RegionStats>>,
    /// A client is there.
    connected: AtomicBool,
    /// Changed when clients come and go only.
    client: Mutex<(Option<ClientInfo>, Option<String>)>,
}

impl Default for Live {
    fn default() -> Self {
        Self {
            stalls: AtomicU64::default(),
            connections: AtomicU64::default(),
            refused: AtomicU64::default(),
            messages: AtomicU64::default(),
            region_reads: AtomicU64::default(),
            region_writes: AtomicU64::default(),
            refused_files: AtomicU64::default(),
            dma_map_ns: AtomicU64::default(),
            connected_at: AtomicU64::default(),
            negotiated_at: AtomicU64::default(),
            attached_at: AtomicU64::default(),
            first_dma_map_at: AtomicU64::default(),
            last_dma_map_at: AtomicU64::default(),
            first_route_at: AtomicU64::default(),
            errors: [const { AtomicU64::new(0) }; ERRNOS],
            regions: ArcSwap::default(),
            connected: AtomicBool::new(false),
            client: Mutex::default(),
        }
    }
}

/// Adds to a counter that one thread writes: no locked instruction is needed.
pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

impl Live {
    pub(crate) fn is_private(&self) -> bool {
        let client = self.client.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        client.0.is_some_and(|client| client.private)
    }

    pub(crate) fn error(&self, errno: i32) {
        let index = usize::try_from(errno).unwrap_or(0).min(ERRNOS - 1);
        add(&self.errors[index], 1);
    }

    /// Stamps `what` with the current time.
    pub(crate) fn stamp(&self, what: &AtomicU64) {
        what.store(monotonic_ns(), Ordering::Relaxed);
    }

    /// Stamps `what` unless it has a time already.
    pub(crate) fn stamp_first(&self, what: &AtomicU64) {
        if what.load(Ordering::Relaxed) == 0 {
            self.stamp(what);
        }
    }

    /// Stamps a DMA map as the last, and the first one as the first.
    pub(crate) fn stamp_dma_map(&self) {
        let now = monotonic_ns();
        if self.first_dma_map_at.load(Ordering::Relaxed) == 0 {
            self.first_dma_map_at.store(now, Ordering::Relaxed);
        }
        self.last_dma_map_at.store(now, Ordering::Relaxed);
    }

    pub(crate) fn connected(&self, client: ClientInfo) {
        add(&self.connections, 1);
        for stamp in [
            &self.negotiated_at,
            &self.attached_at,
            &self.first_dma_map_at,
            &self.last_dma_map_at,
            &self.first_route_at,
            &self.dma_map_ns,
        ] {
            stamp.store(0, Ordering::Relaxed);
        }
        self.stamp(&self.connected_at);
        self.lock().0 = Some(client);
        self.connected.store(true, Ordering::Release);
    }

    /// Whether a client is there.
    pub(crate) fn is_connected(&self) -> bool {
        self.connected.load(Ordering::Acquire)
    }

    pub(crate) fn moved(&self) {
        if let Some(client) = &mut self.lock().0 {
            client.private = true;
        }
    }

    pub(crate) fn disconnected(&self, why: &str) {
        self.connected.store(false, Ordering::Release);
        *self.lock() = (None, Some(why.to_owned()));
    }

    /// The endpoint is gone, and its client, if one was left, with it.
    pub(crate) fn ended(&self) {
        if self.lock().0.is_some() {
            self.disconnected("the endpoint ended");
        }
        self.regions.store(std::sync::Arc::default());
    }

    /// Publishes the DMA maps. How many there are.
    pub(crate) fn mapped(&self, map: &DmaMap) -> usize {
        let regions = map.regions().into_iter().map(|(iova, region)| {
            let kind = match (region.is_remote(), region.is_guarded()) {
                (true, _) => RegionKind::Remote,
                (_, true) => RegionKind::Guarded,
                _ => RegionKind::Mapped,
            };
            RegionStats { iova, len: region.len(), kind }
        });
        let regions: Vec<_> = regions.collect();
        let count = regions.len();
        self.regions.store(std::sync::Arc::new(regions));
        count
    }

    pub(crate) fn snapshot(&self) -> Stats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let stamp = |counter: &AtomicU64| Some(get(counter)).filter(|time| *time != 0);
        let (client, last_disconnect) = self.lock().clone();
        let counts = self.errors.iter().enumerate();
        let errors = counts.map(|(errno, count)| (errno as i32, get(count)));
        Stats {
            client,
            connections: get(&self.connections),
            refused: get(&self.refused),
            last_disconnect,
            regions: self.regions.load().to_vec(),
            messages: get(&self.messages),
            errors: errors.filter(|(_, count)| *count > 0).collect(),
            region_reads: get(&self.region_reads),
            region_writes: get(&self.region_writes),
            refused_files: get(&self.refused_files),
            stalls: get(&self.stalls),
            // The endpoint's, see `Control::stats`.
            held: 0,
            dma_map_ns: get(&self.dma_map_ns),
            connected_at: stamp(&self.connected_at),
            negotiated_at: stamp(&self.negotiated_at),
            attached_at: stamp(&self.attached_at),
            first_dma_map_at: stamp(&self.first_dma_map_at),
            last_dma_map_at: stamp(&self.last_dma_map_at),
            first_route_at: stamp(&self.first_route_at),
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (Option<ClientInfo>, Option<String>)> {
        self.client.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
