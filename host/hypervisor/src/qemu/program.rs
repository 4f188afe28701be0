//! QEMU as a program that is launched.

use std::ffi::OsString;
use std::io;
use std::path::Path;

use super::args::{Passed, build};
use super::find::Binary;
use crate::files::{open_disk, open_socket, open_tap};
use crate::launch::{Common, Program};
use crate::process::Launch;
use crate::{Accel, CpuTemplate, Error, FreePages, Result, VmSpec};

impl Program for Binary {
    const NAME: &'static str = "qemu";
    const RECONNECTS: bool = false;
    const WITHOUT_KVM: Accel = Accel::Tcg;

    fn path(&self) -> &Path {
        &self.path
    }

    fn identity(&self) -> io::Result<String> {
        Ok(self.identity.clone())
    }

    fn check(&self, spec: &VmSpec, _: Accel) -> Result<()> {
        match unsupported(spec) {
            Some(what) => Err(Error::BadSpec { what: what.to_owned() }),
            None => Ok(()),
        }
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
        let tap = spec.nic.as_ref().map(open_tap).transpose()?;
        let passed = Passed {
            common,
            functions: functions.into_iter().map(|fd| launch.pass(fd)).collect(),
            disks: disks.into_iter().map(|(fd, device)| (launch.pass(fd), device)).collect(),
            tap: tap.map(|fd| launch.pass(fd)),
        };
        Ok(build(spec, accel, &passed))
    }
}

/// Returns what a spec has that QEMU cannot do.
fn unsupported(spec: &VmSpec) -> Option<&'static str> {
    if spec.memory.is_of_pool() {
        return Some("memory = \"pool\" needs slipway-vmm: QEMU's faults cannot be served");
    }
    if spec.cpu_template != CpuTemplate::Host {
        return Some(
            "cpu_template needs slipway-vmm, and so KVM: QEMU's guests see the host's CPU",
        );
    }
    if spec.restore.is_some() {
        return Some("templates need slipway-vmm, and so KVM: QEMU's machine is another one");
    }
    if !spec.hot_memory.is_empty() {
        return Some("hot-plug memory needs slipway-vmm: QEMU's is not driven");
    }
    if spec.free_pages != FreePages::Unreported {
        return Some(
            "free page reporting needs slipway-vmm: QEMU's holes are larger than its cage allows",
        );
    }
    let shared = "shared pages need slipway-vmm: QEMU is not given any";
    spec.shared.is_some().then_some(shared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::tests::pages;
    use crate::spec::tests::spec;

    #[test]
    fn what_only_slipway_vmm_has_is_refused() {
        assert_eq!(unsupported(&spec()), None);
        let shared = VmSpec { shared: Some(pages(b"image")), ..spec() };
        assert!(unsupported(&shared).is_some_and(|what| what.contains("need slipway-vmm")));
        let hot_memory = vec![crate::HotRegion { bytes: 128 << 20, node: 1 }];
        let hot = VmSpec { hot_memory, ..spec() };
        assert!(unsupported(&hot).is_some_and(|what| what.contains("needs slipway-vmm")));
        let reports = VmSpec { free_pages: FreePages::GivenBack, ..spec() };
        assert!(unsupported(&reports).is_some_and(|what| what.contains("needs slipway-vmm")));
        let fork =
            VmSpec { restore: Some(std::sync::Arc::new(tempfile::tempfile().unwrap())), ..spec() };
        let level = VmSpec { cpu_template: "x86-64-v2".parse().unwrap(), ..spec() };
        assert!(unsupported(&level).is_some_and(|what| what.contains("cpu_template needs")));
        assert!(unsupported(&fork).is_some_and(|what| what.contains("need slipway-vmm")));
    }
}
