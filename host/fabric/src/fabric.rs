//! The table of switches. Each is a task of a reactor.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use slipway_plane_api::{check_id, v1};
use slipway_switch::ports::TapPort;
use slipway_switch::{Handle, Learning, LearningOptions, PortConfig, PortIndex, Switch};

use crate::capture::{Captures, Receiver};
use crate::error::Error;
use crate::memory_ports::MemoryPorts;
use crate::port::port;
use crate::switch::SwitchHandle;
use crate::taps::Taps;
use crate::uplink;

/// The switches of a node, with their ports and captures.
pub struct Fabric {
    reactors: Vec<slipway_reactor::Handle>,
    /// The TAP interfaces outlive the process.
    lasting: bool,
    switches: Mutex<BTreeMap<String, SwitchHandle>>,
    memory_ports: MemoryPorts,
    taps: Taps,
    captures: Captures,
    /// Held while a caller changes a port's settings, until they are stored as well.
    pub(crate) settings: Mutex<()>,
}

impl Fabric {
    /// Makes a fabric without switches, which will be tasks of `reactors`. There must be at least
    /// one. With `lasting`, TAP interfaces outlive the process.
    pub fn new(reactors: Vec<slipway_reactor::Handle>, lasting: bool) -> Self {
        Self {
            reactors,
            lasting,
            switches: Mutex::default(),
            memory_ports: MemoryPorts::default(),
            taps: Taps::default(),
            captures: Captures::default(),
            settings: Mutex::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, SwitchHandle>> {
        // The map is changed in single calls: a panic leaves it consistent.
        self.switches.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Returns the switch `name`.
    ///
    /// # Errors
    /// [`Error::UnknownSwitch`].
    pub fn switch(&self, name: &str) -> Result<SwitchHandle, Error> {
        let found = self.lock().get(name).cloned();
        found.ok_or_else(|| Error::UnknownSwitch(name.to_owned()))
    }

    /// Returns the switch `name`, which is made if it does not exist: for an endpoint that outlived
    /// the last process, before the switch is requested.
    ///
    /// # Errors
    /// [`Error::Resources`].
    pub fn switch_or_new(&self, name: &str) -> Result<SwitchHandle, Error> {
        let mut switches = self.lock();
        if let Some(switch) = switches.get(name) {
            return Ok(switch.clone());
        }
        // Switches are assigned to the reactors in turn.
        let reactor = switches.len() % self.reactors.len();
        let mut secret = [0; 8];
        // Cannot fail for so few bytes once the system has started.
        let _ = rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty());
        let options = LearningOptions::default();
        let table = Learning::new(options, u64::from_ne_bytes(secret));
        let switch = Switch::new(Box::new(table));
        let handle = slipway_switch::spawn(&self.reactors[reactor], switch);
        let handle = handle.map_err(|_| Error::Resources("the reactor has ended".to_owned()))?;
        let switch = SwitchHandle { handle, reactor, made: false };
        switches.insert(name.to_owned(), switch.clone());
        Ok(switch)
    }

    /// Makes a switch; blocks.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub fn create_switch(&self, request: &v1::CreateSwitchRequest) -> Result<v1::Switch, Error> {
        let name = &request.name;
        check_id(name).map_err(Error::Invalid)?;
        if self.switch(name).is_ok_and(|switch| switch.made) {
            return Err(Error::ExistingSwitch(name.clone()));
        }
        let is_new = self.switch(name).is_err();
        let switch = self.switch_or_new(name)?;
        let tap = match request.tap.as_str() {
            "" => Ok(()),
            tap => self.attach_tap(&switch, tap),
        };
        let uplink = || request.uplink.as_ref().map_or(Ok(()), |one| uplink::attach(&switch, one));
        if let Err(error) = tap.and_then(|()| uplink()) {
            // If the switch existed before, functions have ports at it, so it stays.
            if is_new {
                let _ = self.remove_switch(name);
            }
            return Err(error);
        }
        if let Some(there) = self.lock().get_mut(name) {
            there.made = true;
        }
        Ok(self.describe(name, &switch.handle))
    }

    /// Attaches a TAP interface to a switch. If endpoints outlive this process, so does the
    /// interface, so that its addresses and routes stay. The interface does not if it gets no port.
    fn attach_tap(&self, switch: &SwitchHandle, name: &str) -> Result<(), Error> {
        let failed = |source| Error::Tap { name: name.to_owned(), source };
        let tap = TapPort::open(name).map_err(failed)?;
        let same = tap.hold().map_err(failed)?;
        // The host is trusted: it forwards frames for others.
        let config =
            PortConfig { name: format!("tap:{name}"), trust: true, ..PortConfig::default() };
        let attached = switch.handle.call(move |owner| owner.attach(Box::new(tap), config));
        attached.map_err(|_| Error::Resources("the switch has ended".to_owned()))??;
        same.set_persistent(self.lasting).map_err(failed)
    }

    /// Removes a switch; blocks until its ports are gone.
    ///
    /// # Errors
    /// [`Error::UnknownSwitch`].
    pub fn remove_switch(&self, name: &str) -> Result<(), Error> {
        let removed = self.lock().remove(name);
        let switch = removed.ok_or_else(|| Error::UnknownSwitch(name.to_owned()))?;
        self.memory_ports.remove_of(name);
        self.taps.forget_of(name);
        switch.handle.stop();
        // A stopped switch answers nothing, so the result does not matter.
        let _ = switch.handle.call(|_| ());
        Ok(())
    }

    /// Returns the handle of every switch, by name.
    pub(crate) fn switches(&self) -> BTreeMap<String, SwitchHandle> {
        self.lock().clone()
    }

    /// Returns all switches, by name.
    pub fn list_switches(&self) -> Vec<v1::Switch> {
        let all = self.switches();
        all.iter().map(|(name, switch)| self.describe(name, &switch.handle)).collect()
    }

    fn describe(&self, name: &str, handle: &Handle) -> v1::Switch {
        let ports = handle.call(|owner| {
            let indices: Vec<PortIndex> = owner.switch().ports().collect();
            indices.into_iter().filter_map(|index| port(owner, index)).collect()
        });
        // A switch that has ended has no ports.
        let mut ports: Vec<v1::SwitchPort> = ports.unwrap_or_default();
        let mut sockets = self.memory_ports.sockets(name);
        for port in &mut ports {
            let socket = PortIndex::try_from(port.index).ok().and_then(|at| sockets.remove(&at));
            port.socket_path = socket.unwrap_or_default();
        }
        v1::Switch { name: name.to_owned(), ports }
    }

    /// Makes a memory port; blocks. On return its socket accepts a client.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub fn create_port(&self, request: &v1::CreatePortRequest) -> Result<v1::MemoryPort, Error> {
        let switch = self.switch(&request.switch)?;
        self.memory_ports.create(request, &switch, &self.reactors[switch.reactor])
    }

