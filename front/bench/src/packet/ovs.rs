//! A peer: Open vSwitch with DPDK, between two memif links.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::process::{PERIOD, Running, find, in_namespace, listen, run, wait_for};
use super::{PacketLoad, PacketMeasured, Times};
use crate::block::native::Cpus;
use crate::measurement::Subject;

/// The longest time that Open vSwitch may take to begin, and testpmd after it.
const PATIENCE: Duration = Duration::from_secs(60);
/// Frames in flight in each direction: the most that testpmd handles at once.
const BURST: u32 = 512;
/// Queues of each link in each direction: Open vSwitch's main thread sends by the first one, and
/// its forwarding thread by the second.
const QUEUES: u32 = 2;
/// Debian's path of the program; the plain name may be the build without DPDK.
const VSWITCHD: &str = "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk";
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";

/// Open vSwitch's user-space datapath with DPDK, on a processor of its own. A testpmd on the other
/// one sends frames from one of its ports to the other, both ways, and sends every frame that comes
/// back again. Everything is in a folder and a network namespace of its own, which are removed with
/// the turn.
pub struct OvsDpdk {
    vswitchd: PathBuf,
    programs: Programs,
    cpus: Cpus,
    times: Times,
}

struct Programs {
    testpmd: PathBuf,
    tool: PathBuf,
    database: PathBuf,
    control: PathBuf,
}

impl OvsDpdk {
    /// Returns the subject, or `None` if Open vSwitch or DPDK's testpmd is not installed, this
    /// process is not root, or there are no two processors.
    pub fn find(cpus: &Cpus, times: Times) -> Option<Self> {
        let vswitchd = PathBuf::from(VSWITCHD);
        let able = rustix::process::geteuid().is_root()
            && cpus.target != cpus.client
            && Path::new(SCHEMA).is_file()
            && vswitchd.is_file();
        let programs = Programs {
            testpmd: find(&["dpdk-testpmd", "testpmd"])?,
            tool: find(&["ovsdb-tool"])?,
            database: find(&["ovsdb-server"])?,
            control: find(&["ovs-vsctl"])?,
        };
        able.then(|| Self { vswitchd, programs, cpus: cpus.clone(), times })
    }

    fn carry(&self, load: &PacketLoad) -> Result<PacketMeasured> {
        // The affinity set for earlier subjects is inherited, and would keep everything on one
        // processor.
        let both: Vec<usize> = self.cpus.target.iter().chain(&self.cpus.client).copied().collect();
        crate::block::native::pin(&both)?;
        let folder = tempfile::tempdir().context("a folder for Open vSwitch")?;
        let deadline = Instant::now() + PATIENCE;
        let _switch = self.start_switch(folder.path(), deadline)?;
        let mut testpmd = self.start_testpmd(folder.path(), load)?;
        let rates = testpmd.rates();
        let (sum, count) = listen(&rates, 2, deadline + PATIENCE, self.times.time)
            .context("Open vSwitch forwards nothing")?;
        let elapsed_ns = count * PERIOD.as_nanos() as u64;
        Ok(PacketMeasured { sent: sum, delivered: sum, elapsed_ns, ..PacketMeasured::default() })
    }

