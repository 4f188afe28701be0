//! Directories and files of the host that containers of this guest have.
//!
//! All are entries of one virtio file system device, which is mounted once, outside of containers:
//! when a device is mounted again, Linux (6.1, *fs/fuse/virtio_fs.c*, `virtio_fs_test_super`) may
//! take the superblock of an entry for the device's.
//!
//! Each entry that is a directory is a file system of its own in the guest, which Linux mounts when
//! a path leads through it. That is done here, before a container's mount namespace becomes a copy
//! of this one. So containers that have the same entry have the same file system, and what they map
//! of its files is the same memory. With the last of them the file system is unmounted, and the
//! host's files are let go.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use slipway_agent_protocol::v1::Share;

use crate::lock::lock;
use crate::{log, machine};

/// The directory where the device is mounted.
const DIRECTORY: &str = "/run/shares";
/// Flags of all mounts of shares.
pub const FLAGS: MountFlags = MountFlags::NODEV;
/// The longest wait for a device, under emulation and on a loaded machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// The pause between two attempts to mount a device that the driver has not found yet.
const PAUSE: Duration = Duration::from_millis(2);

/// The mounts of the device and its entries.
struct Mounts {
    device: bool,
    /// The number of containers that have each entry.
    users: BTreeMap<String, usize>,
}

static MOUNTS: Mutex<Mounts> = Mutex::new(Mounts { device: false, users: BTreeMap::new() });

/// Returns the path of a share.
pub fn path(share: &Share) -> PathBuf {
    Path::new(DIRECTORY).join(&share.entry)
}

/// The entries that a container has. They stay mounted until this is dropped.
#[derive(Default)]
pub struct Held(Vec<String>);

/// Mounts the entries of a container's shares. Waits for the device.
///
/// # Errors
/// There is no such device or entry, or the guest's kernel lacks the driver.
pub async fn hold(shares: &[Share]) -> Result<Held> {
    if shares.is_empty() {
        return Ok(Held::default());
    }
    let shares = shares.to_vec();
    let held = tokio::task::spawn_blocking(move || hold_all(&shares));
    held.await.context("mounting the host's files")?
}

fn hold_all(shares: &[Share]) -> Result<Held> {
    let held = count(shares)?;
    // Without the lock: the host's file system may not answer.
    for share in shares {
        // A path that leads through the entry mounts it.
        std::fs::metadata(place(entry(share)).join("."))
            .with_context(|| format!("opening the host's files for {}", share.path))?;
    }
    Ok(held)
}

/// Mounts the device, unless it is mounted, and counts the entries as a container's.
fn count(shares: &[Share]) -> Result<Held> {
    let mut mounts = lock(&MOUNTS);
    if let (false, Some(first)) = (mounts.device, shares.first()) {
        machine::load_shares_modules();
        std::fs::create_dir_all(DIRECTORY).context(DIRECTORY)?;
        mount_device(&first.tag).context("mounting the host's files")?;
        mounts.device = true;
    }
    let entries: Vec<_> = shares.iter().map(|share| entry(share).to_owned()).collect();
    for entry in &entries {
        *mounts.users.entry(entry.clone()).or_default() += 1;
    }
    Ok(Held(entries))
}

/// Returns the name of a share's entry: the first part of its path.
fn entry(share: &Share) -> &str {
    share.entry.split('/').next().unwrap_or_default()
}

fn place(entry: &str) -> PathBuf {
    Path::new(DIRECTORY).join(entry)
}

/// Mounts the device with this tag. Until the driver has found it, the kernel says that the
/// argument is invalid.
fn mount_device(tag: &str) -> Result<()> {
    let begun = Instant::now();
    loop {
        match mount(tag, DIRECTORY, "virtiofs", FLAGS, c"") {
            Ok(()) => return Ok(()),
            Err(Errno::INVAL) if begun.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
            Err(Errno::NODEV) => bail!("the guest's kernel has no virtiofs"),
            Err(error) => return Err(error.into()),
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let entries = std::mem::take(&mut self.0);
        if entries.is_empty() {
            return;
        }
        // An unmount may wait for the host.
        let named = std::thread::Builder::new().name("shares".into());
        if let Err(error) = named.spawn(move || release(entries)) {
            log!("shares stay mounted: {error}");
        }
    }
}

fn release(entries: Vec<String>) {
    let mut mounts = lock(&MOUNTS);
    for entry in entries {
        match mounts.users.get_mut(&entry) {
            Some(users) if *users > 1 => *users -= 1,
            _ => {
                mounts.users.remove(&entry);
                let place = place(&entry);
                match unmount(&place, UnmountFlags::DETACH) {
                    // An entry with a single file is no file system of its own.
                    Ok(()) | Err(Errno::INVAL | Errno::NOENT) => {}
                    Err(error) => log!("{}: {error}", place.display()),
                }
            }
        }
    }
}
