//! Chooses the VMM of each VM.
//!
//! Another VMM is a module as `native` or `qemu` is, with its `Program` (`launch`): its command
//! line, its descriptors and its `Capabilities`. It speaks QMP, or `qmp` gets a second dialect.
//! Here it has a variant of `VmmChoice` with its word, and a field of `Vmms`, which chooses it and
//! takes over what a record names. It needs a client for vfio-user. The setting `vmm` is parsed
//! here and documented in `docs/operation.md`, "The VMM"; `slipway doctor` shows `Preview`. Tests:
//! a folder as `tests/native`, and `slipway bench vmm` if it is to be compared (`front/bench`,
//! `vmm`).

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

use tokio::sync::OnceCell;

use crate::hollow::{self, Hollow};
use crate::identity::{SLIPWAY_HOLLOW, SLIPWAY_VMM};
use crate::native::{self, SlipwayVmm};
use crate::qemu::{self, Qemu};
use crate::{
    Accel, AccelChoice, AccelReport, BoxFuture, Capabilities, Error, Hypervisor, LeftVm, Result,
    Spare, SpareSpec, Vm, VmSpec, accel, no_spares,
};

/// The VMM that a node is to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VmmChoice {
    /// Slipway's own VMM where guests run on KVM with it, QEMU elsewhere and for what only QEMU can
    /// do.
    #[default]
    Auto,
    /// Slipway's own VMM, or an error.
    Native,
    /// QEMU, or an error.
    Qemu,
}

impl FromStr for VmmChoice {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "" | "auto" => Ok(Self::Auto),
            "native" => Ok(Self::Native),
            "qemu" => Ok(Self::Qemu),
            _ => Err(format!("\"{word}\" is no VMM: auto, native or qemu")),
        }
    }
}

impl fmt::Display for VmmChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

impl VmmChoice {
    fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Native => "native",
            Self::Qemu => "qemu",
        }
    }
}

/// The VMMs of a node. Each VM gets one of them, by the node's [`VmmChoice`] and by what its spec
/// asks for. A VM is taken over with the VMM that its record names, whatever the choice is now.
///
/// QEMU is looked for when a VM needs it, so a node on which none does needs no QEMU.
#[derive(Debug)]
pub struct Vmms {
    choice: VmmChoice,
    /// Slipway's own VMM, or the reason why there is none.
    native: Result<SlipwayVmm, String>,
    qemu: OnceCell<Qemu>,
    /// The program that runs no guest, or the reason why there is none.
    hollow: Result<Hollow, String>,
    cache: PathBuf,
    /// The combinations of VMM and accelerator that the log has.
    logged: Mutex<BTreeSet<String>>,
}

/// The VMM that sandboxes get, as far as it is known without booting a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preview {
    /// The name of the hypervisor: `slipway-vmm` or `qemu`.
    pub vmm: &'static str,
    /// The reason, as a clause.
    pub reason: String,
}

impl Vmms {
    /// Makes the VMMs of a node. `program` is the path of `slipway-vmm`, or the reason why there is
    /// none. Results of examinations and probes are kept in the directory `cache`, which is made if
    /// it does not exist.
    pub fn new(choice: VmmChoice, program: Result<PathBuf, String>, cache: &Path) -> Self {
        Self {
            choice,
            native: program.map(|path| SlipwayVmm::new(path, cache)),
            qemu: OnceCell::new(),
            hollow: Err("no program was named".to_owned()),
            cache: cache.to_owned(),
            logged: Mutex::default(),
        }
    }

    /// Sets the path of `slipway-hollow`, or the reason why there is none, for VMs of
    /// [`Accel::Hollow`].
    #[must_use]
    pub fn with_hollow(self, program: Result<PathBuf, String>) -> Self {
        Self { hollow: program.map(Hollow::new), ..self }
    }

    /// Returns the VMM that sandboxes get which ask for nothing special, and the reason, without
    /// booting a guest.
    pub fn preview(&self) -> Preview {
        let qemu = |reason: String| Preview { vmm: "qemu", reason };
        let native = |reason: &str| Preview { vmm: SLIPWAY_VMM, reason: reason.to_owned() };
        match (self.choice, &self.native) {
            (VmmChoice::Qemu, _) => qemu("it was asked for".into()),
            (VmmChoice::Native, _) => native("it was asked for"),
            (VmmChoice::Auto, Err(reason)) => qemu(reason.clone()),
            (VmmChoice::Auto, Ok(vmm)) => match (accel::probe_without_boot(), vmm.known()) {
                (Err(reason), _) => qemu(format!("slipway-vmm needs KVM: {reason}")),
                (Ok(()), None) => native("the first run proves with a boot that KVM does"),
                (Ok(()), Some(AccelReport { accel: Accel::Kvm, reason })) => native(&reason),
                (Ok(()), Some(report)) => qemu(format!("with slipway-vmm {}", report.reason)),
            },
        }
    }

