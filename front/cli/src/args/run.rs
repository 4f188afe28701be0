//! Arguments of the commands that run processes in sandboxes.

use std::ffi::OsStr;
use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

use super::{NetworkArgs, SecurityArgs, Switched, SysctlArg};
use crate::copy::CopyArg;
use crate::size::{CpuCount, parse_cpus, parse_size, parse_whole_cpus};
use crate::tmpfs::TmpfsArg;
use crate::volume::VolumeArg;

#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Image: a reference ("debian:12"), or a digest in the cache; none with a snapshot (--from)
    #[arg(required_unless_present = "from")]
    pub image: Option<String>,
    /// Command and arguments instead of the image's
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<String>,
    /// Start this many sandboxes at once; without --from they begin with a template of the node's
    /// own where they can, as with "auto", unless the settings say templates = "off"
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub count: u32,
    /// Name of the sandbox; with --count, NAME-1 to NAME-N [default: made up]
    #[arg(long)]
    pub name: Option<String>,
    /// Add a container to a running pod, instead of a sandbox of its own; `slipway pod create`
    /// makes one. Its name is then POD/NAME, and the pod gives it network and CPUs
    #[arg(long, value_name = "POD", conflicts_with = "count", group = "in_pod")]
    pub pod: Option<String>,
    /// With --pod: share processes with the other containers of the pod that have this
    #[arg(long, requires = "in_pod")]
    pub share_processes: bool,
    #[command(flatten)]
    pub machine: MachineArgs,
    /// Begin with the machine of a template in place of booting; `slipway template` makes one, with
    /// the same memory, CPUs, kernel and kind of network. "auto": with one that the node makes
    /// after the first start. "none": boot, also where the node would choose a template: with
    /// --count, and if the settings have templates_after. Or go on with a snapshot (`slipway
    /// snapshot`, without an image): the container runs on from where it was saved, with the
    /// snapshot's machine, settings and volumes
    #[arg(long, value_name = "TEMPLATE|SNAPSHOT|auto|none", conflicts_with = "pod")]
    pub from: Option<String>,
    #[command(flatten)]
    pub process: ProcessArgs,
    #[command(flatten)]
    pub network: NetworkArgs,
    /// Host name in the container: labels of letters, digits and '-', with dots between them, 64
    /// characters at most [default: the sandbox's name]
    #[arg(long, value_name = "NAME", value_parser = host_name)]
    pub hostname: Option<String>,
    /// Program instead of the image's entry point; "" removes it
    #[arg(long, value_name = "PROGRAM")]
    pub entrypoint: Option<String>,
    /// Return when the container runs; `logs`, `exec` and `stop` reach it afterwards
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    /// Remove the sandbox when it has ended
    #[arg(long)]
    pub rm: bool,
    /// Mount the container's root read-only
    #[arg(long)]
    pub read_only: bool,
    /// A disk, or a directory or file of the host. A HOST that begins with "/" or "." is at /PATH
    /// in the container, and both sides see each other's changes; ":ro" lets the container change
    /// nothing. NAME:SIZE makes a scratch volume that goes with the sandbox, file:PATH[:ro] takes a
    /// disk image or block device of the host, or an NVMe namespace by passthrough (/dev/ngXnY). A
    /// disk appears as /dev/slipway/NAME (for files: the file's name). ":4k" gives it logical
    /// blocks of 4096 bytes instead of 512; a last ":/DIR" mounts its ext4 there, which a scratch
    /// volume gets for it
    #[arg(
        short,
        long,
        value_name = "HOST:/PATH[:ro][,rslave]|NAME:SIZE[:4k][:/DIR]|file:PATH[:ro][:4k][:/DIR]"
    )]
    pub volume: Vec<VolumeArg>,
    /// Copy a file of the host, or all files below a directory, into the container, in place of the
    /// image's: settings, keys; at most 16 MiB in all, and 2 MiB each. The container can change its
    /// copy only
    #[arg(long, value_name = "HOST:/PATH")]
    pub copy: Vec<CopyArg>,
    /// Mount an empty directory in the guest's memory at /PATH. "size" bounds it [default: half of
    /// the memory], "mode" is its mode [default: 1777], "uid" and "gid" are its owner's; programs
    /// in it are executed with "exec" only
    #[arg(long, value_name = "/PATH[:size=SIZE,mode=MODE,...]")]
    pub tmpfs: Vec<TmpfsArg>,
    /// Label, key=value
    #[arg(short, long, value_name = "KEY=VALUE")]
    pub label: Vec<String>,
    /// Limit of the container's processes, name=soft[:hard], as docker has it
    #[arg(long, value_name = "NAME=SOFT[:HARD]")]
    pub ulimit: Vec<String>,
    /// Kernel setting of the sandbox's network, IPC and UTS namespaces, as net.core.somaxconn=4096
    #[arg(long, value_name = "NAME=VALUE")]
    pub sysctl: Vec<SysctlArg>,
    /// Write the start, stage by stage, to a file whose name ends in .svg, as a picture, or in
    /// .json, as data
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath,
          value_parser = timeline_file)]
    pub timeline: Option<PathBuf>,
    /// When to fetch the image
    #[arg(long, value_enum, default_value_t = Pull::Missing)]
    pub pull: Pull,
    #[command(flatten)]
    pub lazy: LazyArg,
}

