//! Measures how soon a root and a function are there: `cargo run --release -p slipway-plane
//! --example roots -- [COUNT [ROUNDS]]`.
//!
//! Roots: COUNT owners (200) ask for a root at once, ROUNDS (20) times. A root is an NVMe
//! controller with an image, a file that all share, as namespace 1, and a volatile layer on a
//! template as namespace 2. An owner's time is from the common start to its second read: the first
//! block of the image, then that of the layer, through the function, by Slipway's own driver.
//!
//! Attachment: one owner attaches a function that is there to memory of 128 MiB to 16 GiB, the
//! sizes in turn, ROUNDS times each; with a disk as sandboxes have it, and with one whose requests
//! use registered memory (`pin`). The time is from the connection to the first block read. The
//! slope is that of the least squares of the medians.
//!
//! The plane has one reactor, and is in this process. It takes the machine's processors together
//! with the owners.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use slipway_nvme::driver::{Arena, Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::offset;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1::disk::Kind;
use slipway_plane_api::v1::{self, nvme_controller::DoorbellMode};
use slipway_ram::{DmaMap, Permissions, Region};
use slipway_vfio_user_client::{Client, Registers};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const COUNT: usize = 200;
const ROUNDS: usize = 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the image and of the layer's template.
const DISK: u64 = 64 << 20;
/// Bytes of an owner's memory, and of the part that its driver uses.
const MEMORY: u64 = 128 << 20;
const ARENA: u64 = 1 << 20;
/// Sizes of memory for attachments, in MiB.
const SIZES: [u64; 5] = [128, 512, 2048, 8192, 16384];
const BLOCK: usize = 4096;

/// A folder with the disks' files and the functions' sockets.
struct Place {
    plane: Plane,
    folder: tempfile::TempDir,
}

fn main() -> Outcome<()> {
    let mut numbers = std::env::args().skip(1).map(|word| word.parse::<usize>());
    let count = numbers.next().transpose()?.unwrap_or(COUNT).max(1);
    let rounds = numbers.next().transpose()?.unwrap_or(ROUNDS).max(1);
    let place = Place { plane: Plane::new(Settings::default())?, folder: tempfile::tempdir()? };
    for (name, byte) in [("image", 0x11), ("template", 0x22), ("disk", 0x33)] {
        let file = std::fs::File::create(place.path(name))?;
        std::os::unix::fs::FileExt::write_all_at(&file, &[byte; BLOCK], 0)?;
        file.set_len(DISK)?;
    }
    roots(&place, count, rounds)?;
    for pin in [false, true] {
        attachments(&place, pin, rounds)?;
    }
    Ok(())
}

impl Place {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes a function with these disks. Returns its socket.
    fn serve(&self, id: &str, disks: Vec<Kind>) -> Outcome<PathBuf> {
        let socket = self.path(id);
        let disk = |kind| Some(v1::Disk { block_size: 0, kind: Some(kind) });
        let namespaces = (1..).zip(disks);
        let namespaces = namespaces.map(|(nsid, kind)| v1::Namespace {
            nsid,
            disk: disk(kind),
            ..Default::default()
        });
        self.plane.create(&v1::CreateEndpointRequest {
            id: id.to_owned(),
            socket_path: socket.to_string_lossy().into_owned(),
            nvme: Some(v1::NvmeController {
                namespaces: namespaces.collect(),
                doorbells: DoorbellMode::Rung.into(),
                ..Default::default()
            }),
            ..Default::default()
        })?;
        Ok(socket)
    }

    fn file(&self, name: &str, read_only: bool, pin: bool) -> Kind {
        let path = self.path(name).to_string_lossy().into_owned();
        Kind::File(v1::FileDisk { path, read_only, pin, ..Default::default() })
    }
}

/// Makes sparse memory, sealed as a guest's is.
fn memory(bytes: u64) -> Outcome<OwnedFd> {
    let file = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, bytes)?;
    rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::SHRINK)?;
    Ok(file)
}

/// Connects to a function, hands it memory, brings it up, and reads the first block of each of its
/// first `disks` namespaces. Returns the driver, with the first byte of each block.
fn use_it(
    socket: &Path,
    (file, bytes): (&OwnedFd, u64),
    disks: u32,
) -> Outcome<(Driver<Registers>, DmaMap, Vec<u8>)> {
    let mut client = Client::connect(socket, PATIENCE)?;
    client.map(0, bytes, file.as_fd(), 0, true)?;
    let mut map = DmaMap::new();
    map.add(0, Region::mapped(file.as_fd(), 0, ARENA, Permissions::READ_WRITE)?)?;
    let registers = Registers::new(client, PATIENCE).with_doorbells(offset::DOORBELLS)?;
    let mut driver = Driver::new(registers, Arena::new(map.memory(), 0, ARENA), 16)?;
    driver.create_pair(1, 16, None)?;
    let mut found = Vec::new();
    for nsid in 1..=disks {
        let buffer = driver.arena.allocate(BLOCK)?;
        driver.transfer(1, io(NvmOpcode::Read, nsid, 0, BLOCK as u32 / 512), (buffer, BLOCK))?;
        let mut byte = [0];
        driver.arena.memory().read(buffer, &mut byte)?;
        found.push(byte[0]);
    }
    Ok((driver, map, found))
}

