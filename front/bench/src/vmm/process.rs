//! A VMM's process, from its start to its end.

use std::ffi::OsString;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::stub::BYTE;

/// The longest time from the start of a VMM to its guest's byte.
const PATIENCE: Duration = Duration::from_secs(60);
/// The file of a guest's memory that Slipway's driver or a pool has made, in `/proc/PID/smaps`.
const GUEST_FILE: &str = " /memfd:guest-memory";
/// The most bytes of a failed VMM's messages that are shown.
const MOST_SAID: u64 = 2000;

/// A VMM whose guest has sent its byte. The process ends on drop, with this process, or with the
/// thread that started it.
pub(super) struct Started {
    child: Child,
    /// Time from before the process was made to the guest's byte.
    pub byte_ns: u64,
}

impl Started {
    /// Starts `command` and waits for the guest's byte on the standard output. `enter` runs in the
    /// child between fork and exec, so it must make system calls only: no allocation, no lock.
    ///
    /// # Errors
    /// If the program cannot be started, or its guest sends no byte in time. The process has ended
    /// then, and the error has the VMM's messages.
    pub fn start(
        command: &mut Command,
        enter: impl Fn() -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Result<Self> {
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let prepare = move || {
            let signal = rustix::process::Signal::KILL;
            rustix::process::set_parent_process_death_signal(Some(signal))?;
            enter()
        };
        #[allow(unsafe_code)] // a VMM does not end by itself when this process is killed
        // SAFETY: `prepare` makes system calls only, which is allowed between fork and exec; so
        // does each `enter` that `programs` passes, as the doc comment above demands.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(command, prepare);
        }
        let program = command.get_program().to_owned();
        let begun = Instant::now();
        let child = command.spawn();
        let child = child.with_context(|| format!("cannot start {}", program.display()))?;
        let mut started = Self { child, byte_ns: 0 };
        started.wait_for_byte(begun + PATIENCE)?;
        started.byte_ns = begun.elapsed().as_nanos() as u64;
        Ok(started)
    }

    /// Waits for the guest's byte, and reads all that comes before it.
    fn wait_for_byte(&mut self, deadline: Instant) -> Result<()> {
        let mut output = self.child.stdout.take().context("a pipe")?;
        let mut bytes = [0; 4096];
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let timeout = Timespec::try_from(left)?;
            let ready = {
                let mut ends = [PollFd::from_borrowed_fd(output.as_fd(), PollFlags::IN)];
                poll(&mut ends, Some(&timeout))?
            };
            if ready == 0 {
                bail!("the guest sent nothing within {PATIENCE:?}{}", self.kill_and_quote());
            }
            match output.read(&mut bytes)? {
                0 => bail!("the VMM ended before its guest sent anything{}", self.kill_and_quote()),
                count if bytes[..count].contains(&BYTE) => break,
                _ => {}
            }
        }
        // The VMM may still print, and must not be killed by that.
        self.child.stdout = Some(output);
        Ok(())
    }

    /// Kills the VMM, and returns its messages behind a colon, or an empty text without messages.
    fn kill_and_quote(&mut self) -> String {
        let _ = self.child.kill();
        let mut said = Vec::new();
        if let Some(errors) = self.child.stderr.take() {
            let _ = errors.take(MOST_SAID).read_to_end(&mut said);
        }
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> =
            said.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        if lines.is_empty() { String::new() } else { format!(": {}", lines.join("; ")) }
    }

    /// Returns the program that the process runs now, and its arguments. A script that executed the
    /// VMM in its place is not it.
    ///
    /// # Errors
    /// If files of the process in `/proc` cannot be read.
    pub fn command(&self) -> Result<(PathBuf, Vec<OsString>)> {
        let folder = PathBuf::from(format!("/proc/{}", self.child.id()));
        let program = std::fs::read_link(folder.join("exe"))?;
        let line = std::fs::read(folder.join("cmdline"))?;
        let words = line.strip_suffix(b"\0").unwrap_or(&line).split(|byte| *byte == 0);
        Ok((program, words.skip(1).map(|word| OsString::from_vec(word.to_vec())).collect()))
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills the process. Returns the time until nothing is left of it, in nanoseconds.
    ///
    /// # Errors
    /// If the process cannot be killed or waited for.
    pub fn end(mut self) -> Result<u64> {
        let begun = Instant::now();
        self.child.kill()?;
        self.child.wait()?;
        Ok(begun.elapsed().as_nanos() as u64)
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the private dirty memory in bytes of the process `id`, without that of a guest with
/// `guest` bytes.
///
/// # Errors
/// If `/proc/PID/smaps` cannot be read.
pub(super) fn private_bytes(id: u32, guest: u64) -> Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{id}/smaps"))?;
    Ok(private_dirty(&text, guest))
}

/// Adds up the private dirty memory of a process (proc(5), `/proc/PID/smaps`), in bytes. Dirty
/// pages of a program's file in the page cache are not the process's, and do not count. A mapping
/// of an eighth of the guest's memory or more is the guest's, and does not count: VMMs map guest
/// memory in one to three parts, and have nothing else of that size but their heap. That of a fork
/// is in many parts, known by their file.
fn private_dirty(smaps: &str, guest: u64) -> u64 {
    let mut sum = 0;
    // Of the mapping whose lines come next: whether it counts, whether it is shared, dirty KiB.
    let (mut counts, mut shared, mut dirty) = (true, false, 0);
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let first = words.next().unwrap_or_default();
        if let Some((start, end)) = range(first) {
            let guests = line.contains(GUEST_FILE) || end.saturating_sub(start) >= guest / 8;
            counts = !guests || line.ends_with("[heap]");
            shared = words.next().is_some_and(|access| access.ends_with('s'));
            continue;
        }
        let kib = words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        match first {
            "Private_Dirty:" => dirty = kib,
            // Comes after `Private_Dirty` in each mapping. Of a private mapping the process has its
            // anonymous pages, of a shared one, as a memfd's, all dirty pages.
            "Anonymous:" if counts => sum += if shared { dirty } else { dirty.min(kib) } * 1024,
            _ => {}
        }
    }
    sum
}

