//! A disk of an image whose file is still being filled.
//!
//! The file has its final size, and holes where blocks are missing. A process of the node, the
//! *fetcher*, gets the blocks and writes them through the page cache, through which the disk reads.
//! The disk knows of blocks that are there by the fetcher's messages only (`slipway_lazy_spec`,
//! `link`); it never looks at the file for holes. A read of such blocks goes to the file like any
//! other. Other reads wait, and the fetcher is asked for what they lack, once for all of them
//! (`missing`).
//!
//! The fetcher's messages are checked. One that breaks the protocol ends the connection and changes
//! nothing. A connection that is lost is made again while reads wait, and they ask anew; what is
//! known of the file stays known. Once all blocks are there, nothing of this is left: requests go
//! straight to the file.

mod alarm;
mod blocks;
mod link;
mod missing;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::event::epoll;
use rustix::io::Errno;
use slipway_lazy_spec::Hello;
use slipway_ram::Span;
use slipway_telemetry::{Clock, MonotonicClock};

use crate::check::{Extent, check_request, check_transfer, complete};
use crate::file::{Common, failed, measure};
use crate::{
    Completion, Disk, FileDisk, FileOptions, Geometry, OpenError, Operation, Request, Transferred,
};
use link::FetcherConnection;
use missing::{BLOCK, Missing};

/// Most bytes of an image: what is known of each of its blocks then takes 32 MiB.
const MOST_BYTES: u64 = 1 << 40;

/// A read-only disk of an image whose file is still being filled.
///
/// - A read waits until its blocks are there, for 20 s at most; then it fails with ETIMEDOUT.
/// - A read fails with EIO if the fetcher cannot get blocks that it lacks. Submitted again, it asks
///   again.
/// - While reads wait and there is no connection to the fetcher, one is tried every 100 ms; after
///   the fetcher has refused the image again, with pauses that double up to 10 s.
pub struct LazyDisk<D = FileDisk> {
    inner: D,
    /// Readable if the inner disk's descriptor, the connection or the timer is.
    wake: OwnedFd,
    geometry: Geometry,
    /// The state of an image that may not be whole, or `None` once it is.
    missing: Option<Box<Missing>>,
    /// A vector that is reused for requests to the inner disk.
    ready: Vec<Request>,
}

impl LazyDisk {
    /// Opens the image's file at `path`, which is read through the page cache. `digest` is the
    /// SHA-256 digest of the image's manifest, and `socket` the path of the fetcher's socket. Of
    /// the options, the block size and the witness count.
    ///
    /// # Errors
    /// The errors of [`FileDisk::open`]; [`OpenError::Size`] if the file is no whole number of
    /// logical blocks; [`OpenError::File`] if it is larger than any image, or the socket's path too
    /// long.
    pub fn open(
        path: &Path,
        digest: [u8; 32],
        socket: PathBuf,
        options: &FileOptions,
    ) -> Result<Self, OpenError> {
        ImageFile::open(path, digest, socket, options)?.disk()
    }
}

impl<D: Disk> LazyDisk<D> {
    /// Makes a disk over `inner`, which reads the image's file and refuses writes. `hello` names
    /// the image and this file. Connects to the fetcher at `socket`, if there is one by now.
    ///
    /// # Errors
    /// [`OpenError::Wake`] if no descriptors are left; [`OpenError::File`] if the socket's path is
    /// too long.
    pub fn new(
        inner: D,
        hello: Hello,
        socket: &Path,
        clock: Arc<dyn Clock>,
    ) -> Result<Self, OpenError> {
        let geometry = Geometry { read_only: true, ..inner.geometry() };
        let mut missing =
            Missing::new(geometry.bytes(), FetcherConnection::new(socket, hello)?, clock)?;
        let wake = watch(&inner, &missing).map_err(|errno| OpenError::Wake(errno.into()))?;
        missing.connect(&wake);
        Ok(Self { inner, wake, geometry, missing: Some(Box::new(missing)), ready: Vec::new() })
    }

    /// Returns whether the whole image is known to be there.
    pub fn is_whole(&self) -> bool {
        self.missing.is_none()
    }
}

/// Makes a descriptor that is readable if the inner disk's or the timer's is.
fn watch(inner: &impl Disk, missing: &Missing) -> rustix::io::Result<OwnedFd> {
    let wake = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let add = |fd: BorrowedFd<'_>| {
        epoll::add(&wake, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)
    };
    add(missing.timer())?;
    inner.wake_descriptor().map_or(Ok(()), add)?;
    Ok(wake)
}

