//! QEMU as the hypervisor.

mod args;
mod find;
mod program;

use std::path::Path;

pub use find::{Binary, MINIMUM_VERSION, TOOL_ROOT, Version};

use crate::launch::Program;
use crate::probe::Probe;
use crate::{
    Accel, AccelChoice, AccelReport, BoxFuture, Capabilities, Error, Hypervisor, LeftVm, Result,
    Vm, VmSpec, launch,
};

/// Host memory in bytes that a QEMU needs beside its guest's memory: its own, the translator's
/// cache under software emulation, page tables.
const OVERHEAD: u64 = 768 << 20;

/// Any QEMU from 10.1 on.
#[derive(Debug)]
pub struct Qemu {
    binary: Binary,
    probe: Probe,
}

impl Qemu {
    /// Looks for a QEMU that can run sandboxes: `SLIPWAY_QEMU` if it is set (and then no other),
    /// else the tool root that set-up makes (`SLIPWAY_TOOLS`, by default [`TOOL_ROOT`]), else
    /// `PATH`.
    ///
    /// The result of examining a binary is kept in the directory `cache`, which is made if it does
    /// not exist; a cache that cannot be written only costs time. Blocks while a QEMU that is not
    /// in the cache is examined (about 0.2 s).
    pub fn find(cache: &Path) -> Result<Self> {
        Ok(Self { binary: Binary::find(cache)?, probe: Probe::new(cache) })
    }

    /// Examines the QEMU at `path`, as [`Qemu::find`] does.
    ///
    /// # Errors
    /// [`Error::NoQemu`] with the fault of that QEMU.
    pub fn at(path: &Path, cache: &Path) -> Result<Self> {
        let binary = Binary::at(path, cache).map_err(|reason| Error::NoQemu { reason })?;
        Ok(Self { binary, probe: Probe::new(cache) })
    }

    /// Returns the QEMU that was found.
    pub fn binary(&self) -> &Binary {
        &self.binary
    }

    /// Returns the accelerator that [`AccelChoice::Auto`] selects, and the reason. Boots `kernel`
    /// on KVM for a moment if no cheaper check rules KVM out and the answer is not in the cache.
    pub async fn probe(&self, kernel: &Path) -> &AccelReport {
        self.probe.report(&self.binary, kernel).await
    }

    /// Returns the accelerator for `choice`: with `Auto`, that of the last probe with this kernel,
    /// or of a new one.
    async fn resolve(&self, choice: AccelChoice, kernel: &Path) -> Result<Accel> {
        match choice {
            AccelChoice::Auto => Ok(self.probe(kernel).await.accel),
            AccelChoice::Only(Accel::Tcg) => Ok(Accel::Tcg),
            AccelChoice::Only(Accel::Hollow) => {
                Err(Error::Unsupported { what: "QEMU runs guests; slipway-hollow runs none" })
            }
            // KVM was requested explicitly: only the cheap checks are done, since the user may know
            // better than a boot.
            AccelChoice::Only(Accel::Kvm) => match crate::accel::probe_without_boot() {
                Ok(()) => Ok(Accel::Kvm),
                Err(reason) => Err(Error::NoKvm { reason }),
            },
        }
    }
}

impl Hypervisor for Qemu {
    fn name(&self) -> &'static str {
        Binary::NAME
    }

    fn overhead<'a>(&'a self, _: &'a VmSpec) -> BoxFuture<'a, Result<u64>> {
        Box::pin(std::future::ready(Ok(OVERHEAD)))
    }

    fn capabilities<'a>(&'a self, _: &'a VmSpec) -> BoxFuture<'a, Result<Capabilities>> {
        Box::pin(std::future::ready(Ok(Capabilities::default())))
    }

    fn launch<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move {
            let accel = self.resolve(spec.accel, &spec.kernel).await?;
            let vm = launch::launch(&self.binary, spec, accel).await?;
            Ok(Box::new(vm) as Box<dyn Vm>)
        })
    }

    fn adopt<'a>(&'a self, left: &'a LeftVm) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(adopt(left))
    }
}

/// Takes over a QEMU. The program itself is not needed for that.
pub(crate) async fn adopt(left: &LeftVm) -> Result<Box<dyn Vm>> {
    Ok(Box::new(launch::adopt::<Binary>(left).await?))
}
