//! Measures for how long a guest stands still while it is saved after its memory was copied ahead:
//! p50 and p99 of the time from the request to stop it until it goes on, with all of its state and
//! the rest of its memory in files. The guest has touched each page of its memory once.
//!
//! Below that is where the time goes: p50 and p99 of each part, the parts of the longest pause, and
//! the most pages that were copied in a pause. `state` is the time of the save until its first
//! page: the saves of machine and functions, and the first look for pages that were written to.
//! `pages` is the time from the first page to the last one. `end` is the time from there to the
//! reply; without a page it is in `state`.
//!
//!     cargo run --release -p slipway-bench --example pause -- VMM [GIB[-4k|-2m]...]
//!
//! A size with its pages, as `8-4k`, is measured with these alone, and a size without them with
//! both. Without sizes it is `1 8`. Needs KVM, and for pages of 2 MiB `vm.nr_hugepages` and
//! userfaultfd(2). The copy of a guest's memory takes as much memory again, in pages of 4 KiB: of
//! the pages that are set aside by `vm.nr_hugepages` neither it nor a guest of 4 KiB pages has any.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::MemfdFlags;
use slipway_bench::vmm::stub;
use slipway_hypervisor::native::SlipwayVmm;
use slipway_hypervisor::{
    Accel, AccelChoice, Cage, CpuTemplate, Credentials, FreePages, GuestMemory, Hypervisor, Page,
    PageSink, Topology, Vm, VmSpec,
};
use slipway_pool::{Pool, Settings};

/// The number of saves of each guest.
const TURNS: usize = 30;
/// The bytes of memory that a measurement leaves to the rest of the host.
const SPARE: u64 = 512 << 20;
/// The longest time until a guest has touched its memory.
const PATIENCE: Duration = Duration::from_secs(120);

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let vmm = arguments.next().context("pass the path of slipway-vmm, and sizes in GiB")?;
    let mut sizes: Vec<String> = arguments.collect();
    if sizes.is_empty() {
        sizes = vec!["1".to_owned(), "8".to_owned()];
    }
    let loads = sizes.iter().map(|size| loads(size)).collect::<Result<Vec<_>>>()?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    for (gib, page) in loads.into_iter().flatten() {
        let name = if page == Page::Huge { "2 MiB" } else { "4 KiB" };
        match runtime.block_on(measure(Path::new(&vmm), gib << 30, page)) {
            Ok(pauses) => print(&format!("{gib} GiB, pages of {name}"), &pauses),
            Err(error) => println!("{gib} GiB, pages of {name}: not measured: {error:#}"),
        }
    }
    Ok(())
}

/// Parses an argument: a size in GiB, of pages that are named or of both kinds.
fn loads(size: &str) -> Result<Vec<(u64, Page)>> {
    let (gib, pages) = match size.split_once('-') {
        None => (size, vec![Page::Huge, Page::Base]),
        Some((gib, "4k")) => (gib, vec![Page::Base]),
        Some((gib, "2m")) => (gib, vec![Page::Huge]),
        Some(_) => bail!("\"{size}\" is no size such as 8, 8-4k or 8-2m"),
    };
    let gib = gib.parse::<u64>().with_context(|| format!("\"{size}\" is no size in GiB"))?;
    Ok(pages.into_iter().map(|page| (gib, page)).collect())
}

/// Checks that the host has the memory for a guest and its copy. A VMM that the kernel kills for
/// want of memory does not say why it has ended.
fn check_memory(bytes: u64, page: Page) -> Result<()> {
    let parts = if page == Page::Huge { 1 } else { 2 };
    let needed = parts * bytes + SPARE;
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_ascii_whitespace().next()?.parse::<u64>().ok());
    let free = kib.context("/proc/meminfo has no available memory")? << 10;
    ensure!(
        free >= needed,
        "it takes {} MiB of memory, of which {} are available; pages that vm.nr_hugepages sets \
         aside are not",
        needed >> 20,
        free >> 20
    );
    Ok(())
}

/// A pause and its parts.
struct Pause {
    all: Duration,
    /// The request to stop the CPUs.
    stop: Duration,
    /// The request to save, until its first page.
    state: Duration,
    /// The first page to the last one.
    pages: Duration,
    /// The last page to the reply.
    end: Duration,
    /// The request to go on.
    resume: Duration,
    /// The number of pages.
    count: u64,
}

