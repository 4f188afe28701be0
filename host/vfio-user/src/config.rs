//! The configuration of an endpoint.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::time::Duration;

use slipway_peer::Bin;
use slipway_ram::{LateFiles, Permissions, Region};

/// The place where an endpoint listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A socket with this path.
    Socket(PathBuf),
    /// A socket named `cntrl` in this directory, where SPDK's initiator looks. The directory is
    /// made if it is missing.
    Directory(PathBuf),
}

impl Location {
    /// Returns the socket's path.
    pub fn socket(&self) -> PathBuf {
        match self {
            Self::Socket(path) => path.clone(),
            Self::Directory(directory) => directory.join("cntrl"),
        }
    }
}

/// The way in which a client rings doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum DoorbellMode {
    /// By messages. Costs the client a round trip, and nothing while the device is idle.
    #[default]
    Trapped,
    /// By stores to a page that the client maps. The endpoint checks the page by polling while
    /// there is work, and by a timer ([`Config::sweep_period`]) otherwise.
    Mapped,
    /// By stores to a page that the client maps, each followed by an eventfd that wakes the
    /// endpoint: no message, and nothing to look for. The page is for the client, not for its
    /// guest, whose writes the client traps. A client that does not ask for the page
    /// (`VFIO_USER_DEVICE_GET_REGION_IO_FDS`) rings by messages.
    Rung,
}

/// The identity of a file in memory, as stat(2) reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryFile {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

/// The configuration of an endpoint. Only [`Control::open_for`](crate::Control::open_for) changes
/// some of it later, for the next client.
#[derive(Clone, Debug)]
pub struct Config {
    /// The place where the endpoint listens.
    pub location: Location,
    /// The permission bits of the socket. Connecting needs the right to write.
    pub mode: u32,
    /// The owner of the socket (user, group), so that an unprivileged VMM may connect. Changing it
    /// needs root.
    pub owner: Option<(u32, u32)>,
    /// The only user whose clients are served, if set, beside the server's own user: a launcher may
    /// connect for its client and pass the connection on. Others are disconnected.
    pub allowed_uid: Option<u32>,
    /// The socket refuses clients (`ECONNREFUSED`) until [`Control::open`](crate::Control::open).
    /// It does not listen before that, so no client waits in its queue either. A server that binds
    /// the same name meanwhile takes it for the name of a server that was killed, and replaces it.
    /// Has no effect on a socket that a predecessor left: it listens or not, as it did.
    pub shut: bool,
    /// The way in which doorbells are rung.
    pub doorbells: DoorbellMode,
    /// The longest time between two checks of mapped doorbells of an idle device. The first command
    /// after a pause waits that long at most, and half of it on average. A thousand devices that
    /// are checked every 10 ms cost a CPU about twice what they cost at 20 ms.
    pub sweep_period: Duration,
    /// The time that a request may wait for the function before it is answered with an errno. QEMU
    /// gives a device up after 5 s.
    pub reply_deadline: Duration,
    /// The time that an access to message-only memory may take before the client is disconnected.
    pub remote_deadline: Duration,
    /// The time that a new client may take to negotiate.
    pub handshake_deadline: Duration,
    /// The size in bytes above which a writable message-only region moves the client to a thread of
    /// its own. With smaller regions only, the client is not moved and accesses to them fault,
    /// until a larger one comes: VMMs announce the mappable pages of other devices this way, which
    /// are no target of DMA.
    pub remote_threshold: u64,
    /// The largest total of bytes of DMA maps with descriptors at a time: bounds the addresses that
    /// a client takes.
    pub max_dma_bytes: u64,
    /// The only file that DMA maps with descriptors may refer to; `None` permits any file in
    /// memory. The first process to touch a page of a file is charged for the page as long as the
    /// file exists, mapped or not: a client that maps one file after the other would have this
    /// process charged without limit.
    pub memory_file: Option<MemoryFile>,
    /// A file that DMA maps for reading alone may refer to, beside [`Config::memory_file`]: pages
    /// that the client's guest shares with others.
    pub shared_file: Option<MemoryFile>,
    /// The files whose pages may not be zero yet, and those that clients share. A client passes a
    /// descriptor that names such a file and cannot read it. Only the files that
    /// [`Config::memory_file`] and [`Config::shared_file`] name are looked up here: an endpoint
    /// that names none maps what its client passed.
    pub late: LateFiles,
    /// The largest number of reply bytes that wait for the client, 4 MiB if nothing else is asked
    /// for; a client that lets more pile up is disconnected.
    pub max_queued_bytes: usize,
    /// The function ends with the connection of its client: no endpoint will serve it later. A
    /// client that is told so does not wait for one.
    pub one_connection: bool,
}

