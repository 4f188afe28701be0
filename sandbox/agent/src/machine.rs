//! The sandbox as a machine: the tasks of PID 1 in an initramfs besides containers.
//!
//! In the order of a start: the log and panics, the kernel's file systems ([`mount_all`]), modules
//! ([`load_modules`], and those of each kind of device when a sandbox has it), directories that are
//! mounted for the first container that needs them ([`mount_once`]), the loopback interface, the
//! host's settings ([`configure`]), and the end ([`power_off`]).

use std::ffi::CStr;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_bind, mount_move, mount_remount};
use rustix::system::{RebootCommand, reboot};
use rustix::time::{ClockId, Timespec, clock_settime};
use slipway_agent_protocol::v1::ConfigureRequest;

use crate::lock::lock;
use crate::log;
use crate::stages::Stages;

/// The path of sysfs.
pub const SYSFS: &str = "/sys";
/// The directory on which containers build their roots.
pub const BASE: &str = "/containers";
/// The directory on which the directories are mounted that containers share by name.
pub const EMPTY_DIRS: &str = "/empty-dirs";
/// The directory of the mount points of containers' directories for the host's files.
pub const FILE_DIRS: &str = "/file-dirs";
/// The directory of containers' cgroups.
pub const CGROUPS: &str = "/sys/fs/cgroup/containers";
/// The directory that is /dev/shm in all containers of a pod.
const SHARED_MEMORY: &str = "/dev/shm";
/// The directory of the containers' termination messages.
const MESSAGES: &str = "/messages";
/// The mount options of /dev/shm, with the size that container engines give it.
pub const SHARED_MEMORY_OPTIONS: &CStr = c"mode=1777,size=65536k";
const MODULES: &str = "/modules";
/// The folder of modules that few sandboxes need.
const EXTRA_MODULES: &str = "/modules/extra";
/// The folder of modules that a sandbox with a network needs.
const NETWORK_MODULES: &str = "/modules/network";
/// The folder of modules that the kernel requests when a VLAN interface is created.
const VLAN_MODULES: &str = "/modules/vlan";
/// The folder of modules that the kernel requests when a bridge is created.
const BRIDGE_MODULES: &str = "/modules/bridge";
/// The folder of modules that a sandbox with a socket function needs.
const SOCKETS_MODULES: &str = "/modules/sockets";
/// The folder of modules that a sandbox with a root in shared pages needs.
const PMEM_MODULES: &str = "/modules/pmem";
/// The folder of modules that a sandbox with directories of the host needs.
const SHARES_MODULES: &str = "/modules/shares";
/// The folder of modules that a sandbox with room for more memory needs.
const MEMORY_MODULES: &str = "/modules/memory";
/// The folder of modules that list and end connections.
const CONNECTIONS_MODULES: &str = "/modules/connections";
/// The folder of the socket engine and the libraries of its programs.
pub const SOCKETS: &str = "/sockets";
/// The folder of the socket engine's socket.
pub const SOCKETS_RUN: &str = "/run/slipway";
/// The setting with the program that the kernel starts if it lacks a module (Linux,
/// *admin-guide/sysctl/kernel.rst*). Its path is in the kernel's own root: the initramfs, where the
/// agent is `/init`.
const MODPROBE: &str = "/proc/sys/kernel/modprobe";
const SELF: &str = "/run/agent";

/// Writes a line to the kernel's console. A failure is ignored.
pub fn write_log(arguments: std::fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "slipway-agent: {arguments}");
}

/// Makes a panic log its message and end the sandbox, since a panic of PID 1 would be a kernel
/// panic with a useless trace.
pub fn end_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        log!("{panic}");
        power_off();
    }));
}

