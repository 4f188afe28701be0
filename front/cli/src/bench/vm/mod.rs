//! `slipway bench block` with guests: the thesis's configurations, all on the same file of the
//! host.
//!
//! [`Medium`] is that file. [`node::Node`] starts a sandbox for each configuration, whose disk is a
//! namespace of ours or a device of QEMU's own. [`guest::Guests`] runs fio or RocksDB in them, and
//! [`host::Host`] on the host; [`user::UserGuest`] runs our own user-space driver in a guest. All
//! guests are up from the first turn to the last, and one at a time works; but those of
//! [`passthrough::Passthrough`] share a function of hardware, which one of them at a time can have.
//!
//! A new configuration is an entry of `CONFIGURATIONS`, which makes `--only` know it, and an arm in
//! `Machines::guests`, or in `subjects` and `rocks_subjects` if it is no guest with a block device;
//! if it has a disk beside the one that most share, its name is in `Medium::file`; one on hardware
//! has a `Way` in `passthrough`, with which it has no file. `with_file_system` leaves out those
//! that RocksDB cannot have. `docs/bench-block.md` has a row, and `tests/e2e/85-bench.sh` runs
//! some. A subject without a guest (`--native`) is one of `block` in `front/bench`.

mod guest;
mod host;
mod image;
mod interfaces;
mod nic;
mod node;
mod passthrough;
mod tap;
mod user;

use std::path::PathBuf;
use std::rc::Rc;

use anyhow::{Context, Result, bail, ensure};
use slipway_bench::Turns;
use slipway_bench::block::{RocksPlan, RocksRun, RocksSubject, Subject, measure_rocksdb};
use slipway_runtime::v1::volume_spec::Device;

use super::scratch::Scratch;
use crate::args::{BlockArgs, DiskKind, NodeArgs};
use guest::Guests;
use host::Host;
pub use interfaces::{INTERFACES, Interface};
pub use nic::Interfaces;
pub use node::{GuestSettings, Node};
pub use passthrough::with_hardware;
use passthrough::{Function, Hardware, Passthrough, Way};
pub use tap::Namespace;
use user::UserGuest;

/// The configurations, with descriptions.
pub const CONFIGURATIONS: [(&str, &str); 9] = [
    ("host", "no guest: the host's kernel, straight on the file"),
    ("qemu-nvme", "a guest on the NVMe controller that QEMU emulates: io_uring, no page cache"),
    ("virtio-blk", "a guest on QEMU's virtio-blk: io_uring, no page cache, an I/O thread"),
    ("slipway", "a guest on Slipway's NVMe controller over vfio-user, the guest kernel's driver"),
    (USER, "a guest on the same controller, our own polling driver in the guest's user space"),
    (SHARED, "two guests on one Slipway disk, both at work"),
    (Way::Broker.name(), "a guest on a hardware function (--pci, --vf-pool) that Slipway serves"),
    (Way::Qemu.name(), "a guest on the hardware function of --pci that QEMU has by VFIO"),
    (Way::QemuIommu.name(), "the same, behind an IOMMU of QEMU's that the guest's kernel drives"),
];

/// Memory of a guest that runs a database, bytes.
const DATABASE_MEMORY: u64 = 1 << 30;

/// The configuration without a block device.
const USER: &str = "slipway-user";
/// The configuration whose guests share a disk.
const SHARED: &str = "slipway-shared";

/// Returns those of `names` that can have a file system.
pub fn with_file_system<'a>(names: &[&'a str]) -> Vec<&'a str> {
    names.iter().copied().filter(|name| ![USER, SHARED].contains(name)).collect()
}

/// A folder with the file that configurations are measured on. Further configurations with a disk
/// of the plane get a file of their own with the same content, since the plane does not let two
/// disks write to one file. Removed on drop, and when the user interrupts.
pub struct Medium {
    dir: Scratch,
    about: String,
    bytes: u64,
}

