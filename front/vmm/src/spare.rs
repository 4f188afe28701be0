//! A spare: this program before it knows its machine.
//!
//! The kernel waits for a while when it makes a virtual machine, and a spare has that behind it.
//! The command line comes over a socket, with the descriptors that it names
//! (`slipway_machine::spare`). A spare has served nobody: from there on it is an ordinary VMM.

use std::ffi::OsString;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};

use rustix::io::{Errno, fcntl_dupfd_cloexec, retry_on_intr};
use rustix::net::{RecvFlags, ReturnFlags, SendFlags};
use rustix::stdio::{dup2_stderr, dup2_stdout};
use slipway_peer::{Bin, Foreign, receive};
use slipway_vmm::{EmptyVm, spare};

/// The descriptors of a spare.
#[derive(Debug)]
pub struct Spare {
    /// The socket to the launcher, of the type SOCK_SEQPACKET.
    pub socket: OwnedFd,
    /// The KVM device.
    pub kvm: OwnedFd,
}

/// The end of a spare's wait.
pub struct Given {
    /// The command line, from the name of the program on.
    pub words: Vec<OsString>,
    /// The virtual machine that was made ahead.
    pub vm: EmptyVm,
}

impl Spare {
    /// Makes a virtual machine, and waits for the command line. Returns `None` if the launcher
    /// closes the socket instead.
    ///
    /// # Errors
    /// The reason in one line.
    pub fn wait(self) -> Result<Option<Given>, String> {
        let vm = EmptyVm::new(self.kvm)?;
        // The launcher takes all files away once this process waits. Before Linux 6.4 the size of a
        // page is one of them, as it is read from /proc when it is first asked for.
        let _ = (rustix::param::page_size(), slipway_ram::overcommit_is_strict());
        let failed = |errno: Errno| format!("the socket of --spare: {errno}");
        match rustix::net::send(&self.socket, &[spare::READY], SendFlags::NOSIGNAL) {
            Err(Errno::PIPE | Errno::CONNRESET) => return Ok(None),
            sent => sent.map_err(failed)?,
        };
        let mut bytes = vec![0; spare::MAX_BYTES];
        let bin = Bin::new();
        let received = retry_on_intr(|| {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            receive(&self.socket, &mut parts, &bin, RecvFlags::empty())
        });
        let received = match received {
            // It has not read the byte.
            Err(Errno::CONNRESET) => return Ok(None),
            received => received.map_err(failed)?,
        };
        if received.bytes == 0 {
            return Ok(None);
        }
        let cut = received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
        let words = bytes.get(..received.bytes).filter(|_| !cut).and_then(spare::decode);
        let words = words.ok_or("the message to a spare is cut, or of another version")?;
        // Closing what this process's own launcher sent does not wait.
        place(received.files.into_iter().map(Foreign::into_owned).collect())?;
        let name = std::iter::once("slipway-vmm".into());
        Ok(Some(Given { words: name.chain(words).collect(), vm }))
    }
}

/// Makes the first of these descriptors the standard streams, and gives the others the numbers by
/// which the command line names them.
fn place(files: Vec<OwnedFd>) -> Result<(), String> {
    let count = files.len();
    if !(spare::STREAMS..=spare::STREAMS + spare::MAX_FILES).contains(&count) {
        return Err(format!("a spare was sent {count} descriptors"));
    }
    let failed = |errno: Errno| format!("the descriptors sent to a spare: {errno}");
    let mut files = files.into_iter();
    files.next().map(dup2_stdout).transpose().map_err(failed)?;
    files.next().map(dup2_stderr).transpose().map_err(failed)?;
    for (file, number) in files.zip(spare::FIRST_FILE..) {
        let placed = fcntl_dupfd_cloexec(&file, number).map_err(failed)?;
        if placed.as_raw_fd() != number {
            return Err(format!("descriptor {number} of a spare is taken"));
        }
        // The option that names the number takes it over.
        let _ = placed.into_raw_fd();
    }
    Ok(())
}
