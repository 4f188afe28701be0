//! QEMU as a program that is launched.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use super::args::{Passed, build};
use super::find::Binary;
use crate::files::{open_disk, open_socket};
use crate::launch::{Common, Program};
use crate::process::Launch;
use crate::{Accel, Result, VmSpec};

impl Program for Binary {
    const NAME: &'static str = "qemu";
    const RECONNECTS: bool = false;

    fn path(&self) -> &Path {
        &self.path
    }

    fn identity(&self) -> io::Result<String> {
        Ok(self.identity.clone())
    }

    fn check(&self, spec: &VmSpec, _: Accel) -> Result<()> {
        if spec.memory.is_of_pool() {
            let what = "memory = \"pool\" needs slipway-vmm: QEMU's faults cannot be served";
            return Err(crate::Error::BadSpec { what: what.to_owned() });
        }
        Ok(())
    }

    fn prepare(
        &self,
        spec: &VmSpec,
        accel: Accel,
        common: Common,
        launch: &mut Launch,
    ) -> Result<Vec<OsString>> {
        let functions = spec.vfio_user_sockets.iter().map(|path| open_socket(path));
        let functions = functions.collect::<Result<Vec<_>>>()?;
        let disks = spec.disks.iter().map(open_disk).collect::<Result<Vec<_>>>()?;
        let passed = Passed {
            common,
            functions: functions.into_iter().map(|fd| launch.pass(fd)).collect(),
            disks: disks.into_iter().map(|(fd, device)| (launch.pass(fd), device)).collect(),
        };
        Ok(build(spec, accel, &passed))
    }
}
