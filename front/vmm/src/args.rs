//! The command line. Every file is given as a path, or as `fd:N`: a descriptor that the process
//! that starts this one has opened, so that the VMM needs no right to any path.
//!
//! A new option is a field of `Args`, an arm in `parse`, and a line of `help.txt`. The daemon gives
//! it in `arguments` of `native/args.rs` (`host/hypervisor`), from a field of `VmSpec`, for which
//! `qemu/args.rs` has an option of QEMU's, or `Capabilities` an answer. `docs/vmm.md` has it. Tests
//! are below and, for the daemon's side, in `host/hypervisor/tests/native`; `70-kvm.sh` of
//! `tests/e2e` runs it with a guest.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;

use lexopt::ValueExt;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::FdFlags;
use slipway_vmm::{EmptyVm, HotRegion, Template};

use crate::spare::Spare;

/// The help text.
pub const HELP: &str = include_str!("help.txt");

/// Everything that the command line says.
#[derive(Debug, Default)]
pub struct Args {
    pub name: String,
    pub cpus: u32,
    pub max_cpus: u32,
    pub slots: u8,
    pub template: Template,
    pub kvm: Option<OwnedFd>,
    /// The virtual machine, if it was made ahead. `kvm` is not used then.
    pub vm: Option<EmptyVm>,
    pub memory: Option<OwnedFd>,
    pub hot_memory: Vec<HotRegion>,
    pub lease: Option<OwnedFd>,
    pub pmem: Option<OwnedFd>,
    pub kernel: Option<OwnedFd>,
    pub restore: Option<OwnedFd>,
    pub initramfs: Option<OwnedFd>,
    pub command_line: String,
    pub control: Option<Socket>,
    pub agent: Option<Socket>,
    pub functions: Vec<OwnedFd>,
    pub free_page_reporting: bool,
    pub paused: bool,
    pub statistics: bool,
}

/// A listening socket; the path is removed at the end if this process made it.
#[derive(Debug)]
pub struct Socket {
    pub listener: OwnedFd,
    _path: Option<Made>,
}

