//! Configurations whose guest has an NVMe function of hardware: by Slipway's broker, or by the VFIO
//! of QEMU itself (the thesis's section 3.2.3), also with an IOMMU in the guest.
//!
//! All of them have the same function, so that they differ in the way alone. One guest at a time
//! can have it: the guest of a configuration starts in the first turn of that configuration, and
//! again after each turn of another one that had the function.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use slipway_bench::Own;
use slipway_bench::block::{
    Measured, RocksJob, RocksMeasured, RocksPlace, RocksPlan, RocksSubject, Subject, Workload,
    fio_arguments_within, fio_measured, rocks_measured, rocks_script,
};
use slipway_plane_api::{VfClient, vf_v1};
use slipway_runtime::v1;

use super::guest::MOUNTED;
use super::node::{Guest, Node};
use crate::args::BlockArgs;
use crate::client::answer;
use crate::{pci, vf};

/// The device node of a function that QEMU has by VFIO, in its guest.
const DEVICE: &str = "/dev/slipway-bench";
/// The beginning of the names of pools that this command makes; its process id follows.
const POOL: &str = "bench-hw-";
/// The number of times that a pool is asked to go, and the wait between two: its function is being
/// reset when its guest has ended.
const TRIES: (u32, Duration) = (300, Duration::from_millis(200));

/// The way in which a guest has the function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Slipway's broker keeps it open, and serves it to the VMM over vfio-user.
    Broker,
    /// QEMU opens it by VFIO.
    Qemu,
    /// QEMU opens it by VFIO, and the guest translates its addresses by an IOMMU of QEMU's.
    QemuIommu,
}

impl Way {
    /// Returns the way of the configuration `name`, or `None` if it is another configuration.
    pub fn of(name: &str) -> Option<Self> {
        [Self::Broker, Self::Qemu, Self::QemuIommu].into_iter().find(|way| way.name() == name)
    }

    /// Returns the configuration's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Broker => "passthrough",
            Self::Qemu => "qemu-passthrough",
            Self::QemuIommu => "qemu-viommu",
        }
    }
}

/// The hardware that the user named.
#[derive(Clone, Debug)]
pub enum Hardware {
    /// The function at this PCI address of the host.
    Function(String),
    /// Any function of this pool.
    Pool(String),
}

impl Hardware {
    /// Returns the hardware that the user named, or `None` if the user named none.
    pub fn asked(args: &BlockArgs) -> Option<Self> {
        let function = args.pci.clone().map(Self::Function);
        function.or_else(|| args.vf_pool.clone().map(Self::Pool))
    }
}

/// Returns those of `names` that the hardware allows, and says of the others what they lack.
///
/// # Errors
/// The function that the user named is not bound to vfio-pci; no configuration is left.
pub fn with_hardware<'a>(args: &BlockArgs, names: &[&'a str]) -> Result<Vec<&'a str>> {
    let hardware = Hardware::asked(args);
    if let Some(Hardware::Function(address)) = &hardware
        && names.iter().any(|name| Way::of(name).is_some())
    {
        pci::check_spare_disk(Path::new("/"), address)?;
    }
    let mut left = Vec::new();
    for &name in names {
        match Way::of(name).and_then(|way| lacks(Path::new("/"), way, hardware.as_ref())) {
            Some(why) => eprintln!("SKIPPED: {name}: {why}"),
            None => left.push(name),
        }
    }
    ensure!(!left.is_empty(), "no configuration is left to measure");
    Ok(left)
}

/// Returns what a way lacks, with the next step, on the host whose root directory is `root`.
/// Returns `None` if it lacks nothing.
fn lacks(root: &Path, way: Way, hardware: Option<&Hardware>) -> Option<String> {
    match (way, hardware) {
        (Way::Broker, Some(_)) | (_, Some(Hardware::Function(_))) => None,
        (_, Some(Hardware::Pool(_))) => {
            Some("QEMU opens no function of a pool: --pci ADDRESS in place of --vf-pool".to_owned())
        }
        (_, None) => Some(pci::lacks(root).map(str::to_owned).unwrap_or_else(|| {
            "no hardware was named: --pci ADDRESS of an NVMe function that is bound to vfio-pci, \
             whose content is lost, or --vf-pool POOL"
                .to_owned()
        })),
    }
}

/// The function, which one guest has at a time. Dropping it ends that guest.
pub struct Function {
    node: Rc<Node>,
    hardware: Hardware,
    /// The most bytes of it that loads use.
    most: u64,
    held: RefCell<Option<Held>>,
    /// Set if these bytes have been written.
    filled: Cell<bool>,
}

/// The guest that has the function.
struct Held {
    way: Way,
    device: String,
    /// The bytes of the device that loads use.
    bytes: u64,
    /// Dropped before the pool, which cannot be removed while a guest has its function.
    guest: Guest,
    _pool: Option<OwnPool>,
}

