//! The registers of BAR 0 and the client's requests, over a connection that the keeper holds, or
//! over one that the client makes again.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slipway_nvme::driver::{AccessError, RegisterAccess};
use slipway_vfio_user_client::{Bell, Client, RemoteFunction, Window};
use slipway_vfio_user_spec::{IrqSetFlags, irq};

use super::{BAR, LONG, LOOKS, PATIENCE, PAUSE, SERVING, resumed};

/// A client of the plane.
pub enum Link {
    /// One connection, which outlives the plane.
    Kept(Box<Client>),
    /// A function that is connected again and resumed.
    Resumed(Arc<RemoteFunction>),
}

type Outcome = Result<(), String>;

fn plain<E: std::fmt::Display>(outcome: Result<(), E>) -> Outcome {
    outcome.map_err(|error| error.to_string())
}

/// Connects to the plane, once it serves.
fn connect(path: &Path) -> Client {
    let begun = Instant::now();
    loop {
        match Client::connect(path, LONG) {
            Ok(client) => return client,
            Err(error) => assert!(begun.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Link {
    pub fn new(dir: &Path, resumed: bool) -> Self {
        let path = dir.join("cntrl");
        if !resumed {
            return Self::Kept(Box::new(connect(&path)));
        }
        Self::Resumed(resumed::connect(&path, LONG))
    }

    pub fn map(&mut self, iova: u64, len: u64, file: BorrowedFd<'_>) -> Outcome {
        match self {
            Self::Kept(client) => plain(client.map(iova, len, file, 0, true)),
            Self::Resumed(function) => plain(function.map_ram(iova, len, file, 0)),
        }
    }

    pub fn unmap(&mut self, iova: u64, len: u64) -> Outcome {
        match self {
            Self::Kept(client) => plain(client.unmap(iova, len).map(drop)),
            Self::Resumed(function) => plain(function.unmap(iova, len)),
        }
    }

    pub fn route(&mut self, vector: u32, file: BorrowedFd<'_>) -> Outcome {
        match self {
            Self::Kept(client) => plain(client.route_irqs(irq::MSIX, vector, 1, &[file])),
            Self::Resumed(function) => plain(function.route(vector, &[file])),
        }
    }

    pub fn route_pin(&mut self, raised: BorrowedFd<'_>, unmasked: BorrowedFd<'_>) -> Outcome {
        match self {
            Self::Kept(client) => {
                plain(client.route_irqs(irq::INTX, 0, 1, &[raised]))?;
                let unmasks = IrqSetFlags::DATA_EVENTFD | IrqSetFlags::UNMASK;
                plain(client.set_irqs(unmasks, irq::INTX, 0, 1, &[], &[unmasked]))
            }
            Self::Resumed(function) => {
                plain(function.route_pin(Some(raised)))?;
                plain(function.unmask_pin_by(Some(unmasked)))
            }
        }
    }

    pub fn unmask_pin(&mut self) -> Outcome {
        let unmasks = IrqSetFlags::DATA_NONE | IrqSetFlags::UNMASK;
        match self {
            Self::Kept(client) => plain(client.set_irqs(unmasks, irq::INTX, 0, 1, &[], &[])),
            Self::Resumed(function) => plain(function.unmask_pin()),
        }
    }

    /// Returns the doorbells that are rung by the connection's holder.
    pub fn bells(&mut self) -> Vec<Bell> {
        match self {
            Self::Kept(client) => client.io_fds(0, BAR).unwrap().bells,
            Self::Resumed(_) => Vec::new(),
        }
    }

    pub fn window(&mut self, at: u64) -> Option<Window> {
        match self {
            Self::Kept(client) => client.window(0, at).unwrap(),
            Self::Resumed(_) => None,
        }
    }

    fn read(&mut self, at: u64, into: &mut [u8]) -> Outcome {
        match self {
            Self::Kept(client) => plain(client.read(0, at, into)),
            Self::Resumed(function) => plain(function.read(0, at, into)),
        }
    }

    pub fn write(&mut self, at: u64, from: &[u8]) -> Outcome {
        match self {
            Self::Kept(client) => plain(client.write(0, at, from)),
            Self::Resumed(function) => plain(function.write(0, at, from)),
        }
    }

    fn post(&mut self, at: u64, from: &[u8]) -> Outcome {
        match self {
            Self::Kept(client) => plain(client.post(0, at, from)),
            Self::Resumed(function) => plain(function.post(0, at, from)),
        }
    }
}

/// The registers of BAR0, accessed over the socket.
pub struct Socket {
    pub link: Link,
    /// The doorbells, if they are mapped.
    pub window: Option<Window>,
    /// The doorbells, if they are rung.
    pub bells: Vec<Bell>,
    /// The longest duration of a request.
    pub longest: Duration,
    since: Instant,
    /// The number of fruitless polls since `since`.
    looks: u32,
    /// The file that exists while a plane serves.
    serving: PathBuf,
}

impl Socket {
    pub fn new(dir: &Path, mut link: Link, doorbells: u64) -> Self {
        let (window, bells) = (link.window(doorbells), link.bells());
        let (longest, since) = (Duration::ZERO, Instant::now());
        Self { link, window, bells, longest, since, looks: 0, serving: dir.join(SERVING) }
    }

    pub fn timed<T>(&mut self, call: impl FnOnce(&mut Link) -> T) -> T {
        let begun = Instant::now();
        let value = call(&mut self.link);
        self.longest = self.longest.max(begun.elapsed());
        value
    }
}

impl RegisterAccess for Socket {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let read = self.timed(|link| link.read(offset, into));
        read.map_err(AccessError)
    }

    fn write(&mut self, at: u64, from: &[u8]) -> Result<(), AccessError> {
        (self.since, self.looks) = (Instant::now(), 0);
        let written = self.timed(|link| link.write(at, from));
        written.map_err(AccessError)
    }

    fn post(&mut self, at: u64, from: &[u8]) -> Result<(), AccessError> {
        (self.since, self.looks) = (Instant::now(), 0);
        if let (Some(window), Ok(value)) = (&self.window, from.try_into()) {
            window.store_u32(at, u32::from_le_bytes(value));
            return Ok(());
        }
        if let (Some(bell), Ok(value)) =
            (self.bells.iter().find(|b| b.offset == at), from.try_into())
        {
            return match bell.ring(u32::from_le_bytes(value)) {
                true => Ok(()),
                false => Err(AccessError("the eventfd cannot be raised".into())),
            };
        }
        let posted = self.timed(|link| link.post(at, from));
        posted.map_err(AccessError)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        self.looks += 1;
        if !self.serving.exists() {
            (self.since, self.looks) = (Instant::now(), 0);
        }
        if self.since.elapsed() > PATIENCE && self.looks > LOOKS {
            return Err(AccessError("the controller does not answer".into()));
        }
        std::thread::sleep(PAUSE);
        Ok(())
    }
}
