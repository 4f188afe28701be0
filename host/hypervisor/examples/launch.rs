//! Measures how long a VM takes to start: `launch KERNEL [COUNT]` starts COUNT of them (20) in
//! turn, each until its guest is to run, and prints the median and the longest time.
#![allow(clippy::unwrap_used)] // A measurement that fails has nothing to say.

use std::path::{Path, PathBuf};
use std::time::Duration;

use slipway_hypervisor::qemu::Qemu;
use slipway_hypervisor::{
    Accel, AccelChoice, CpuTemplate, Credentials, FreePages, GuestMemory, Hypervisor, VmSpec,
};

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let mut arguments = std::env::args_os().skip(1);
    let kernel = PathBuf::from(arguments.next().expect("usage: launch KERNEL [COUNT]"));
    let count = arguments.next().map_or(20, |count| count.to_str().unwrap().parse().unwrap());
    let directory = std::env::temp_dir().join(format!("slipway-launch-{}", std::process::id()));
    std::fs::create_dir(&directory).unwrap();
    let qemu = Qemu::find(&directory.join("cache")).unwrap();
    let mut times = Vec::new();
    for number in 0..count {
        times.push(launch(&qemu, &kernel, directory.join(format!("vm-{number}"))).await);
    }
    std::fs::remove_dir_all(&directory).unwrap();
    times.sort();
    let median = times[times.len() / 2];
    println!("{count} starts: median {median:?}, longest {:?}", times[times.len() - 1]);
}

async fn launch(qemu: &Qemu, kernel: &Path, run_dir: PathBuf) -> Duration {
    std::fs::create_dir(&run_dir).unwrap();
    let initramfs = run_dir.with_extension("initramfs");
    // The content of the initramfs is never used.
    std::fs::write(&initramfs, [0; 512]).unwrap();
    let nobody = Credentials { uid: 65534, gid: 65534 };
    let spec = VmSpec {
        name: "launch".into(),
        memory: GuestMemory::new(128 << 20).unwrap(),
        cpus: 1,
        cpu_template: CpuTemplate::Host,
        kernel: kernel.to_owned(),
        initramfs,
        cmdline: Vec::new(),
        agent_socket: run_dir.join("agent"),
        vfio_user_sockets: Vec::new(),
        hot_memory: Vec::new(),
        free_pages: FreePages::Unreported,
        shared: None,
        restore: None,
        plug_slots: 0,
        plug_cpus: 0,
        disks: Vec::new(),
        nic: None,
        assigned: None,
        console_log: run_dir.join("console"),
        run_dir,
        credentials: rustix::process::geteuid().is_root().then_some(nobody),
        cgroup_procs: Vec::new(),
        accel: AccelChoice::Only(Accel::Tcg),
    };
    let vm = qemu.launch(&spec).await.unwrap();
    let time = vm.times().unwrap().vmm();
    vm.kill().unwrap();
    vm.wait().await;
    time
}
