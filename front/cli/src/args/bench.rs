//! Arguments of `slipway bench`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum, ValueHint};

use super::MachineArgs;
use super::bench_function::BenchFunctionArgs;
use super::density::DensityArgs;
use super::disk::{DiskArg, DiskKind, Doorbells, NamedPath};
use super::report::{ReportArgs, seconds};
use super::roots::RootsArgs;
use super::startup::StartupArgs;
use crate::pci::parse_address;
use crate::size::parse_size;

#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Start sandboxes at once, round after round, and say where the time went
    Startup(Box<StartupArgs>),
    /// Put loads on disks, configuration by configuration in turn, and say how they compare
    Block(Box<BlockArgs>),
    /// Send frames through the switch, and through what it is measured against, in turn
    Packet(PacketArgs),
    /// Send from one program to another by several ways in turn, and say what each costs
    Socket(SocketArgs),
    /// Start VMMs in turn with a guest of a few instructions, and say how soon it runs
    Vmm(VmmArgs),
    /// Give recycled memory and new memory to a program in turn, and say how soon it is there
    Memory(MemoryArgs),
    /// Ask for control groups with processes in them, made on demand and from a pool in turn
    Cgroups(CgroupsArgs),
    /// Give virtual functions to many owners at once, with one lock, a lock for each function, and
    /// the pool in turn, and say how soon all have theirs
    Attach(AttachArgs),
    /// Give a root to many owners at once, made on demand and made before in turn, and say how soon
    /// each has read from image and layer
    Roots(RootsArgs),
    /// Deploy more and more sandboxes that idle, and say what each takes of the host
    Density(Box<DensityArgs>),
    /// Send bursts of requests to functions that scale up, out, and both ways in turn, and say how
    /// soon they are answered and what that takes of the host
    Function(Box<BenchFunctionArgs>),
    /// One of the two programs that `socket` measures
    #[command(hide = true)]
    SocketLoad(SocketLoadArgs),
    /// The program that `memory` gives memory to
    #[command(hide = true)]
    MemoryUser(MemoryUserArgs),
    /// Serve one endpoint until standard input ends: what `block` measures
    #[command(hide = true)]
    Target(TargetArgs),
    /// Network functions that `bench packet` measures
    #[command(hide = true)]
    PacketTarget(PacketTargetArgs),
}

