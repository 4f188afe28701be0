//! Measures how soon a function is attached to memory of many sizes: `cargo run --release -p
//! slipway-plane --example attachments -- [ROUNDS]`.
//!
//! One owner attaches a function that is there to memory of 128 MiB to 16 GiB, the sizes in turn,
//! ROUNDS (20) times each; with a disk as sandboxes have it, and with one whose requests use
//! registered memory (`pin`). The time is from the connection to the first block read. The slope is
//! that of the least squares of the medians.
//!
//! The plane has one reactor, and is in this process. It takes the machine's processors together
//! with the owner. `slipway bench roots` measures many owners at once.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use slipway_nvme::driver::{Arena, Driver, io};
use slipway_nvme_spec::opcode::NvmOpcode;
use slipway_nvme_spec::registers::offset;
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1::disk::Kind;
use slipway_plane_api::v1::{self, nvme_controller::DoorbellMode};
use slipway_ram::{DmaMap, Permissions, Region};
use slipway_vfio_user_client::{Client, Registers, sealed_memory};

type Outcome<T> = Result<T, Box<dyn std::error::Error + Send + Sync>>;

const ROUNDS: usize = 20;
const PATIENCE: Duration = Duration::from_secs(60);
/// Bytes of the disk.
const DISK: u64 = 64 << 20;
/// Bytes of the part of an owner's memory that its driver uses.
const ARENA: u64 = 1 << 20;
/// The bytes of the disk's first block.
const BYTE: u8 = 0x33;
/// Sizes of memory for attachments, in MiB.
const SIZES: [u64; 5] = [128, 512, 2048, 8192, 16384];
const BLOCK: usize = 4096;

/// A folder with the disks' files and the functions' sockets.
struct DiskFolder {
    plane: Plane,
    folder: tempfile::TempDir,
}

fn main() -> Outcome<()> {
    let rounds = std::env::args().nth(1).map(|word| word.parse::<usize>()).transpose()?;
    let place =
        DiskFolder { plane: Plane::new(Settings::default())?, folder: tempfile::tempdir()? };
    let file = std::fs::File::create(place.path("disk"))?;
    std::os::unix::fs::FileExt::write_all_at(&file, &[BYTE; BLOCK], 0)?;
    file.set_len(DISK)?;
    for pin in [false, true] {
        attachments(&place, pin, rounds.unwrap_or(ROUNDS).max(1))?;
    }
    Ok(())
}

impl DiskFolder {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Makes a function with the disk. Returns its socket.
    fn serve(&self, id: &str, pin: bool) -> Outcome<PathBuf> {
        let socket = self.path(id);
        let path = self.path("disk").to_string_lossy().into_owned();
        let kind = Kind::File(v1::FileDisk { path, pin, ..Default::default() });
        self.plane.create(&v1::CreateEndpointRequest {
            id: id.to_owned(),
            socket_path: socket.to_string_lossy().into_owned(),
            nvme: Some(v1::NvmeController {
                namespaces: vec![v1::Namespace {
                    nsid: 1,
                    disk: Some(v1::Disk { block_size: 0, kind: Some(kind) }),
                    ..Default::default()
                }],
                doorbells: DoorbellMode::Rung.into(),
                ..Default::default()
            }),
            ..Default::default()
        })?;
        Ok(socket)
    }
}

/// Connects to a function, hands it memory, brings it up, and reads the first block of its disk.
/// Returns the driver, with the memory that it uses.
fn use_it(socket: &Path, (file, bytes): (&OwnedFd, u64)) -> Outcome<(Driver<Registers>, DmaMap)> {
    let mut client = Client::connect(socket, PATIENCE)?;
    client.map(0, bytes, file.as_fd(), 0, true)?;
    let mut map = DmaMap::new();
    map.add(0, Region::mapped(file.as_fd(), 0, ARENA, Permissions::READ_WRITE)?)?;
    let registers = Registers::new(client, PATIENCE).with_doorbells(offset::DOORBELLS)?;
    let mut driver = Driver::new(registers, Arena::new(map.memory(), 0, ARENA), 16)?;
    driver.create_pair(1, 16, None)?;
    let buffer = driver.arena.allocate(BLOCK)?;
    driver.transfer(1, io(NvmOpcode::Read, 1, 0, BLOCK as u32 / 512), (buffer, BLOCK))?;
    let mut byte = [0];
    driver.arena.memory().read(buffer, &mut byte)?;
    if byte != [BYTE] {
        return Err(format!("the disk begins with {byte:x?}").into());
    }
    Ok((driver, map))
}

fn attachments(place: &DiskFolder, pin: bool, rounds: usize) -> Outcome<()> {
    let id = if pin { "attached-pin" } else { "attached" };
    let mut times: Vec<(u64, Vec<Duration>)> = SIZES.map(|mib| (mib, Vec::new())).to_vec();
    for _ in 0..rounds {
        for (mib, times) in &mut times {
            let file = sealed_memory(*mib << 20)?;
            let socket = place.serve(id, pin)?;
            let begun = Instant::now();
            let (mut driver, _map) = use_it(&socket, (&file, *mib << 20))?;
            times.push(begun.elapsed());
            driver.disable()?;
            // Each owner has a function of its own, as sandboxes have.
            place.plane.remove(id)?;
        }
    }
    let pinned = if pin { ", pinned" } else { "" };
    let mut points = Vec::new();
    for (mib, times) in &mut times {
        let [p50, p99] = percentiles(times);
        points.push((*mib as f64, p50.as_secs_f64() * 1e6));
        println!("attachment of {mib} MiB{pinned}, {rounds} rounds: p50 {p50:?}, p99 {p99:?}");
    }
    println!("slope{pinned}: {:.5} us/MiB", slope(&points));
    Ok(())
}

/// Returns the median and the 99th percentile.
fn percentiles(times: &mut [Duration]) -> [Duration; 2] {
    times.sort_unstable();
    let at = |percent: usize| {
        let rank = (times.len() * percent).div_ceil(100).max(1);
        times.get(rank - 1).copied().unwrap_or_default()
    };
    [at(50), at(99)]
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