fn print(what: &str, pauses: &[Pause]) {
    line(what, pauses, |pause| pause.all);
    line("    stop", pauses, |pause| pause.stop);
    line("    state", pauses, |pause| pause.state);
    line("    pages", pauses, |pause| pause.pages);
    line("    end", pauses, |pause| pause.end);
    line("    resume", pauses, |pause| pause.resume);
    if let Some(longest) = pauses.iter().max_by_key(|pause| pause.all) {
        let Pause { all, stop, state, pages, end, resume, count } = longest;
        println!(
            "    longest: {all:.2?}: stop {stop:.2?}, state {state:.2?}, pages {pages:.2?} \
             ({count}), end {end:.2?}, resume {resume:.2?}"
        );
    }
    let most = pauses.iter().map(|pause| pause.count).max().unwrap_or(0);
    println!("    at most {most} pages of 4 KiB");
}

/// Prints p50 and p99 of a part of the pauses.
fn line(name: &str, pauses: &[Pause], part: fn(&Pause) -> Duration) {
    let mut times: Vec<_> = pauses.iter().map(part).collect();
    times.sort_unstable();
    let at = |hundredths: usize| times[(times.len() - 1) * hundredths / 100];
    println!("{name}: p50 {:.2?}, p99 {:.2?}", at(50), at(99));
}

/// Returns the pauses of a guest with this memory.
async fn measure(vmm: &Path, bytes: u64, page: Page) -> Result<Vec<Pause>> {
    check_memory(bytes, page)?;
    let step = if page == Page::Huge { 2 << 20 } else { 4096 };
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

async fn saves(vm: &dyn Vm, bytes: u64, log: &Path) -> Result<Vec<Pause>> {
    let begun = Instant::now();
    while !std::fs::read(log)?.contains(&stub::BYTE) {
        ensure!(begun.elapsed() < PATIENCE, "the guest has not touched its memory");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut pauses = Vec::with_capacity(TURNS);
    for _ in 0..TURNS {
        let copy = Arc::new(File::from(rustix::fs::memfd_create("copy", MemfdFlags::CLOEXEC)?));
        copy.set_len(bytes)?;
        vm.copy_ahead(bytes, sink(&copy, &Arc::default())).await?;
        pauses.push(pause(vm, bytes, &copy).await?);
    }
    Ok(pauses)
}

/// Stops a guest, saves it with the rest of its memory, and lets it go on.
async fn pause(vm: &dyn Vm, bytes: u64, copy: &Arc<File>) -> Result<Pause> {
    let (seen, begun) = (Arc::<Mutex<Seen>>::default(), Instant::now());
    vm.pause().await?;
    let stopped = Instant::now();
    let saved = vm.save_rest(bytes, sink(copy, &seen)).await;
    let ended = Instant::now();
    vm.resume().await?;
    let resumed = Instant::now();
    saved?;
    let seen = seen.lock().map_err(|_| anyhow::anyhow!("a page was not written"))?;
    let (first, last) = seen.times.unwrap_or((ended, ended));
    Ok(Pause {
        all: resumed - begun,
        stop: stopped - begun,
        state: first - stopped,
        pages: last - first,
        end: ended - last,
        resume: resumed - ended,
        count: seen.count,
    })
}

/// The pages that were given to a sink.
#[derive(Default)]
struct Seen {
    count: u64,
    /// The times before the first one was written, and after the last one was.
    times: Option<(Instant, Instant)>,
}

fn sink(copy: &Arc<File>, seen: &Arc<Mutex<Seen>>) -> PageSink {
    let (copy, seen) = (Arc::clone(copy), Arc::clone(seen));
    Box::new(move |at: u64, page: &[u8]| {
        let begun = Instant::now();
        copy.write_all_at(page, at)?;
        let mut seen = seen.lock().map_err(|_| std::io::ErrorKind::Other)?;
        let first = seen.times.map_or(begun, |(first, _)| first);
        (seen.count, seen.times) = (seen.count + 1, Some((first, Instant::now())));
        Ok(())
    })
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
        free_pages: FreePages::Unreported,
        kernel: place.join("kernel"),
        initramfs: place.join("initramfs"),
        cmdline: Vec::new(),
        agent_socket: place.join("agent"),
        vfio_user_sockets: Vec::new(),
        plug_slots: 0,
        plug_cpus: 0,
        disks: Vec::new(),
        nic: None,
        assigned: None,
        console_log: place.join("console"),
        run_dir: place.to_owned(),
        credentials: Cage::of_launcher().map(|_| Credentials { uid: 65534, gid: 65534 }),
        cgroup_procs: Vec::new(),
        accel: AccelChoice::Only(Accel::Kvm),
    }
}
