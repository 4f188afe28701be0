//! TAP interfaces for network devices that QEMU emulates, and a bridge between them.
//!
//! They are in a network namespace of their own: what the host's filters do to bridges is not
//! measured, and nothing of them is left when this process ends in whatever way.

use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use anyhow::{Context, Result, ensure};
use rustix::thread::{LinkNameSpaceType, UnshareFlags};
use slipway_bench::packet::run_command;

/// A namespace that exists as long as this and its clones.
#[derive(Clone)]
pub struct Namespace {
    path: String,
    /// The option by which nsenter(1) enters it.
    option: String,
    file: Arc<File>,
    /// The thread that the path names ends when this is dropped.
    _holder: Sender<()>,
}

impl Namespace {
    /// Makes a network namespace without interfaces but for its own loopback one.
    ///
    /// # Errors
    /// The process may make none.
    pub fn make() -> Result<Self> {
        Self::hold(UnshareFlags::NEWNET, "net", "--net")
    }

    /// Makes a mount namespace with the mounts of this process.
    ///
    /// # Errors
    /// The process may make none.
    pub fn of_mounts() -> Result<Self> {
        Self::hold(UnshareFlags::NEWNS, "mnt", "--mount")
    }

    /// Makes a namespace that a thread holds. `file` is its name in /proc.
    fn hold(flags: UnshareFlags, file: &str, option: &str) -> Result<Self> {
        let (holder, held) = channel::<()>();
        let (made, thread) = channel();
        std::thread::spawn(move || {
            #[allow(unsafe_code)] // rustix has it as unsafe for the sake of another flag
            // SAFETY: only one namespace is unshared, and no descriptors.
            let unshared = unsafe { rustix::thread::unshare_unsafe(flags) };
            let thread = rustix::thread::gettid().as_raw_nonzero();
            if made.send(unshared.map(|()| thread)).is_ok() {
                // Nothing is sent: this is the end of the namespace's last owner.
                let _ = held.recv();
            }
        });
        let thread = thread.recv().context("the thread of a namespace")?;
        let thread = thread.context("a namespace takes root")?;
        let path = format!("/proc/{}/task/{thread}/ns/{file}", std::process::id());
        let file = Arc::new(File::open(&path).with_context(|| format!("cannot open {path}"))?);
        let option = format!("{option}={path}");
        Ok(Self { path, option, file, _holder: holder })
    }

    /// Returns the path by which others find the namespace while this process runs.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns a command that runs a program in the namespace.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(&self.option).arg(program);
        command
    }

    /// Moves the calling thread into the network namespace, for good.
    ///
    /// # Errors
    /// The errors of setns(2).
    pub fn enter(&self) -> Result<()> {
        let kind = Some(LinkNameSpaceType::Network);
        Ok(rustix::thread::move_into_link_name_space(self.file.as_fd(), kind)?)
    }

    /// Runs `ip` in the namespace once for several commands, a line for each.
    ///
    /// # Errors
    /// A command fails: the error has the words of `ip`.
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        let mut command = self.command("ip");
        command.args(["-batch", "-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().context("interfaces need iproute2 and util-linux")?;
        // The commands fit a pipe, so that this does not wait for what `ip` writes.
        let written = child.stdin.take().map(|mut input| input.write_all(lines.as_bytes()));
        let ended = child.wait_with_output().context("ip -batch")?;
        let said = String::from_utf8_lossy(&ended.stderr);
        ensure!(ended.status.success(), "ip: {}: {lines}", said.trim());
        if let Some(written) = written {
            written.context("ip -batch")?;
        }
        Ok(())
    }

    /// Runs `ip` in the namespace.
    fn ip(&self, arguments: &str) -> Result<()> {
        run(self.command("ip").args(arguments.split(' ')))
    }
}

/// A TAP interface for each guest of one kind.
pub struct Taps {
    pub namespace: Namespace,
    /// Tells the interfaces of several kinds apart, 0 to 99.
    number: u8,
}

impl Taps {
    /// Makes the bridge between the guests. `number` tells these interfaces from those of other
    /// kinds of this process.
    pub fn make(number: u8) -> Result<Self> {
        let namespace = Namespace::make()?;
        namespace.ip("link add bridge type bridge mcast_snooping 0")?;
        namespace.ip("link set bridge up")?;
        Ok(Self { namespace, number })
    }

    /// Returns the name of the interface of a guest, from 1 on. The guest's VMM makes it, among
    /// those of the host, and it goes with the VMM.
    pub fn name(&self, guest: u8) -> String {
        format!("slwb{}-{}t{guest}", std::process::id() % 100_000, self.number)
    }

    /// Moves the interface of a guest, which runs, to where it is measured. Returns
    /// the script that gives the guest its addresses.
    pub fn take(&self, guest: u8) -> Result<String> {
        let tap = self.name(guest);
        let mut command = Command::new("ip");
        command.args(["link", "set", &tap, "netns", &self.namespace.path]);
        run(&mut command)?;
        self.namespace.ip(&format!("addr add {}/24 dev {tap}", self.host(guest)))?;
        self.namespace.ip(&format!("link set {tap} up"))?;
        let addresses = [self.guest(guest), self.bridged(guest)];
        let script = addresses.map(|address| format!("ip addr add {address}/24 dev eth0"));
        // The guest loads the driver beside the start of its container.
        let wait = "for try in $(seq 600); do [ -e /sys/class/net/eth0 ] && break; sleep 0.1; done";
        Ok(format!("{wait}; ip link set eth0 up && {}", script.join(" && ")))
    }

    /// Returns the MAC address of a guest, from 1 on.
    pub fn mac(&self, guest: u8) -> String {
        format!("52:54:00:00:{:02x}:{guest:02x}", self.number)
    }

    /// Has the interfaces of the first `guests` guests be ports of the bridge, or interfaces of the
    /// host with addresses.
    pub fn set_bridged(&self, guests: u8, bridged: bool) -> Result<()> {
        let master = if bridged { "master bridge" } else { "nomaster" };
        let set = |guest| self.namespace.ip(&format!("link set {} {master}", self.name(guest)));
        (1..=guests).try_for_each(set)
    }

    /// Returns the host's address at the interface of a guest.
    pub fn host(&self, guest: u8) -> IpAddr {
        Ipv4Addr::new(198, 18, guest, 1).into()
    }

    /// Returns the address by which the host reaches a guest.
    pub fn guest(&self, guest: u8) -> IpAddr {
        Ipv4Addr::new(198, 18, guest, 2).into()
    }

    /// Returns the address by which guests reach a guest over the bridge.
    pub fn bridged(&self, guest: u8) -> IpAddr {
        Ipv4Addr::new(198, 19, 1, guest).into()
    }
}

fn run(command: &mut Command) -> Result<()> {
    run_command(command).context("QEMU's interfaces need root, iproute2 and util-linux")
}