#[derive(Debug, Args)]
pub struct BlockArgs {
    /// Without VMs: a small NVMe driver of ours over vfio-user sockets instead of fio in guests
    #[arg(long)]
    pub native: bool,
    /// Only these configurations [default: all]; --list shows them
    #[arg(
        long,
        visible_alias = "configurations",
        value_name = "CONFIGURATION",
        value_delimiter = ','
    )]
    pub only: Vec<String>,
    /// Only these loads, as randread-4k-d32-t1: pattern (randread, randwrite, randrw, read, write),
    /// block size, depth, threads
    #[arg(long, visible_alias = "workloads", value_name = "LOAD", value_delimiter = ',')]
    pub workload: Vec<slipway_bench::block::Workload>,
    /// Every load at each of these depths
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(1..=1023),
    )]
    pub depths: Vec<u32>,
    /// Every load with each of these numbers of threads (fio's numjobs)
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        value_parser = clap::value_parser!(u32).range(1..=64),
    )]
    pub threads: Vec<u32>,
    /// RocksDB (db_bench) in place of fio: fillseq, readrandom, readseq, fillrandom and
    /// readrandomwriterandom on ext4; guests have 1 GiB of memory unless --memory says otherwise
    #[arg(long, conflicts_with_all = ["native", "workload", "depths", "threads"])]
    pub rocksdb: bool,
    /// Keys of a database, with values of 1 KiB [default: 200000]
    #[arg(
        long,
        value_name = "N",
        requires = "rocksdb",
        value_parser = clap::value_parser!(u64).range(1000..=100_000_000),
    )]
    pub keys: Option<u64>,
    /// Threads that compact, each number with turns of its own [default: 1,10]
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        requires = "rocksdb",
        value_parser = clap::value_parser!(u32).range(1..=64),
    )]
    pub compaction: Vec<u32>,
    /// Image of the guests, with fio (and db_bench) in it [default: made from Debian's packages]
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Disk: ram:SIZE, null:SIZE (--native only), or file:DIR:SIZE (a new file there, removed
    /// afterwards). With guests one file for all, ram: one in /dev/shm [default: ram:64M with
    /// --native, file:/var/tmp:256M with guests, as large as is needed with --rocksdb]
    #[arg(long, value_name = "DISK")]
    pub disk: Option<DiskKind>,
    /// For passthrough, qemu-passthrough and qemu-viommu: the NVMe function of hardware at this PCI
    /// address, bound to vfio-pci. Loads write to its first namespace: its content is lost
    #[arg(long, value_name = "ADDRESS", value_parser = parse_address,
          conflicts_with_all = ["native", "vf_pool"])]
    pub pci: Option<String>,
    /// For passthrough: a function of this pool of hardware. The content of its first namespace is
    /// lost
    #[arg(long, value_name = "POOL", conflicts_with = "native")]
    pub vf_pool: Option<String>,
    /// Turns of each configuration with each load
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Seconds of a turn that are measured; of RocksDB's random loads at most 10 times that
    #[arg(
        long,
        visible_alias = "runtime",
        default_value_t = 1.0,
        value_name = "SECONDS",
        value_parser = seconds,
    )]
    pub time: f64,
    /// Seconds of load before that
    #[arg(long, default_value_t = 0.2, value_name = "SECONDS", value_parser = seconds)]
    pub warm_up: f64,
    /// Instead: how a quiet client fares, alone and beside each of these loads of a noisy one on
    /// another controller of the same disk and reactor [without LOAD: randread-4k-d128 and
    /// randread-128k-d128]. The quiet one's load is --workload [default: randread-4k-d1]; both
    /// clients share a thread
    #[arg(long, value_name = "LOAD", value_delimiter = ',', num_args = 0.., require_equals = true,
          default_missing_values = ["randread-4k-d128", "randread-128k-d128"],
          conflicts_with_all = ["target", "socket"])]
    pub neighbour: Vec<slipway_bench::block::Workload>,
    /// Three loads (a small database), three short turns at most: shows that everything works, in
    /// seconds with --native, in minutes with guests
    #[arg(long)]
    pub quick: bool,
    /// One more configuration: an NVMe controller that somebody else serves on a vfio-user socket
    #[arg(long, value_name = "NAME=SOCKET")]
    pub socket: Vec<NamedPath>,
    /// Write the disks of --socket first: their content is lost
    #[arg(long)]
    pub fill: bool,
    /// One more configuration: a target from another build of slipway, doorbells mapped
    #[arg(long, value_name = "NAME=PROGRAM")]
    pub target: Vec<NamedPath>,
    #[command(flatten)]
    pub report: ReportArgs,
    /// Write curves: IOPS and latency over depth, or operations of RocksDB over time. As with
    /// --svg, the report is written beside them as NAME.json unless --output names a file
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub curves: Option<PathBuf>,
    /// List configurations and loads
    #[arg(long)]
    pub list: bool,
}

/// Which subjects are measured, how often and how long.
#[derive(Debug, Args)]
pub struct TurnsArgs {
    /// Only these subjects [default: all that are installed]; --list shows them
    #[arg(long, value_name = "SUBJECT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Turns of each subject with each load
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Seconds of a turn that are measured; whole ones for a peer that tells no finer
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS", value_parser = seconds)]
    pub time: f64,
    /// Seconds of load before that
    #[arg(long, default_value_t = 0.2, value_name = "SECONDS", value_parser = seconds)]
    pub warm_up: f64,
    /// List subjects and loads
    #[arg(long)]
    pub list: bool,
}

impl TurnsArgs {
    /// Warm-up and measured time of a turn.
    pub fn durations(&self) -> (Duration, Duration) {
        (Duration::from_secs_f64(self.warm_up), Duration::from_secs_f64(self.time))
    }
}

