//! What is known of a sandbox, kept on disk so that it outlives the daemon.

use std::fs;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use slipway_hypervisor::VmRecord;
use slipway_telemetry::Timeline;

use crate::{Error, Result};

/// Where a sandbox is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Recorded, nothing started.
    Created,
    /// On the way to its container's process.
    Starting,
    /// The container's process runs.
    Running,
    /// The container ended; what it held is being given back.
    Stopping,
    /// The container ended by itself or was stopped.
    Exited,
    /// It never came to run.
    Failed,
    /// The daemon ended while it ran.
    Lost,
}

impl State {
    /// Whether it holds a VMM, an endpoint or a cgroup.
    pub fn is_live(self) -> bool {
        matches!(self, Self::Starting | Self::Running | Self::Stopping)
    }

    /// The word that `slipway ps` prints.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stopping => "stopping",
            Self::Exited => "exited",
            Self::Failed => "failed",
            Self::Lost => "lost",
        }
    }
}

/// A block volume of a sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Volume {
    /// `/dev/slipway/NAME` in the container.
    pub name: String,
    /// The host's file.
    pub path: PathBuf,
    /// Size of a scratch volume in bytes; None: a file of the user's, which stays.
    pub scratch_bytes: Option<u64>,
    /// The container cannot write it.
    pub read_only: bool,
    /// Where its file system is mounted; empty: nowhere.
    pub mount_point: String,
    /// Bytes of a logical block, 512 or 4096; 0 stands for 512.
    #[serde(default)]
    pub block_size: u32,
    /// What the guest drives.
    #[serde(default)]
    pub device: Device,
}

/// The device behind a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Device {
    /// A namespace of the sandbox's first function, which the plane serves.
    #[default]
    Namespace,
    /// Namespace 1 of a function of its own, which the plane serves.
    Function,
    /// An NVMe controller of the VMM's, for comparisons.
    VmmNvme,
    /// A virtio block device of the VMM's, for comparisons.
    VmmVirtioBlk,
}

/// The container's process as asked for, after the image's configuration was applied.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Process {
    /// Program and arguments; never empty.
    pub args: Vec<String>,
    /// `NAME=value`.
    pub env: Vec<String>,
    /// Working directory; empty: `/`.
    pub cwd: String,
    /// As in `--user`; empty: root.
    pub user: String,
    /// Has a terminal.
    pub terminal: bool,
    /// Initial size of the terminal.
    pub rows: u32,
    /// Initial size of the terminal.
    pub columns: u32,
    /// Standard input stays open.
    pub stdin: bool,
    /// (name, soft, hard).
    pub limits: Vec<(String, u64, u64)>,
}

/// A sandbox's place in a network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// The network's name.
    pub name: String,
    /// The plane's switch that it lies on.
    pub switch: String,
    /// Of its interface.
    pub mac: String,
    /// Its IPv4 address.
    pub ipv4: String,
    /// Length of the network's prefix.
    pub ipv4_prefix: u32,
    /// The host's address.
    pub ipv4_gateway: String,
    /// Its IPv6 address.
    pub ipv6: String,
    /// Length of the network's prefix.
    pub ipv6_prefix: u32,
    /// The host's address.
    pub ipv6_gateway: String,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// Who answers names.
    pub name_servers: Vec<String>,
    /// Ports of the host that lead to it, "8080:80/tcp".
    pub published: Vec<String>,
    /// The container's process waits for it.
    pub wait: bool,
    /// Queue pairs of its interface; 0: one for each CPU.
    #[serde(default)]
    pub queues: u32,
}

/// Everything about a sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// 12 hexadecimal digits.
    pub id: String,
    /// Unique among the sandboxes of the node.
    pub name: String,
    /// As the user said it.
    pub image: String,
    /// Digest of the image's manifest.
    pub image_digest: String,
    /// The read-only root, an EROFS file.
    pub image_path: PathBuf,
    /// Where it is in its life.
    pub state: State,
    /// CLOCK_REALTIME of its creation, ns since the epoch.
    pub created_ns: u64,
    /// Exit status of the container's process, once it ended.
    pub exit_status: Option<u32>,
    /// Why it ended, when that was not the container's own doing.
    pub reason: String,
    /// Guest memory.
    pub memory_bytes: u64,
    /// Virtual CPUs.
    pub cpus: u32,
    /// In the container's UTS namespace.
    pub hostname: String,
    /// The container's process.
    pub process: Process,
    /// Signal number that asks the container to end.
    pub stop_signal: u32,
    /// All capabilities and devices.
    pub privileged: bool,
    /// The root is mounted read-only.
    pub read_only: bool,
    /// Block volumes, from namespace 3.
    pub volumes: Vec<Volume>,
    /// A guest kernel of the user's.
    pub kernel: Option<PathBuf>,
    /// "auto", "kvm" or "tcg".
    pub accelerator: String,
    /// The user's labels.
    pub labels: std::collections::BTreeMap<String, String>,
    /// Removed when it has ended.
    pub remove: bool,
    /// Its place in a network, from its creation to its end.
    #[serde(default)]
    pub network: Option<Network>,
    /// Socket of the engine that serves its socket function; None: it has none.
    #[serde(default)]
    pub sockets: Option<PathBuf>,
    /// User id of the VMM while it runs.
    pub vmm_uid: Option<u32>,
    /// The VMM's process while it runs.
    pub vm: Option<VmRecord>,
    /// The start, stage by stage; CLOCK_MONOTONIC.
    pub timeline: Timeline,
}

