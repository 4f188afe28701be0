//! `slipway-hollow` as the hypervisor: a program that drives a VM's functions in a guest's place.
//!
//! It runs no guest code and needs no KVM. Everything else of a start is as with `slipway-vmm`: the
//! process and its cage, the control channel, the connections to vfio-user servers, the maps of the
//! guest's memory, and an agent that answers. So the host's side of hundreds of starts can be
//! measured on any machine.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use crate::cache::file_identity;
use crate::files::connect;
use crate::identity::SLIPWAY_HOLLOW;
use crate::launch::{Common, Program};
use crate::process::Launch;
use crate::{
    Accel, BoxFuture, Capabilities, Error, FreePages, Hypervisor, LeftVm, Result, Vm, VmSpec,
    launch,
};

/// Host memory in bytes that a `slipway-hollow` needs beside its guest's memory.
const OVERHEAD: u64 = 32 << 20;

/// The program `slipway-hollow`.
#[derive(Clone, Debug)]
pub struct Hollow(PathBuf);

impl Hollow {
    /// Makes a hypervisor of the program at `path`.
    pub fn new(path: PathBuf) -> Self {
        Self(path)
    }
}

/// Returns the reason why a VM cannot be hollow, or `None` if it can.
pub(crate) fn refused(spec: &VmSpec, accel: Accel) -> Option<&'static str> {
    if accel != Accel::Hollow {
        return Some("slipway-hollow runs no guest code");
    }
    if spec.emulates_devices() {
        return Some("slipway-hollow emulates no devices");
    }
    if spec.free_pages != FreePages::Unreported {
        return Some("slipway-hollow has no guest that reports free pages");
    }
    if spec.restore.is_some() || spec.shared.is_some() || !spec.hot_memory.is_empty() {
        return Some("slipway-hollow has no template, no shared pages and no hot-plug memory");
    }
    None
}

impl Program for Hollow {
    const NAME: &'static str = SLIPWAY_HOLLOW;
    const RECONNECTS: bool = false;
    const WITHOUT_KVM: Accel = Accel::Hollow;

    fn path(&self) -> &Path {
        &self.0
    }

    fn identity(&self) -> io::Result<String> {
        file_identity(&self.0)
    }

    fn check(&self, spec: &VmSpec, accel: Accel) -> Result<()> {
        match refused(spec, accel) {
            None => Ok(()),
            Some(what) => Err(Error::BadSpec { what: what.to_owned() }),
        }
    }

    fn prepare(
        &self,
        spec: &VmSpec,
        _: Accel,
        common: Common,
        launch: &mut Launch,
    ) -> Result<Vec<OsString>> {
        let Common { memory, lease, control, agent, .. } = common;
        if lease.is_some() {
            let what = "slipway-hollow has no memory of a pool: memory = \"kernel\"".to_owned();
            return Err(Error::BadSpec { what });
        }
        let functions = spec.vfio_user_sockets.iter().map(|path| connect(path));
        let functions = functions.collect::<Result<Vec<_>>>()?;
        let functions = functions.into_iter().map(|fd| ("--function", launch.pass(fd)));
        let own = [("--memory", memory), ("--control", control), ("--agent", agent)];
        let all = own.into_iter().chain(functions);
        let words = all.flat_map(|(option, fd)| [option.into(), format!("fd:{fd}").into()]);
        Ok(words.collect())
    }
}

impl Hypervisor for Hollow {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn overhead<'a>(&'a self, _: &'a VmSpec) -> BoxFuture<'a, Result<u64>> {
        Box::pin(std::future::ready(Ok(OVERHEAD)))
    }

    fn capabilities<'a>(&'a self, _: &'a VmSpec) -> BoxFuture<'a, Result<Capabilities>> {
        Box::pin(std::future::ready(Ok(Capabilities::default())))
    }

    fn launch<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move {
            let vm = launch::launch(self, spec, Accel::Hollow).await?;
            Ok(Box::new(vm) as Box<dyn Vm>)
        })
    }

    fn adopt<'a>(&'a self, left: &'a LeftVm) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(adopt(left))
    }
}

/// Takes over a `slipway-hollow`. The program itself is not needed for that.
pub(crate) async fn adopt(left: &LeftVm) -> Result<Box<dyn Vm>> {
    Ok(Box::new(launch::adopt::<Hollow>(left).await?))
}