impl Held {
    /// Returns a script that writes all bytes that loads use, with content that no layer below can
    /// compress.
    fn fill(&self) -> String {
        let Self { device, bytes, .. } = self;
        format!(
            "fio --name=fill --filename={device} --size={bytes} --rw=write --bs=1m --iodepth=4 \
             --ioengine=libaio --direct=1 --refill_buffers --randrepeat=0 --output-format=terse \
             >/dev/null"
        )
    }
}

impl Function {
    /// Returns `hardware`, of which loads use the first `most` bytes. No guest has it yet.
    pub fn new(node: &Rc<Node>, hardware: Hardware, most: u64) -> Self {
        let node = Rc::clone(node);
        Self { node, hardware, most, held: RefCell::new(None), filled: Cell::new(false) }
    }

    /// Runs a script in the guest of `way`, which gets the function if another guest has it.
    fn shell(
        &self,
        way: Way,
        time: Duration,
        script: impl FnOnce(&Held) -> String,
    ) -> Result<String> {
        let mut place = self.held.borrow_mut();
        let current = match place.take() {
            Some(held) if held.way == way => held,
            other => {
                drop(other);
                self.start(way)?
            }
        };
        let held: &Held = place.insert(current);
        self.node.wait(held.guest.shell(&script(held), time))
    }

    /// Starts a guest that has the function.
    fn start(&self, way: Way) -> Result<Held> {
        let mut client = self.node.functions();
        self.node.wait(remove_left(&mut client))?;
        let (mut pool, mut spec) = (None, self.node.template());
        let device = match (way, &self.hardware) {
            (Way::Broker, hardware) => {
                spec.vf_pool = match hardware {
                    Hardware::Pool(name) => name.clone(),
                    Hardware::Function(address) => {
                        pool.insert(OwnPool::make(&self.node, address)?).name.clone()
                    }
                };
                format!("/dev/slipway/{}-0", spec.vf_pool)
            }
            (_, Hardware::Function(address)) => {
                let (pci_address, iommu) = (address.clone(), way == Way::QemuIommu);
                spec.assigned_function = Some(v1::AssignedFunction { pci_address, iommu });
                DEVICE.to_owned()
            }
            (_, Hardware::Pool(name)) => bail!("QEMU opens no function of the pool {name}"),
        };
        let guest = Guest::start_as(&self.node, way.name(), spec)?;
        if let (Way::Qemu | Way::QemuIommu, Hardware::Function(address)) = (way, &self.hardware) {
            let identity = pci::identity(Path::new("/"), address)?;
            let script = find_script(&identity, way == Way::QemuIommu);
            self.node.wait(guest.shell(&script, Duration::ZERO)).context("the function's disk")?;
        }
        let size = format!("blockdev --getsize64 {device}");
        let size = self.node.wait(guest.shell(&size, Duration::ZERO))?;
        let size: u64 = size.trim().parse().with_context(|| format!("{device} has no size"))?;
        let bytes = size.min(self.most) >> 20 << 20;
        ensure!(bytes > 0, "the function's disk has {size} bytes: 1 MiB is the least");
        Ok(Held { way, device, bytes, guest, _pool: pool })
    }
}

/// Returns a script for a guest that makes [`DEVICE`] of the first namespace of the NVMe controller
/// with the vendor and device identifiers `identity`. With `iommu`, the guest's IOMMU translates
/// the controller's addresses from then on.
fn find_script(identity: &str, iommu: bool) -> String {
    let translate = "\
        type=/sys/bus/pci/devices/$f/iommu_group/type; \
        [ -e $type ] || { echo 'the kernel of the guest has no IOMMU' >&2; exit 1; }; \
        echo $f >/sys/bus/pci/drivers/nvme/unbind && echo DMA >$type && \
        echo $f >/sys/bus/pci/drivers/nvme/bind || exit 1; \
        case $(cat $type) in DMA*) ;; *) echo 'the IOMMU translates nothing' >&2; exit 1;; esac; ";
    let translate = if iommu { translate } else { "" };
    // With multipath, a controller has nvme0c1n1, and nvme0n1 is the disk.
    format!(
        "f=; for d in /sys/bus/pci/devices/*; do \
         if [ \"$(cat $d/vendor $d/device | tr -d '\\n')\" = {identity} ]; then f=${{d##*/}}; fi; \
         done; [ -n \"$f\" ] || {{ echo 'the guest has no such function' >&2; exit 1; }}; \
         {translate}\
         for try in $(seq 300); do for n in /sys/bus/pci/devices/$f/nvme/nvme*/nvme*n*; do \
         b=/sys/class/block/$(basename $n | sed 's/c[0-9]*n/n/'); if [ -e $b/dev ]; then \
         mknod -m 600 {DEVICE} b $(tr : ' ' <$b/dev); exit; fi; done; sleep 0.1; done; \
         echo 'the function has no namespace' >&2; exit 1"
    )
}

/// A pool of the function alone. Dropping it, after the guest, gives the function back.
struct OwnPool {
    node: Rc<Node>,
    name: String,
}

