//! Tests whether the guest kernel boots on KVM, by booting it.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use serde::{Deserialize, Serialize};
use tokio::sync::OnceCell;

use crate::cache::{file_identity, read_cached, write_cached};
use crate::launch::{Program, launch};
use crate::{
    Accel, AccelChoice, AccelReport, CpuTemplate, FreePages, GuestMemory, ShutdownReason, Vm,
    VmSpec, accel, identity,
};

/// The time that the boot may take, unless `SLIPWAY_PROBE_TIMEOUT_S` gives another in seconds. A
/// kernel that works on KVM needs well under a second. The rest is for hosts that are busy or
/// virtual machines themselves: a verdict holds until the next boot, so KVM must not lose to a
/// moment of load. Only on a CPU that claims VT-x or AMD-V without supporting it does the probe
/// take this long.
const BOOT_DEADLINE: Duration = Duration::from_secs(30);

fn boot_deadline() -> Duration {
    let seconds = std::env::var("SLIPWAY_PROBE_TIMEOUT_S").ok();
    seconds.and_then(|text| text.parse().ok()).map_or(BOOT_DEADLINE, Duration::from_secs)
}

/// An empty archive: the end marker of the newc format, padded to four bytes.
const EMPTY_INITRAMFS: &[u8] = b"07070100000000000000000000000000000000000000010000000000000000\
00000000000000000000000000000000000000000000000b00000000TRAILER!!!\0\0\0\0";

/// The configuration for which the outcome of a boot is valid.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
struct Tried {
    /// The host's boot.
    boot: String,
    /// The identity of the VMM's program.
    program: String,
    /// The identity of the guest kernel.
    kernel: String,
}

impl Tried {
    /// Returns the present configuration of the host, of `program` and of `kernel`.
    ///
    /// # Errors
    /// A clause that names what cannot be read.
    fn now<P: Program>(program: &P, kernel: &Path) -> Result<Self, String> {
        let unread = |what: &str, path: &Path, error: &io::Error| {
            format!("{what} {} cannot be read: {error}", path.display())
        };
        Ok(Self {
            boot: identity::boot_id().map_err(|error| error.to_string())?,
            program: program
                .identity()
                .map_err(|error| unread("the VMM", program.path(), &error))?,
            kernel: file_identity(kernel)
                .map_err(|error| unread("the guest kernel", kernel, &error))?,
        })
    }
}

/// The outcome of a boot, as it is kept in a file.
#[derive(Serialize, Deserialize)]
struct Cached {
    #[serde(flatten)]
    tried: Tried,
    report: AccelReport,
}

/// The probe of one VMM's program: its outcome, once it is known.
#[derive(Debug)]
pub(crate) struct Probe {
    cache: PathBuf,
    outcome: OnceCell<AccelReport>,
}

impl Probe {
    /// Makes a probe that keeps its outcome in the directory `cache`.
    pub(crate) fn new(cache: &Path) -> Self {
        Self { cache: cache.to_owned(), outcome: OnceCell::new() }
    }

    /// Returns the accelerator for guests of `program`, and the reason. Boots `kernel` on KVM for a
    /// moment if no cheaper check rules KVM out and the outcome of such a boot is not known.
    pub(crate) async fn report<P: Program>(&self, program: &P, kernel: &Path) -> &AccelReport {
        let find_out = || async {
            let report = self.find_out(program, kernel).await;
            tracing::info!(vmm = P::NAME, %report, "KVM probed");
            report
        };
        self.outcome.get_or_init(find_out).await
    }

    /// Returns the outcome of the last boot with `program`, whatever the kernel was. Returns `None`
    /// if there was none since the host started.
    pub(crate) fn known<P: Program>(&self, program: &P) -> Option<AccelReport> {
        let Cached { tried, report } = read_cached(&self.file::<P>())?;
        let same =
            tried.boot == identity::boot_id().ok()? && tried.program == program.identity().ok()?;
        same.then_some(report)
    }

    fn file<P: Program>(&self) -> PathBuf {
        self.cache.join(format!("accel-{}.json", P::NAME))
    }

