//! The launcher's and the VMM's side.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use slipway_numa::NumaNode;
use slipway_peer::Bin;

use crate::message::{self, Given, Range, Request, WireError, failed};
use crate::userfault::Userfault;

/// Memory of the pool that was given to a launcher. The pool takes it back when the VMM that it is
/// passed to has ended; if no VMM hands faults over, the pool gives the pages to the kernel when
/// the connection ends.
#[derive(Debug)]
pub struct Lease {
    /// The file of the memory, whose bytes may be those of an earlier user.
    pub file: OwnedFd,
    /// The connection, to be passed to the VMM.
    pub connection: OwnedFd,
    /// The NUMA node on which the kernel makes the memory's pages; `None` if it is that of the
    /// thread that touches a page first, as on a host with one node.
    pub home: Option<NumaNode>,
}

impl Lease {
    /// Asks the pool whose socket is at `path` for memory. Waits for its answer.
    ///
    /// # Errors
    /// [`WireError`]; [`WireError::Refused`] has the pool's reason.
    pub fn ask(path: &Path, request: Request) -> Result<Self, WireError> {
        let failed = failed("connecting to the pool of memory");
        let address = SocketAddrUnix::new(path).map_err(&failed)?;
        let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let connection = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None);
        let connection = connection.map_err(&failed)?;
        rustix::net::connect(&connection, &address).map_err(&failed)?;
        message::ask(connection.as_fd(), request)?;
        let Given { file, home, .. } = message::given(connection.as_fd(), &Bin::new())?;
        Ok(Self { file, connection, home })
    }
}

/// A VMM's side of the connection, until the pool serves its faults.
#[derive(Debug)]
pub struct HandOver {
    connection: OwnedFd,
    token: Given<OwnedFd>,
    faults: Userfault,
}

impl HandOver {
    /// Takes what the pool sent over `connection`, and makes a userfaultfd of this process.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn begin(connection: OwnedFd) -> Result<Self, WireError> {
        let (token, device) = message::token(connection.as_fd(), &Bin::new())?;
        let faults = Userfault::new(device.as_fd()).map_err(failed("making a userfaultfd"))?;
        Ok(Self { connection, token, faults })
    }

    /// Hands the faults of `ranges` over: mappings of the file that nobody has touched. From its
    /// return on, every page that this process touches is zero, or that of the template, and is
    /// made on the home of the memory. Returns the connection, to be kept open as long as this
    /// process uses the memory, and the token.
    ///
    /// # Errors
    /// [`WireError`]; the mappings must not be used then.
    pub fn finish(self, ranges: &[Range]) -> Result<(OwnedFd, OwnedFd), WireError> {
        for range in ranges {
            if let Some(home) = self.token.home {
                // A process that may not use that node's memory has its pages farther away.
                let _ = slipway_numa::prefer(range.address, range.len, home);
            }
            let registered = self.faults.register(range.address, range.len, self.token.fork);
            registered.map_err(failed("registering the guest's memory for faults"))?;
        }
        message::send_faults(self.connection.as_fd(), self.faults.as_fd(), ranges)?;
        message::served(self.connection.as_fd(), &Bin::new())?;
        Ok((self.connection, self.token.file))
    }
}
