//! Identifies our processes, even after their ids were reused.
//!
//! A process id alone does not identify a process for long. Together with the process's start time,
//! and the boot that both belong to, it is unique. A pidfd pins it: if the process id has the
//! recorded start time after the pidfd was opened, no signal sent through the pidfd can hit another
//! process.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The name of Slipway's own VMM.
pub(crate) const SLIPWAY_VMM: &str = "slipway-vmm";

/// The name of the program that runs no guest.
pub(crate) const SLIPWAY_HOLLOW: &str = "slipway-hollow";

/// The record on disk by which a VM's process is found again, and no other process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmRecord {
    /// The hypervisor that runs the VM: `qemu`, `slipway-vmm` or
    /// `slipway-hollow`.
    pub hypervisor: String,
    /// The process id.
    pub pid: i32,
    /// The start time in clock ticks after boot (field 22 of `/proc/PID/stat`).
    pub start_time_ticks: u64,
    /// The boot that both numbers belong to ([`slipway_peer::boot_id`]).
    pub boot_id: String,
    /// The sockets of the functions that were plugged, by the functions' numbers. The socket of a
    /// function that was removed stays until another function takes its number.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub plugged: BTreeMap<usize, PathBuf>,
}

impl VmRecord {
    /// Returns the record of the process `pid`, which must not have been reaped yet.
    pub(crate) fn of(hypervisor: &str, pid: i32) -> Result<Self> {
        let start_time_ticks = start_time(pid)
            .and_then(|ticks| ticks.ok_or_else(|| io::ErrorKind::NotFound.into()))
            .map_err(|source| Error::system("reading the start time of a process", source))?;
        let (hypervisor, boot_id) = (hypervisor.to_owned(), boot_id()?);
        Ok(Self { hypervisor, pid, start_time_ticks, boot_id, plugged: BTreeMap::new() })
    }

    /// Returns whether the VMM gets new connections of its functions from its launcher, so that a
    /// function may have been lost meanwhile.
    pub fn reconnects(&self) -> bool {
        self.hypervisor == SLIPWAY_VMM
    }

    /// Returns a pidfd of the process, or `None` if it has ended or belongs to another boot. A
    /// zombie still has a pidfd.
    fn open(&self) -> Result<Option<OwnedFd>> {
        // The kernel treats negative numbers as process groups, and `Pid` panics.
        let Some(pid) = Pid::from_raw(self.pid.max(0)) else { return Ok(None) };
        if boot_id()? != self.boot_id {
            return Ok(None);
        }
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(Errno::SRCH) => return Ok(None),
            Err(errno) => return Err(Error::system("pidfd_open", errno)),
        };
        // Read after the pidfd is open: if the id still has our start time, the pidfd is that of
        // our process.
        match start_time(self.pid) {
            Ok(Some(ticks)) if ticks == self.start_time_ticks => Ok(Some(pidfd)),
            Ok(_) => Ok(None),
            Err(source) => Err(Error::system("reading the start time of a process", source)),
        }
    }

    /// Returns whether the process still runs. A zombie counts as ended.
    pub fn is_running(&self) -> Result<bool> {
        Ok(self.running()?.is_some())
    }

    /// Returns a pidfd of the process, or `None` if it has ended. A zombie counts as ended.
    pub(crate) fn running(&self) -> Result<Option<OwnedFd>> {
        let Some(pidfd) = self.open()? else { return Ok(None) };
        Ok(if ended(&pidfd, Duration::ZERO)? { None } else { Some(pidfd) })
    }
}

/// Kills a VM's process after its launcher has died, and waits until it has ended.
///
/// Returns whether there was a process to kill. Never signals another process than the recorded
/// one: a record of an earlier boot or of a reused process id does nothing.
///
/// Blocks for as long as the kernel needs to end the process (a few milliseconds), and returns an
/// error after `deadline`.
pub fn reap_leftover(record: &VmRecord, deadline: Duration) -> Result<bool> {
    let Some(pidfd) = record.open()? else { return Ok(false) };
    kill(&pidfd)?;
    if !ended(&pidfd, deadline)? {
        return Err(Error::Timeout { command: "SIGKILL".into(), timeout: deadline });
    }
    Ok(true)
}

