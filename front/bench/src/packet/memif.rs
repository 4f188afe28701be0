//! A peer: a memif link between two of DPDK's testpmd, which copies frames and switches nothing.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::{PacketLoad, PacketMeasured, PacketSubject};
use crate::block::native::Cpus;

/// How long testpmd may take until the link is up.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often it tells what it received.
const PERIOD: Duration = Duration::from_secs(1);

/// Two testpmd with a memif link between them, one of which only sends and the other only receives, a
/// processor each.
pub struct Memif {
    program: PathBuf,
    cpus: Cpus,
}

impl Memif {
    /// None: DPDK's testpmd is not in the path, or there are no two processors.
    pub fn find(cpus: &Cpus) -> Option<Self> {
        let paths = std::env::var_os("PATH")?;
        let programs = std::env::split_paths(&paths)
            .flat_map(|path| ["dpdk-testpmd", "testpmd"].map(|name| path.join(name)));
        let program = programs.into_iter().find(|program| program.is_file())?;
        (cpus.target != cpus.client).then(|| Self { program, cpus: cpus.clone() })
    }

    fn start(&self, role: &str, folder: &std::path::Path, mode: &[String]) -> Result<Running> {
        let socket = folder.join("memif.sock");
        let first = |cpus: &[usize]| cpus.first().copied().unwrap_or(0);
        // Who sends has the target's processor; its main thread, which prints, the other.
        let (main, worker) = match role {
            "server" => (first(&self.cpus.target), first(&self.cpus.client)),
            _ => (first(&self.cpus.client), first(&self.cpus.target)),
        };
        let device = format!(
            "--vdev=net_memif0,role={role},socket={},socket-abstract=no,bsize=2048",
            socket.display()
        );
        let mut command = Command::new(&self.program);
        command
            .args(["--no-huge", "-m", "512", "--no-pci", "--no-telemetry"])
            .arg(format!("--file-prefix=slipway-{}-{role}", std::process::id()))
            .arg(format!("--lcores=0@{main},1@{worker}"))
            .arg(device)
            .args(["--", "--auto-start", "--stats-period=1", "--no-mlockall"])
            .arg("--total-num-mbufs=20000")
            .args(mode)
            .stdin(Stdio::null())
            // Only who receives is listened to.
            .stdout(if role == "server" { Stdio::piped() } else { Stdio::null() })
            .stderr(Stdio::null());
        let dies_with_us = || {
            let signal = rustix::process::Signal::KILL;
            Ok(rustix::process::set_parent_process_death_signal(Some(signal))?)
        };
        #[allow(unsafe_code)] // testpmd does not end by itself when this process is killed
        // SAFETY: one system call, which may be made between fork and exec.
        unsafe {
            std::os::unix::process::CommandExt::pre_exec(&mut command, dies_with_us);
        }
        let child =
            command.spawn().with_context(|| format!("cannot start {}", self.program.display()))?;
        Ok(Running(child))
    }
}

/// A testpmd, which ends when this does.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Running {
    /// The frames a second that it receives, as it tells them.
    fn rates(&mut self) -> Receiver<u64> {
        let (send, rates) = channel();
        if let Some(output) = self.0.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                    if let Some(rate) = rate(&String::from_utf8_lossy(&line))
                        && send.send(rate).is_err()
                    {
                        break;
                    }
                }
            });
        }
        rates
    }
}

/// The rate in a line such as `  Rx-pps:     19080727          Rx-bps:   9769332224`.
fn rate(line: &str) -> Option<u64> {
    line.trim().strip_prefix("Rx-pps:")?.split_whitespace().next()?.parse().ok()
}

impl PacketSubject for Memif {
    fn name(&self) -> &'static str {
        "memif"
    }

    fn about(&self) -> String {
        format!(
            "a memif link between two {} (DPDK), a processor each, no switch in it",
            self.program.display()
        )
    }

    fn takes(&self, load: &PacketLoad) -> bool {
        load.ports == 2
            && load.offered == 0
            && load.ring.is_none()
            && load.neighbour == 0
            && load.bytes >= 64
    }

    fn run(&mut self, load: &PacketLoad, _: Duration, time: Duration) -> Result<PacketMeasured> {
        // What earlier subjects bound is inherited, and would keep both on one processor.
        let both: Vec<usize> = self.cpus.target.iter().chain(&self.cpus.client).copied().collect();
        crate::block::native::pin(&both)?;
        let folder = tempfile::tempdir().context("a folder for memif's socket")?;
        let mut server =
            self.start("server", folder.path(), &["--forward-mode=rxonly".to_owned()])?;
        let rates = server.rates();
        let deadline = Instant::now() + PATIENCE;
        while !folder.path().join("memif.sock").exists() {
            if Instant::now() > deadline || server.0.try_wait()?.is_some() {
                bail!("testpmd made no memif socket; try {} by hand", self.program.display());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let sends = ["--forward-mode=txonly".to_owned(), format!("--txpkts={}", load.bytes)];
        let _client = self.start("client", folder.path(), &sends)?;
        let wanted = (time.as_secs_f64() / PERIOD.as_secs_f64()).ceil().max(1.0) as u64;
        let (mut sum, mut count, mut warm) = (0, 0, false);
        while count < wanted {
            let left = deadline.saturating_duration_since(Instant::now()) + time + PERIOD;
            match rates.recv_timeout(left) {
                Ok(0) => {}
                // The first period with frames in it is not a whole one.
                Ok(_) if !warm => warm = true,
                Ok(rate) => (sum, count) = (sum + rate, count + 1),
                Err(RecvTimeoutError::Timeout) => bail!("testpmd received nothing by memif"),
                Err(RecvTimeoutError::Disconnected) => bail!("testpmd ended"),
            }
        }
        let elapsed_ns = count * PERIOD.as_nanos() as u64;
        Ok(PacketMeasured { sent: sum, delivered: sum, elapsed_ns, neighbour: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read() {
        assert_eq!(rate("  Rx-pps:     19080727          Rx-bps:   9769332224"), Some(19_080_727));
        assert_eq!(rate("  Tx-pps:            0          Tx-bps:            0"), None);
        assert_eq!(rate("Rx-pps: many"), None);
    }
}
