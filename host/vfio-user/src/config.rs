//! How an endpoint is set up.

use std::path::PathBuf;
use std::time::Duration;

/// Where an endpoint listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A socket of this name.
    Socket(PathBuf),
    /// A socket named `cntrl` in this directory (made if it is missing), where SPDK's initiator
    /// looks.
    Directory(PathBuf),
}

impl Location {
    /// The socket's path.
    pub fn socket(&self) -> PathBuf {
        match self {
            Self::Socket(path) => path.clone(),
            Self::Directory(directory) => directory.join("cntrl"),
        }
    }
}

/// How a client rings doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// By messages. Costs the client a round trip, and an idle device nothing at all.
    #[default]
    Trapped,
    /// By stores to a page that it maps; the endpoint looks at the page by polling while there is
    /// work and by a timer ([`Config::sweep_period`]) when there is none.
    Mapped,
}

/// A file in memory, by what stat(2) says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// What an endpoint is told once.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where it listens.
    pub location: Location,
    /// Permission bits of the socket. Connecting needs the right to write.
    pub mode: u32,
    /// Owner of the socket (user, group), so that an unprivileged VMM may connect. Changing it
    /// needs root.
    pub owner: Option<(u32, u32)>,
    /// Only clients of this user are served; others are hung up on.
    pub allowed_uid: Option<u32>,
    /// How doorbells are rung.
    pub doorbells: DoorbellMode,
    /// Longest time between two looks at mapped doorbells of an idle device: the first command after
    /// a pause waits for as long at most, and half of it on average. A thousand devices that are
    /// looked at every 10 ms cost a CPU about twice what they cost at 20 ms.
    pub sweep_period: Duration,
    /// How long a request may wait for the function before it is answered with an errno. QEMU gives
    /// a device up after 5 s.
    pub reply_deadline: Duration,
    /// How long an access to message-only memory may take before the client is dropped.
    pub remote_deadline: Duration,
    /// How long a new client may take to negotiate.
    pub handshake_deadline: Duration,
    /// Writable message-only regions larger than this move the client to a thread of its own.
    /// Smaller ones stay where they are and accesses to them fault until a larger one comes: VMMs
    /// announce the mappable pages of other devices this way, which nobody has DMA into.
    pub remote_threshold: u64,
    /// Most bytes of DMA maps with descriptors at a time: bounds the addresses a client takes.
    pub max_dma_bytes: u64,
    /// The only file that DMA maps with descriptors may be of; `None`: any file in memory. The first
    /// to touch a page of a file is charged for it for as long as the file is there, mapped or not:
    /// a client with one file after the other would have this process charged without end.
    pub memory_file: Option<MemoryFile>,
    /// Most bytes of replies that wait for the client; one that lets more pile up is dropped.
    pub max_queued_bytes: usize,
}

impl Config {
    /// Defaults for a socket at `path`: only its owner may connect, doorbells trap.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self {
            location: Location::Socket(path.into()),
            mode: 0o600,
            owner: None,
            allowed_uid: None,
            doorbells: DoorbellMode::Trapped,
            sweep_period: Duration::from_millis(20),
            reply_deadline: Duration::from_secs(4),
            remote_deadline: Duration::from_secs(1),
            handshake_deadline: Duration::from_secs(10),
            remote_threshold: 4096,
            max_dma_bytes: 1 << 40,
            memory_file: None,
            max_queued_bytes: 4 << 20,
        }
    }

    /// As [`Config::at`], for a socket named `cntrl` in `directory`.
    pub fn in_directory(directory: impl Into<PathBuf>) -> Self {
        Self { location: Location::Directory(directory.into()), ..Self::at("") }
    }
}
