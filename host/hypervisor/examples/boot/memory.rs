//! The memory of forks of a VM whose guest has booted, and is idle again.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use slipway_hypervisor::{GuestMemory, Hypervisor, TemplateName, Topology, Vm, VmSpec};
use slipway_pool::{Pool, SLOTS, Settings, Shelves};

use super::fork::keeper;

/// A page in bytes.
const PAGE: usize = 4096;
/// The time in which a guest becomes idle once its agent has answered.
const IDLE: Duration = Duration::from_secs(5);
/// The number of forks that run at once, after one that runs alone.
const FORKS: u64 = 6;

/// Boots a VM and saves it once its agent has answered. Has one fork become idle, and prints the
/// bytes that it touched, by whether they differ from the template's. Then has [`FORKS`] of them be
/// idle at once, for which what the first one touched is copied ahead, and prints the bytes that
/// they and this process's pool take. Returns `false` if an agent did not answer within `limit`.
pub async fn measure(hypervisor: &dyn Hypervisor, spec: VmSpec, limit: Duration) -> bool {
    let bytes = spec.memory.bytes();
    let booted = VmSpec { memory: GuestMemory::new(bytes).unwrap(), ..spec.clone() };
    let vm = hypervisor.launch(&booted).await.unwrap();
    if !answers(&spec.agent_socket, limit).await {
        return false;
    }
    print("boot-hello", held(&booted.memory));
    tokio::time::sleep(IDLE).await;
    print("boot-idle", held(&booted.memory));
    let own = Process::of(vm.record().pid);
    print("boot-vmm", own.private);
    print("boot-vmm-tables", own.tables);
    vm.pause().await.unwrap();
    let mut state =
        File::from(rustix::fs::memfd_create(c"state", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    state.write_all(&vm.save().await.unwrap()).unwrap();
    let shelves =
        Some(Shelves::new(Arc::new(keeper(&spec.run_dir)), 0..(FORKS as u32 + 2) * SLOTS));
    let pool = Pool::new(Settings { limit: 0, shelves, ..Settings::default() }).unwrap();
    let socket = spec.run_dir.with_extension("pool");
    let _server = pool.listen(&socket).unwrap();
    let name = TemplateName::new("booted").unwrap();
    let memory = File::from(booted.memory.descriptor().unwrap());
    let template = pool.freeze(memory.as_fd()).unwrap();
    let original = File::from(template.file().try_clone_to_owned().unwrap());
    print("template", template.held() as u64);
    pool.add_template(name, template).unwrap();
    end(vm).await;
    drop((memory, booted));
    let forks =
        Forks { hypervisor, spec, pool: &pool, socket, name, state: Arc::new(state), limit };
    let Some((vm, memory)) = forks.start(0).await else { return false };
    let at_hello = pool.copied(memory.identity().unwrap()).unwrap();
    print("hello-touched", at_hello.iter().map(|range| range.end - range.start).sum());
    tokio::time::sleep(IDLE).await;
    let touched = pool.copied(memory.identity().unwrap()).unwrap();
    Pages::count(&original, &memory).print();
    print("idle-touched", touched.iter().map(|range| range.end - range.start).sum());
    assert!(pool.copy_ahead(name, &touched));
    end(vm).await;
    drop(memory);
    forks.together(&original).await
}

/// A fork that runs, and its memory.
type Running = (Box<dyn Vm>, GuestMemory);

/// The parts that all forks begin with.
struct Forks<'a> {
    hypervisor: &'a dyn Hypervisor,
    spec: VmSpec,
    pool: &'a Pool,
    socket: std::path::PathBuf,
    name: TemplateName,
    state: Arc<File>,
    limit: Duration,
}

impl Forks<'_> {
    /// Starts the fork of a number, and waits until its agent answers.
    async fn start(&self, number: u64) -> Option<Running> {
        let (bytes, topology) = (self.spec.memory.bytes(), Topology::of_host());
        let memory = GuestMemory::of_template(&self.socket, bytes, self.name, &topology).unwrap();
        let run_dir = self.spec.run_dir.join(format!("fork-{number}"));
        std::fs::create_dir(&run_dir).unwrap();
        let fork = VmSpec {
            memory: memory.clone(),
            restore: Some(Arc::clone(&self.state)),
            agent_socket: run_dir.join("agent"),
            console_log: run_dir.join("console"),
            run_dir,
            ..self.spec.clone()
        };
        let vm = self.hypervisor.launch(&fork).await.unwrap();
        answers(&fork.agent_socket, self.limit).await.then_some((vm, memory))
    }

    /// Has [`FORKS`] forks be idle at once, and prints the mean of what each takes.
    async fn together(&self, original: &File) -> bool {
        let before = (available(), Process::of(std::process::id().cast_signed()));
        let mut all = Vec::new();
        for number in 1..=FORKS {
            let Some(one) = self.start(number).await else { return false };
            all.push(one);
        }
        tokio::time::sleep(IDLE).await;
        let after = (available(), Process::of(std::process::id().cast_signed()));
        let mean = |of: &dyn Fn(&Running) -> u64| all.iter().map(of).sum::<u64>() / FORKS;
        print("forks", FORKS);
        print("fork-memory", mean(&|(_, memory)| held(memory)));
        print("fork-written", mean(&|(_, memory)| Pages::count(original, memory).written()));
        print("fork-vmm", mean(&|(vm, _)| Process::of(vm.record().pid).private));
        print("fork-vmm-tables", mean(&|(vm, _)| Process::of(vm.record().pid).tables));
        print("fork-pool", after.1.private.saturating_sub(before.1.private) / FORKS);
        print("fork-pool-tables", after.1.tables.saturating_sub(before.1.tables) / FORKS);
        print("fork-host", before.0.saturating_sub(after.0) / FORKS);
        print("copied-ahead", self.pool.stats().copied_ahead * PAGE as u64 / FORKS);
        for (vm, _) in all {
            end(vm).await;
        }
        true
    }
}

