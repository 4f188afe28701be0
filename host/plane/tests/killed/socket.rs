//! The registers of BAR 0 and the client's requests, over a connection that the keeper holds, or
//! over one that the client makes again.

use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use slipway_nvme::driver::{AccessError, RegisterAccess};
use slipway_vfio_user_client::{Bell, Client, RegisterWindow, Registers, SharedRegisters};
use slipway_vfio_user_spec::{IrqSetFlags, irq};

use super::{BAR, LONG, LOOKS, PATIENCE, PAUSE, SERVING, resumed};

/// A client of the plane.
pub enum PlaneClient {
    /// One connection, which outlives the plane.
    Kept(Box<Registers>),
    /// A function that is connected again and resumed.
    Resumed(SharedRegisters),
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

impl PlaneClient {
    pub fn new(dir: &Path, resumed: bool) -> Self {
        let path = dir.join("cntrl");
        if !resumed {
            return Self::Kept(Box::new(Registers::new(connect(&path), LONG)));
        }
        Self::Resumed(SharedRegisters::new(resumed::connect(&path, LONG), LONG))
    }

    pub fn map(&mut self, iova: u64, len: u64, file: BorrowedFd<'_>) -> Outcome {
        match self {
            Self::Kept(kept) => plain(kept.client.map(iova, len, file, 0, true)),
            Self::Resumed(shared) => plain(shared.function.map_ram(iova, len, file, 0)),
        }
    }

    pub fn unmap(&mut self, iova: u64, len: u64) -> Outcome {
        match self {
            Self::Kept(kept) => plain(kept.client.unmap(iova, len).map(drop)),
            Self::Resumed(shared) => plain(shared.function.unmap(iova, len)),
        }
    }

    pub fn route(&mut self, vector: u32, file: BorrowedFd<'_>) -> Outcome {
        match self {
            Self::Kept(kept) => plain(kept.client.route_irqs(irq::MSIX, vector, 1, &[file])),
            Self::Resumed(shared) => plain(shared.function.route(vector, &[file])),
        }
    }

    pub fn route_pin(&mut self, raised: BorrowedFd<'_>, unmasked: BorrowedFd<'_>) -> Outcome {
        match self {
            Self::Kept(kept) => {
                let client = &mut kept.client;
                plain(client.route_irqs(irq::INTX, 0, 1, &[raised]))?;
                let unmasks = IrqSetFlags::DATA_EVENTFD | IrqSetFlags::UNMASK;
                plain(client.set_irqs(unmasks, irq::INTX, 0, 1, &[], &[unmasked]))
            }
            Self::Resumed(SharedRegisters { function, .. }) => {
                plain(function.route_pin(Some(raised)))?;
                plain(function.unmask_pin_by(Some(unmasked)))
            }
        }
    }

    pub fn unmask_pin(&mut self) -> Outcome {
        let unmasks = IrqSetFlags::DATA_NONE | IrqSetFlags::UNMASK;
        match self {
            Self::Kept(kept) => plain(kept.client.set_irqs(unmasks, irq::INTX, 0, 1, &[], &[])),
            Self::Resumed(shared) => plain(shared.function.unmask_pin()),
        }
    }

    /// Returns the doorbells that are rung by the connection's holder.
    pub fn bells(&mut self) -> Vec<Bell> {
        match self {
            Self::Kept(kept) => kept.client.io_fds(0, BAR).unwrap().bells,
            Self::Resumed(_) => Vec::new(),
        }
    }

    pub fn window(&mut self, at: u64) -> Option<RegisterWindow> {
        match self {
            Self::Kept(kept) => kept.client.window(0, at).unwrap(),
            Self::Resumed(_) => None,
        }
    }

    /// Returns the registers of BAR 0. Their patience is not used: [`Socket`] has its own.
    pub fn registers(&mut self) -> &mut dyn RegisterAccess {
        match self {
            Self::Kept(kept) => &mut **kept,
            Self::Resumed(shared) => shared,
        }
    }
}

/// The registers of BAR0, accessed over the socket.
pub struct Socket {
    pub link: PlaneClient,
    /// The doorbells, if they are mapped.
    pub window: Option<RegisterWindow>,
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
    pub fn new(dir: &Path, mut link: PlaneClient, doorbells: u64) -> Self {
        let (window, bells) = (link.window(doorbells), link.bells());
        let (longest, since) = (Duration::ZERO, Instant::now());
        Self { link, window, bells, longest, since, looks: 0, serving: dir.join(SERVING) }
    }

    pub fn timed<T>(&mut self, call: impl FnOnce(&mut PlaneClient) -> T) -> T {
        let begun = Instant::now();
        let value = call(&mut self.link);
        self.longest = self.longest.max(begun.elapsed());
        value
    }
}

impl RegisterAccess for Socket {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        self.timed(|link| link.registers().read(offset, into))
    }

    fn write(&mut self, at: u64, from: &[u8]) -> Result<(), AccessError> {
        (self.since, self.looks) = (Instant::now(), 0);
        self.timed(|link| link.registers().write(at, from))
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
        self.timed(|link| link.registers().post(at, from))
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
