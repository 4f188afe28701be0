//! Tests of a disk of an image that is still being filled. The test plays the fetcher, message by
//! message, and turns the disk's clock.

mod connection;
mod reads;

use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with,
};
use slipway_lazy_spec::{Answer, Extent, Hello, MOST, Want};
use slipway_peer::{Bin, receive};
use slipway_telemetry::ManualClock;
use tempfile::TempDir;

use super::*;
use crate::model::await_completions;
use crate::{Completion, FileDisk, FileOptions, LazyDisk, create_sparse};

const BLOCK: u64 = 4096;
const DIGEST: [u8; 32] = [7; 32];
/// Time between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(100);
const MILLISECOND: Duration = Duration::from_millis(1);
/// Only a lost wake-up, or an end that never comes, takes so long.
const LONG: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
const NOW: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// An image's file without any of its blocks, and the fetcher's socket.
struct Rig {
    folder: TempDir,
    clock: ManualClock,
    listener: OwnedFd,
}

impl Rig {
    fn new(bytes: u64) -> Self {
        let folder = tempfile::tempdir().unwrap();
        create_sparse(&folder.path().join("image"), bytes).unwrap();
        let listener = listen(&folder.path().join("fetcher"));
        Self { folder, clock: ManualClock::new(), listener }
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("fetcher")
    }

    /// Returns the greeting of a disk that reads the image's file.
    fn hello(&self) -> Hello {
        let file = std::fs::metadata(self.image()).unwrap();
        Hello { digest: DIGEST, device: file.dev(), inode: file.ino() }
    }

    fn disk(&self) -> LazyDisk {
        let options = FileOptions { read_only: true, direct: false, ..FileOptions::default() };
        let file = FileDisk::open(&self.image(), &options).unwrap();
        LazyDisk::new(file, self.hello(), &self.socket(), Arc::new(self.clock.clone())).unwrap()
    }

    /// Accepts a connection that waits, and takes its greeting. Returns `None` if none waits.
    fn accept(&self) -> Option<Fetcher> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = accept_with(&self.listener, flags).ok()?;
        let image = File::options().write(true).open(self.image()).unwrap();
        let fetcher = Fetcher { socket, bin: Bin::new(), image };
        let hello = fetcher.hear().unwrap();
        assert_eq!(Hello::decode(&hello), Some(self.hello()));
        Some(fetcher)
    }

    /// Makes a disk with an open connection.
    fn open(&self) -> (LazyDisk, Fetcher) {
        let mut disk = self.disk();
        let fetcher = self.welcome(&mut disk);
        (disk, fetcher)
    }

    /// Accepts the connection of a disk, and opens it.
    fn welcome(&self, disk: &mut dyn Disk) -> Fetcher {
        let fetcher = self.accept().unwrap();
        fetcher.say(&Answer::Open);
        assert!(polled(disk).is_empty());
        fetcher
    }
}

fn listen(path: &Path) -> OwnedFd {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, kind, flags, None).unwrap();
    rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&socket, 16).unwrap();
    socket
}

/// The fetcher's end of a connection.
struct Fetcher {
    socket: OwnedFd,
    bin: Bin,
    image: File,
}

impl Fetcher {
    /// Takes a message. Returns `None` if there is none, or the connection has ended.
    fn hear(&self) -> Option<Vec<u8>> {
        let mut message = vec![0; MOST];
        let mut into = [IoSliceMut::new(&mut message)];
        let got = receive(&self.socket, &mut into, &self.bin, RecvFlags::DONTWAIT).ok()?;
        message.truncate(got.bytes);
        (got.bytes > 0).then_some(message)
    }

    /// Takes all requests that were sent.
    fn extents(&self) -> Vec<Extent> {
        let wants = std::iter::from_fn(|| self.hear());
        wants.map(|message| Want::decode(&message).unwrap().0).collect()
    }