impl Medium {
    /// Makes files of `kind`, in RAM or in a folder, and writes every block of them.
    pub fn make(kind: &DiskKind, names: &[&str]) -> Result<Self> {
        let (place, bytes) = match kind {
            DiskKind::Ram(bytes) => (PathBuf::from("/dev/shm"), *bytes),
            DiskKind::File(dir, bytes) => (std::path::absolute(dir)?, *bytes),
            DiskKind::Null(_) => {
                bail!("a null disk serves --native only; guests need ram:SIZE or file:DIR:SIZE")
            }
        };
        let dir = Scratch::make_in(&place)?;
        remove_when_interrupted(dir.path().to_owned());
        let medium = Self { dir, about: DiskKind::File(place, bytes).to_string(), bytes };
        let on_file = names.iter().filter(|name| Way::of(name).is_none());
        let mut files: Vec<PathBuf> = on_file.map(|name| medium.file(name)).collect();
        files.sort();
        files.dedup();
        for path in files {
            let written = std::fs::File::create_new(&path).and_then(|file| fill(file, bytes));
            written.with_context(|| format!("filling {}", path.display()))?;
        }
        Ok(medium)
    }

    /// Returns the file of configuration `name`.
    fn file(&self, name: &str) -> PathBuf {
        let own = if [USER, SHARED].contains(&name) { name } else { "disk" };
        self.dir.path().join(own)
    }

    fn host(&self) -> Result<Host> {
        Host::new(self.file("host"), self.dir.path().join("host"))
    }
}

/// Removes `dir` and ends this process when the user or a supervisor asks it to end. The guests
/// then end by themselves.
fn remove_when_interrupted(dir: PathBuf) {
    use tokio::signal::unix::{SignalKind, signal};
    let wait = move || -> std::io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let number = runtime.block_on(async {
            let mut interrupt = signal(SignalKind::interrupt())?;
            let mut terminate = signal(SignalKind::terminate())?;
            std::io::Result::Ok(tokio::select! {
                _ = interrupt.recv() => libc::SIGINT,
                _ = terminate.recv() => libc::SIGTERM,
            })
        })?;
        // A file that stays in a place for temporary files does no harm.
        let _ = std::fs::remove_dir_all(&dir);
        std::process::exit(128 + number);
    };
    std::thread::spawn(wait);
}

/// Fills `file` with bytes that no layer below can compress.
fn fill(mut file: std::fs::File, bytes: u64) -> std::io::Result<()> {
    use std::io::Write;
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut block = vec![0; 1 << 20];
    for _ in 0..bytes >> 20 {
        for word in block.chunks_exact_mut(8) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            word.copy_from_slice(&state.to_ne_bytes());
        }
        file.write_all(&block)?;
    }
    file.sync_all()
}

/// The subjects of a run, with their node and disk. Dropping it ends the guests.
pub struct Machines {
    node: Option<Rc<Node>>,
    /// The function of hardware, if the user named one.
    function: Option<Rc<Function>>,
    medium: Medium,
}

