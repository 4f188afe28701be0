//! Slipway's own VMM as the hypervisor: the program `slipway-vmm`, which needs KVM.

mod args;

use std::path::{Path, PathBuf};

use args::Binary;

use crate::launch::Program;
use crate::probe::Probe;
use crate::{
    Accel, AccelChoice, AccelReport, BoxFuture, Capabilities, Error, Hypervisor, LeftVm, Result,
    Spare, SpareSpec, Vm, VmSpec, accel, launch,
};

/// Host memory in bytes that a `slipway-vmm` needs beside its guest's memory, page tables included.
const OVERHEAD: u64 = 32 << 20;

/// The program `slipway-vmm`.
#[derive(Debug)]
pub struct SlipwayVmm {
    binary: Binary,
    probe: Probe,
}

impl SlipwayVmm {
    /// Makes a hypervisor of the program at `path`. The outcome of a [probe](SlipwayVmm::probe) is
    /// kept in the directory `cache`, which is made if it does not exist.
    pub fn new(path: PathBuf, cache: &Path) -> Self {
        Self { binary: Binary(path), probe: Probe::new(cache) }
    }

    /// Returns the path of the program.
    pub fn path(&self) -> &Path {
        self.binary.path()
    }

    /// Returns [`Accel::Kvm`] if guests run on KVM with this VMM, and the reason. Boots `kernel`
    /// for a moment if no cheaper check rules KVM out and the answer is not in the cache.
    pub async fn probe(&self, kernel: &Path) -> &AccelReport {
        self.probe.report(&self.binary, kernel).await
    }

    /// Returns the outcome of the last probe that booted a kernel, by this process or an earlier
    /// one. Returns `None` if there was none since the host started.
    pub fn known(&self) -> Option<AccelReport> {
        self.probe.known(&self.binary)
    }

    /// Checks that KVM can be used for a VM with this choice of the accelerator.
    fn check_kvm(choice: AccelChoice) -> Result<Accel> {
        let usable = match choice {
            AccelChoice::Auto => accel::probe_without_boot(),
            // Requested explicitly: a device that is KVM will do.
            AccelChoice::Only(Accel::Kvm) => accel::probe_device(),
            AccelChoice::Only(other) => return Ok(other),
        };
        usable.map(|()| Accel::Kvm).map_err(|reason| Error::NeedsKvm { reason })
    }
}

impl Hypervisor for SlipwayVmm {
    fn name(&self) -> &'static str {
        Binary::NAME
    }

    fn overhead<'a>(&'a self, _: &'a VmSpec) -> BoxFuture<'a, Result<u64>> {
        Box::pin(std::future::ready(Ok(OVERHEAD)))
    }

    fn capabilities<'a>(&'a self, _: &'a VmSpec) -> BoxFuture<'a, Result<Capabilities>> {
        let all = Capabilities {
            shares_pages: true,
            saves_machines: true,
            plugs_memory: true,
            reports_free_pages: true,
        };
        Box::pin(std::future::ready(Ok(all)))
    }

    fn launch<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move {
            let accel = Self::check_kvm(spec.accel)?;
            let vm = launch::launch(&self.binary, spec, accel).await?;
            Ok(Box::new(vm) as Box<dyn Vm>)
        })
    }

    fn launch_spare<'a>(&'a self, spec: &'a SpareSpec) -> BoxFuture<'a, Result<Spare>> {
        Box::pin(Spare::start(self.path(), spec))
    }

    fn launch_in<'a>(
        &'a self,
        spare: Spare,
        spec: &'a VmSpec,
    ) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move {
            if !spare.fits(spec) {
                spare.end().await;
                return self.launch(spec).await;
            }
            let accel = Self::check_kvm(spec.accel)?;
            let vm = launch::launch_in(&self.binary, spec, accel, Some(spare)).await?;
            Ok(Box::new(vm) as Box<dyn Vm>)
        })
    }

    fn adopt<'a>(&'a self, left: &'a LeftVm) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(adopt(left))
    }
}

/// Takes over a `slipway-vmm`. The program itself is not needed for that.
pub(crate) async fn adopt(left: &LeftVm) -> Result<Box<dyn Vm>> {
    Ok(Box::new(launch::adopt::<Binary>(left).await?))
}