/// Reads the path of a file for a timeline, whose extension says what is written.
fn timeline_file(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match path.extension().and_then(OsStr::to_str) {
        Some("json" | "svg") => Ok(path),
        _ => Err(format!("\"{text}\" has to end in .svg, for a picture, or in .json, for data")),
    }
}

/// Reads a host name.
pub(super) fn host_name(text: &str) -> Result<String, String> {
    slipway_runtime::name::check_host(text).map_err(|error| error.to_string())?;
    Ok(text.to_owned())
}

/// The way in which an image is fetched.
#[derive(Clone, Copy, Debug, Args)]
pub struct LazyArg {
    /// Start before the image is here, if all of its layers are eStargz; otherwise as without
    /// [default: lazy_pulls of the settings, false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    pub lazy: Option<bool>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Pull {
    /// When it is not in the cache
    Missing,
    /// Always
    Always,
    /// Never
    Never,
}

#[derive(Clone, Debug, Args)]
pub struct MachineArgs {
    /// Memory of the sandbox, as 512M or 2G [default: 256M]; with --pod, the container's limit
    /// [default: none]
    #[arg(short, long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// The most memory that `slipway update --memory` can give it, rounded up to whole 128M beside
    /// --memory; on slipway-vmm only [default: --memory; of a pod on slipway-vmm: twice that]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub max_memory: Option<u64>,
    /// The most memory of the host that what containers write to their roots may take, all
    /// containers of a pod together; at least 16M [default: twice the size of a root]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub layers: Option<u64>,
    /// Virtual CPUs, 1 to 64, whole ones [default: 1]; with --pod, the CPUs whose time the
    /// container may use, also a part of one, as 0.5, for which the pod's come, as far as it has
    /// room [default: no limit]
    #[arg(long, value_name = "N", value_parser = parse_cpus)]
    pub cpus: Option<CpuCount>,
    /// The most virtual CPUs that `slipway update --cpus`, and limits of a pod's containers, can
    /// give it [default: --cpus]
    #[arg(long, value_name = "N", value_parser = parse_whole_cpus)]
    pub max_cpus: Option<u32>,
    /// Have the guest report pages that it does not use, which the host then has back, or not; with
    /// --from only if the template was made so, and on slipway-vmm only: `slipway inspect` says
    /// whether it does [default: as the template does, or free_page_reporting of the settings, off]
    #[arg(long, value_enum, value_name = "on|off", num_args = 0..=1, require_equals = true,
          default_missing_value = "on")]
    pub free_page_reporting: Option<Switched>,
    /// Guest kernel instead of the node's
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub kernel: Option<PathBuf>,
    /// How guest code runs: auto, kvm, or tcg (software emulation); "hollow" runs none, for
    /// measurements of the host
    #[arg(long, value_name = "WORD")]
    pub accel: Option<String>,
}

#[derive(Clone, Debug, Args)]
pub struct ProcessArgs {
    /// Environment, NAME=VALUE; NAME alone takes the value from here
    #[arg(short, long, value_name = "NAME[=VALUE]")]
    pub env: Vec<String>,
    /// File of environment entries, one a line as for --env, which wins over these; empty lines and
    /// lines that begin with # are left out
    #[arg(long, value_name = "FILE")]
    pub env_file: Vec<PathBuf>,
    /// Working directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// User: name or number, with :GROUP if wanted
    #[arg(short, long, value_name = "USER[:GROUP]")]
    pub user: Option<String>,
    /// Keep standard input open
    #[arg(short, long)]
    pub interactive: bool,
    /// Give it a terminal
    #[arg(short, long)]
    pub tty: bool,
    /// All capabilities and devices
    #[arg(long, conflicts_with_all = ["cap_add", "cap_drop"])]
    pub privileged: bool,
    #[command(flatten)]
    pub security: SecurityArgs,
}

#[derive(Debug, Args)]
pub struct ExecArgs {
    #[command(flatten)]
    pub process: ProcessArgs,
    /// Return when the command runs; its output is discarded, and its end not waited for
    #[arg(short, long, conflicts_with_all = ["interactive", "tty"])]
    pub detach: bool,
    /// Sandbox: name, id, or the beginning of an id; a container of a pod as POD/CONTAINER
    pub name: String,
    /// Command and arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    pub command: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_is_a_picture_or_data() {
        for good in ["a.svg", "dir/a.json", "/a.b.svg"] {
            assert_eq!(timeline_file(good), Ok(PathBuf::from(good)));
        }
        for bad in ["", "t.txt", "svg", ".svg", "a.SVG"] {
            let error = timeline_file(bad).unwrap_err();
            assert!(error.contains(".svg, for a picture, or in .json"), "{error}");
        }
    }

    #[test]
    fn a_host_name_is_refused_with_a_line_that_quotes_it() {
        assert_eq!(host_name("web-1.example"), Ok("web-1.example".to_owned()));
        assert!(host_name("x y").unwrap_err().starts_with("\"x y\" is no host name"));
    }
}