/// Mounts the kernel's file systems, and makes a root from which containers can pivot away.
pub fn mount_all() -> Result<()> {
    // pivot_root(2) refuses to leave the initramfs itself, but not a mount on top of it. Everything
    // is mounted on that mount, so all of it disappears from a container's namespace.
    mount_bind("/", "/run").context("binding the root")?;
    rustix::process::chdir("/run")?;
    mount_move("/run", "/").context("moving the root")?;
    rustix::process::chroot(".").context("entering the root")?;
    let none = MountFlags::empty();
    let safe = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let all: [(&str, &str, MountFlags, &CStr); 4] = [
        ("devtmpfs", "/dev", MountFlags::NOSUID, c"mode=0755"),
        ("proc", "/proc", safe, c""),
        ("sysfs", SYSFS, safe, c""),
        ("tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV, c"mode=0755"),
    ];
    for (kind, path, flags, options) in all {
        mount(kind, path, kind, flags | none, options)
            .with_context(|| format!("mounting {path}"))?;
    }
    if Path::new("/sys/fs/cgroup").is_dir()
        && let Err(error) = mount("cgroup2", "/sys/fs/cgroup", "cgroup2", safe, c"")
    {
        log!("no cgroup2: {error}");
    }
    open_console();
    show_errors();
    Ok(())
}

/// Lets the kernel's errors reach the console, which its start keeps to itself. A level that shows
/// more stays (Linux, *admin-guide/sysctl/kernel.rst*, printk).
fn show_errors() {
    const LEVEL: &str = "/proc/sys/kernel/printk";
    const WITH_ERRORS: u32 = 4;
    let level = std::fs::read_to_string(LEVEL).unwrap_or_default();
    let level = level.split_whitespace().next().and_then(|level| level.parse::<u32>().ok());
    if level.is_some_and(|level| level < WITH_ERRORS)
        && let Err(error) = std::fs::write(LEVEL, WITH_ERRORS.to_string())
    {
        log!("{LEVEL}: {error}");
    }
}

/// Opens the console as the standard streams. The kernel opens `/dev/console` for PID 1 only if the
/// initramfs has that node.
fn open_console() {
    let flags = OFlags::RDWR | OFlags::NOCTTY;
    let Ok(console) = rustix::fs::open("/dev/console", flags, Mode::empty()) else { return };
    let _ = rustix::stdio::dup2_stdin(&console);
    let _ = rustix::stdio::dup2_stdout(&console);
    let _ = rustix::stdio::dup2_stderr(&console);
}

/// Returns the path of the agent's program in a read-only mount. Otherwise a container that an exec
/// joins could reach the program through `/proc/PID/exe` and write to it.
pub fn read_only_program() -> Result<PathBuf> {
    std::fs::write(SELF, "").context("making the agent's mount point")?;
    mount_bind("/init", SELF).context("binding the agent")?;
    mount_remount(SELF, MountFlags::BIND | MountFlags::RDONLY, c"")
        .context("write-protecting the agent")?;
    Ok(PathBuf::from(SELF))
}

/// Loads `/modules/NN-name.ko` in the order of their names, and then the driver of memory that
/// comes and goes, for which nobody waits.
pub fn load_modules(stages: &Stages) {
    stages.modules_begin();
    load_modules_of(Path::new(MODULES));
    stages.modules_end();
    load_modules_of(Path::new(MEMORY_MODULES));
}

/// Loads the modules that few sandboxes need, unless they are loaded already.
pub fn load_extra_modules() {
    load_modules_of(Path::new(EXTRA_MODULES));
}

/// Loads the modules of the network interface, unless they are loaded already. Makes the kernel
/// request further modules, such as VLAN's, from the agent.
pub fn load_network_modules() {
    load_modules_of(Path::new(NETWORK_MODULES));
    if let Err(error) = std::fs::write(MODPROBE, "/init") {
        log!("{MODPROBE}: {error}");
    }
}

/// Loads the driver of the socket function, unless it is loaded already.
pub fn load_sockets_modules() {
    load_modules_of(Path::new(SOCKETS_MODULES));
}

/// Loads the drivers of shared pages, unless they are loaded already.
pub fn load_pmem_modules() {
    load_modules_of(Path::new(PMEM_MODULES));
}

/// Loads the drivers of directories of the host, unless they are loaded already.
pub fn load_shares_modules() {
    load_modules_of(Path::new(SHARES_MODULES));
}

/// Loads the modules that list and end connections, unless they are loaded already.
pub fn load_connections_modules() {
    load_modules_of(Path::new(CONNECTIONS_MODULES));
}

/// The first argument of the kernel's request for a module: `-q -- NAME`.
pub const MODPROBE_OPTION: &str = "-q";

/// Loads the module that the kernel requests by name or alias. Returns `false` if there is no such
/// module.
pub fn load_asked(name: &str) -> bool {
    let directory = match name {
        "8021q" | "rtnl-link-vlan" => VLAN_MODULES,
        "bridge" | "rtnl-link-bridge" => BRIDGE_MODULES,
        _ => return false,
    };
    load_modules_of(Path::new(directory));
    true
}

fn load_modules_of(directory: &Path) {
    for path in module_files(directory) {
        if let Err(error) = load_module(&path) {
            log!("module {}: {error}", path.display());
        }
    }
}

fn module_files(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "ko"))
        .collect();
    files.sort();
    files
}

