//! Hot-plug memory: the devices by which the guest plugs and unplugs it, sizes that a client of the
//! control socket asks for, and events when the guest has followed.

use std::time::{Duration, Instant};

use rustix::event::Timespec;
use serde_json::{Value, json};
use slipway_virtio_mem::Mem;
use slipway_vmm::Machine;
use slipway_vmm::local::Local;
use slipway_vmm::own;
use slipway_vmm::state::LocalState;

use crate::qmp;
use crate::watch::Watch;

/// The least time between two events of a device: a guest decides how often its memory changes.
const BETWEEN_EVENTS: Duration = Duration::from_millis(10);

/// Polls of a device at a time, each of which gives back 2 MiB at most.
const STEPS: usize = 8;

/// A device of hot-plug memory, by its number: the event that the driver has asked for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token(usize);

struct Device {
    local: Local<Mem>,
    /// The plugged bytes that were told last.
    told: u64,
    /// The time of the last event.
    at: Option<Instant>,
}

/// The devices of hot-plug memory, in the order of the command line.
pub struct HotMemory(Vec<Device>);

impl HotMemory {
    /// Adds the devices to the machine.
    ///
    /// # Errors
    /// The reason in one line.
    pub fn new(machine: &Machine) -> Result<Self, String> {
        let devices = own::memory(&machine.chassis)?;
        let device = |local| Device { local, told: 0, at: None };
        Ok(Self(devices.into_iter().map(device).collect()))
    }

    /// Returns the states of the devices for a successor. The guest is stopped.
    pub fn save(&self) -> Vec<LocalState> {
        self.0.iter().map(|device| device.local.save()).collect()
    }

    /// Lets the devices go on where those of a saved machine were, whose memory this one has.
    ///
    /// # Errors
    /// The reason in one line.
    pub fn restore(&mut self, machine: &Machine, saved: &[LocalState]) -> Result<(), String> {
        if saved.len() != self.0.len() {
            return Err("the saved state: devices of hot-plug memory that cannot be".into());
        }
        for (device, saved) in self.0.iter_mut().zip(saved) {
            device.local.restore(&machine.chassis.pci, saved)?;
            device.told = device.plugged();
        }
        Ok(())
    }

    /// Has the devices served after [`HotMemory::save`], whatever has come meanwhile.
    pub fn go_on(&self) {
        self.0.iter().for_each(|device| device.local.announce());
    }

    /// Adds to `watch` what the devices wait for.
    pub fn watch<'a, T: Copy>(&'a self, watch: &mut Watch<'a, T>, token: impl Fn(Token) -> T) {
        for (number, device) in self.0.iter().enumerate() {
            watch.read(device.local.notified(), token(Token(number)));
        }
    }

    /// Serves an event: a bounded amount of work, so that others have their turn.
    pub fn serve(&self, Token(number): Token) {
        if let Some(device) = self.0.get(number) {
            (0..STEPS).for_each(|_| device.local.step());
        }
    }

    /// Asks the guest to have `bytes` bytes of device `number` plugged.
    ///
    /// # Errors
    /// The reason why that cannot be.
    pub fn request(&self, number: usize, bytes: u64) -> Result<(), String> {
        let count = self.0.len();
        let device = self.0.get(number).ok_or_else(|| {
            format!("there is no device {number} of hot-plug memory: the machine has {count}")
        })?;
        device.local.with(|mem| mem.request(bytes)).map_err(|error| error.to_string())
    }

    /// Returns the devices, for a client.
    pub fn list(&self) -> Value {
        self.0.iter().enumerate().map(|(number, device)| device.describe(number)).collect()
    }

    /// Returns the bytes that are plugged, of all devices.
    pub fn plugged(&self) -> u64 {
        self.0.iter().map(Device::plugged).sum()
    }

    /// Returns an event for each device whose plugged bytes have changed, unless its last one was
    /// just now.
    pub fn events(&mut self) -> Vec<Vec<u8>> {
        let devices = self.0.iter_mut().enumerate();
        devices.filter_map(|(number, device)| device.event(number)).collect()
    }

    /// Returns the time after which an event is due. Returns `None` if none is waiting.
    pub fn due(&self) -> Option<Timespec> {
        let waiting = self.0.iter().filter(|device| device.plugged() != device.told);
        let rest = waiting.map(Device::rest).min()?;
        // Rounded up, so that the wait does not end a little too early again and again.
        let rest = rest + Duration::from_micros(100);
        Some(Timespec { tv_sec: 0, tv_nsec: rest.subsec_nanos().into() })
    }
}

impl Device {
    fn plugged(&self) -> u64 {
        self.local.with(|mem| mem.plugged())
    }

    /// Returns the time until the next event may be sent.
    fn rest(&self) -> Duration {
        self.at.map_or(Duration::ZERO, |at| BETWEEN_EVENTS.saturating_sub(at.elapsed()))
    }

    fn describe(&self, number: usize) -> Value {
        self.local.with(|mem| {
            let geometry = *mem.geometry();
            json!({
                "device": number,
                "node": geometry.node,
                "address": geometry.address,
                "bytes": geometry.bytes,
                "block": geometry.block,
                "requested": mem.requested(),
                "plugged": mem.plugged(),
            })
        })
    }

    fn event(&mut self, number: usize) -> Option<Vec<u8>> {
        let (plugged, requested) = self.local.with(|mem| (mem.plugged(), mem.requested()));
        if plugged == self.told || !self.rest().is_zero() {
            return None;
        }
        (self.told, self.at) = (plugged, Some(Instant::now()));
        let data = json!({ "device": number, "plugged": plugged, "requested": requested });
        Some(qmp::event("SLIPWAY_MEMORY_CHANGED", data))
    }
}
