//! Finds the accelerator that guests can run on, and the reason.
//!
//! The presence of `/dev/kvm` proves little: there are machines whose KVM is itself software and
//! kills a stock kernel at the first instruction that it lacks. So there are three checks, the
//! cheap ones first, each of which can rule KVM out:
//!
//! 1. Does the CPU have VT-x or AMD-V (`vmx` or `svm` in `/proc/cpuinfo`)?
//! 2. Does `/dev/kvm` open, and does it support the only API version?
//! 3. Does the guest kernel really boot on it? Checked once per boot, kernel and VMM, see
//!    [`SlipwayVmm::probe`](crate::native::SlipwayVmm::probe) and
//!    [`Qemu::probe`](crate::qemu::Qemu::probe).

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The KVM device.
pub const KVM_DEVICE: &str = "/dev/kvm";

/// `KVM_API_VERSION` of *linux/kvm.h*: the only stable version.
const KVM_API_VERSION: i32 = 12;

/// `KVM_GET_API_VERSION`: `_IO(0xAE, 0x00)`.
const KVM_GET_API_VERSION: libc::c_ulong = 0xAE00;

/// The means by which a guest's instructions are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accel {
    /// The CPU itself, through KVM.
    Kvm,
    /// QEMU's software emulation.
    Tcg,
    /// No processor: a program drives the functions in a guest's place, for measurements.
    Hollow,
}

/// Returns whether QEMU's software emulation is this host's processor: its signature in CPUID leaf
/// 0x4000_0000. `slipway-vmm` looks for itself, and says why in its `cpuid`.
pub(crate) fn is_emulated() -> bool {
    let leaf = std::arch::x86_64::__cpuid(0x4000_0000);
    [leaf.ebx, leaf.ecx, leaf.edx].map(u32::to_le_bytes).as_flattened() == b"TCGTCGTCGTCG"
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
            Self::Hollow => "hollow",
        })
    }
}

/// The accelerator that a VM is to use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccelChoice {
    /// KVM where it works, software emulation elsewhere.
    #[default]
    Auto,
    /// This accelerator, or an error.
    Only(Accel),
}

impl FromStr for AccelChoice {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        match word {
            "" | "auto" => Ok(Self::Auto),
            "kvm" => Ok(Self::Only(Accel::Kvm)),
            "tcg" => Ok(Self::Only(Accel::Tcg)),
            "hollow" => Ok(Self::Only(Accel::Hollow)),
            _ => Err(format!("\"{word}\" is no accelerator: auto, kvm, tcg or hollow")),
        }
    }
}

/// The result of a probe, for `doctor` and for logs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccelReport {
    /// The accelerator that [`AccelChoice::Auto`] selects on this machine.
    pub accel: Accel,
    /// The reason, as a clause: `the CPU has neither VT-x nor AMD-V`.
    pub reason: String,
}

impl AccelReport {
    pub(crate) fn tcg(reason: impl Into<String>) -> Self {
        Self { accel: Accel::Tcg, reason: reason.into() }
    }

    pub(crate) fn kvm(reason: impl Into<String>) -> Self {
        Self { accel: Accel::Kvm, reason: reason.into() }
    }
}

impl fmt::Display for AccelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.accel {
            Accel::Kvm => write!(f, "KVM: {}", self.reason),
            Accel::Tcg => write!(f, "software emulation: {}", self.reason),
            Accel::Hollow => write!(f, "hollow: {}", self.reason),
        }
    }
}

/// Does the checks that need no boot. Returns the reason as `Err` if KVM is ruled out; after `Ok`,
/// only a real boot can tell.
pub fn probe_without_boot() -> Result<(), String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !has_virtualisation(&cpuinfo) {
        let device = if fs::exists(KVM_DEVICE).unwrap_or(false) {
            format!(" ({KVM_DEVICE} is there, but what stands behind it is software)")
        } else {
            String::new()
        };
        return Err(format!("the CPU has neither VT-x nor AMD-V{device}"));
    }
    probe_device()
}

/// Checks that the KVM device opens and answers. Returns the reason as `Err` if it does not.
pub(crate) fn probe_device() -> Result<(), String> {
    let kvm = open_kvm().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            format!("{KVM_DEVICE} does not exist: load kvm_intel or kvm_amd")
        }
        _ => format!("{KVM_DEVICE} cannot be opened: {error}"),
    })?;
    match api_version(&kvm) {
        Ok(KVM_API_VERSION) => Ok(()),
        Ok(other) => Err(format!("{KVM_DEVICE} speaks API version {other}, not {KVM_API_VERSION}")),
        Err(error) => Err(format!("{KVM_DEVICE} does not answer like KVM: {error}")),
    }
}

/// Opens the KVM device.
pub(crate) fn open_kvm() -> io::Result<OwnedFd> {
    Ok(OpenOptions::new().read(true).write(true).open(KVM_DEVICE)?.into())
}

fn api_version(kvm: &OwnedFd) -> io::Result<i32> {
    // SAFETY: KVM_GET_API_VERSION takes no argument and touches no memory; on a descriptor of
    // anything else it is an error.
    let version = unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_GET_API_VERSION as _, 0) };
    if version < 0 { Err(io::Error::last_os_error()) } else { Ok(version) }
}

/// Returns whether a flags line of `/proc/cpuinfo` has VT-x or AMD-V.
fn has_virtualisation(cpuinfo: &str) -> bool {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(key, _)| key.trim() == "flags")
        .flat_map(|(_, flags)| flags.split_ascii_whitespace())
        .any(|flag| flag == "vmx" || flag == "svm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accelerators_are_read_as_they_are_written() {
        for accel in [Accel::Kvm, Accel::Tcg, Accel::Hollow] {
            assert_eq!(accel.to_string().parse(), Ok(AccelChoice::Only(accel)));
        }
        assert_eq!("auto".parse(), Ok(AccelChoice::Auto));
        assert_eq!("".parse(), Ok(AccelChoice::Auto));
        assert!("qemu".parse::<AccelChoice>().is_err());
    }

    #[test]
    fn virtualisation_is_read_from_whole_flags() {
        assert!(has_virtualisation("processor\t: 0\nflags\t\t: fpu vmx sse\n"));
        assert!(has_virtualisation("flags\t\t: fpu svm\n"));
        // Neither flags that only begin with the name nor words of other lines count.
        assert!(!has_virtualisation("flags : fpu svm_lock\nvmx flags : ept vmx\n"));
        assert!(!has_virtualisation("model name : vmx\n"));
        assert!(!has_virtualisation(""));
    }

    #[test]
    fn a_file_that_is_no_kvm_is_told_apart() {
        let file: OwnedFd = fs::File::open("/dev/null").unwrap().into();
        assert!(api_version(&file).is_err());
    }

    #[test]
    fn a_refusal_has_a_reason() {
        if let Err(reason) = probe_without_boot() {
            assert!(!reason.is_empty());
        }
    }
}
