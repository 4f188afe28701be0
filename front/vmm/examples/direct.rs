//! Writes a file to a disk in two ways, and compares what is then on the disk: `direct FILE DISK`.
//! - From a mapping of the file, past the page cache (`O_DIRECT`): the disk reads the file's own
//!   pages where the file system is mounted with `dax`.
//! - By sendfile(2).
//!
//! The file's size is a multiple of 4 KiB.
#![allow(unsafe_code)] // the mapping

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek};
use std::os::fd::AsFd;

use rustix::fs::OFlags;
use rustix::mm::{MapFlags, ProtFlags};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn open(path: &str, flags: OFlags) -> Outcome<File> {
    use std::os::unix::fs::OpenOptionsExt;
    let flags = i32::try_from(flags.bits())?;
    Ok(OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?)
}

/// Writes the first `len` bytes of `file` to `disk` from a mapping.
fn write_mapped(file: &File, len: usize, disk: &File) -> Outcome<()> {
    let (any, prot, flags) = (std::ptr::null_mut(), ProtFlags::READ, MapFlags::SHARED);
    // SAFETY: a fresh mapping at an address of the kernel's choice aliases nothing of this process.
    let start = unsafe { rustix::mm::mmap(any, len, prot, flags, file, 0)? };
    // SAFETY: the mapping stays until the end of this process, which alone has it; nobody writes
    // the file, which is on a file system that is mounted for reading.
    let bytes = unsafe { std::slice::from_raw_parts(start.cast::<u8>(), len) };
    let mut done = 0;
    while done < len {
        done += rustix::io::pwrite(disk, &bytes[done..], done as u64)?;
    }
    Ok(())
}

/// Writes all of `file` to `disk` by sendfile(2).
fn send(file: &File, len: usize, mut disk: &File) -> Outcome<()> {
    disk.rewind()?;
    let mut offset = 0;
    while (offset as usize) < len {
        let left = len - offset as usize;
        if rustix::fs::sendfile(disk.as_fd(), file.as_fd(), Some(&mut offset), left)? == 0 {
            return Err("sendfile moved nothing".into());
        }
    }
    Ok(disk.sync_all()?)
}

/// Compares the disk's first bytes, read anew, with `wanted`, and then writes zeros there.
fn check(way: &str, path: &str, wanted: &[u8]) -> Outcome<()> {
    let disk = open(path, OFlags::empty())?;
    rustix::fs::fadvise(&disk, 0, None, rustix::fs::Advice::DontNeed)?;
    let mut found = vec![0; wanted.len()];
    (&disk).read_exact(&mut found)?;
    if found != wanted {
        return Err(format!("{way}: the disk has other bytes").into());
    }
    println!("{way}: {} bytes are on the disk", wanted.len());
    rustix::io::pwrite(&disk, &vec![0; wanted.len()], 0)?;
    Ok(disk.sync_all()?)
}

fn main() -> Outcome<()> {
    let [_, path, disk] = &std::env::args().collect::<Vec<_>>()[..] else {
        return Err("direct FILE DISK".into());
    };
    let wanted = std::fs::read(path)?;
    let file = File::open(path)?;
    write_mapped(&file, wanted.len(), &open(disk, OFlags::DIRECT)?)?;
    check("O_DIRECT from a mapping", disk, &wanted)?;
    send(&file, wanted.len(), &open(disk, OFlags::empty())?)?;
    check("sendfile", disk, &wanted)
}
