//! The figures that an endpoint publishes for other threads.
//!
//! A new figure is a field of `Stats` and of what the endpoint's thread counts below. For users it
//! is a field of `EndpointCounters` or `Endpoint` in `plane.proto`, which `Endpoint::describe` of
//! `host/plane` (`endpoint`) fills in; the CLI's `endpoint.rs` has it in `as_json`, and
//! `metrics/figures.rs` as a metric `slipway_endpoint_…`, with a row in `docs/observe.md`. Tests:
//! `tests/server` of this crate, and `tests/e2e/96-metrics.sh`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use slipway_ram::DmaMap;
use slipway_telemetry::monotonic_ns;

use crate::inspect::Stage;

/// A connected client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientInfo {
    /// The process that connected (`SO_PEERCRED`); 0 if it is in another PID namespace.
    pub pid: u32,
    /// The user of that process.
    pub uid: u32,
    /// The client is served on a thread of its own because of message-only memory.
    pub private: bool,
}

/// The way in which a region of client memory is accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionKind {
    /// Mapped, and accessed by plain copies.
    Mapped,
    /// Mapped, but the file may shrink, so its owner may take pages away.
    Guarded,
    /// Accessed by messages.
    Remote,
}

/// A DMA map of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionStats {
    /// First DMA address.
    pub iova: u64,
    /// The length in bytes.
    pub len: u64,
    /// The way in which the region is accessed.
    pub kind: RegionKind,
}

/// A snapshot of an endpoint's figures. Times are nanoseconds of `CLOCK_MONOTONIC`, which all
/// processes of a machine share. Times of a client are those of the current client or, without one,
/// of the last one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// The connected client, if there is one.
    pub client: Option<ClientInfo>,
    /// The number of clients served so far, including the current one.
    pub connections: u64,
    /// The number of connections that were closed at once: the user was wrong, another client was
    /// connected, or interrupts could not be delivered without waiting.
    pub refused: u64,
    /// The reason for which the last client's connection ended.
    pub last_disconnect: Option<String>,
    /// The DMA maps in ascending order.
    pub regions: Vec<RegionStats>,
    /// The number of messages received from all clients.
    pub messages: u64,
    /// The number of error replies to all clients, by errno.
    pub errors: Vec<(i32, u64)>,
    /// The number of register reads.
    pub region_reads: u64,
    /// The number of register writes.
    pub region_writes: u64,
    /// The number of descriptors that were refused: too many with a message, not expected, not
    /// memory, or not an eventfd.
    pub refused_files: u64,
    /// The number of descriptors, connections and mappings of clients that await closing or
    /// unmapping. With more than [`MAX_HELD`](crate::MAX_HELD), the client has to wait, and is
    /// disconnected in the end.
    pub held: usize,
    /// The number of times that the endpoint or one of its lanes slept in a step, which a client
    /// can cause by punching holes into its memory. An endpoint or lane that slept has a thread of
    /// its own afterwards.
    pub stalls: u64,
    /// The time spent in mapping memory, in nanoseconds.
    pub dma_map_ns: u64,
    /// The number of bytes of late memory that were zeroed within that time, since hardware was
    /// given them and nobody had zeroed them ahead.
    pub zeroed_for_hardware: u64,
    /// The time at which the client connected.
    pub connected_at: Option<u64>,
    /// The time at which version and capabilities were negotiated.
    pub negotiated_at: Option<u64>,
    /// The time at which the client attached to the device (its first `VFIO_USER_DEVICE_GET_INFO`).
    pub attached_at: Option<u64>,
    /// The time at which the client's first DMA map was done.
    pub first_dma_map_at: Option<u64>,
    /// The time at which the client's last DMA map so far was done.
    pub last_dma_map_at: Option<u64>,
    /// The time at which the client first routed an MSI-X vector: a driver in its guest attached to
    /// the function.
    pub first_route_at: Option<u64>,
}

/// The number of errno counters; larger errnos share the last one.
const ERRNOS: usize = 160;

