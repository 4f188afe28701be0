//! A peer: a memif link between two of DPDK's testpmd, which copies frames and switches nothing.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::process::{PERIOD, Running, find, listen, wait_for};
use super::{PacketLoad, PacketMeasured, Times};
use crate::block::native::Cpus;
use crate::measurement::Subject;

/// The longest time that testpmd may take until the link is up.
const PATIENCE: Duration = Duration::from_secs(20);

/// Two testpmd with a memif link between them, on a processor each: one only sends and the other
/// only receives.
pub struct Memif {
    program: PathBuf,
    cpus: Cpus,
    times: Times,
}

impl Memif {
    /// Returns the subject, or `None` if DPDK's testpmd is not in the path or there are no two
    /// processors.
    pub fn find(cpus: &Cpus, times: Times) -> Option<Self> {
        let program = find(&["dpdk-testpmd", "testpmd"])?;
        (cpus.target != cpus.client).then(|| Self { program, cpus: cpus.clone(), times })
    }

    fn start(&self, role: &str, folder: &std::path::Path, mode: &[String]) -> Result<Running> {
        let socket = folder.join("memif.sock");
        let first = |cpus: &[usize]| cpus.first().copied().unwrap_or(0);
        // The sender has the target's processor. Its main thread, which prints, has the other.
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
            // Only the receiver's output is read.
            .stdout(if role == "server" { Stdio::piped() } else { Stdio::null() })
            .stderr(Stdio::null());
        Running::start(&mut command)
    }
}

impl Subject for Memif {
    type Load = PacketLoad;
    type Measured = PacketMeasured;

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
        load.is_plain() && load.bytes >= 64
    }

    fn run(&mut self, load: &PacketLoad) -> Result<PacketMeasured> {
        // The affinity set for earlier subjects is inherited, and would keep both on one processor.
        let both: Vec<usize> = self.cpus.target.iter().chain(&self.cpus.client).copied().collect();
        crate::block::native::pin(&both)?;
        let folder = tempfile::tempdir().context("a folder for memif's socket")?;
        let mut server =
            self.start("server", folder.path(), &["--forward-mode=rxonly".to_owned()])?;
        let rates = server.rates();
        let deadline = Instant::now() + PATIENCE;
        wait_for(&folder.path().join("memif.sock"), &mut server, deadline)
            .with_context(|| format!("try {} by hand", self.program.display()))?;
        let sends = ["--forward-mode=txonly".to_owned(), format!("--txpkts={}", load.bytes)];
        let _client = self.start("client", folder.path(), &sends)?;
        let (sum, count) = listen(&rates, 1, deadline, self.times.time)?;
        let elapsed_ns = count * PERIOD.as_nanos() as u64;
        Ok(PacketMeasured { sent: sum, delivered: sum, elapsed_ns, ..PacketMeasured::default() })
    }
}