/// Kills the process behind a pidfd. Succeeds if it has ended already.
pub(crate) fn kill(pidfd: impl AsFd) -> Result<()> {
    match pidfd_send_signal(pidfd, Signal::KILL) {
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(errno) => Err(Error::system("killing the VM's process", errno)),
    }
}

/// Waits until the process behind a pidfd has ended, at most `limit`. Returns whether it has.
fn ended(pidfd: &OwnedFd, limit: Duration) -> Result<bool> {
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        match poll(&mut fds, Some(&left)) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::system("waiting for the VM's process", errno)),
        }
    }
}

/// Returns the start time of a process in clock ticks after boot, or `None` if no process has this
/// id.
fn start_time(pid: i32) -> io::Result<Option<u64>> {
    match fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => match parse_start_time(&stat) {
            Some(ticks) => Ok(Some(ticks)),
            None => Err(io::Error::other("unexpected form of /proc/PID/stat")),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // The process ended between open and read.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns field 22 of proc(5)'s stat. The name in field 2 may hold spaces and parentheses, so
/// fields are counted after the last `)`.
fn parse_start_time(stat: &[u8]) -> Option<u64> {
    let after_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let rest = std::str::from_utf8(stat.get(after_name..)?).ok()?;
    rest.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Returns the id of this boot.
pub(crate) fn boot_id() -> Result<String> {
    slipway_peer::boot_id().map_err(|source| Error::system("reading the id of the boot", source))
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process that is killed if a test fails.
    struct Sleeper(Child);

    impl Sleeper {
        fn start() -> Self {
            let mut command = Command::new("sleep");
            command.arg("1000").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            Self(command.spawn().unwrap())
        }

        fn record(&self) -> VmRecord {
            VmRecord::of("qemu", self.0.id() as i32).unwrap()
        }
    }

    impl Drop for Sleeper {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn start_time_is_counted_after_a_hostile_name() {
        let stat = b"7 (a) 1 2 (x) S 1 7 7 0 -1 4 90 0 0 0 0 0 0 0 20 0 1 0 4242 99 100";
        assert_eq!(parse_start_time(stat), Some(4242));
        for bad in [&b""[..], b"7 (a", b"7 (a) S 1 2", b"7 (a) \xff"] {
            assert_eq!(parse_start_time(bad), None);
        }
    }

    #[test]
    fn leftover_is_killed_once() {
        let mut child = Sleeper::start();
        let record = child.record();
        assert!(record.is_running().unwrap());
        assert!(reap_leftover(&record, Duration::from_secs(10)).unwrap());
        // Not reaped yet: a zombie is not running, and killing it again succeeds as well.
        assert!(!record.is_running().unwrap());
        child.0.wait().unwrap();
        assert!(!reap_leftover(&record, Duration::from_secs(10)).unwrap());
    }

    #[test]
    fn a_stranger_is_never_killed() {
        let child = Sleeper::start();
        let ours = child.record();
        let strangers = [
            VmRecord { start_time_ticks: ours.start_time_ticks + 1, ..ours.clone() },
            VmRecord { boot_id: "another boot".into(), ..ours.clone() },
            VmRecord { pid: 0, ..ours.clone() },
            VmRecord { pid: -1, ..ours.clone() },
        ];
        for stranger in &strangers {
            assert!(!stranger.is_running().unwrap());
            assert!(!reap_leftover(stranger, Duration::from_secs(1)).unwrap());
        }
        assert!(ours.is_running().unwrap());
    }

    #[test]
    fn records_survive_a_round_trip() {
        let child = Sleeper::start();
        let ours = child.record();
        let text = serde_json::to_string(&ours).unwrap();
        assert_eq!(serde_json::from_str::<VmRecord>(&text).unwrap(), ours);
        assert!(serde_json::from_str::<VmRecord>(&text.replace("pid", "pit")).is_err());
    }
}