/// A path that is removed when it is dropped.
#[derive(Debug)]
struct Made(PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The result of parsing.
#[derive(Debug)]
pub enum Parsed {
    /// Run a machine.
    Run(Box<Args>),
    /// Wait for the command line of a machine.
    Spare(Spare),
    /// Print this text and end.
    Print(String),
}

/// The default size of the guest's memory in MiB.
const MEMORY_MIB: u64 = 256;

/// Parses the command line. The machine is made of `vm`, if that was made ahead.
///
/// # Errors
/// The fault in the command line, in one line.
pub fn parse(
    words: impl IntoIterator<Item = OsString>,
    vm: Option<EmptyVm>,
) -> Result<Parsed, String> {
    use lexopt::Arg::Long;
    let mut parser = lexopt::Parser::from_iter(words);
    let mut args = Args { name: "vm".into(), cpus: 1, ..Args::default() };
    let (mut memory, mut spare) = (Memory::Mib(MEMORY_MIB), None);
    while let Some(arg) = parser.next().map_err(|error| error.to_string())? {
        let Long(name) = arg else { return Err(arg.unexpected().to_string()) };
        let name = name.to_owned();
        let mut value = || parser.value().map_err(|error| error.to_string());
        match name.as_str() {
            "name" => args.name = text(value()?)?,
            "cpus" => args.cpus = number(value()?, "--cpus")?,
            "max-cpus" => args.max_cpus = number(value()?, "--max-cpus")?,
            "cpu-template" => {
                args.template =
                    text(value()?)?.parse().map_err(|why| format!("--cpu-template: {why}"))?;
            }
            "slots" => args.slots = number(value()?, "--slots")?,
            "memory" => memory = Memory::parse(value()?)?,
            "hotplug-memory" => {
                args.hot_memory.push(hot_region(value()?, args.hot_memory.len() + 1)?);
            }
            "lease" => args.lease = Some(connection(&value()?, "--lease")?),
            "spare" if vm.is_some() => return Err("--spare: this VMM was one".into()),
            "spare" => spare = Some(connection(&value()?, "--spare")?),
            "pmem" if args.pmem.is_some() => return Err("--pmem is given more than once".into()),
            "pmem" => args.pmem = Some(open(&value()?, "the shared pages", false)?),
            "kvm" => args.kvm = Some(open(&value()?, "KVM", true)?),
            "kernel" => args.kernel = Some(open(&value()?, "the kernel", false)?),
            "restore" => args.restore = Some(open(&value()?, "the saved state", false)?),
            "initramfs" => args.initramfs = Some(open(&value()?, "the initramfs", false)?),
            "cmdline" => args.command_line = text(value()?)?,
            "function" => args.functions.push(connect(&value()?)?),
            "agent" => args.agent = Some(listen(value()?)?),
            "control" => args.control = Some(listen(value()?)?),
            "free-page-reporting" => args.free_page_reporting = true,
            "paused" => args.paused = true,
            "statistics" => args.statistics = true,
            "help" => return Ok(Parsed::Print(HELP.into())),
            "version" => {
                return Ok(Parsed::Print(format!("slipway-vmm {}\n", env!("CARGO_PKG_VERSION"))));
            }
            _ => return Err(format!("there is no option --{name}; --help lists the options")),
        }
    }
    let kvm = || open(&"/dev/kvm".into(), "KVM", true);
    if let Some(socket) = spare {
        let kvm = args.kvm.take().map_or_else(kvm, Ok)?;
        return Ok(Parsed::Spare(Spare { socket, kvm }));
    }
    check_start(&args, &memory)?;
    if args.max_cpus == 0 {
        args.max_cpus = args.cpus;
    }
    if args.kvm.is_none() && vm.is_none() {
        args.kvm = Some(kvm()?);
    }
    args.vm = vm;
    args.memory = Some(memory.open(&args.hot_memory)?);
    Ok(Parsed::Run(Box::new(args)))
}

/// Checks that the guest begins with a kernel, or where a saved one was.
fn check_start(args: &Args, memory: &Memory) -> Result<(), String> {
    let kernels = args.initramfs.is_some() || !args.command_line.is_empty();
    match (&args.kernel, &args.restore) {
        (None, None) => Err("--kernel is missing; --help lists the options".into()),
        (Some(_), Some(_)) => Err("--kernel and --restore exclude each other".into()),
        (None, Some(_)) if kernels => Err("--restore takes no --initramfs and no --cmdline".into()),
        (None, Some(_)) if matches!(memory, Memory::Mib(_)) => {
            Err("--restore needs --memory fd:N, a copy of the saved machine's memory".into())
        }
        _ => Ok(()),
    }
}

fn text(value: OsString) -> Result<String, String> {
    value.into_string().map_err(|value| format!("{} is not UTF-8", value.display()))
}

fn number<T: std::str::FromStr>(value: OsString, option: &str) -> Result<T, String>
where
    T::Err: std::error::Error + Send + Sync + 'static,
{
    value.parse().map_err(|error| format!("{option}: {error}"))
}

/// Returns the descriptor N of `fd:N`. Returns `None` for a path.
fn inherited(value: &OsString) -> Result<Option<OwnedFd>, String> {
    let Some(number) = value.to_str().and_then(|text| text.strip_prefix("fd:")) else {
        return Ok(None);
    };
    let parsed = number.parse::<RawFd>().ok().filter(|number| *number >= 0);
    let number = parsed.ok_or_else(|| format!("fd:{number} is no descriptor"))?;
    // SAFETY: borrowed for one call only, which fails if the descriptor is not open.
    let borrowed = unsafe { std::os::fd::BorrowedFd::borrow_raw(number) };
    rustix::io::fcntl_setfd(borrowed, FdFlags::CLOEXEC)
        .map_err(|errno| format!("descriptor {number} was not inherited: {errno}"))?;
    // SAFETY: the descriptor is open, and the caller of this program gave it to this option alone:
    // nothing else in this process closes it.
    Ok(Some(unsafe { OwnedFd::from_raw_fd(number) }))
}

fn open(value: &OsString, what: &str, write: bool) -> Result<OwnedFd, String> {
    if let Some(file) = inherited(value)? {
        return Ok(file);
    }
    let file = OpenOptions::new().read(true).write(write).open(value);
    let file = file.map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::NotFound if write => ": load kvm_intel or kvm_amd",
            io::ErrorKind::PermissionDenied if write => ": join the group kvm, or run as root",
            _ => "",
        };
        format!("{what}: {} cannot be opened: {error}{hint}", value.display())
    })?;
    Ok(file.into())
}

/// The guest's memory.
enum Memory {
    /// A file of this process's own is made, with so many MiB of RAM.
    Mib(u64),
    /// The launcher has made the file.
    Given(OwnedFd),
}

impl Memory {
    fn parse(value: OsString) -> Result<Self, String> {
        match inherited(&value)? {
            Some(file) => Ok(Self::Given(file)),
            None => Ok(Self::Mib(number(value, "--memory")?)),
        }
    }

