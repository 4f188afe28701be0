//! Guests as measured subjects.

use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result};
use slipway_bench::Own;
use slipway_bench::block::{
    Measured, RocksJob, RocksMeasured, RocksPlace, RocksPlan, RocksSubject, Subject, Workload,
    fio_arguments, fio_measured, rocks_measured, rocks_script,
};
use slipway_runtime::v1::VolumeSpec;
use slipway_runtime::v1::volume_spec::{Device, Source};

use super::node::{Guest, Node, SharedDisk, shells};

/// The disk's device node in a guest with a disk of its own.
pub const OWN: &str = "/dev/slipway/bench";
/// The disk's device node in guests that share a disk.
const SHARED: &str = "/dev/slipway-bench";
/// The mount point of a database's file system.
pub const MOUNTED: &str = "/bench";

/// Returns the volume of a guest with a disk of its own.
pub fn volume(file: &Path, device: Device) -> VolumeSpec {
    VolumeSpec {
        name: "bench".to_owned(),
        source: Some(Source::Path(file.to_string_lossy().into_owned())),
        device: device.into(),
        ..VolumeSpec::default()
    }
}

/// One guest, or several that work at once on one disk.
pub struct Guests {
    name: String,
    about: &'static str,
    device: &'static str,
    /// Dropped before the disk, which cannot be removed while it is in use.
    guests: Vec<Guest>,
    node: Rc<Node>,
    _disk: Option<SharedDisk>,
}

impl Guests {
    /// Starts one guest whose disk is `file`, behind `device`.
    pub fn alone(
        node: &Rc<Node>,
        name: &str,
        about: &'static str,
        file: &Path,
        device: Device,
    ) -> Result<Self> {
        let guests = vec![Guest::start(node, name, vec![volume(file, device)])?];
        let (name, node) = (name.to_owned(), Rc::clone(node));
        Ok(Self { name, about, device: OWN, guests, node, _disk: None })
    }

    /// Starts two guests that share one disk, which is `file`.
    pub fn sharing(node: &Rc<Node>, name: &str, about: &'static str, file: &Path) -> Result<Self> {
        let disk = SharedDisk::create(node, file)?;
        let mut guests = Vec::new();
        for number in 1..=2 {
            let guest = Guest::start(node, &format!("{name}-{number}"), Vec::new())?;
            disk.attach(&guest, SHARED)?;
            guests.push(guest);
        }
        let (name, node) = (name.to_owned(), Rc::clone(node));
        Ok(Self { name, about, device: SHARED, guests, node, _disk: Some(disk) })
    }
}

impl Subject for Guests {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        self.about.to_owned()
    }

    fn own(&self) -> Own {
        Own::Node
    }

    /// Runs fio in all guests. Their commands count together, in the time of the guest that took
    /// longest.
    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        let arguments = fio_arguments(workload, self.device, warm_up, time).join(" ");
        let script = format!("fio {arguments}");
        let mut all = Measured::default();
        for output in self.node.wait(shells(&self.guests, &script, warm_up + time))? {
            let one = fio_measured(&output)?;
            all.latency.merge(&one.latency);
            all.bytes = all.bytes.saturating_add(one.bytes);
            all.elapsed_ns = all.elapsed_ns.max(one.elapsed_ns);
        }
        Ok(all)
    }
}

impl RocksSubject for Guests {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        self.about.to_owned()
    }

    fn run(&mut self, plan: &RocksPlan, job: RocksJob) -> Result<RocksMeasured> {
        let script = rocks_script(plan, job, RocksPlace::Device(self.device, MOUNTED));
        let outputs = self.node.wait(shells(&self.guests, &script, plan.time))?;
        rocks_measured(outputs.first().context("there is no guest")?, job.load)
    }
}