/// Returns the blocks of the file that a request concerns.
fn blocks_of(extent: &Extent) -> Range<u64> {
    extent.start / BLOCK..(extent.start + extent.len).div_ceil(BLOCK)
}

impl<D: Disk> Disk for LazyDisk<D> {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&mut self, requests: &mut Vec<Request>, completions: &mut Vec<Completion>) {
        let Some(missing) = &mut self.missing else {
            return self.inner.submit(requests, completions);
        };
        let mut waits = false;
        for request in requests.drain(..) {
            let blocks = match check_request(&self.geometry, &request) {
                // A flush, or no block: nothing to wait for.
                Ok(Extent { len: 0, .. }) => 0..0,
                Ok(extent) => blocks_of(&extent),
                Err(error) => {
                    completions.push(complete(request, Err(error)));
                    continue;
                }
            };
            if missing.has(&blocks) {
                self.ready.push(request);
            } else {
                missing.wait(request, blocks);
                waits = true;
            }
        }
        if waits {
            missing.pursue(&self.wake, completions);
        }
        if !self.ready.is_empty() {
            self.inner.submit(&mut self.ready, completions);
        }
    }

    fn transfer(&mut self, operation: Operation, at: (u64, u32), spans: &[Span]) -> Transferred {
        if let Some(missing) = &self.missing {
            match check_transfer(&self.geometry, operation, at, spans) {
                Ok(extent) if extent.len > 0 && !missing.has(&blocks_of(&extent)) => return None,
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
        }
        self.inner.transfer(operation, at, spans)
    }

    fn expect(&self, operation: Operation, lba: u64, blocks: u32) {
        self.inner.expect(operation, lba, blocks);
    }

    fn poll(&mut self, completions: &mut Vec<Completion>) {
        if let Some(missing) = &mut self.missing {
            missing.poll(&self.wake, &mut self.ready, completions);
            if missing.is_whole() {
                missing.lose(&self.wake);
                // With the map and the timer.
                self.missing = None;
            }
            if !self.ready.is_empty() {
                self.inner.submit(&mut self.ready, completions);
            }
        }
        self.inner.poll(completions);
    }

    fn cancel(&mut self, tag: u64, completions: &mut Vec<Completion>) -> bool {
        if let Some(missing) = &mut self.missing
            && missing.cancel(tag, completions)
        {
            return true;
        }
        self.inner.cancel(tag, completions)
    }

    fn release(&mut self) {
        self.inner.release();
    }

    fn copies(&self, operation: Operation) -> bool {
        self.inner.copies(operation)
    }

    fn wake_descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }
}

/// An image's file, opened once for any number of disks, each of which has a connection of its own
/// to the fetcher.
pub(crate) struct ImageFile {
    path: PathBuf,
    common: Arc<Common>,
    hello: Hello,
    socket: PathBuf,
}

impl ImageFile {
    /// Opens the file; see [`LazyDisk::open`].
    pub fn open(
        path: &Path,
        digest: [u8; 32],
        socket: PathBuf,
        options: &FileOptions,
    ) -> Result<Self, OpenError> {
        let block_size = options.block_size;
        let witness = options.witness.clone();
        let options = FileOptions {
            read_only: true,
            block_size,
            direct: false,
            witness,
            ..FileOptions::default()
        };
        let common = Common::open(path, &options)?;
        let bytes = measure(&common.fd, path)?;
        if bytes != common.geometry().bytes() {
            return Err(OpenError::Size { bytes, block_size });
        }
        if bytes > MOST_BYTES {
            return Err(failed(path, "open")(Errno::FBIG));
        }
        let status = rustix::fs::fstat(&common.fd).map_err(failed(path, "look at"))?;
        let hello = Hello { digest, device: status.st_dev, inode: status.st_ino };
        Ok(Self { path: path.to_owned(), common: Arc::new(common), hello, socket })
    }

    /// Opens a disk.
    pub fn disk(&self) -> Result<LazyDisk, OpenError> {
        let file = FileDisk::over(Arc::clone(&self.common), true)?;
        LazyDisk::new(file, self.hello, &self.socket, Arc::new(MonotonicClock::new()))
    }

    /// Returns the shape of the disks.
    pub fn geometry(&self) -> Geometry {
        self.common.geometry()
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
