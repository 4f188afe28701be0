//! Boots one VM on KVM, as a sandbox is booted, and measures the time to its agent:
//! `boot agent|init|fork|spare|memory q35|PROGRAM KERNEL INITRAMFS CPUS`.
//!
//! `q35` is QEMU; PROGRAM is a `slipway-vmm`. With `agent` the microseconds from the start of the
//! VMM's process to the first byte from the agent's port are printed, and the VM is killed. With
//! `init` the guest has to end its VM by itself. With `fork` the VM is saved, and others begin with
//! it (`fork`); with `spare` they do so in VMMs that were started before; with `memory` the memory
//! that they take is printed (`memory`). Status: 3 if a guest took longer than [`LIMIT`] allows.
#![allow(clippy::unwrap_used)] // A measurement that fails has nothing to say.

mod agent;
mod fork;
mod memory;

use std::path::{Path, PathBuf};
use std::time::Duration;

use slipway_hypervisor::native::SlipwayVmm;
use slipway_hypervisor::qemu::Qemu;
use slipway_hypervisor::{
    Accel, AccelChoice, CpuTemplate, Credentials, FreePages, GuestMemory, Hypervisor, VmSpec,
};

/// The time that a guest may take for each of its CPUs: twice what QEMU's takes, in virtual time. A
/// guest that hangs is slow to emulate.
const LIMIT: Duration = Duration::from_secs(4);

/// The number of forks that are measured.
const FORKS: usize = 6;

const USAGE: &str = "usage: boot agent|init|fork|spare|memory q35|PROGRAM KERNEL INITRAMFS CPUS";

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    let [until, vmm, kernel, initramfs, cpus] = words.as_slice() else { panic!("{USAGE}") };
    let directory = std::env::temp_dir().join(format!("slipway-boot-{}", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    let cpus = cpus.to_str().unwrap().parse().unwrap();
    let spec = spec(&directory, Path::new(kernel), Path::new(initramfs), cpus);
    let hypervisor = hypervisor(Path::new(vmm), &directory);
    let limit = LIMIT * cpus;
    if let Some(what @ ("fork" | "spare" | "memory")) = until.to_str() {
        let measured = match what {
            "memory" => memory::measure(&*hypervisor, spec, limit).await,
            _ => fork::measure(&*hypervisor, spec, FORKS, what == "spare", limit).await,
        };
        std::fs::remove_dir_all(&directory).unwrap();
        std::process::exit(if measured { 0 } else { 3 });
    }
    let vm = hypervisor.launch(&spec).await.unwrap();
    let booted = match until.to_str() {
        Some("agent") => {
            tokio::time::timeout(limit, agent::greet(&spec.agent_socket)).await.is_ok()
        }
        Some("init") => tokio::time::timeout(limit, vm.wait()).await.is_ok(),
        _ => panic!("{USAGE}"),
    };
    let time = vm.times().unwrap().spawned.elapsed();
    vm.kill().unwrap();
    vm.wait().await;
    std::fs::remove_dir_all(&directory).unwrap();
    if !booted {
        std::process::exit(3);
    }
    println!("{}", time.as_micros());
}

fn hypervisor(vmm: &Path, directory: &Path) -> Box<dyn Hypervisor> {
    let cache = std::env::temp_dir().join("slipway-boot-cache");
    match vmm.to_str() {
        Some("q35") => Box::new(Qemu::find(&cache).unwrap()),
        _ => Box::new(SlipwayVmm::new(vmm.to_owned(), directory)),
    }
}

fn spec(run_dir: &Path, kernel: &Path, initramfs: &Path, cpus: u32) -> VmSpec {
    VmSpec {
        name: "boot".into(),
        memory: GuestMemory::new(256 << 20).unwrap(),
        cpus,
        cpu_template: CpuTemplate::Host,
        plug_cpus: 0,
        hot_memory: Vec::new(),
        free_pages: FreePages::Unreported,
        shared: None,
        restore: None,
        plug_slots: 0,
        kernel: kernel.to_owned(),
        initramfs: initramfs.to_owned(),
        cmdline: Vec::new(),
        agent_socket: run_dir.join("agent"),
        vfio_user_sockets: Vec::new(),
        disks: Vec::new(),
        nic: None,
        assigned: None,
        console_log: run_dir.join("console"),
        run_dir: PathBuf::from(run_dir),
        credentials: Some(Credentials { uid: 65534, gid: 65534 }),
        cgroup_procs: Vec::new(),
        accel: AccelChoice::Only(Accel::Kvm),
    }
}
