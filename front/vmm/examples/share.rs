//! Shares the pages of a file with guests: `share FILE COMMAND [ARGUMENT...]` copies the file into
//! memory, sealed and filled up to 2 MiB with zeros as `slipway-vmm --pmem` takes it, and runs the
//! command with that as its standard input. So `share FILE slipway-vmm --pmem fd:0 ...` runs one
//! guest, and a script that `exec 3<&0` begins runs several, each with `--pmem fd:3 3<&3`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Command, ExitCode};

use rustix::fs::MemfdFlags;
use slipway_vmm::layout::SHARED_PAGES_UNIT;
use slipway_vmm::shared::SEALS;

/// Copies `from` into a sealed file, and returns it opened for reading only.
fn share(mut from: File) -> std::io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut file = File::from(rustix::fs::memfd_create(c"shared-pages", flags)?);
    let len = std::io::copy(&mut from, &mut file)?;
    file.set_len(len.next_multiple_of(SHARED_PAGES_UNIT))?;
    rustix::fs::fcntl_add_seals(&file, SEALS)?;
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn main() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let mut words = std::env::args_os().skip(1);
    let path = words.next().ok_or("share FILE COMMAND [ARGUMENT...]")?;
    let program = words.next().ok_or("share FILE COMMAND [ARGUMENT...]")?;
    let shared = share(File::open(path)?)?;
    let status = Command::new(program).args(words).stdin(shared).status()?;
    Ok(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1).into())
}