    /// Checks that the VMM which sandboxes get is installed.
    ///
    /// # Errors
    /// [`Error::NoQemu`], [`Error::NoSlipwayVmm`].
    pub async fn check(&self) -> Result<()> {
        match self.preview().vmm {
            "qemu" => self.qemu().await.map(drop),
            _ => self.native().map(drop),
        }
    }

    /// Returns Slipway's own VMM.
    ///
    /// # Errors
    /// [`Error::NoSlipwayVmm`].
    pub fn native(&self) -> Result<&SlipwayVmm> {
        self.native.as_ref().map_err(|reason| Error::NoSlipwayVmm { reason: reason.clone() })
    }

    /// Returns QEMU, which is looked for by the first call that finds one.
    ///
    /// # Errors
    /// The errors of [`Qemu::find`].
    pub async fn qemu(&self) -> Result<&Qemu> {
        let find = || {
            let cache = self.cache.clone();
            crate::files::elsewhere(move || Qemu::find(&cache))
        };
        self.qemu.get_or_try_init(find).await
    }

    /// Returns the VMM for a VM.
    async fn choose(&self, spec: &VmSpec) -> Result<&dyn Hypervisor> {
        if spec.accel == AccelChoice::Only(Accel::Hollow) {
            let found = self.hollow.as_ref();
            let missing = |reason: &String| Error::NoSlipwayHollow { reason: reason.clone() };
            return found.map(|hollow| hollow as &dyn Hypervisor).map_err(missing);
        }
        let native = match self.choice {
            VmmChoice::Qemu => None,
            VmmChoice::Native => Some(self.native()?),
            VmmChoice::Auto => self.native_for(spec).await?,
        };
        if let Some(native) = native {
            if spec.accel == AccelChoice::Auto {
                let asked = AccelReport::kvm("it was asked for");
                let report = match self.choice {
                    VmmChoice::Native => &asked,
                    _ => native.probe(&spec.kernel).await,
                };
                self.log(native, report);
            }
            return Ok(native);
        }
        let qemu = self.qemu().await?;
        if spec.accel == AccelChoice::Auto {
            self.log(qemu, qemu.probe(&spec.kernel).await);
        }
        Ok(qemu)
    }

    /// Returns Slipway's own VMM if it can run the VM.
    async fn native_for(&self, spec: &VmSpec) -> Result<Option<&SlipwayVmm>> {
        let Ok(native) = &self.native else { return Ok(None) };
        if spec.emulates_devices() {
            return Ok(None);
        }
        let runs = match spec.accel {
            AccelChoice::Auto => native.probe(&spec.kernel).await.accel == Accel::Kvm,
            AccelChoice::Only(Accel::Tcg | Accel::Hollow) => false,
            AccelChoice::Only(Accel::Kvm) => match accel::probe_without_boot() {
                Ok(()) => true,
                Err(reason) => return Err(Error::NoKvm { reason }),
            },
        };
        Ok(runs.then_some(native))
    }

    /// Logs a choice that was not made before.
    fn log(&self, vmm: &dyn Hypervisor, report: &AccelReport) {
        let (vmm, accel, reason) = (vmm.name(), report.accel, &report.reason);
        let mut logged = self.logged.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.insert(format!("{vmm} {accel}")) {
            tracing::info!(%accel, vmm, %reason, "accelerator chosen");
        }
    }
}