#[derive(Debug, Args)]
pub struct PacketArgs {
    /// With Linux guests: traffic of ordinary sockets through their interfaces, beside the figures
    /// of Speeding Up Packet I/O in Virtual Machines
    #[arg(long)]
    pub guests: bool,
    /// Only these loads, as 64b-p2 (bytes of a frame, ports of the switch), 64b-p1024-r32 (frames
    /// in a row to one port), 64b-p2-s64x256 (slots of a ring, bytes of each), 64b-p2-o5M (frames
    /// offered a second; else as many as the source can) or 64b-p2-w1 (frames on their way there
    /// and back). With --guests as udp8-gh (datagrams of 8 bytes from a guest to the host), tcp1460
    /// (a stream in pieces of so many bytes), rr (requests and responses), -hg (from the host), -gg
    /// (between two guests), -sg (from a port of the switch), -c2 (CPUs of a guest), -tso, -o5k
    #[arg(long, value_name = "LOAD", value_delimiter = ',')]
    pub load: Vec<String>,
    #[command(flatten)]
    pub turns: TurnsArgs,
    /// Three loads, three short turns at most: shows that everything works, in seconds; in minutes
    /// with --guests
    #[arg(long)]
    pub quick: bool,
    /// Image of the guests, with ethtool and iproute2 in it [default: made from Debian's packages]
    #[arg(long, value_name = "IMAGE", requires = "guests")]
    pub image: Option<String>,
    /// Memory of each guest, as 512M [default: 256M]
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size, requires = "guests")]
    pub memory: Option<u64>,
    /// How guest code runs: auto, kvm, or tcg (software emulation)
    #[arg(long, value_name = "WORD", requires = "guests")]
    pub accel: Option<String>,
    /// Processor that all guests have for themselves, if this command and the daemon were started
    /// on others (taskset) [default: any]
    #[arg(long, value_name = "N", requires = "guests")]
    pub guest_cpu: Option<usize>,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Debug, Args)]
pub struct SocketArgs {
    /// Only these loads, as stream-128k-c16 (bytes of a message, sockets), window-4k-c256 (with 16
    /// MiB under way at most), pingpong-64b-busy (neither side sleeps; -block: both do; -asleep:
    /// with a pause between messages) or idle-c100000
    #[arg(long, value_name = "LOAD", value_delimiter = ',')]
    pub load: Vec<slipway_bench::socket::SocketLoad>,
    /// Programs as they are, where they are installed, in place of loads of our own (beside them
    /// where --load names any): iperf3, wrk with nginx and with a proxy before it, redis-benchmark,
    /// memcached
    #[arg(long)]
    pub apps: bool,
    /// Fair shares instead: the example of SG-IOV's slides, random mixes of tenants on executors of
    /// set rates, one that floods; measured, by the formula, and by an independent script
    #[arg(long, conflicts_with_all = ["only", "load", "apps"])]
    pub drf: bool,
    /// Engines are those of another slipway; the rest, the library included, is this one's
    #[arg(long, value_name = "PROGRAM", value_hint = ValueHint::FilePath)]
    pub engine: Option<PathBuf>,
    #[command(flatten)]
    pub turns: TurnsArgs,
    /// Five loads, two short turns at most: shows that everything works, in seconds
    #[arg(long)]
    pub quick: bool,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Debug, Args)]
pub struct SocketLoadArgs {
    /// Work to do, as JSON
    pub specification: String,
}