fn load_module(path: &Path) -> io::Result<()> {
    let file = std::fs::File::open(path)?;
    match rustix::system::finit_module(&file, c"", 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        // A kernel that takes signed modules only: its configuration says so, or lockdown.
        Err(Errno::KEYREJECTED | Errno::PERM) => load_signed_module(path),
        Err(error) => Err(error.into()),
    }
}

/// Loads a module with its signature, which the initramfs hides by a zero byte behind it.
fn load_signed_module(path: &Path) -> io::Result<()> {
    let bytes = std::fs::read(path)?;
    let signed = bytes.strip_suffix(&[0]).unwrap_or(&bytes);
    match rustix::system::init_module(signed, c"") {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the directory that is /dev/shm in all containers of a pod, and mounts it for the first
/// one.
///
/// # Errors
/// It cannot be mounted.
pub fn shared_memory() -> Result<&'static str> {
    mount_once(SHARED_MEMORY, SHARED_MEMORY_OPTIONS)
}

/// Returns the directory of the containers' termination messages, and mounts a small file system
/// there for the first one.
///
/// # Errors
/// It cannot be mounted.
pub fn messages() -> Result<&'static str> {
    mount_once(MESSAGES, c"mode=0700,size=1m")
}

/// Mounts a tmpfs at `path`, unless that exists.
fn mount_once(path: &'static str, options: &CStr) -> Result<&'static str> {
    /// Held while the directory exists and its file system may not be mounted yet.
    static MOUNTING: Mutex<()> = Mutex::new(());
    let _mounting = lock(&MOUNTING);
    match std::fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(path),
        made => made.context(path)?,
    }
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("tmpfs", path, "tmpfs", flags, options)
        .inspect_err(|_| drop(std::fs::remove_dir(path)))
        .with_context(|| format!("mounting {path}"))?;
    Ok(path)
}

/// Returns a request about the interface `name` (netdevice(7)), and a socket for it.
pub fn interface_request(name: &str) -> io::Result<(OwnedFd, libc::ifreq)> {
    let kind = rustix::net::SocketType::DGRAM;
    let flags = rustix::net::SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(rustix::net::AddressFamily::INET, kind, flags, None)?;
    // SAFETY: all-zero bytes are a valid ifreq.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The last byte stays 0.
    let room = request.ifr_name.len() - 1;
    for (place, byte) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    Ok((socket, request))
}