    /// Disconnects a memory port's client and removes the port; blocks.
    ///
    /// # Errors
    /// [`Error::UnknownMemoryPort`].
    pub fn remove_port(&self, name: &str) -> Result<(), Error> {
        self.memory_ports.remove(name)
    }

    /// Attaches a TAP interface in a network namespace to a switch and makes its settings; blocks.
    ///
    /// # Errors
    /// [`Error`]; no port is left then, and no interface that was made here. If the settings of an
    /// interface that was left fail ([`Error::TapSettings`]), its port is there.
    pub fn attach_tap_in_namespace(
        &self,
        request: &v1::AttachTapRequest,
    ) -> Result<v1::AttachTapReply, Error> {
        let switch = self.switch(&request.switch)?;
        let has_ipv6 = self.taps.attach(request, switch.handle)?;
        Ok(v1::AttachTapReply { has_ipv6 })
    }

    /// Detaches a TAP interface in a network namespace and removes it; blocks.
    ///
    /// # Errors
    /// [`Error::UnknownTap`], [`Error::Tap`].
    pub fn detach_tap_in_namespace(&self, name: &str) -> Result<(), Error> {
        self.taps.detach(name)
    }

    /// Returns the number of memory ports.
    pub fn count_ports(&self) -> usize {
        self.memory_ports.count()
    }

    /// Captures the frames of a port until the receiver of the chunks is dropped; blocks until the
    /// capture has begun.
    ///
    /// # Errors
    /// [`Error::UnknownPort`], [`Error::AmbiguousPort`], [`Error::Resources`].
    pub fn capture_port(
        &self,
        request: &v1::CapturePortRequest,
    ) -> Result<Receiver<v1::CaptureChunk>, Error> {
        self.captures.capture(self.find_port(request.port.as_ref())?, request)
    }