/// Parses the addresses at the beginning of a mapping's first line.
fn range(word: &str) -> Option<(u64, u64)> {
    let (start, end) = word.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu_time::process_cpu_ns;

    #[test]
    fn guest_memory_does_not_count() {
        let smaps = "\
55d000000000-55d000100000 rw-p 00000000 00:00 0                          [heap]
Size:               1024 kB
Private_Dirty:        12 kB
Anonymous:            12 kB
7f0000000000-7f0008000000 rw-s 00000000 00:01 5                          /memfd:guest (deleted)
Size:             131072 kB
Private_Dirty:       400 kB
Anonymous:             0 kB
7f0010000000-7f0010002000 rw-p 00000000 00:00 0
Private_Clean:         4 kB
Private_Dirty:         8 kB
Anonymous:            12 kB
7f0018000000-7f0018001000 rw-s 00000000 00:01 6                 /memfd:guest-memory (deleted)
Private_Dirty:         4 kB
Anonymous:             0 kB
7f0020000000-7f0020100000 r-xp 00000000 00:01 9                          /usr/bin/vmm
Private_Dirty:       900 kB
Anonymous:             0 kB
";
        assert_eq!(private_dirty(smaps, 128 << 20), 20 * 1024);
        // The same mapping beside a guest of 16 GiB is no part of it.
        assert_eq!(private_dirty(smaps, 16 << 30), 420 * 1024);
        assert_eq!(private_dirty("no smaps", 1 << 30), 0);
    }

    #[test]
    fn a_process_is_followed_from_start_to_end() {
        // Prints a line of text, then the byte, then waits for its end. It stays the same program:
        // one that is just being executed has no memory to count.
        let script = "echo starting; printf '\\001'; kill -STOP $$";
        let mut command = Command::new("/bin/sh");
        let started = Started::start(command.args(["-c", script]), || Ok(())).unwrap();
        assert!(started.byte_ns > 0);
        assert!(private_bytes(started.id(), 1 << 30).unwrap() > 0);
        assert!(process_cpu_ns(started.id()).unwrap() > 0);
        assert!(started.end().unwrap() > 0);
    }

    #[test]
    fn a_process_that_ends_without_the_byte_is_an_error() {
        let mut command = Command::new("/bin/sh");
        let started = Started::start(command.args(["-c", "echo no; echo why >&2"]), || Ok(()));
        let error = started.err().unwrap().to_string();
        assert!(error.ends_with("its guest sent anything: why"), "{error}");
    }
}
