//! Arguments of `slipway bench startup`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};
use slipway_bench::arms::Arm;

use super::report::ReportArgs;
use crate::size::parse_size;
use crate::volume::VolumeArg;

/// The kind of sandboxes that `bench startup` starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// Guests, by KVM or by software emulation.
    Guests,
    /// Hollow sandboxes.
    Hollow,
}

#[derive(Debug, Args)]
pub struct StartupArgs {
    /// Image, in the cache or to be fetched
    pub image: String,
    /// Sandboxes at once; several numbers (10,50,100,200) in turn, as with --arms
    #[arg(
        long,
        value_name = "N",
        value_delimiter = ',',
        default_value = "4",
        value_parser = clap::value_parser!(u32).range(1..=4096),
    )]
    pub count: Vec<u32>,
    /// Rounds
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub rounds: u32,
    /// Memory of each sandbox, as 512M or 2G; several sizes in turn, as with --arms [default: the
    /// node's]
    #[arg(short, long, value_name = "SIZE", value_delimiter = ',', value_parser = parse_size)]
    pub memory: Vec<u64>,
    /// Virtual CPUs [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub cpus: Option<u32>,
    /// The most virtual CPUs that `slipway update --cpus` could give it [default: --cpus]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub max_cpus: Option<u32>,
    /// Guest kernel instead of the node's
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub kernel: Option<PathBuf>,
    /// How guest code runs: auto, kvm, or tcg (software emulation)
    #[arg(long, value_name = "WORD")]
    pub accel: Option<String>,
    /// Kind of sandboxes: guests that run `true`, or hollow sandboxes, in which no guest code runs
    /// and functions are driven by Slipway's own drivers: the host's side, on any machine
    #[arg(long, value_enum, default_value_t = Engine::Guests)]
    pub engine: Engine,
    /// Network of the sandboxes that have one [default: none, with --arms "default"]
    #[arg(long, value_name = "NETWORK")]
    pub network: Option<String>,
    /// A volume of each sandbox, as `slipway run --volume` has it
    #[arg(long, value_name = "NAME:SIZE[:4k][:/DIR]|file:PATH[:ro][:4k][:/DIR]|HOST:/PATH[:ro]")]
    pub volume: Vec<VolumeArg>,
    /// Start sandboxes in these ways in turn: without a network (none), with a network function
    /// that is made when it is needed (slipway), with one of a pool that is made for the
    /// measurement (pool), with one that the container waits for (no-async, FastIOV-A), with one of
    /// a pool behind a wait of 100 ms for a reset (vf-locks; one after the other: one-lock,
    /// FastIOV-L), with one of a pool and without control groups made ahead (pool-no-cgroups), the
    /// volatile layers' template (pool-no-layer), late zeroing (pool-no-late, FastIOV-D) or shared
    /// roots (pool-no-root), by a daemon of the measurement's own, with an interface of the
    /// kernel's that is made when it is needed (veth on a bridge, macvlan, macvtap), with QEMU's
    /// own interface on a TAP (tap), with hardware (vf); and, as peers, runc's containers with
    /// interfaces by ip(8) (runc) or by the CNI plugin bridge (runc-cni). FastIOV-S has no way: no
    /// image is mapped for DMA [default with --engine hollow, several numbers or --single:
    /// none,slipway]
    #[arg(long, value_name = "WAY", value_delimiter = ',')]
    pub arms: Vec<Arm>,
    /// The pool of hardware of the way vf (`slipway vf create POOL --pci ADDRESS,…`)
    #[arg(long, value_name = "POOL", requires = "arms")]
    pub vf_pool: Option<String>,
    /// With --arms: a container begins when its network can be used, not before
    #[arg(long, requires = "arms")]
    pub wait_network: bool,
    /// As many starts one after the other behind each turn: the time of all at once over the
    /// processor time of these divided by the number of processors
    #[arg(long)]
    pub single: bool,
    /// Write the report as JSON [default with a picture: beside it, as NAME.json]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Write the picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Compare with an earlier report
    #[arg(long, value_name = "FILE")]
    pub compare: Option<PathBuf>,
    /// Print the report as JSON instead of tables
    #[arg(long)]
    pub json: bool,
}

impl StartupArgs {
    /// Returns where the report goes to, and what it is compared with.
    pub fn files(&self) -> ReportArgs {
        ReportArgs {
            report: None,
            output: self.output.clone(),
            svg: self.svg.clone(),
            compare: self.compare.clone(),
            json: self.json,
        }
    }

    /// Returns whether several configurations are measured in turn.
    pub fn has_turns(&self) -> bool {
        let several = self.count.len() > 1 || self.memory.len() > 1;
        !self.arms.is_empty() || self.engine == Engine::Hollow || several || self.single
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{BenchCli, BenchCommand};

    fn parse(words: &str) -> Result<StartupArgs, clap::Error> {
        let all = ["slipway-bench", "startup", "debian:12"].into_iter();
        match BenchCli::try_parse_from(all.chain(words.split_whitespace()))?.command {
            BenchCommand::Startup(args) => Ok(*args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn lists_are_measured_in_turn() {
        let plain = parse("--count 8 --memory 512M --volume data:64M:/data").unwrap();
        assert_eq!((plain.count.as_slice(), plain.memory.as_slice()), (&[8][..], &[512 << 20][..]));
        assert!(!plain.has_turns() && plain.volume.len() == 1 && plain.network.is_none());
        assert_eq!(parse("").unwrap().count, [4]);
        let lists = parse("--count 10,50 --memory 512M,1G").unwrap();
        assert!(lists.has_turns() && lists.count == [10, 50] && lists.memory[1] == 1 << 30);
        assert!(parse("--single").unwrap().has_turns());
        assert!(parse("--engine hollow").unwrap().has_turns());
        for wrong in ["--count 0", "--count 5,x", "--memory 5Q", "--wait-network", "--vf-pool a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ways_are_named() {
        let named = parse("--arms none,veth,no-async,vf --vf-pool fast").unwrap();
        assert_eq!(named.arms, [Arm::None, Arm::Veth, Arm::NoAsync, Arm::Vf]);
        assert_eq!(named.vf_pool.as_deref(), Some("fast"));
        assert!(parse("--arms vanilla").unwrap_err().to_string().contains("macvtap"));
    }
}