#[derive(Debug, Args)]
pub struct VmmArgs {
    /// Memory of the guests
    #[arg(
        long,
        visible_alias = "load",
        value_name = "SIZE",
        value_delimiter = ',',
        default_value = "128M,16G"
    )]
    pub memory: Vec<slipway_bench::vmm::VmmLoad>,
    /// A subject's program, as firecracker=/opt/firecracker [default: slipway-vmm beside this
    /// program, QEMU of set-up, all others from PATH]
    #[arg(long, value_name = "SUBJECT=PROGRAM")]
    pub program: Vec<NamedPath>,
    /// Only these subjects [default: all that are installed]; --list shows them
    #[arg(long, value_name = "SUBJECT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Starts of each subject with each size of memory
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// One size of memory, three starts at most: shows that everything works, in seconds
    #[arg(long)]
    pub quick: bool,
    /// List subjects and sizes of memory
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Debug, Args)]
pub struct MemoryArgs {
    /// Only these loads, as 128M-4k (memory, and its pages: 4k or 2m), gate-block (a device copies
    /// 4 KiB), gate-pin (pins 128 KiB), gate-word (writes a word) or gate-stream (copies all of it
    /// in pieces of 128 KiB)
    #[arg(long, value_name = "LOAD", value_delimiter = ',')]
    pub load: Vec<slipway_bench::memory::MemoryLoad>,
    /// Only these subjects [default: all that the host has what they need for]; --list shows them
    #[arg(long, value_name = "SUBJECT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Turns of each subject with each size of memory; devices have six times as many
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Little memory, two turns at most: shows that everything works, in seconds
    #[arg(long)]
    pub quick: bool,
    /// List subjects and loads
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Debug, Args)]
pub struct CgroupsArgs {
    /// Loads, as 2000-t50: the number of groups, and of threads that ask for them
    #[arg(long, value_name = "LOAD", value_delimiter = ',')]
    pub load: Vec<slipway_bench::cgroups::CgroupLoad>,
    /// Only these subjects [default: all that the host has the hierarchies of, but joint ones];
    /// --list shows them
    #[arg(long, value_name = "SUBJECT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Controllers of version 1, each with a group of its own [default: those that sandboxes have]
    #[arg(long, value_name = "CONTROLLER", value_delimiter = ',',
          default_values = slipway_cgroup::V1_CONTROLLERS)]
    pub controllers: Vec<String>,
    /// Instead: what groups cost the host while their processes sleep. Loads as 2000-w10: the
    /// number of groups, each with a process, and how often each is woken in a second; 2000 is
    /// 2000-w1 [default without a value: 1,500,2000]
    #[arg(long, value_name = "LOAD", value_delimiter = ',', num_args = 0..=1,
          default_missing_value = "1,500,2000", conflicts_with_all = ["load", "controllers"])]
    pub idle: Vec<slipway_bench::cgroups::idle::IdleLoad>,
    /// Turns of each subject with each load
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Few groups, two turns at most: shows that everything works, in seconds. With --idle, short
    /// turns in place of few groups
    #[arg(long)]
    pub quick: bool,
    /// List subjects and loads
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Debug, Args)]
pub struct AttachArgs {
    /// Only these loads, as n200-1024k-100ms (owners, KiB that each scrub zeroes, ms of the wait
    /// that stands for a function-level reset)
    #[arg(long, value_name = "LOAD", value_delimiter = ',', default_value = "n200-1024k-100ms")]
    pub load: Vec<slipway_bench::attach::AttachLoad>,
    /// Only these subjects [default: all]; --list shows them
    #[arg(long, value_name = "SUBJECT", value_delimiter = ',')]
    pub only: Vec<String>,
    /// Turns of each subject with each load
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Few owners, two turns at most: shows that everything works, in seconds
    #[arg(long)]
    pub quick: bool,
    /// List subjects and loads
    #[arg(long)]
    pub list: bool,
    #[command(flatten)]
    pub report: ReportArgs,
}

#[derive(Debug, Args)]
pub struct MemoryUserArgs {
    /// Memory to take, as JSON
    pub specification: String,
}

#[derive(Debug, Args)]
pub struct TargetArgs {
    /// Path of the socket
    #[arg(long)]
    pub socket: PathBuf,
    /// As `endpoint create` has it
    #[arg(long)]
    pub disk: DiskArg,
    /// Path of a second controller's socket, on the same disk
    #[arg(long)]
    pub neighbour: Option<PathBuf>,
    /// How clients ring
    #[arg(long, value_enum)]
    pub doorbells: Doorbells,
    /// Processors that it may use
    #[arg(long)]
    pub cpu: Vec<usize>,
    /// Threads that serve
    #[arg(long, default_value_t = 1)]
    pub reactors: u32,
}

#[derive(Debug, Args)]
pub struct PacketTargetArgs {
    /// Where the sockets are
    #[arg(long)]
    pub directory: PathBuf,
    /// Processors that it may use
    #[arg(long)]
    pub cpu: Vec<usize>,
    /// Model of the functions
    #[arg(long, value_enum, default_value_t = PacketModelArg::Virtio)]
    pub model: PacketModelArg,
    /// Frames a second that the switch offers to the second function
    #[arg(long)]
    pub offered: Option<u64>,
    /// Bytes of each of them
    #[arg(long, default_value_t = 64)]
    pub bytes: u32,
}

/// The model of a network function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PacketModelArg {
    Virtio,
    E1000,
    E1000Csb,
}