/// The client of an endpoint that was made before anybody knew whose it is to be: see
/// [`Control::open_for`](crate::Control::open_for). The fields take the place of those of the
/// endpoint's [`Config`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admission {
    /// The user and group that own the socket. The user is the only one whose clients are served,
    /// beside the server's own; `None` leaves both as they are.
    pub owner: Option<(u32, u32)>,
    /// [`Config::max_dma_bytes`].
    pub max_dma_bytes: u64,
    /// [`Config::memory_file`].
    pub memory_file: Option<MemoryFile>,
    /// [`Config::shared_file`].
    pub shared_file: Option<MemoryFile>,
}

/// The role of a file that a client passed, by its endpoint's configuration.
///
/// A client chooses the device and inode number of a file within limits: those of files of huge
/// pages wrap. So no file is looked up among other clients' files ([`Config::late`]) for its
/// numbers alone, but only one that is named here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileRole {
    /// [`Config::memory_file`].
    Own,
    /// [`Config::shared_file`], for reading.
    Shared,
    /// Any file of a client that may pass any.
    Unnamed,
    /// Any other file of a client that may not.
    Refused,
}

impl Config {
    /// Returns the defaults for a socket at `path`: only its owner may connect, doorbells trap.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self {
            location: Location::Socket(path.into()),
            mode: 0o600,
            owner: None,
            allowed_uid: None,
            shut: false,
            doorbells: DoorbellMode::Trapped,
            sweep_period: Duration::from_millis(20),
            reply_deadline: Duration::from_secs(4),
            remote_deadline: Duration::from_secs(1),
            handshake_deadline: Duration::from_secs(10),
            remote_threshold: 4096,
            max_dma_bytes: 1 << 40,
            memory_file: None,
            shared_file: None,
            late: LateFiles::default(),
            max_queued_bytes: 4 << 20,
            one_connection: false,
        }
    }

    /// Returns the role of a file that a client passed, for a mapping with `permissions`.
    pub(crate) fn role_of(&self, file: MemoryFile, permissions: Permissions) -> FileRole {
        let (own, shared) = (self.memory_file, self.shared_file);
        match own {
            Some(own) if own == file => FileRole::Own,
            _ if shared == Some(file) && !permissions.write => FileRole::Shared,
            None => FileRole::Unnamed,
            Some(_) => FileRole::Refused,
        }
    }

    /// Maps a part (offset, length) of a file in memory that a client passed, by the file's role.
    /// The client came after so many additions of late memory.
    ///
    /// # Errors
    /// As for [`LateFiles::region`]; `EACCES` for a file that the client may not pass.
    pub(crate) fn map(
        &self,
        (file, added): (BorrowedFd<'_>, u64),
        (offset, len): (u64, u64),
        permissions: Permissions,
        bin: &Bin,
    ) -> std::io::Result<Region> {
        let status = rustix::fs::fstat(file)?;
        let this = MemoryFile { device: status.st_dev, inode: status.st_ino };
        match self.role_of(this, permissions) {
            FileRole::Own => self.late.region((file, added), offset, len, permissions, bin),
            FileRole::Shared => self.late.shared(file, offset, len, permissions, bin),
            FileRole::Unnamed => Region::of_peer(file, offset, len, permissions, bin),
            FileRole::Refused => Err(rustix::io::Errno::ACCESS.into()),
        }
    }

    /// Returns the configuration for the client of `admission`.
    pub(crate) fn admitting(&self, admission: Admission) -> Self {
        let Admission { owner, max_dma_bytes, memory_file, shared_file } = admission;
        let allowed_uid = owner.map(|(user, _)| user).or(self.allowed_uid);
        let owner = owner.or(self.owner);
        Self { owner, allowed_uid, max_dma_bytes, memory_file, shared_file, ..self.clone() }
    }

    /// Returns whether clients of the user `uid` are served.
    pub(crate) fn admits(&self, uid: u32) -> bool {
        let own = rustix::process::geteuid().as_raw();
        self.allowed_uid.is_none_or(|allowed| uid == allowed || uid == own)
    }

    /// Returns the defaults for a socket named `cntrl` in `directory`: only its owner may connect,
    /// doorbells trap.
    pub fn in_directory(directory: impl Into<PathBuf>) -> Self {
        Self { location: Location::Directory(directory.into()), ..Self::at("") }
    }
}
