//! Tests whether the guest kernel boots on KVM, by booting it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::find::{Binary, file_identity, read_cached, write_cached};
use super::launch::launch;
use crate::{
    Accel, AccelChoice, AccelReport, GuestMemory, ShutdownReason, Vm, VmSpec, accel, identity,
};

/// The time that the boot may take. A kernel that works on KVM needs well under a second. The rest
/// is for hosts that are busy or virtual machines themselves: a verdict holds until the next boot,
/// so KVM must not lose to a moment of load. Only on a CPU that claims VT-x or AMD-V without
/// supporting it does the probe take this long.
const BOOT_DEADLINE: Duration = Duration::from_secs(30);

/// An empty archive: the end marker of the newc format, padded to four bytes.
const EMPTY_INITRAMFS: &[u8] = b"07070100000000000000000000000000000000000000010000000000000000\
00000000000000000000000000000000000000000000000b00000000TRAILER!!!\0\0\0\0";

/// The outcome of a boot, and the key of the configuration that it is valid for.
#[derive(Serialize, Deserialize)]
struct Cached {
    key: String,
    report: AccelReport,
}

pub(super) async fn probe(binary: &Binary, kernel: &Path, cache: &Path) -> AccelReport {
    if let Err(reason) = accel::probe_without_boot() {
        return AccelReport::tcg(reason);
    }
    let Some(key) = key(binary, kernel) else {
        return AccelReport::tcg("the guest kernel cannot be read, so KVM was not tried");
    };
    let file = cache.join("accel.json");
    if let Some(cached) = read_cached::<Cached>(&file).filter(|cached| cached.key == key) {
        return cached.report;
    }
    let report = match try_boot(binary, kernel, cache).await {
        Ok(()) => AccelReport::kvm("the guest kernel boots on it"),
        Err(reason) => AccelReport::tcg(format!("the guest kernel does not boot on KVM: {reason}")),
    };
    write_cached(&file, &Cached { key, report: report.clone() });
    report
}

fn key(binary: &Binary, kernel: &Path) -> Option<String> {
    let boot = identity::boot_id().ok()?;
    Some(format!("{boot} {} {}", file_identity(kernel).ok()?, binary.identity()))
}

/// Boots the kernel with an empty initramfs. The kernel finds no root, panics and resets: by then
/// it has gone through all of its start-up, and the reset reports that.
async fn try_boot(binary: &Binary, kernel: &Path, cache: &Path) -> Result<(), String> {
    let directory = cache.join(format!("probe-{}", std::process::id()));
    fs::create_dir_all(&directory).map_err(|error| error.to_string())?;
    let result = boot_once(binary, kernel, &directory).await;
    let _ = fs::remove_dir_all(&directory);
    result
}

async fn boot_once(binary: &Binary, kernel: &Path, directory: &Path) -> Result<(), String> {
    let initramfs = directory.join("empty.cpio");
    fs::write(&initramfs, EMPTY_INITRAMFS).map_err(|error| error.to_string())?;
    let spec = VmSpec {
        name: "probe".into(),
        memory: GuestMemory::new(256 << 20).map_err(|error| error.to_string())?,
        cpus: 1,
        kernel: kernel.to_owned(),
        initramfs,
        cmdline: Vec::new(),
        agent_socket: directory.join("agent"),
        vfio_user_sockets: Vec::new(),
        disks: Vec::new(),
        console_log: directory.join("console"),
        run_dir: directory.to_owned(),
        credentials: None,
        cgroup_procs: Vec::new(),
        accel: AccelChoice::Only(Accel::Kvm),
    };
    let boot = async {
        let vm =
            launch(binary.path(), &spec, Accel::Kvm).await.map_err(|error| error.to_string())?;
        Ok::<_, String>(vm.wait().await)
    };
    match tokio::time::timeout(BOOT_DEADLINE, boot).await {
        Ok(Ok(exit)) if exit.reason == Some(ShutdownReason::GuestReset) => Ok(()),
        Ok(Ok(exit)) => Err(format!("the VM {exit}")),
        Ok(Err(reason)) => Err(reason),
        Err(_) => Err(format!("it is not through after {} s", BOOT_DEADLINE.as_secs())),
    }
}