fn roots(place: &Place, count: usize, rounds: usize) -> Outcome<()> {
    let mut times = Vec::new();
    let cpu = cpu_time();
    for _ in 0..rounds {
        times.extend(at_once(place, count)?);
        for number in 0..count {
            place.plane.remove(&format!("root-{number}"))?;
        }
    }
    let cpu = (cpu_time() - cpu) / (count * rounds) as u32;
    let [p50, p99, most] = percentiles(&mut times);
    println!(
        "{count} roots at once, {rounds} rounds: p50 {p50:?}, p99 {p99:?}, most {most:?}; \
         {cpu:?} of processor time each, removal included"
    );
    Ok(())
}

/// Has `count` owners ask for a root at once, each on a thread of its own.
fn at_once(place: &Place, count: usize) -> Outcome<Vec<Duration>> {
    let start = Barrier::new(count + 1);
    let owner = |number: usize| -> Outcome<(Instant, Driver<Registers>, DmaMap)> {
        let memory = memory(MEMORY)?;
        start.wait();
        let template = place.path("template").to_string_lossy().into_owned();
        let layer = v1::OverlayDisk { base_path: template, limit_bytes: 0 };
        let disks = vec![place.file("image", true, false), Kind::Overlay(layer)];
        let socket = place.serve(&format!("root-{number}"), disks)?;
        let (driver, map, found) = use_it(&socket, (&memory, MEMORY), 2)?;
        if found != [0x11, 0x22] {
            return Err(format!("a root begins with {found:x?}").into());
        }
        Ok((Instant::now(), driver, map))
    };
    std::thread::scope(|scope| {
        let owner = &owner;
        let owners: Vec<_> = (0..count).map(|number| scope.spawn(move || owner(number))).collect();
        // Until all threads wait.
        std::thread::sleep(Duration::from_millis(50));
        let begun = Instant::now();
        start.wait();
        let ended = owners.into_iter().map(|one| one.join().expect("an owner panicked"));
        // Functions are kept until the last one is there.
        let ended: Vec<_> = ended.collect::<Outcome<_>>()?;
        Ok(ended.iter().map(|(end, ..)| end.duration_since(begun)).collect())
    })
}

fn attachments(place: &Place, pin: bool, rounds: usize) -> Outcome<()> {
    let id = if pin { "attached-pin" } else { "attached" };
    let mut times: Vec<(u64, Vec<Duration>)> = SIZES.map(|mib| (mib, Vec::new())).to_vec();
    for _ in 0..rounds {
        for (mib, times) in &mut times {
            let file = memory(*mib << 20)?;
            let socket = place.serve(id, vec![place.file("disk", false, pin)])?;
            let begun = Instant::now();
            let (mut driver, _map, found) = use_it(&socket, (&file, *mib << 20), 1)?;
            times.push(begun.elapsed());
            if found != [0x33] {
                return Err(format!("the disk begins with {found:x?}").into());
            }
            driver.disable()?;
            // Each owner has a function of its own, as sandboxes have.
            place.plane.remove(id)?;
        }
    }
    let pinned = if pin { ", pinned" } else { "" };
    let mut points = Vec::new();
    for (mib, times) in &mut times {
        let [p50, p99, _] = percentiles(times);
        points.push((*mib as f64, p50.as_secs_f64() * 1e6));
        println!("attachment of {mib} MiB{pinned}, {rounds} rounds: p50 {p50:?}, p99 {p99:?}");
    }
    println!("slope{pinned}: {:.5} us/MiB", slope(&points));
    Ok(())
}

/// Returns the median, the 99th percentile, and the greatest value.
fn percentiles(times: &mut [Duration]) -> [Duration; 3] {
    times.sort_unstable();
    let at = |percent: usize| {
        let rank = (times.len() * percent).div_ceil(100).max(1);
        times.get(rank - 1).copied().unwrap_or_default()
    };
    [at(50), at(99), at(100)]
}

/// Returns the slope of the line of least squares through points.
fn slope(points: &[(f64, f64)]) -> f64 {
    let count = points.len().max(1) as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let across: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let both: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    both / across.max(f64::MIN_POSITIVE)
}

/// Returns the CPU time of this process so far.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}
