//! The description of a template or snapshot, which is kept beside its state as JSON.
//!
//! An earlier build may have written it, and a later one may have: unknown fields are refused, so
//! that nothing of a machine is passed over. A new field that a description may lack is
//! `#[serde(default)]`, and `skip_serializing_if` keeps it out of descriptions without it, which
//! earlier builds then read. Any other change raises `VERSION`, and templates and snapshots of
//! earlier builds are refused. The types of `record` in it ([`Origin`], [`Settings`], [`Volume`])
//! are those of sandboxes' records. What a fork cannot have otherwise than its template is in
//! `Shape`. Tests are below; the fuzz targets `template-manifest` and `snapshot-import` read
//! descriptions; `docs/snapshots.md` and `docs/templates.md` list the files.
//!
//! The description has a digest of itself beside its fields: SHA-256 of the JSON of all other
//! fields, without white space and with the names of each object in ascending order. It finds
//! damage, and no intent.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use slipway_hypervisor::CpuTemplate;
use slipway_initramfs::is_same_content;

use super::pages::digest;
use crate::error::MOST_MESSAGE;
use crate::record::{
    BootRecord, BoundMemory, MOST_ASKED, Needs, Network, Nic, Origin, Record, Settings, Volume,
};
use crate::{Error, Result};

/// The version of the layout of a template's directory.
const VERSION: u32 = 4;
/// The name of the field with the digest of a description.
const DIGEST: &str = "sha256";
/// The most bytes of a manifest. That of a snapshot has the command line and environment of its
/// container; that of a pod, for each of its containers, a file and the volumes, whose files have a
/// stamp beside what their record has.
pub(crate) const MOST_MANIFEST: u64 = MOST_ASKED as u64 + (512 << 10);

/// The description of a template or snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Manifest {
    version: u32,
    /// The template's name, as its directory's.
    pub name: String,
    /// CLOCK_REALTIME when it was saved, ns since the epoch.
    pub created_ns: u64,
    /// The machine, which each fork has.
    pub shape: Shape,
    /// The MAC address of the interface, which forks exchange for theirs. `None`: there is no
    /// interface.
    pub mac: Option<String>,
    /// The bytes of memory that the guest had touched.
    pub touched_bytes: u64,
    /// SHA-256 of the machine's state, in hexadecimal digits.
    pub machine_sha256: String,
    /// The [digest](super::pages::digest_pages) of the memory's file.
    pub memory_sha256: String,
    /// The container of a snapshot. `None`: it is a template, which has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<Snapshot>,
}

/// The container of a snapshot, and what a sandbox needs to go on with it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Snapshot {
    /// The name of the sandbox that was saved.
    pub sandbox: String,
    /// The traits of the sandbox that those have which begin with the snapshot.
    pub origin: Origin,
    /// The image and the first process.
    pub settings: Settings,
    /// Set if the container's processes were stopped by its user.
    pub paused: bool,
    /// The number of virtual CPUs when it was saved.
    pub cpus: u32,
    /// The most bytes of host memory that the volatile layer holds.
    pub layers_bytes: u64,
    /// The user's own guest kernel, or `None` for the node's.
    pub kernel: Option<PathBuf>,
    /// The accelerator: "auto" or "kvm".
    pub accelerator: String,
    /// The block volumes, those of all containers of a pod. The path of one with an overlay is the
    /// name of its file beside this description.
    pub volumes: Vec<Volume>,
    /// The files of the disks beside this description.
    pub files: Vec<DiskFile>,
    /// For how long the sandbox stood still to be saved, in ns.
    pub paused_ns: u64,
    /// The bytes of the room for more memory that the guest had plugged.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub plugged_bytes: u64,
}

/// Returns whether a description has no field for a number of bytes, since it is 0.
fn is_zero(bytes: &u64) -> bool {
    *bytes == 0
}

/// A file with the content of a disk, which is sparse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskFile {
    /// Its name, beside the description.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// The bytes of its pages that are not zeros.
    pub data_bytes: u64,
    /// The [digest](super::pages::digest_pages) of these pages.
    pub sha256: String,
}

/// The machine of a template or a sandbox, as far as a fork cannot differ from its template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Shape {
    /// The file that booted. The name of an unpacked kernel tells its content; a kernel that boots
    /// as it is has its own path.
    pub kernel: PathBuf,
    /// The initramfs, whose name tells its content: with another agent, or other modules of the
    /// kernel, it is another file.
    pub initramfs: PathBuf,
    /// The parts of the initramfs.
    pub needs: Needs,
    /// The size in bytes of the guest memory that it begins with.
    pub memory_bytes: u64,
    /// The bytes that it can be given beside that while it runs.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub room_bytes: u64,
    /// The size in bytes of each of its regions of memory of containers; 0: it has none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub region_bytes: u64,
    /// Virtual CPUs.
    pub cpus: u32,
    /// The most CPUs that it can be given while it runs.
    pub max_cpus: u32,
    /// The name of the CPU template.
    pub cpu_template: String,
    /// Its interface.
    pub interface: Option<Interface>,
}