/// Brings the loopback interface up (netdevice(7)).
pub fn loopback_up() -> io::Result<()> {
    let (socket, mut request) = interface_request("lo")?;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: SIOCSIFFLAGS reads one ifreq, which `request` is.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Applies the host's settings: host name, clock, random seed, kernel settings.
pub fn configure(request: &ConfigureRequest) -> Result<()> {
    if !request.hostname.is_empty() {
        rustix::system::sethostname(request.hostname.as_bytes())
            .with_context(|| format!("hostname {:?}", request.hostname))?;
    }
    if request.realtime_ns != 0 {
        let time = Timespec {
            tv_sec: (request.realtime_ns / 1_000_000_000) as i64,
            tv_nsec: (request.realtime_ns % 1_000_000_000) as i64,
        };
        clock_settime(ClockId::Realtime, time).context("setting the clock")?;
    }
    if !request.entropy.is_empty() {
        seed(&request.entropy).context("seeding the random pool")?;
    }
    crate::sysctl::set_all(&request.sysctls.clone().into_iter().collect())
}

/// Seeds the kernel's random pool, and has its generator begin anew: RNDADDENTROPY alone, which
/// takes a count of bits, a length and the bytes, changes what a generator that is seeded already
/// gives only after a while (random(4)). The forks of a machine have the same generator at first.
fn seed(entropy: &[u8]) -> io::Result<()> {
    const MAX_SEED: usize = 512;
    // linux/random.h: _IOW('R', 0x03, int[2]).
    const RNDADDENTROPY: libc::c_ulong = 0x4008_5203;
    // _IO('R', 0x07).
    const RNDRESEEDCRNG: libc::c_ulong = 0x5207;
    #[repr(C)]
    struct PoolInfo {
        entropy_count: libc::c_int,
        buf_size: libc::c_int,
        buf: [u8; MAX_SEED],
    }
    let length = entropy.len().min(MAX_SEED);
    let mut info = PoolInfo {
        entropy_count: length as libc::c_int * 8,
        buf_size: length as libc::c_int,
        buf: [0; MAX_SEED],
    };
    info.buf[..length].copy_from_slice(&entropy[..length]);
    let pool = std::fs::File::open("/dev/urandom")?;
    use std::os::fd::AsRawFd;
    // SAFETY: RNDADDENTROPY reads the two counts and `buf_size` bytes, all inside `info`.
    if unsafe { libc::ioctl(pool.as_raw_fd(), RNDADDENTROPY as _, &info) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: RNDRESEEDCRNG takes no argument.
    if unsafe { libc::ioctl(pool.as_raw_fd(), RNDRESEEDCRNG as _) } == 0 {
        return Ok(());
    }
    match Errno::from_io_error(&io::Error::last_os_error()) {
        // A generator that is not seeded yet has given nothing yet.
        Some(Errno::NODATA) => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Ends the machine. Without ACPI there is no power switch, and the kernel would only halt. A
/// restart then makes the hypervisor end the machine, since it is told to exit instead of
/// resetting.
pub fn power_off() {
    let has_switch = Path::new("/sys/firmware/acpi").exists();
    let command = if has_switch { RebootCommand::PowerOff } else { RebootCommand::Restart };
    for command in [command, RebootCommand::Restart] {
        if let Err(error) = reboot(command) {
            log!("power off: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fork of a machine that was saved with a container is configured once more.
    #[test]
    fn a_machine_is_configured_once_more_as_root() {
        let done = std::thread::spawn(|| {
            let own = libc::CLONE_NEWUTS | libc::CLONE_NEWIPC | libc::CLONE_NEWNET;
            // SAFETY: unshare(2) takes no pointers; it concerns this thread, which ends here.
            if unsafe { libc::unshare(own) } != 0 {
                println!("SKIPPED: a_machine_is_configured_once_more_as_root: needs root");
                return;
            }
            let settings = [
                ("kernel.shmmni", "100"),
                ("net.ipv4.ip_forward", "1"),
                ("net.ipv4.ip_local_port_range", "3000 4000"),
                ("net.ipv4.ip_unprivileged_port_start", "2000"),
            ];
            let sysctls = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
            for hostname in ["saved", "fork"] {
                let request = ConfigureRequest {
                    hostname: hostname.into(),
                    realtime_ns: 0,
                    entropy: vec![7; 32],
                    sysctls: sysctls.clone().into_iter().collect(),
                };
                configure(&request).unwrap();
                assert_eq!(rustix::system::uname().nodename().to_string_lossy(), hostname);
                let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
                assert_eq!(range.unwrap().split_whitespace().collect::<Vec<_>>(), ["3000", "4000"]);
            }
        });
        done.join().unwrap();
    }

    #[test]
    fn modules_are_taken_in_the_order_of_their_names() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["10-c.ko", "02-b.ko", "01-a.ko", "README"] {
            std::fs::write(dir.path().join(name), "").unwrap();
        }
        let names: Vec<_> = module_files(dir.path())
            .iter()
            .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["01-a.ko", "02-b.ko", "10-c.ko"]);
        assert!(module_files(Path::new("/no/such")).is_empty());
    }
}
