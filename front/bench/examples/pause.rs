//! Measures for how long a guest stands still while it is saved after its memory was copied ahead:
//! p50 and p99 of the time from the request to stop it until it goes on, with all of its state and
//! the rest of its memory in files. The guest has touched each page of its memory once, up to
//! 3 GiB.
//!
//!     cargo run --release -p slipway-bench --example pause -- VMM [GIB...]
//!
//! Needs KVM, and for pages of 2 MiB `vm.nr_hugepages` and userfaultfd(2).

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::MemfdFlags;
use slipway_bench::vmm::stub;
use slipway_hypervisor::native::SlipwayVmm;
use slipway_hypervisor::{
    Accel, AccelChoice, Cage, CpuTemplate, Credentials, GuestMemory, Hypervisor, Page, PageSink,
    Topology, Vm, VmSpec,
};
use slipway_pool::{Pool, Settings};

/// The number of saves of each guest.
const TURNS: usize = 30;
/// The longest time until a guest has touched its memory.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let vmm = arguments.next().context("pass the path of slipway-vmm, and sizes in GiB")?;
    let sizes: Vec<u64> = arguments.map(|size| Ok(size.parse()?)).collect::<Result<_>>()?;
    let sizes = if sizes.is_empty() { vec![1, 8] } else { sizes };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    for gib in sizes {
        for (page, step) in [(Page::Huge, 2 << 20), (Page::Base, 4096)] {
            let name = if page == Page::Huge { "2 MiB" } else { "4 KiB" };
            match runtime.block_on(measure(Path::new(&vmm), gib << 30, (page, step))) {
                Ok(mut pauses) => {
                    pauses.sort_unstable();
                    let at = |part: usize| pauses[(pauses.len() - 1) * part / 100];
                    let (half, most) = (at(50), at(99));
                    println!("{gib} GiB, pages of {name}: p50 {half:.2?}, p99 {most:.2?}");
                }
                Err(error) => println!("{gib} GiB, pages of {name}: not measured: {error:#}"),
            }
        }
    }
    Ok(())
}

/// Returns the pauses of a guest with this memory.
async fn measure(vmm: &Path, bytes: u64, (page, step): (Page, u32)) -> Result<Vec<Duration>> {
    let folder = tempfile::Builder::new().prefix("slipway-pause").tempdir()?;
    let place = folder.path();
    std::fs::write(place.join("kernel"), stub::touching_elf(bytes, step))?;
    std::fs::write(place.join("initramfs"), [0; 4096])?;
    // Without a keeper the pool zeroes all pages before it gives them.
    let pool = Pool::new(Settings::default());
    let mut server = None;
    let memory = match (page, &pool) {
        (Page::Base, _) => GuestMemory::new(bytes)?,
        (Page::Huge, Ok(pool)) => {
            let socket = place.join("pool");
            server = Some(pool.listen(&socket).context("a pool's socket")?);
            GuestMemory::of_pool(&socket, bytes, Page::Huge, &Topology::of_host())?
        }
        (Page::Huge, Err(error)) => anyhow::bail!("no pool: {error}"),
    };
    let native = SlipwayVmm::new(std::path::absolute(vmm)?, place);
    let spec = spec(place, memory);
    File::create(&spec.console_log)?;
    let vm = native.launch(&spec).await?;
    let pauses = saves(&*vm, bytes, &spec.console_log).await;
    vm.kill()?;
    vm.wait().await;
    drop(server);
    pauses
}

async fn saves(vm: &dyn Vm, bytes: u64, log: &Path) -> Result<Vec<Duration>> {
    let begun = Instant::now();
    while !std::fs::read(log)?.contains(&stub::BYTE) {
        ensure!(begun.elapsed() < PATIENCE, "the guest has not touched its memory");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut pauses = Vec::with_capacity(TURNS);
    for _ in 0..TURNS {
        let copy = Arc::new(File::from(rustix::fs::memfd_create("copy", MemfdFlags::CLOEXEC)?));
        copy.set_len(bytes)?;
        vm.copy_ahead(bytes, sink(&copy)).await?;
        let stopped = Instant::now();
        vm.pause().await?;
        let saved = vm.save_rest(bytes, sink(&copy)).await;
        vm.resume().await?;
        pauses.push(stopped.elapsed());
        saved?;
    }
    Ok(pauses)
}

fn sink(copy: &Arc<File>) -> PageSink {
    let copy = Arc::clone(copy);
    Box::new(move |at: u64, page: &[u8]| copy.write_all_at(page, at))
}

fn spec(place: &Path, memory: GuestMemory) -> VmSpec {
    VmSpec {
        name: "pause".into(),
        memory,
        shared: None,
        restore: None,
        cpus: 1,
        cpu_template: CpuTemplate::Host,
        hot_memory: Vec::new(),
        kernel: place.join("kernel"),
        initramfs: place.join("initramfs"),
        cmdline: Vec::new(),
        agent_socket: place.join("agent"),
        vfio_user_sockets: Vec::new(),
        plug_slots: 0,
        plug_cpus: 0,
        disks: Vec::new(),
        nic: None,
        console_log: place.join("console"),
        run_dir: place.to_owned(),
        credentials: Cage::of_launcher().map(|_| Credentials { uid: 65534, gid: 65534 }),
        cgroup_procs: Vec::new(),
        accel: AccelChoice::Only(Accel::Kvm),
    }
}