impl OwnPool {
    fn make(node: &Rc<Node>, address: &str) -> Result<Self> {
        let (mut client, name) = (node.functions(), format!("{POOL}{}", std::process::id()));
        node.wait(vf::make_hardware(&mut client, &name, address))?;
        Ok(Self { node: Rc::clone(node), name })
    }
}

impl Drop for OwnPool {
    fn drop(&mut self) {
        let mut client = self.node.functions();
        let removed = self.node.wait(async {
            let (tries, wait) = TRIES;
            for _ in 1..tries {
                if vf::remove(&mut client, &self.name).await.is_ok() {
                    return Ok(());
                }
                tokio::time::sleep(wait).await;
            }
            vf::remove(&mut client, &self.name).await
        });
        if let Err(error) = removed {
            crate::complain(&error.context(format!("pool {}", self.name)));
        }
    }
}

/// Removes the pools that earlier processes of this command have left, by being killed.
async fn remove_left(client: &mut VfClient) -> Result<()> {
    let pools = answer(client.list_pools(vf_v1::ListPoolsRequest {}).await)?.pools;
    for pool in pools {
        if is_left(&pool.name) {
            vf::remove(client, &pool.name).await?;
        }
    }
    Ok(())
}

/// Returns whether a pool is one of a process of this command that has ended.
fn is_left(pool: &str) -> bool {
    let process = pool.strip_prefix(POOL).and_then(|number| number.parse::<u32>().ok());
    process.is_some_and(|process| !Path::new(&format!("/proc/{process}")).exists())
}

/// One way of having the function, as a subject.
pub struct Passthrough {
    pub way: Way,
    pub function: Rc<Function>,
}

impl Subject for Passthrough {
    fn name(&self) -> &str {
        self.way.name()
    }

    fn about(&self) -> String {
        super::about(self.way.name()).to_owned()
    }

    fn own(&self) -> Own {
        Own::Node
    }

    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        let function = &self.function;
        if !function.filled.get() {
            function.shell(self.way, Duration::ZERO, Held::fill).context("filling the disk")?;
            function.filled.set(true);
        }
        let script = |held: &Held| {
            let place = (held.device.as_str(), held.bytes);
            format!("fio {}", fio_arguments_within(workload, place, warm_up, time).join(" "))
        };
        fio_measured(&function.shell(self.way, warm_up + time, script)?)
    }
}

impl RocksSubject for Passthrough {
    fn name(&self) -> &str {
        self.way.name()
    }

    fn about(&self) -> String {
        super::about(self.way.name()).to_owned()
    }

    fn run(&mut self, plan: &RocksPlan, job: RocksJob) -> Result<RocksMeasured> {
        let script =
            |held: &Held| rocks_script(plan, job, RocksPlace::Device(&held.device, MOUNTED));
        rocks_measured(&self.function.shell(self.way, plan.time, script)?, job.load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_says_what_it_lacks() {
        let root = tempfile::tempdir().unwrap();
        let function = Hardware::Function("0000:01:10.0".to_owned());
        let pool = Hardware::Pool("disks".to_owned());
        let lacks = |way, hardware| lacks(root.path(), way, hardware);
        for way in [Way::Broker, Way::Qemu, Way::QemuIommu] {
            assert_eq!(Way::of(way.name()), Some(way));
            assert_eq!(lacks(way, Some(&function)), None);
            assert!(lacks(way, None).is_some_and(|why| why.contains("the IOMMU is off")));
        }
        assert_eq!(lacks(Way::Broker, Some(&pool)), None);
        assert!(lacks(Way::Qemu, Some(&pool)).is_some_and(|why| why.contains("--pci ADDRESS")));
        for path in ["sys/kernel/iommu_groups/0", "sys/class/iommu", "dev/vfio/vfio"] {
            std::fs::create_dir_all(root.path().join(path)).unwrap();
        }
        std::fs::create_dir_all(root.path().join("sys/bus/pci/drivers/vfio-pci")).unwrap();
        assert!(lacks(Way::Broker, None).is_some_and(|why| why.contains("--pci ADDRESS")));
        assert_eq!(Way::of("slipway"), None);
    }

    #[test]
    fn a_guest_finds_the_function_by_its_identity() {
        let script = |iommu| find_script("0x80860x2701", iommu);
        assert!(script(false).contains(" = 0x80860x2701 ]"), "{}", script(false));
        assert!(!script(false).contains("unbind") && script(true).contains("echo DMA >$type"));
        for script in [script(false), script(true)] {
            let checked = std::process::Command::new("sh").args(["-n", "-c", &script]).status();
            assert!(checked.unwrap().success(), "{script}");
        }
    }

    #[test]
    fn pools_of_processes_that_live_stay() {
        assert!(!is_left(&format!("{POOL}{}", std::process::id())));
        assert!(!is_left("disks") && !is_left("bench-hw-x"));
        assert!(is_left(&format!("{POOL}{}", u32::MAX)));
    }
}