/// The interface of a template or a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Interface {
    /// The kind of device.
    pub nic: Nic,
    /// Its queue pairs; 0: one for each CPU.
    pub queues: u32,
    /// The largest packet in bytes.
    pub mtu: u32,
}

impl Interface {
    /// Returns the interface of a sandbox in this network. A function that was taken of a pool has
    /// one queue pair, however many CPUs there are.
    fn of(network: &Network) -> Self {
        let queues = if network.taken().is_some() { 1 } else { network.queues };
        Self { nic: network.nic, queues, mtu: network.mtu }
    }
}

impl Manifest {
    /// Describes a template that is complete but for this description.
    pub(crate) fn new(record: &Record, name: &str, shape: Shape, saved: Saved) -> Self {
        Self {
            version: VERSION,
            name: name.to_owned(),
            created_ns: slipway_telemetry::realtime_ns(),
            shape,
            mac: record.network.as_ref().map(|network| network.mac_in_guest().to_owned()),
            touched_bytes: saved.touched_bytes,
            machine_sha256: saved.machine_sha256,
            memory_sha256: saved.memory_sha256,
            snapshot: None,
        }
    }

    /// Parses the manifest at `path`, in the directory of template `name`.
    ///
    /// # Errors
    /// [`Error::Template`]: it is of another version, of another template, or no manifest.
    pub(crate) fn parse(json: &[u8], name: &str) -> Result<Self> {
        let no = |why: String| Error::Template { name: name.to_owned(), why };
        let manifest = Self::parse_any(json).map_err(no)?;
        if manifest.name != name {
            return Err(no(format!("its manifest is that of {:?}", manifest.name)));
        }
        Ok(manifest)
    }

    /// Parses the manifest of a template of any name.
    ///
    /// # Errors
    /// The reason: it is of another version, or no manifest, or was changed.
    pub(crate) fn parse_any(json: &[u8]) -> Result<Self, String> {
        match Self::parse_unchecked(json)? {
            (manifest, true) => Ok(manifest),
            (_, false) => Err("its manifest was changed".to_owned()),
        }
    }

    /// Parses the manifest of a template of any name. The second part is `true` if the manifest has
    /// its own digest.
    ///
    /// # Errors
    /// The reason: it is of another version, or no manifest.
    pub(crate) fn parse_unchecked(json: &[u8]) -> Result<(Self, bool), String> {
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        // The parser's message repeats names of fields as they are in the file.
        let unclear = |error: serde_json::Error| {
            slipway_printable::line(&format!("its manifest is damaged: {error}"), MOST_MESSAGE)
        };
        let Version { version } = serde_json::from_slice(json).map_err(unclear)?;
        if version != VERSION {
            return Err(format!("it has layout {version}, this version reads {VERSION}"));
        }
        let mut fields: Map<String, Value> = serde_json::from_slice(json).map_err(unclear)?;
        let named = fields.remove(DIGEST);
        let fields = Value::Object(fields);
        let is_its = named == Some(Value::String(digest_of(&fields).map_err(unclear)?));
        Ok((serde_json::from_value(fields).map_err(unclear)?, is_its))
    }

    /// Returns the JSON of the manifest, with its digest.
    ///
    /// # Errors
    /// The error of encoding it.
    pub(crate) fn to_json(&self) -> serde_json::Result<Vec<u8>> {
        let mut fields = serde_json::to_value(self)?;
        fields[DIGEST] = Value::String(digest_of(&fields)?);
        serde_json::to_vec_pretty(&fields)
    }
}

/// Returns the digest of a description, whose objects keep their names in ascending order.
fn digest_of(fields: &Value) -> serde_json::Result<String> {
    Ok(digest(&serde_json::to_vec(fields)?))
}

/// The files that a sandbox boots, and the processor for them.
#[derive(Clone, Copy)]
pub(crate) struct Boots<'a> {
    /// The parts of the initramfs.
    pub needs: Needs,
    /// The kernel.
    pub kernel: &'a Path,
    /// The initramfs.
    pub initramfs: &'a Path,
    /// The processor that the guest sees.
    pub cpu_template: CpuTemplate,
}

/// The figures of files that were saved.
#[derive(Clone, Debug)]
pub(crate) struct Saved {
    /// The bytes of memory that the guest had touched.
    pub touched_bytes: u64,
    /// SHA-256 of the machine's state.
    pub machine_sha256: String,
    /// The [digest](super::pages::digest_pages) of the memory.
    pub memory_sha256: String,
}