/// The pages that a fork has, in bytes.
#[derive(Default)]
struct Pages {
    /// Pages with other bytes than the template's.
    changed: u64,
    /// Pages of holes of the template with bytes that are not zeros.
    new: u64,
    /// Pages with the template's bytes.
    same: u64,
    /// Pages of holes of the template with zeros.
    zeros: u64,
}

impl Pages {
    /// Compares memory with the template that it began as.
    fn count(template: &File, memory: &GuestMemory) -> Self {
        let (memory, mut pages, zeros) = (opened(memory), Self::default(), [0; PAGE]);
        let (mut own, mut original) = ([0; PAGE], [0; PAGE]);
        for at in data(&memory) {
            memory.read_exact_at(&mut own, at).unwrap();
            template.read_exact_at(&mut original, at).unwrap();
            let count = match (own == original, original == zeros) {
                (true, false) => &mut pages.same,
                (true, true) => &mut pages.zeros,
                (false, false) => &mut pages.changed,
                (false, true) => &mut pages.new,
            };
            *count += PAGE as u64;
        }
        pages
    }

    fn written(&self) -> u64 {
        self.changed + self.new
    }

    fn print(&self) {
        print("idle-changed", self.changed);
        print("idle-new", self.new);
        print("idle-same", self.same);
        print("idle-zeros", self.zeros);
    }
}

/// Returns the offsets of all pages that a file has.
fn data(file: &File) -> Vec<u64> {
    use rustix::fs::{SeekFrom, seek};
    let (mut pages, mut at) = (Vec::new(), 0);
    while let Ok(start) = seek(file, SeekFrom::Data(at)) {
        at = seek(file, SeekFrom::Hole(start)).unwrap();
        pages.extend((start..at).step_by(PAGE));
    }
    pages
}

/// Opens the file of memory, of which the descriptor may be one for no access.
fn opened(memory: &GuestMemory) -> File {
    use std::os::fd::AsRawFd;
    let descriptor = memory.descriptor().unwrap();
    File::open(format!("/proc/self/fd/{}", descriptor.as_raw_fd())).unwrap()
}

/// Returns the bytes of all pages that memory has.
fn held(memory: &GuestMemory) -> u64 {
    opened(memory).metadata().unwrap().blocks() * 512
}

/// Memory of a process in bytes.
struct Process {
    /// Pages that no other process has, without those of files in memory: guests' memory.
    private: u64,
    /// Page tables.
    tables: u64,
}

impl Process {
    fn of(pid: i32) -> Self {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let (mut guests, mut private) = (false, 0);
        for line in text.lines() {
            let name = line.split_whitespace().next().unwrap_or_default();
            if !name.ends_with(':') {
                guests = line.contains("/memfd:");
            } else if name.starts_with("Private_") && !guests {
                private += kib(line);
            }
        }
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let tables = status.lines().find(|line| line.starts_with("VmPTE:")).map_or(0, kib);
        Self { private, tables }
    }
}

/// Returns the bytes of a line `NAME: NUMBER kB`.
fn kib(line: &str) -> u64 {
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Returns the bytes of memory that the host has left.
fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap();
    text.lines().find(|line| line.starts_with("MemAvailable:")).map_or(0, kib)
}

fn print(name: &str, value: u64) {
    println!("{name}={value}");
}

async fn answers(socket: &Path, limit: Duration) -> bool {
    tokio::time::timeout(limit, super::agent::greet(socket)).await.is_ok()
}

async fn end(vm: Box<dyn Vm>) {
    vm.kill().unwrap();
    vm.wait().await;
}
