//! Measures the cost of attached but unused controllers, the latency of the first command after a
//! pause, and the time until a target is ready: `cargo run --release -p slipway-plane --example
//! idle_controllers -- [CONTROLLERS [SECONDS [SWEEP_MS]]]`.
//!
//! The target is a process of its own with one reactor and one NVMe controller with a RAM disk for
//! each client. The clients are in this process: each enables its controller, makes an I/O queue
//! pair, reads one block, and then stays attached without sending anything. CPU time and memory are
//! those that the kernel counts for the target (`/proc/PID/stat`, `/proc/PID/status`).

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use slipway_nvme::driver::{Arena, Driver, io};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::offset::DOORBELLS;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1::{self, disk::Kind, nvme_controller::DoorbellMode};
use slipway_vfio_user_client::{Registers, TestGuest};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The size in bytes of the memory that each client lends.
const MEMORY: u64 = 1 << 20;
const PATIENCE: Duration = Duration::from_secs(30);

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, otherwise: u64| {
        arguments.get(index).map_or(Ok(otherwise), |text| text.parse::<u64>())
    };
    // Each controller needs several descriptors, in both processes.
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let limit = rustix::process::Rlimit { current: most, maximum: most };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?;
    if arguments.first().is_some_and(|word| word == "--target") {
        return target(Path::new(&arguments[1]), &arguments[2], number(3, 1)?, number(4, 0)?);
    }
    let (controllers, seconds, sweep) = (number(0, 1000)?, number(1, 10)?, number(2, 0)?);
    for mode in ["trapped", "mapped"] {
        measure(mode, 1, 1, sweep)?;
        measure(mode, controllers, seconds, sweep)?;
    }
    Ok(())
}

/// Runs the target's process: serves until its standard input ends.
fn target(directory: &Path, mode: &str, controllers: u64, sweep_ms: u64) -> Outcome<()> {
    let plane = Plane::new(Settings::default())?;
    let doorbells = if mode == "mapped" { DoorbellMode::Mapped } else { DoorbellMode::Trapped };
    for index in 0..controllers {
        let socket = directory.join(index.to_string());
        let disk = Some(Kind::Ram(v1::RamDisk { size_bytes: 1 << 20 }));
        let disk = v1::Disk { block_size: 512, kind: disk };
        plane.create(&v1::CreateEndpointRequest {
            virtio_net: None,
            memory: None,
            id: index.to_string(),
            socket_path: socket.to_string_lossy().into_owned(),
            owner: None,
            nvme: Some(v1::NvmeController {
                namespaces: vec![v1::Namespace { nsid: 1, disk: Some(disk), ..Default::default() }],
                doorbells: doorbells.into(),
                sweep_period_us: u32::try_from(sweep_ms * 1000)?,
                ..Default::default()
            }),
        })?;
    }
    println!("serving");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

fn measure(mode: &str, controllers: u64, seconds: u64, sweep_ms: u64) -> Outcome<()> {
    let directory = std::env::temp_dir().join(format!("slipway-idle-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let outcome = run(&directory, mode, controllers, seconds, sweep_ms);
    std::fs::remove_dir_all(&directory)?;
    outcome
}

fn run(directory: &Path, mode: &str, controllers: u64, seconds: u64, sweep_ms: u64) -> Outcome<()> {
    let started = Instant::now();
    let mut child = spawn(directory, mode, controllers, sweep_ms)?;
    let mut guests = vec![attach(&directory.join("0"))?];
    let first = started.elapsed();
    for index in 1..controllers {
        guests.push(attach(&directory.join(index.to_string()))?);
    }
    std::thread::sleep(Duration::from_millis(500));
    let (cpu, begun) = (cpu_time(child.id())?, Instant::now());
    std::thread::sleep(Duration::from_secs(seconds));
    let share = (cpu_time(child.id())? - cpu) / begun.elapsed().as_secs_f64();
    println!(
        "{controllers} {mode}: first read {:.1} ms after exec, idle CPU {:.2} % of a core, \
         resident {:.1} MiB",
        first.as_secs_f64() * 1e3,
        share * 100.0,
        resident_mib(child.id())?
    );
    let mut times = Vec::new();
    for round in 0..30 {
        // Long enough for the sweeps to be at their slowest, and never in step with them.
        std::thread::sleep(Duration::from_micros(100_000 + round * 1370));
        let guest = round as usize * 31 % guests.len();
        let begun = Instant::now();
        read(&mut guests[guest])?;
        times.push(begun.elapsed());
    }
    times.sort();
    println!("  first command after a pause: p50 {:?}, most {:?}", times[15], times[29]);
    drop(child.stdin.take());
    child.wait()?;
    Ok(())
}

fn spawn(directory: &Path, mode: &str, controllers: u64, sweep_ms: u64) -> Outcome<Child> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["--target".as_ref(), directory.as_os_str(), mode.as_ref()])
        .args([controllers.to_string(), sweep_ms.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    if line.trim() == "serving" { Ok(child) } else { Err(line.into()) }
}

struct Guest {
    driver: Driver<Registers>,
    page: u64,
}

fn attach(socket: &Path) -> Outcome<Guest> {
    let guest = TestGuest::new(0, MEMORY)?;
    let registers = guest.connect(socket, PATIENCE)?.with_doorbells(DOORBELLS)?;
    let mut driver = Driver::new(registers, Arena::new(guest.memory, 0, MEMORY), 16)?;
    driver.create_pair(1, 16, None)?;
    let page = driver.arena.allocate(4096)?;
    let mut guest = Guest { driver, page };
    read(&mut guest)?;
    Ok(guest)
}

/// Reads a block. It waits by polling the completion queue only: reading a register would wake the
/// target.
fn read(guest: &mut Guest) -> Outcome<()> {
    let command = SubmissionEntry { prp1: guest.page.into(), ..io(NvmOpcode::Read, 1, 0, 1) };
    guest.driver.submit(1, command)?;
    let (begun, mut entries) = (Instant::now(), Vec::new());
    while guest.driver.reap(1, &mut entries)? == 0 {
        if begun.elapsed() > PATIENCE {
            return Err("the target does not answer".into());
        }
        std::thread::yield_now();
    }
    if entries[0].status().is_success() { Ok(()) } else { Err("the read failed".into()) }
}

/// Returns the CPU time of a process in seconds, user and kernel.
fn cpu_time(pid: u32) -> Outcome<f64> {
    let mut nanoseconds = 0;
    // Finer than utime and stime: the run time of each thread, in nanoseconds.
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let text = std::fs::read_to_string(task?.path().join("schedstat"))?;
        nanoseconds += text.split(' ').next().ok_or("schedstat")?.parse::<u64>()?;
    }
    Ok(nanoseconds as f64 / 1e9)
}

fn resident_mib(pid: u32) -> Outcome<f64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).ok_or("VmRSS")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0)
}