impl Shape {
    /// Returns the shape of a sandbox that boots these files.
    pub(crate) fn of(record: &Record, boots: &Boots<'_>) -> Self {
        let Boots { needs, kernel, initramfs, cpu_template } = *boots;
        let interface = record.network.as_ref().map(Interface::of);
        Self {
            kernel: kernel.to_owned(),
            initramfs: initramfs.to_owned(),
            needs,
            memory_bytes: record.ram_bytes(),
            room_bytes: record.memory.room(),
            region_bytes: record.bound.region_bytes,
            cpus: record.cpus.boot,
            max_cpus: record.cpus.max,
            cpu_template: cpu_template.to_string(),
            interface,
        }
    }

    /// Returns the size in bytes of the file of the memory: what the machine begins with, and the
    /// room or the regions behind it, whose blocks that are not plugged are holes.
    pub(crate) fn memory_file_bytes(&self) -> u64 {
        let hot = self.room_bytes.saturating_add(self.bound().room());
        self.memory_bytes.saturating_add(hot)
    }

    /// Returns the regions of memory of containers that each fork has, with nothing plugged.
    pub(crate) fn bound(&self) -> BoundMemory {
        BoundMemory::of_regions(self.region_bytes)
    }

    /// Returns the files that the guest booted.
    pub(crate) fn booted(&self) -> BootRecord {
        let (kernel, initramfs) = (self.kernel.clone(), self.initramfs.clone());
        let cpu_template = self.cpu_template.clone();
        BootRecord { kernel, initramfs, cpu_template, reporting: self.needs.reporting }
    }

    /// Returns whether the machine has the device that free pages are reported to.
    pub(crate) fn reports(&self) -> bool {
        self.needs.reporting
    }