    async fn find_out<P: Program>(&self, program: &P, kernel: &Path) -> AccelReport {
        if let Err(reason) = accel::probe_without_boot() {
            return AccelReport::tcg(reason);
        }
        let tried = match Tried::now(program, kernel) {
            Ok(tried) => tried,
            Err(reason) => return AccelReport::tcg(format!("KVM was not tried: {reason}")),
        };
        let file = self.file::<P>();
        if let Some(cached) = read_cached::<Cached>(&file).filter(|cached| cached.tried == tried) {
            return cached.report;
        }
        let report = match try_boot(program, kernel, &self.cache).await {
            Ok(()) => AccelReport::kvm("the guest kernel boots on it"),
            Err(reason) => {
                AccelReport::tcg(format!("the guest kernel does not boot on KVM: {reason}"))
            }
        };
        let cached = Cached { tried, report };
        write_cached(&file, &cached);
        cached.report
    }
}

/// Boots the kernel with an empty initramfs. The kernel finds no root, panics and resets: by then
/// it has gone through all of its start-up, and the reset reports that.
async fn try_boot<P: Program>(program: &P, kernel: &Path, cache: &Path) -> Result<(), String> {
    let directory = cache.join(format!("probe-{}-{}", P::NAME, std::process::id()));
    fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
    let result = boot_once(program, kernel, &directory).await;
    let _ = fs::remove_dir_all(&directory);
    result
}

async fn boot_once<P: Program>(program: &P, kernel: &Path, directory: &Path) -> Result<(), String> {
    let initramfs = directory.join("empty.cpio");
    fs::write(&initramfs, EMPTY_INITRAMFS).map_err(|error| error.to_string())?;
    let spec = VmSpec {
        name: "probe".into(),
        memory: GuestMemory::new(256 << 20).map_err(|error| error.to_string())?,
        hot_memory: Vec::new(),
        free_pages: FreePages::Unreported,
        shared: None,
        restore: None,
        cpus: 1,
        cpu_template: CpuTemplate::Host,
        kernel: kernel.to_owned(),
        initramfs,
        cmdline: Vec::new(),
        agent_socket: directory.join("agent"),
        vfio_user_sockets: Vec::new(),
        plug_slots: 0,
        plug_cpus: 0,
        disks: Vec::new(),
        nic: None,
        assigned: None,
        console_log: directory.join("console"),
        run_dir: directory.to_owned(),
        credentials: None,
        cgroup_procs: Vec::new(),
        accel: AccelChoice::Only(Accel::Kvm),
    };
    let boot = async {
        let vm = launch(program, &spec, Accel::Kvm).await.map_err(|error| error.to_string())?;
        Ok::<_, String>(vm.wait().await)
    };
    let deadline = boot_deadline();
    match tokio::time::timeout(deadline, boot).await {
        Ok(Ok(exit)) if exit.reason == Some(ShutdownReason::GuestReset) => Ok(()),
        Ok(Ok(exit)) => Err(format!("the VM {exit}")),
        Ok(Err(reason)) => Err(reason),
        Err(_) => Err(format!("it has not reset after {} s", deadline.as_secs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hollow::Hollow;

    fn unreadable(program: &Path, kernel: &Path) -> String {
        Tried::now(&Hollow::new(program.to_owned()), kernel).err().expect("a file is missing")
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let [program, kernel] = ["program", "kernel"].map(|name| directory.path().join(name));
        fs::write(&program, "").unwrap();
        let error = unreadable(&program, &kernel);
        let begin = format!("the guest kernel {} cannot be read: ", kernel.display());
        assert!(error.starts_with(&begin), "{error}");
        fs::rename(&program, &kernel).unwrap();
        let error = unreadable(&program, &kernel);
        let begin = format!("the VMM {} cannot be read: ", program.display());
        assert!(error.starts_with(&begin), "{error}");
    }

    #[test]
    fn an_outcome_is_known_for_the_same_program_and_boot_and_any_kernel() {
        let directory = tempfile::tempdir().unwrap();
        let [program, other, kernel] =
            ["program", "other", "kernel"].map(|name| directory.path().join(name));
        for file in [&program, &other, &kernel] {
            fs::write(file, "").unwrap();
        }
        let (program, other) = (Hollow::new(program), Hollow::new(other));
        let probe = Probe::new(directory.path());
        assert_eq!(probe.known(&program), None);
        let keep = |tried| {
            let report = AccelReport::kvm("the guest kernel boots on it");
            write_cached(&probe.file::<Hollow>(), &Cached { tried, report });
        };
        keep(Tried::now(&program, &kernel).unwrap());
        assert_eq!(probe.known(&program).map(|report| report.accel), Some(Accel::Kvm));
        assert_eq!(probe.known(&other), None);
        let boot = "another boot".to_owned();
        keep(Tried { boot, ..Tried::now(&program, &kernel).unwrap() });
        assert_eq!(probe.known(&program), None);
    }
}