impl Hypervisor for Vmms {
    fn name(&self) -> &'static str {
        self.choice.word()
    }

    fn overhead<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<u64>> {
        Box::pin(async move { self.choose(spec).await?.overhead(spec).await })
    }

    fn capabilities<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<Capabilities>> {
        Box::pin(async move { self.choose(spec).await?.capabilities(spec).await })
    }

    fn launch<'a>(&'a self, spec: &'a VmSpec) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move { self.choose(spec).await?.launch(spec).await })
    }

    fn launch_spare<'a>(&'a self, spec: &'a SpareSpec) -> BoxFuture<'a, Result<Spare>> {
        Box::pin(async move {
            let vmm = self.preview().vmm;
            match vmm {
                SLIPWAY_VMM => self.native()?.launch_spare(spec).await,
                _ => no_spares(),
            }
        })
    }

    fn launch_in<'a>(
        &'a self,
        spare: Spare,
        spec: &'a VmSpec,
    ) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        Box::pin(async move { self.choose(spec).await?.launch_in(spare, spec).await })
    }

    fn adopt<'a>(&'a self, left: &'a LeftVm) -> BoxFuture<'a, Result<Box<dyn Vm>>> {
        match left.record.hypervisor.as_str() {
            SLIPWAY_VMM => Box::pin(native::adopt(left)),
            SLIPWAY_HOLLOW => Box::pin(hollow::adopt(left)),
            _ => Box::pin(qemu::adopt(left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::tests::spec;
    use crate::{DiskModel, EmulatedDisk};

    /// The identity of the kernel that the tests name, which exists on any Linux.
    const KERNEL: &str = "/proc/version";

    fn vmms(choice: VmmChoice, program: Result<PathBuf, String>, cache: &Path) -> Vmms {
        Vmms::new(choice, program, cache)
    }

    /// Returns the name of the VMM that a spec gets, or the error.
    async fn chosen(vmms: &Vmms, spec: &VmSpec) -> Result<&'static str> {
        vmms.choose(spec).await.map(|vmm| vmm.name())
    }

    fn only(accel: Accel) -> VmSpec {
        VmSpec { accel: AccelChoice::Only(accel), kernel: KERNEL.into(), ..spec() }
    }

    #[test]
    fn words_are_read_as_they_are_written() {
        for choice in [VmmChoice::Auto, VmmChoice::Native, VmmChoice::Qemu] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("".parse(), Ok(VmmChoice::Auto));
        let refused = "kvm".parse::<VmmChoice>().unwrap_err();
        assert_eq!(refused, "\"kvm\" is no VMM: auto, native or qemu");
    }

    #[tokio::test]
    async fn what_was_asked_for_is_used_or_refused() {
        let directory = tempfile::tempdir().unwrap();
        let program = Ok("/nowhere/slipway-vmm".into());
        let native = vmms(VmmChoice::Native, program, directory.path());
        assert_eq!(native.preview().vmm, "slipway-vmm");
        assert_eq!(chosen(&native, &only(Accel::Kvm)).await.unwrap(), "slipway-vmm");
        let error = native.launch(&only(Accel::Tcg)).await.err().expect("no emulation");
        assert!(matches!(error, Error::BadSpec { .. }), "{error}");
        let absent = vmms(VmmChoice::Native, Err("it is not there".into()), directory.path());
        for error in [
            absent.check().await.unwrap_err(),
            chosen(&absent, &only(Accel::Kvm)).await.unwrap_err(),
        ] {
            assert!(matches!(error, Error::NoSlipwayVmm { .. }), "{error}");
            assert!(error.to_string().contains("it is not there"), "{error}");
        }
    }

    #[tokio::test]
    async fn qemu_is_looked_for_only_where_it_is_needed() {
        let directory = tempfile::tempdir().unwrap();
        let program = Ok("/nowhere/slipway-vmm".into());
        let auto = vmms(VmmChoice::Auto, program, directory.path());
        let kvm = chosen(&auto, &only(Accel::Kvm)).await;
        match accel::probe_without_boot() {
            Ok(()) => assert_eq!(kvm.unwrap(), "slipway-vmm"),
            Err(_) => assert!(matches!(kvm, Err(Error::NoKvm { .. }))),
        }
        assert!(!auto.qemu.initialized());
        // Slipway's own VMM has neither of these.
        let model = DiskModel::Nvme;
        let disks = vec![EmulatedDisk { model, path: "/d".into(), read_only: false }];
        for spec in [only(Accel::Tcg), VmSpec { disks, ..only(Accel::Kvm) }] {
            match chosen(&auto, &spec).await {
                Ok(name) => assert_eq!(name, "qemu"),
                Err(error) => assert!(matches!(error, Error::NoQemu { .. }), "{error}"),
            }
        }
    }

    #[tokio::test]
    async fn a_guest_without_a_processor_is_for_who_asks_for_it() {
        let directory = tempfile::tempdir().unwrap();
        let native = || vmms(VmmChoice::Native, Ok(KERNEL.into()), directory.path());
        let without = chosen(&native(), &only(Accel::Hollow)).await.unwrap_err();
        assert!(matches!(without, Error::NoSlipwayHollow { .. }), "{without}");
        let with = native().with_hollow(Ok("/nowhere/slipway-hollow".into()));
        assert_eq!(chosen(&with, &only(Accel::Hollow)).await.unwrap(), "slipway-hollow");
        assert_eq!(chosen(&with, &only(Accel::Kvm)).await.unwrap(), "slipway-vmm");
        let shared = VmSpec { vfio_user_sockets: Vec::new(), ..only(Accel::Tcg) };
        assert!(hollow::refused(&shared, Accel::Tcg).is_some());
    }

    #[test]
    fn the_preview_has_the_reason() {
        let directory = tempfile::tempdir().unwrap();
        let without = vmms(VmmChoice::Auto, Err("no slipway-vmm".into()), directory.path());
        let expected = Preview { vmm: "qemu", reason: "no slipway-vmm".into() };
        assert_eq!(without.preview(), expected);
        let with = vmms(VmmChoice::Auto, Ok(KERNEL.into()), directory.path()).preview();
        match accel::probe_without_boot() {
            Ok(()) => assert_eq!(with.vmm, "slipway-vmm"),
            Err(reason) => {
                assert_eq!(with.vmm, "qemu");
                assert!(with.reason.ends_with(&reason), "{}", with.reason);
            }
        }
    }
}