    /// Counts the frames of a port and reports some of them until the receiver of the reports is
    /// dropped; blocks until the trace has begun.
    ///
    /// # Errors
    /// [`Error::UnknownPort`], [`Error::AmbiguousPort`], [`Error::Resources`].
    pub fn trace_port(
        &self,
        request: &v1::TracePortRequest,
    ) -> Result<Receiver<v1::TraceReport>, Error> {
        self.captures.trace(self.find_port(request.port.as_ref())?, request)
    }
}

#[cfg(test)]
mod tests {
    use slipway_reactor::{Reactor, Settings};

    use super::*;

    #[test]
    fn switches_come_and_go() {
        let reactors: Vec<_> =
            (0..2).map(|_| Reactor::spawn(Settings::default()).unwrap()).collect();
        let fabric = Fabric::new(reactors.iter().map(Reactor::handle).collect(), false);
        let named =
            |name: &str| v1::CreateSwitchRequest { name: name.to_owned(), ..Default::default() };
        for name in ["blue", "green", "red"] {
            assert!(fabric.create_switch(&named(name)).unwrap().ports.is_empty());
        }
        assert!(matches!(fabric.create_switch(&named("red")), Err(Error::ExistingSwitch(_))));
        assert!(matches!(fabric.create_switch(&named("a/b")), Err(Error::Invalid(_))));
        assert_eq!(fabric.list_switches().len(), 3);
        let red = fabric.switch("red").unwrap();
        fabric.remove_switch("red").unwrap();
        assert!(red.handle.call(|_| ()).is_err());
        assert!(matches!(fabric.remove_switch("red"), Err(Error::UnknownSwitch(_))));
        // A switch that an endpoint needs exists before it is requested.
        let kept = fabric.switch_or_new("red").unwrap();
        fabric.create_switch(&named("red")).unwrap();
        assert!(kept.handle.call(|_| ()).is_ok());
        assert!(fabric.create_switch(&named("red")).is_err());
    }

    /// Runs in a network namespace of its own.
    #[test]
    #[allow(unsafe_code)] // unshare(2)
    fn a_switch_that_is_not_made_leaves_nothing_as_root() {
        let done = std::thread::spawn(|| {
            let test = "a_switch_that_is_not_made_leaves_nothing_as_root";
            let network = rustix::thread::UnshareFlags::NEWNET;
            // SAFETY: descriptors stay shared; the namespace concerns this thread, which ends here,
            // and its threads.
            if unsafe { rustix::thread::unshare_unsafe(network) }.is_err() {
                return println!("SKIPPED: {test}: needs root");
            }
            if !std::path::Path::new("/dev/net/tun").exists() {
                return println!("SKIPPED: {test}: needs /dev/net/tun");
            }
            let reactor = Reactor::spawn(Settings::default()).unwrap();
            let fabric = Fabric::new(vec![reactor.handle()], false);
            let request = |name: &str, tap: &str| v1::CreateSwitchRequest {
                name: name.to_owned(),
                tap: tap.to_owned(),
                uplink: None,
            };
            let bad = fabric.create_switch(&request("red", "a/b"));
            assert!(matches!(bad, Err(Error::Tap { .. })), "{bad:?}");
            assert!(fabric.list_switches().is_empty());
            // The switch exists already, since functions need it, and is full.
            let red = fabric.switch_or_new("red").unwrap();
            let full = red.handle.call(|owner| {
                let null = || Box::new(slipway_switch::ports::NullPort);
                let all = (0..slipway_switch::MAX_PORTS).map(|_| null());
                all.filter_map(|port| owner.attach(port, PortConfig::default()).ok()).count()
            });
            assert_eq!(full.unwrap(), slipway_switch::MAX_PORTS);
            let refused = fabric.create_switch(&request("red", "slip0"));
            assert!(matches!(refused, Err(Error::Port(_))), "{refused:?}");
            let devices = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            assert!(!devices.contains("slip0"), "{devices}");
            assert_eq!(fabric.list_switches().len(), 1);
            fabric.create_switch(&request("blue", "slip0")).unwrap();
        });
        done.join().unwrap();
    }
}