    /// Makes a command that finds Open vSwitch's and DPDK's files in `folder`.
    fn command(&self, program: &Path, folder: &Path) -> Command {
        let mut command = Command::new(program);
        for name in ["OVS_RUNDIR", "OVS_LOGDIR", "OVS_DBDIR", "RUNTIME_DIRECTORY"] {
            command.env(name, folder);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    }

    /// Starts the database and the switch, which end in the order in which they are dropped.
    fn start_switch(&self, folder: &Path, deadline: Instant) -> Result<(Running, Running)> {
        let (file, socket) = (folder.join("conf.db"), folder.join("db.sock"));
        let programs = &self.programs;
        run(self.command(&programs.tool, folder).arg("create").arg(&file).arg(SCHEMA))?;
        let remote = format!("--remote=punix:{}", socket.display());
        let mut database = self.command(&programs.database, folder);
        let mut database = Running::start(database.arg(remote).arg(&file))?;
        wait_for(&socket, &mut database, deadline)?;
        let remote = format!("unix:{}", socket.display());
        self.configure(folder, &remote)?;
        let mut switch = self.command(&self.vswitchd, folder);
        let mut switch = Running::start(switch.arg(&remote))?;
        self.add_ports(folder, &remote)?;
        for port in 0..2 {
            wait_for(&folder.join(format!("memif{port}")), &mut switch, deadline)?;
        }
        Ok((switch, database))
    }

    /// Has the switch, which is about to start, use DPDK on the target's processors. `remote` is
    /// the address of its database.
    fn configure(&self, folder: &Path, remote: &str) -> Result<()> {
        let mask = |cpus: &[usize]| {
            format!("{:#x}", cpus.iter().fold(0_u64, |mask, cpu| mask | 1 << (cpu & 63)))
        };
        // No huge pages, so that nothing on the host changes. The link without a switch uses
        // ordinary memory, too.
        let extra = "--no-huge --legacy-mem --no-pci --no-telemetry -m 1024 --file-prefix=ovs";
        let set = [
            "set Open_vSwitch . other_config:dpdk-init=true".to_owned(),
            format!("other_config:pmd-cpu-mask={}", mask(&self.cpus.target)),
            format!("other_config:dpdk-lcore-mask={}", mask(&self.cpus.client)),
        ];
        let mut control = self.command(&self.programs.control, folder);
        control.arg(format!("--db={remote}")).args(["--no-wait", "--timeout=20", "init", "--"]);
        control.args(set.join(" ").split(' ')).arg(format!("other_config:dpdk-extra={extra}"));
        run(&mut control)
    }

    /// Adds a bridge with two memif links, whose sockets are in `folder`.
    fn add_ports(&self, folder: &Path, remote: &str) -> Result<()> {
        let mut bridge = "add-br br0 -- set bridge br0 datapath_type=netdev".to_owned();
        for port in 0..2 {
            let device = format!(
                "net_memif{port},role=server,id={port},socket={},socket-abstract=no,bsize=2048",
                folder.join(format!("memif{port}")).display()
            );
            bridge += &format!(
                " -- add-port br0 m{port} -- set Interface m{port} type=dpdk \
                 options:n_rxq={QUEUES} options:dpdk-devargs=\"{device}\""
            );
        }
        let mut control = self.command(&self.programs.control, folder);
        control.arg(format!("--db={remote}")).arg("--timeout=50");
        run(control.args(bridge.split(' ')))
    }

    fn start_testpmd(&self, folder: &Path, load: &PacketLoad) -> Result<Running> {
        let cpu = self.cpus.client.first().copied().unwrap_or(0);
        let mac = |port: u32| format!("02:5a:11:00:00:0{port}");
        let mut command = self.command(&self.programs.testpmd, folder);
        command
            .args(["--no-huge", "-m", "512", "--no-pci", "--no-telemetry", "--file-prefix=pmd"])
            .arg(format!("--lcores=0@{cpu},1@{cpu}"));
        for port in 0..2 {
            let socket = folder.join(format!("memif{port}"));
            command.arg(format!(
                "--vdev=net_memif{port},role=client,id={port},socket={},socket-abstract=no,\
                 bsize=2048,mac={}",
                socket.display(),
                mac(port)
            ));
        }
        command
            .args(["--", "--auto-start", "--tx-first", "--stats-period=1", "--no-mlockall"])
            .args(["--total-num-mbufs=20000", "--forward-mode=mac"])
            .arg(format!("--rxq={QUEUES}"))
            .arg(format!("--txq={QUEUES}"))
            .arg(format!("--burst={BURST}"))
            .arg(format!("--txpkts={}", load.bytes))
            .arg(format!("--eth-peer=0,{}", mac(1)))
            .arg(format!("--eth-peer=1,{}", mac(0)))
            .stdout(Stdio::piped());
        Running::start(&mut command)
    }
}

impl Subject for OvsDpdk {
    type Load = PacketLoad;
    type Measured = PacketMeasured;

    fn name(&self) -> &'static str {
        "ovs-dpdk"
    }

    fn about(&self) -> String {
        "Open vSwitch with DPDK on a processor, between two memif links to a testpmd on another, \
         which sends frames in circles, both ways"
            .to_owned()
    }

    fn takes(&self, load: &PacketLoad) -> bool {
        load.is_plain() && (64..=1514).contains(&load.bytes)
    }

    fn run(&mut self, load: &PacketLoad) -> Result<PacketMeasured> {
        in_namespace(|| self.carry(load))
    }
}