    /// Returns the file, with room for `regions` at its end.
    fn open(self, regions: &[HotRegion]) -> Result<OwnedFd, String> {
        match self {
            Self::Given(file) => Ok(file),
            Self::Mib(mib) => {
                let bytes = regions.iter().map(|region| region.bytes).fold(0, u64::saturating_add);
                make_memory(mib.saturating_add(bytes >> 20))
            }
        }
    }
}

/// Parses a region of hot-plug memory, `SIZE[,NODE]`, which is the `number`th.
fn hot_region(value: OsString, number: usize) -> Result<HotRegion, String> {
    let value = text(value)?;
    let wrong = || format!("--hotplug-memory: {value} is not SIZE[,NODE], in MiB and a number");
    let (size, node) = match value.split_once(',') {
        Some((size, node)) => (size, node.parse().ok()),
        None => (value.as_str(), u8::try_from(number).ok()),
    };
    let mib: u64 = size.parse().map_err(|_| wrong())?;
    Ok(HotRegion { bytes: mib.saturating_mul(1 << 20), node: node.ok_or_else(wrong)? })
}

fn connection(value: &OsString, option: &str) -> Result<OwnedFd, String> {
    inherited(value)?.ok_or_else(|| format!("{option} takes an inherited descriptor, fd:N"))
}

/// Makes a sealed file of `mib` MiB.
fn make_memory(mib: u64) -> Result<OwnedFd, String> {
    let make = || {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create(c"guest-memory", flags)?;
        rustix::fs::ftruncate(&file, mib.saturating_mul(1 << 20))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        Ok(file)
    };
    make().map_err(|errno: rustix::io::Errno| format!("{mib} MiB of guest memory: {errno}"))
}

fn connect(value: &OsString) -> Result<OwnedFd, String> {
    if let Some(socket) = inherited(value)? {
        return Ok(socket);
    }
    let stream = std::os::unix::net::UnixStream::connect(value);
    let failed = |error| format!("the function's socket {}: {error}", value.display());
    stream.map(Into::into).map_err(failed)
}

fn listen(value: OsString) -> Result<Socket, String> {
    if let Some(listener) = inherited(&value)? {
        return Ok(Socket { listener, _path: None });
    }
    let path = PathBuf::from(value);
    let listener = std::os::unix::net::UnixListener::bind(&path);
    let failed = |error| format!("the socket {} cannot be made: {error}", path.display());
    let listener = listener.map_err(failed)?.into();
    Ok(Socket { listener, _path: Some(Made(path)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(words: &[&str]) -> String {
        let words = ["slipway-vmm"].iter().chain(words).map(OsString::from);
        parse(words, None).expect_err("refused")
    }

    #[test]
    fn what_is_wrong_is_said() {
        assert!(refused(&[]).contains("--kernel is missing"));
        assert!(refused(&["--restore", "/dev/null"]).contains("--restore needs --memory"));
        let both = ["--restore", "/dev/null", "--kernel", "/dev/null"];
        assert!(refused(&both).contains("exclude each other"));
        let more = ["--restore", "/dev/null", "--cmdline", "quiet"];
        assert!(refused(&more).contains("no --cmdline"));
        assert!(refused(&["--kernle", "x"]).contains("no option --kernle"));
        assert!(refused(&["--kernel", "/nonexistent/vmlinux"]).contains("/nonexistent/vmlinux"));
        assert!(refused(&["--kernel", "fd:999999"]).contains("999999 was not inherited"));
        assert!(refused(&["--kernel", "fd:-1"]).contains("is no descriptor"));
        assert!(refused(&["--kernel", "fd:x"]).contains("is no descriptor"));
        assert!(refused(&["--cpus", "two"]).contains("--cpus"));
        let template = refused(&["--cpu-template", "v9"]);
        assert!(template.starts_with("--cpu-template: \"v9\" is no CPU template"), "{template}");
        assert!(refused(&["--kernel"]).contains("kernel"));
        for bad in ["", "1G", "128,", "128,256", "128,1,2", "-128"] {
            let text = refused(&["--hotplug-memory", bad]);
            assert!(text.contains("is not SIZE[,NODE]"), "{text}");
        }
        assert!(refused(&["--kvm", "/nonexistent/kvm"]).contains("load kvm_intel or kvm_amd"));
        assert!(refused(&["--spare", "/run/socket"]).contains("--spare takes an inherited"));
        assert!(refused(&["--spare", "fd:999999"]).contains("999999 was not inherited"));
    }

    #[test]
    fn sockets_made_at_a_path_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("control");
        let socket = listen(path.clone().into()).unwrap();
        assert!(path.exists());
        drop(socket);
        assert!(!path.exists());
    }
}