impl Machines {
    /// Prepares the image and the daemon if `names` need them. `threads` is the most that a load
    /// has.
    pub fn new(
        node: &NodeArgs,
        args: &BlockArgs,
        medium: Medium,
        names: &[&str],
        threads: u32,
    ) -> Result<Self> {
        host::need(if args.rocksdb { "db_bench" } else { "fio" }, names.contains(&"host"))?;
        let guests = names.iter().any(|name| *name != "host");
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get) as u32;
        let wishes = GuestSettings {
            image: args.image.as_deref(),
            machine: &args.machine,
            memory: if args.rocksdb { DATABASE_MEMORY } else { 0 },
            cpus: threads.clamp(1, cores),
            program: if args.rocksdb { "db_bench" } else { "fio" },
        };
        let node = guests.then(|| Node::open(node, &wishes)).transpose()?.map(Rc::new);
        let function = node.as_ref().zip(Hardware::asked(args));
        let function = function.map(|(node, named)| Function::new(node, named, medium.bytes));
        Ok(Self { node, function: function.map(Rc::new), medium })
    }

    /// Describes the disk that all configurations have, in a few words.
    pub fn disk(&self) -> &str {
        &self.medium.about
    }

    /// Returns one subject for each of `names`, for fio.
    pub fn subjects(&self, names: &[&str]) -> Result<Vec<Box<dyn Subject>>> {
        let subject = |name: &&str| -> Result<Box<dyn Subject>> {
            Ok(match (*name, Way::of(name)) {
                (_, Some(way)) => Box::new(self.passthrough(way)?),
                ("host", _) => Box::new(self.medium.host()?),
                (USER, _) => Box::new(self.user()?),
                (name, _) => Box::new(self.guests(name)?),
            })
        };
        names.iter().map(subject).collect()
    }

    /// Returns one subject for each of `names`, for RocksDB.
    pub fn rocks_subjects(&self, names: &[&str]) -> Result<Vec<Box<dyn RocksSubject>>> {
        let subject = |name: &&str| -> Result<Box<dyn RocksSubject>> {
            Ok(match (*name, Way::of(name)) {
                (_, Some(way)) => Box::new(self.passthrough(way)?),
                ("host", _) => Box::new(self.medium.host()?),
                (name, _) => Box::new(self.guests(name)?),
            })
        };
        names.iter().map(subject).collect()
    }

    fn node(&self) -> Result<&Rc<Node>> {
        self.node.as_ref().context("there is no node for guests")
    }

    fn passthrough(&self, way: Way) -> Result<Passthrough> {
        let function = self.function.as_ref().context("there is no function of hardware")?;
        Ok(Passthrough { way, function: Rc::clone(function) })
    }

    fn user(&self) -> Result<UserGuest> {
        let guest = UserGuest::start(self.node()?, USER, about(USER), &self.medium.file(USER));
        guest.with_context(|| format!("configuration {USER}"))
    }

    fn guests(&self, name: &str) -> Result<Guests> {
        let node = self.node()?;
        let about = about(name);
        let file = &self.medium.file(name);
        let guests = match name {
            "qemu-nvme" => Guests::alone(node, name, about, file, Device::VmmNvme),
            "virtio-blk" => Guests::alone(node, name, about, file, Device::VmmVirtioBlk),
            SHARED => Guests::sharing(node, name, about, file),
            _ => Guests::alone(node, name, about, file, Device::Plane),
        };
        guests.with_context(|| format!("configuration {name}"))
    }
}

/// Configurations in which RocksDB is measured.
type RocksSubjects = Vec<Box<dyn RocksSubject>>;

/// Measures RocksDB in the configurations that have a disk of their own. Returns these
/// configurations, and their turns.
pub fn rocksdb(
    machines: &Machines,
    names: &[&str],
    plan: &RocksPlan,
) -> Result<(RocksSubjects, Turns<RocksRun>)> {
    let mut subjects = machines.rocks_subjects(names)?;
    ensure!(!subjects.is_empty(), "{USER} and {SHARED} have no file system for a database");
    let bar = crate::progress::turns();
    let turns = measure_rocksdb(&mut subjects, plan, |name, job, done, turns| {
        bar.set_length(turns as u64);
        bar.set_position(done as u64);
        bar.set_message(format!("{job} {name}"));
    });
    bar.finish_and_clear();
    Ok((subjects, turns?))
}

/// Describes a configuration.
fn about(name: &str) -> &'static str {
    CONFIGURATIONS.iter().find(|(known, _)| *known == name).map_or("", |(_, about)| about)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_medium_is_written_whole_and_goes_away() {
        let dir = tempfile::tempdir().unwrap();
        let kind = DiskKind::File(dir.path().to_owned(), 2 << 20);
        let medium = Medium::make(&kind, &["host", SHARED]).unwrap();
        assert_eq!(std::fs::metadata(medium.file(SHARED)).unwrap().len(), 2 << 20);
        assert!(!medium.file(USER).exists(), "nobody asked for it");
        let bytes = std::fs::read(medium.file("slipway")).unwrap();
        assert_eq!(bytes.len(), 2 << 20);
        assert!(bytes.chunks(4096).all(|block| block.iter().any(|byte| *byte != 0)));
        drop(medium);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(Medium::make(&DiskKind::Null(1 << 20), &["host"]).is_err());
    }
}