    /// Checks that a sandbox of shape `wanted` can be a fork of a template of this shape. A fork
    /// may need less of its initramfs than the template has.
    ///
    /// # Errors
    /// One line that says the first thing that differs.
    pub(crate) fn check(&self, wanted: &Self) -> Result<(), String> {
        let differs = |what: &str, has: &dyn std::fmt::Display, asked: &dyn std::fmt::Display| {
            Err(format!("it has {what} {has}, and {asked} is asked for"))
        };
        if self.memory_bytes != wanted.memory_bytes {
            let [has, asked] =
                [self, wanted].map(|shape| format!("{} MiB", shape.memory_bytes >> 20));
            return differs("memory of", &has, &asked);
        }
        if self.room_bytes != wanted.room_bytes {
            let [has, asked] =
                [self, wanted].map(|shape| format!("{} MiB", shape.room_bytes >> 20));
            return differs("room for more memory (--max-memory):", &has, &asked);
        }
        if self.region_bytes != wanted.region_bytes {
            let [has, asked] = [self, wanted].map(|shape| match shape.bound().most_limit() >> 20 {
                0 => "none".to_owned(),
                most => format!("up to {most} MiB"),
            });
            return differs("memory of containers (--bind-memory):", &has, &asked);
        }
        if (self.cpus, self.max_cpus) != (wanted.cpus, wanted.max_cpus) {
            let [has, asked] =
                [self, wanted].map(|shape| format!("{} of {}", shape.cpus, shape.max_cpus));
            return differs("CPUs:", &has, &asked);
        }
        if self.cpu_template != wanted.cpu_template {
            return differs("cpu_template =", &self.cpu_template, &wanted.cpu_template);
        }
        if !is_same_content(&self.kernel, &wanted.kernel) {
            return differs("the kernel", &self.kernel.display(), &wanted.kernel.display());
        }
        if !is_same_content(&self.initramfs, &wanted.initramfs) {
            return Err("it was made with another agent or other modules; make it anew".to_owned());
        }
        match (&self.interface, &wanted.interface) {
            (has, asked) if has == asked => Ok(()),
            (None, Some(_)) => Err("it has no network; `--network none` asks for none".to_owned()),
            (Some(_), None) => Err("it has a network interface, and none is asked for".to_owned()),
            (Some(has), Some(asked)) => Err(format!(
                "it has another interface: {} with {} queue pairs and an MTU of {}, not {}, {} and \
                 {}",
                has.nic.as_str(),
                has.queues,
                has.mtu,
                asked.nic.as_str(),
                asked.queues,
                asked.mtu
            )),
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::record::{FunctionPool, TakenFunction};

    pub(crate) fn shape() -> Shape {
        Shape {
            kernel: "/k".into(),
            initramfs: "/i".into(),
            needs: Needs::default(),
            memory_bytes: 128 << 20,
            room_bytes: 0,
            region_bytes: 0,
            cpus: 1,
            max_cpus: 2,
            cpu_template: "host".to_owned(),
            interface: Some(Interface { nic: Nic::Virtio, queues: 0, mtu: 1500 }),
        }
    }

    pub(crate) fn manifest(name: &str) -> Manifest {
        Manifest {
            version: VERSION,
            name: name.to_owned(),
            created_ns: 1,
            shape: shape(),
            mac: Some("5a:11:0a:d5:00:02".to_owned()),
            touched_bytes: 4096,
            machine_sha256: "a".to_owned(),
            memory_sha256: "b".to_owned(),
            snapshot: None,
        }
    }

    #[test]
    fn a_fork_has_the_machine_of_its_template() {
        let has = shape();
        assert_eq!(has.check(&shape()), Ok(()));
        let refused = |change: fn(&mut Shape)| {
            let mut wanted = shape();
            change(&mut wanted);
            has.check(&wanted).unwrap_err()
        };
        assert!(refused(|shape| shape.memory_bytes *= 2).contains("128 MiB, and 256 MiB"));
        assert!(refused(|shape| shape.room_bytes = 1 << 30).contains(": 0 MiB, and 1024 MiB"));
        let binds = refused(|shape| shape.region_bytes = 128 << 20);
        assert!(binds.contains("(--bind-memory): none, and up to 124 MiB is"), "{binds}");
        assert!(refused(|shape| shape.cpus = 2).contains("1 of 2, and 2 of 2"));
        let other = refused(|shape| shape.cpu_template = "x86-64-v2".to_owned());
        assert_eq!(other, "it has cpu_template = host, and x86-64-v2 is asked for");
        assert!(refused(|shape| shape.kernel = "/l".into()).contains("/l"));
        assert!(refused(|shape| shape.initramfs = "/j".into()).contains("another agent"));
        let mut elsewhere = shape();
        let named = |node: &str| format!("{node}/cache/vmlinux-{}.elf", "0".repeat(32)).into();
        elsewhere.kernel = named("/a");
        let mut wanted = elsewhere.clone();
        wanted.kernel = named("/b");
        assert_eq!(elsewhere.check(&wanted), Ok(()), "a snapshot of another node");
        assert!(refused(|shape| shape.interface = None).contains("none is asked for"));
        assert!(
            refused(|shape| shape.interface.as_mut().unwrap().mtu = 9000).contains("9000"),
            "the MTU"
        );
    }

    #[test]
    fn a_fork_has_one_queue_pair_if_the_saved_sandbox_had_a_function_of_a_pool() {
        let (name, owner) = ("nics".to_owned(), String::new());
        let mut pool = FunctionPool { name, needed: false, owner, taken: None };
        let network = |pool: &FunctionPool| Network {
            queues: 0,
            mtu: 1500,
            pool: Some(pool.clone()),
            ..Network::default()
        };
        // Its interface was made for it: one pair for each CPU.
        assert_eq!(Interface::of(&network(&pool)).queues, 0);
        let (id, mac) = ("nics.0".to_owned(), "5a:11:0a:d5:00:03".to_owned());
        pool.taken = Some(TakenFunction { id, socket: "/vf/nics.0".into(), mac });
        let its = Interface::of(&network(&pool));
        assert_eq!((its.nic, its.queues, its.mtu), (Nic::Virtio, 1, 1500));
    }

    #[test]
    fn a_manifest_is_read_back_and_others_are_refused() {
        let json = manifest("a").to_json().unwrap();
        assert_eq!(Manifest::parse(&json, "a").unwrap(), manifest("a"));
        let refused = |json: &[u8]| Manifest::parse(json, "a").unwrap_err().to_string();
        let of_b = manifest("b").to_json().unwrap();
        assert!(refused(&of_b).contains("that of \"b\""));
        assert!(refused(&json[..40]).contains("damaged"));
        let field = String::from_utf8(json.clone()).unwrap().replace("touched", "tou\\nched");
        assert!(!refused(field.as_bytes()).contains('\n'), "{}", refused(field.as_bytes()));
        let newer = Manifest { version: 9, ..manifest("a") }.to_json().unwrap();
        assert!(refused(&newer).contains("layout 9"));
        let without = serde_json::to_vec(&manifest("a")).unwrap();
        assert!(refused(&without).contains("was changed"), "it has no digest");
    }

    #[test]
    fn no_changed_byte_of_a_manifest_is_believed() {
        let whole = manifest("a");
        let json = whole.to_json().unwrap();
        for at in 0..json.len() {
            for bits in [0x01, 0x20, 0x80] {
                let mut changed = json.clone();
                changed[at] ^= bits;
                match Manifest::parse(&changed, "a") {
                    Err(error) => assert!(!error.to_string().contains('\n'), "{at}: {error}"),
                    // White space between two fields says nothing.
                    Ok(read) => assert!(json[at].is_ascii_whitespace() && read == whole, "{at}"),
                }
            }
        }
    }
}