/// Most bytes of a record as its user asked for it: the command line and environment of its process above all.
pub const MOST_ASKED: usize = 1 << 20;
/// Most bytes of a record on disk. What a guest adds (when its stages were, why it ended) is bounded where it
/// comes in, and fits between the two.
pub const MOST_RECORD: usize = MOST_ASKED + (64 << 10);

/// The directory of one sandbox's records. Its methods wait for the disk: a daemon calls them in the
/// sandbox's [lane](crate::files::Lane).
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
}

impl Store {
    /// The store of sandbox `id` under `sandboxes_dir`.
    pub fn new(sandboxes_dir: &Path, id: &str) -> Self {
        Self { dir: sandboxes_dir.join(id) }
    }

    /// The sandbox's directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The container's kept output.
    pub fn log(&self) -> PathBuf {
        self.dir.join("output.log")
    }

    /// What the guest kernel and the agent said.
    pub fn console(&self) -> PathBuf {
        self.dir.join("console.log")
    }

    /// Makes the directory.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn create(&self) -> Result<()> {
        fs::create_dir_all(&self.dir).map_err(Error::file("cannot create", &self.dir))
    }

    /// Writes the record so that a crash of the daemon leaves the old one or the new one.
    ///
    /// # Errors
    /// [`Error::File`]; [`Error::TooLarge`] for one of more than [`MOST_RECORD`] bytes.
    pub fn save(&self, record: &Record) -> Result<()> {
        let path = self.dir.join("record.json");
        let new = self.dir.join("record.json.new");
        let json = encode(record)?;
        if json.len() > MOST_RECORD {
            return Err(Error::TooLarge(MOST_RECORD));
        }
        fs::write(&new, json).map_err(Error::file("cannot write", &new))?;
        fs::rename(&new, &path).map_err(Error::file("cannot write", &path))
    }

    /// Reads the record; None when none was written.
    ///
    /// # Errors
    /// [`Error::File`] when it cannot be read, or is another version's: what belongs to it is a
    /// user's all the same.
    pub fn load(&self) -> Result<Option<Record>> {
        let path = self.dir.join("record.json");
        let json = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            read => read.map_err(Error::file("cannot read", &path))?,
        };
        let record = serde_json::from_slice(&json).map_err(std::io::Error::from);
        record.map(Some).map_err(Error::file("cannot understand", &path))
    }

    /// Removes everything of the sandbox.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn remove(&self) -> Result<()> {
        match fs::remove_dir_all(&self.dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::file("cannot remove", &self.dir)(error))
            }
            _ => Ok(()),
        }
    }
}

fn encode(record: &Record) -> Result<Vec<u8>> {
    let json = serde_json::to_vec_pretty(record).map_err(std::io::Error::from);
    json.map_err(Error::file("cannot encode the record of", record.name.clone()))
}

/// Refuses a record that its user made too large.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn check_size(record: &Record) -> Result<()> {
    if encode(record)?.len() > MOST_ASKED {
        return Err(Error::TooLarge(MOST_ASKED));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "0123456789ab");
        store.create().unwrap();
        let mut record = crate::adopt::tests::record_of(State::Running);
        check_size(&record).unwrap();
        store.save(&record).unwrap();
        record.process.env = vec!["x".repeat(MOST_ASKED)];
        assert!(matches!(check_size(&record), Err(Error::TooLarge(_))));
        store.save(&record).unwrap();
        record.process.env = vec!["x".repeat(MOST_RECORD)];
        assert!(matches!(store.save(&record), Err(Error::TooLarge(_))));
        // The last one that could be kept is still there.
        assert_eq!(store.load().unwrap().unwrap().process.env[0].len(), MOST_ASKED);
    }

    #[test]
    fn a_record_that_is_not_understood_is_not_one_that_is_missing() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(dir.path(), "0123456789ab");
        assert!(store.load().unwrap().is_none());
        store.create().unwrap();
        assert!(store.load().unwrap().is_none());
        fs::write(store.dir().join("record.json"), "{\"of\": \"a later version\"}").unwrap();
        let message = store.load().unwrap_err().to_string();
        assert!(message.contains("record.json"), "{message}");
    }
}