    /// Takes all requests that were sent, each as its first block and its number of blocks.
    fn wants(&self) -> Vec<(u64, u64)> {
        let in_blocks = |one: Extent| {
            assert!(one.offset.is_multiple_of(BLOCK) && one.bytes.is_multiple_of(BLOCK));
            (one.offset / BLOCK, one.bytes / BLOCK)
        };
        self.extents().into_iter().map(in_blocks).collect()
    }

    fn send(&self, message: &[u8]) {
        rustix::net::send(&self.socket, message, SendFlags::NOSIGNAL).unwrap();
    }

    fn say(&self, answer: &Answer<'_>) {
        self.send(&answer.encode());
    }

    /// Writes blocks to the image, and says so.
    fn fill(&self, blocks: Range<u64>) {
        let extent = extent(blocks);
        self.image.write_all_at(&content(extent), extent.offset).unwrap();
        self.say(&Answer::Have(extent));
    }

    /// Waits for the end of the connection. Returns `false` if a message comes instead, or nothing.
    fn is_over(&self) -> bool {
        let _ = rustix::event::poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&LONG));
        let mut into = [0; 1];
        let mut into = [IoSliceMut::new(&mut into)];
        match receive(&self.socket, &mut into, &self.bin, RecvFlags::DONTWAIT) {
            Ok(got) => got.bytes == 0,
            Err(errno) => errno != rustix::io::Errno::AGAIN,
        }
    }
}

fn extent(blocks: Range<u64>) -> Extent {
    Extent { offset: blocks.start * BLOCK, bytes: (blocks.end - blocks.start) * BLOCK }
}

/// Returns the content of a part of the image; no byte of it is 0, as holes are.
fn content(extent: Extent) -> Vec<u8> {
    (extent.offset..extent.end()).map(|at| (at ^ (at >> 8) ^ (at >> 15)) as u8 | 1).collect()
}

/// Submits a read of blocks of the image, which does not end at once.
fn submit(disk: &mut dyn Disk, tag: u64, blocks: Range<u64>) -> Span {
    let per_block = BLOCK / u64::from(disk.geometry().block_size);
    let (lba, count) = (blocks.start * per_block, (blocks.end - blocks.start) * per_block);
    let span = Span::heap(extent(blocks).bytes as usize);
    let read = request(Operation::Read, lba, count as u32, vec![span.clone()]);
    let mut ended = Vec::new();
    disk.submit(&mut vec![Request { tag, ..read }], &mut ended);
    assert!(ended.is_empty());
    span
}

/// Polls once. Returns the requests that ended.
fn polled(disk: &mut dyn Disk) -> Vec<(u64, Result<(), DiskError>)> {
    let mut ended = Vec::new();
    disk.poll(&mut ended);
    outcomes(&ended)
}

/// Waits until `count` requests have ended. Returns them in the order of their tags.
fn ends(disk: &mut dyn Disk, count: usize) -> Vec<(u64, Result<(), DiskError>)> {
    let mut ended = Vec::new();
    await_completions(disk, count, &mut ended);
    let mut all = outcomes(&ended);
    all.sort_unstable_by_key(|(tag, _)| *tag);
    all
}

fn outcomes(ended: &[Completion]) -> Vec<(u64, Result<(), DiskError>)> {
    ended.iter().map(|one| (one.tag, one.result)).collect()
}

/// Checks that a span has the image's content from `block` on.
fn check(span: &Span, block: u64) {
    let mut found = vec![0; span.len()];
    span.read(0, &mut found).unwrap();
    assert!(found == content(Extent { offset: block * BLOCK, bytes: span.len() as u64 }));
}

/// Waits until the disk's descriptor is readable. Returns whether it became so in time.
fn is_awake(disk: &dyn Disk, timeout: Timespec) -> bool {
    let wake = disk.wake_descriptor().unwrap();
    rustix::event::poll(&mut [PollFd::new(&wake, PollFlags::IN)], Some(&timeout)) == Ok(1)
}
