//! Our driver on a vfio-user socket.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use slipway_load::native::Cpus;
use slipway_load::native::bell::{Bell, Post, ring};
use slipway_load::native::controller::{BASE, Controller, room};
use slipway_load::native::load::{self, Part};
use slipway_nvme::driver::{AccessError, Arena, RegisterAccess};
use slipway_nvme_spec::registers::offset;
use slipway_vfio_user_client::{Client, TestGuest};

use crate::block::{Measured, Subject, Workload};

/// The longest wait for the target.
const PATIENCE: Duration = Duration::from_secs(10);
/// The region of configuration space, and the offset of the Command register in it (PCI Local Bus
/// 3.0, 6.2.2).
const CONFIGURATION: u32 = 7;
const COMMAND: u64 = 4;
/// The bits of the Command register for a driver that polls: Memory Space, Bus Master, Interrupt
/// Disable. The controller need not maintain its interrupt pin.
const DRIVER: u16 = 1 << 1 | 1 << 2 | 1 << 10;

/// Registers of BAR 0 that are written by messages; the lock keeps messages whole.
struct Messages(Arc<Mutex<Client>>);

impl Post for Messages {
    fn post(&self, at: u64, value: u32) -> Result<()> {
        let mut client = self.0.lock().map_err(|_| anyhow!("another thread panicked"))?;
        Ok(client.post(0, at, &value.to_le_bytes())?)
    }
}

/// The registers of BAR 0, accessed over the socket.
struct Registers {
    client: Arc<Mutex<Client>>,
    bell: Bell,
    since: Instant,
}

impl Registers {
    fn client<T>(
        &mut self,
        call: impl FnOnce(&mut Client) -> Result<T, slipway_vfio_user_client::ClientError>,
    ) -> Result<T, AccessError> {
        self.since = Instant::now();
        let mut client = self.client.lock().map_err(|_| AccessError("a thread panicked".into()))?;
        call(&mut client).map_err(|error| AccessError(error.to_string()))
    }
}

impl RegisterAccess for Registers {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let since = self.since;
        let read = self.client(|client| client.read(0, offset, into));
        // A driver that waits for a command reads the status register all the time, which must not
        // restart the wait.
        self.since = since;
        read
    }

    fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.client(|client| client.write(0, offset, from))
    }

    fn post(&mut self, offset: u64, from: &[u8]) -> Result<(), AccessError> {
        self.since = Instant::now();
        ring(&self.bell, offset, from)
    }

    fn idle(&mut self) -> Result<(), AccessError> {
        if self.since.elapsed() > PATIENCE {
            return Err(AccessError("the controller does not answer".into()));
        }
        std::thread::yield_now();
        Ok(())
    }
}

/// Our driver, connected to an NVMe controller behind a vfio-user socket.
pub struct Session {
    name: String,
    about: String,
    controller: Controller<Registers>,
    cpus: Cpus,
    pid: Option<u32>,
}

impl Session {
    /// Connects to the socket at `path`, brings the controller up and reserves memory for
    /// `workloads`. Doorbells are rung in the page that the server lets clients map, or by messages
    /// if it lets them map none.
    ///
    /// # Errors
    /// If no server is there, or it is no NVMe controller with a namespace 1.
    pub fn connect(
        name: impl Into<String>,
        path: &Path,
        cpus: Cpus,
        workloads: &[Workload],
    ) -> Result<Self> {
        let len = room(workloads);
        let guest = TestGuest::new(BASE, len).context("no memory to share")?;
        let registers = guest.connect(path, PATIENCE);
        let mut client =
            registers.with_context(|| format!("cannot connect to {}", path.display()))?.client;
        let pid = client.server_pid();
        client.write(CONFIGURATION, COMMAND, &DRIVER.to_le_bytes()).context("PCI Command")?;
        let window = client.window(0, offset::DOORBELLS)?;
        let client = Arc::new(Mutex::new(client));
        let (bell, doorbells) = match window {
            Some(window) => (Bell::Page(Arc::new(window)), "in a mapped page"),
            None => (Bell::Message(Arc::new(Messages(client.clone()))), "by messages"),
        };
        let registers = Registers { client, bell: bell.clone(), since: Instant::now() };
        let arena = Arena::new(guest.memory, BASE, len);
        let controller = Controller::bring_up(registers, bell, arena)?;
        let (path, model) = (path.display(), &controller.model);
        let about = format!("our driver over {path}, {model}, doorbells {doorbells}");
        Ok(Self { name: name.into(), about, controller, cpus, pid })
    }

    /// Makes loads ring shadow doorbells (Doorbell Buffer Config), as Linux' driver does where a
    /// controller's doorbells are trapped.
    ///
    /// # Errors
    /// If the controller does not support them.
    pub fn shadow_doorbells(&mut self) -> Result<()> {
        self.controller.shadow_doorbells()?;
        self.about.push_str(", shadowed");
        Ok(())
    }

    /// Returns the bytes of the namespace.
    pub fn disk_bytes(&self) -> u64 {
        self.controller.disk_bytes()
    }

    /// Writes the whole disk, with different content at each place, and checks some of it. So the
    /// disk that is measured afterwards has real blocks.
    ///
    /// # Errors
    /// If a command fails, or data differs from what was written.
    pub fn fill(&mut self) -> Result<()> {
        self.controller.fill()
    }

    /// Runs `workload` from one thread, and from the same thread the load of a neighbour on another
    /// session, if there is one. Measures this session only.
    ///
    /// # Errors
    /// The errors of [`Subject::run`].
    pub fn run_beside(
        &mut self,
        workload: &Workload,
        neighbour: Option<(&mut Session, &Workload)>,
        times: (Duration, Duration),
    ) -> Result<Measured> {
        let lanes = self.controller.lanes(workload)?;
        let taker = self.controller.taker(&self.cpus, self.pid);
        let quiet = Part { lanes, taker, workload };
        let Some((other, loud)) = neighbour else {
            let ([lanes, _], measured) = load::run_beside(quiet, None, times)?;
            self.controller.clear(lanes, workload)?;
            return Ok(measured);
        };
        let lanes = other.controller.lanes(loud)?;
        let taker = other.controller.taker(&other.cpus, other.pid);
        let part = Part { lanes, taker, workload: loud };
        let ([ours, theirs], measured) = load::run_beside(quiet, Some(part), times)?;
        self.controller.clear(ours, workload)?;
        other.controller.clear(theirs, loud)?;
        Ok(measured)
    }
}

impl Subject for Session {
    fn name(&self) -> &str {
        &self.name
    }

    fn about(&self) -> String {
        self.about.clone()
    }

    fn takes(&self, workload: &Workload) -> bool {
        self.controller.takes(workload)
    }

    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        self.controller.run((&self.cpus, self.pid), workload, (warm_up, time))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Fails if the server is gone.
        let _ = self.controller.driver.disable().map_err(|error| anyhow!("{error}"));
    }
}
