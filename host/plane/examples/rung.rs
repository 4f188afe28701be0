//! Measures what functions with rung doorbells cost the plane: `cargo run --release -p
//! slipway-plane --example rung`. The functions are NVMe controllers as sandboxes have them, each
//! with a vfio-user client of its own, a started driver, one queue pair and shadow doorbells.
//!
//! First the CPU time of the whole process, clients included, over ten seconds in which nobody does
//! anything; then, for one function at queue depth 1 and 32, messages and raised eventfds for each
//! command.

use std::path::Path;
use std::time::{Duration, Instant};

use slipway_nvme::driver::{Arena, Driver, RegisterAccess, Shadowed, io};
use slipway_nvme_spec::command::SubmissionEntry;
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1;
use slipway_vfio_user_client::{SharedRegisters, TestGuest};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;
type Guest = Driver<Shadowed<SharedRegisters>>;

const FUNCTIONS: usize = 100;
const IDLE: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(60);
const MEMORY: u64 = 4 << 20;
const COMMANDS: usize = 50_000;

fn main() -> Outcome<()> {
    let directory = std::env::temp_dir().join(format!("slipway-rung-{}", std::process::id()));
    std::fs::create_dir(&directory)?;
    let outcome = figures(&directory);
    std::fs::remove_dir_all(&directory)?;
    outcome
}

fn figures(directory: &Path) -> Outcome<()> {
    let plane = Plane::new(Settings::default())?;
    let mut drivers = Vec::new();
    for number in 0..FUNCTIONS {
        drivers.push(driver(&plane, &directory.join(number.to_string()), number)?);
    }
    // Until every thread has gone to sleep.
    std::thread::sleep(Duration::from_secs(1));
    let (cpu, begun) = (cpu_time(), Instant::now());
    std::thread::sleep(IDLE);
    let (cpu, time) = (cpu_time() - cpu, begun.elapsed());
    let share = cpu.as_secs_f64() / time.as_secs_f64() * 100.0;
    println!("{FUNCTIONS} idle functions: {cpu:?} of CPU time in {time:?}, {share:.3} % of a core");
    for depth in [1, 32] {
        load(&plane, &mut drivers[0], depth)?;
    }
    Ok(())
}

/// Makes a function and starts a driver for it.
fn driver(plane: &Plane, socket: &Path, number: usize) -> Outcome<Guest> {
    let kind = Some(v1::disk::Kind::Ram(v1::RamDisk { size_bytes: 1 << 20 }));
    let disk = Some(v1::Disk { block_size: 0, kind });
    plane.create(&v1::CreateEndpointRequest {
        virtio_net: None,
        memory: None,
        id: number.to_string(),
        socket_path: socket.to_string_lossy().into_owned(),
        owner: None,
        nvme: Some(v1::NvmeController {
            namespaces: vec![v1::Namespace { nsid: 1, disk, ..Default::default() }],
            doorbells: v1::nvme_controller::DoorbellMode::Rung.into(),
            ..Default::default()
        }),
    })?;
    let guest = TestGuest::new(0, MEMORY)?;
    let registers = guest.connect_shared(socket, PATIENCE)?;
    let registers = Shadowed::new(registers, guest.memory.clone());
    let arena = Arena::new(guest.memory, 0, MEMORY);
    let mut driver = Driver::new(registers, arena, 16)?;
    driver.create_pair(1, 64, None)?;
    driver.shadow_doorbells(false)?;
    Ok(driver)
}

/// Reads blocks, `depth` at a time.
fn load(plane: &Plane, driver: &mut Guest, depth: usize) -> Outcome<()> {
    let page = driver.arena.allocate(4096)?;
    let read = SubmissionEntry { prp1: page.into(), ..io(NvmOpcode::Read, 1, 0, 1) };
    let messages = || Ok::<_, slipway_plane::Error>(plane.get("0")?.counters.map(|c| c.messages));
    let (before, written) = (messages()?.ok_or("no counters")?, driver.registers.written);
    let (mut sent, mut ended) = (0, Vec::new());
    while ended.len() < COMMANDS {
        let room = depth - driver.pair(1).ok_or("no queue pair")?.in_flight();
        for _ in 0..room.min(COMMANDS - sent) {
            driver.submit(1, read)?;
            sent += 1;
        }
        driver.reap(1, &mut ended)?;
        driver.registers.idle()?;
    }
    if !ended.iter().all(|entry| entry.status().is_success()) {
        return Err("a read failed".into());
    }
    let messages = messages()?.ok_or("no counters")? - before;
    let written = driver.registers.written - written;
    println!(
        "queue depth {depth}: {COMMANDS} reads took {messages} messages and {written} eventfds"
    );
    Ok(())
}

/// Returns the CPU time of this process so far.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