/// The number of error replies, by errno.
struct ErrorCounts([AtomicU64; ERRNOS]);

impl Default for ErrorCounts {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; ERRNOS])
    }
}

/// The live figures. The endpoint's thread alone writes them, except for `stalls`; any thread reads
/// them.
#[derive(Default)]
pub(crate) struct Live {
    pub(crate) stalls: AtomicU64,
    pub(crate) connections: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) messages: AtomicU64,
    pub(crate) region_reads: AtomicU64,
    pub(crate) region_writes: AtomicU64,
    pub(crate) refused_files: AtomicU64,
    pub(crate) dma_map_ns: AtomicU64,
    pub(crate) zeroed_for_hardware: AtomicU64,
    /// The time at which the client connected; zero, as in the next five stamps, if that has not
    /// happened.
    pub(crate) connected_at: AtomicU64,
    pub(crate) negotiated_at: AtomicU64,
    pub(crate) attached_at: AtomicU64,
    pub(crate) first_dma_map_at: AtomicU64,
    pub(crate) last_dma_map_at: AtomicU64,
    pub(crate) first_route_at: AtomicU64,
    errors: ErrorCounts,
    regions: ArcSwap<Vec<RegionStats>>,
    /// A client is connected.
    connected: AtomicBool,
    /// The endpoint's [`Stage`] after its last step; 0 is [`Stage::Listening`].
    stage: AtomicU8,
    /// The client, and the reason for the last disconnection. Changed only when a client connects
    /// or disconnects.
    client: Mutex<(Option<ClientInfo>, Option<String>)>,
}

/// Adds to a counter that only one thread writes, so no locked instruction is needed.
pub(crate) fn add(counter: &AtomicU64, by: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(by), Ordering::Relaxed);
}

impl Live {
    pub(crate) fn is_private(&self) -> bool {
        self.client().is_some_and(|client| client.private)
    }

    /// Notes what the endpoint does after a step.
    pub(crate) fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Relaxed);
    }

    /// Returns what the endpoint did after its last step.
    pub(crate) fn stage(&self) -> Stage {
        Stage::of(self.stage.load(Ordering::Relaxed))
    }

    /// Returns the client's process, if a client is connected.
    pub(crate) fn client(&self) -> Option<ClientInfo> {
        self.lock().0
    }

    /// Calls `look` with each DMA map of the client.
    pub(crate) fn each_region(&self, look: impl FnMut(&RegionStats)) {
        self.regions.load().iter().for_each(look);
    }

    pub(crate) fn error(&self, errno: i32) {
        let index = usize::try_from(errno).unwrap_or(0).min(ERRNOS - 1);
        add(&self.errors.0[index], 1);
    }

    /// Stores the current time in `what`.
    pub(crate) fn stamp(&self, what: &AtomicU64) {
        what.store(monotonic_ns(), Ordering::Relaxed);
    }

    /// Stores the current time in `what` unless it holds a time already.
    pub(crate) fn stamp_first(&self, what: &AtomicU64) {
        if what.load(Ordering::Relaxed) == 0 {
            self.stamp(what);
        }
    }

    /// Stamps a DMA map as the last one, and as the first one if there was none before.
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
            &self.zeroed_for_hardware,
        ] {
            stamp.store(0, Ordering::Relaxed);
        }
        self.stamp(&self.connected_at);
        self.lock().0 = Some(client);
        self.connected.store(true, Ordering::Release);
    }

    /// Returns whether a client is connected.
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

    /// Notes that the endpoint has ended, and with it its client, if one was left.
    pub(crate) fn ended(&self) {
        if self.lock().0.is_some() {
            self.disconnected("the endpoint ended");
        }
        self.regions.store(std::sync::Arc::default());
    }

    /// Publishes the DMA maps and returns their number.
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
        let counts = self.errors.0.iter().enumerate();
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
            // The endpoint adds it, see `Control::stats`.
            held: 0,
            dma_map_ns: get(&self.dma_map_ns),
            zeroed_for_hardware: get(&self.zeroed_for_hardware),
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
