//! Switches. Each is a task of a reactor; its ports are functions of endpoints, TAP interfaces and
//! memory ports.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use slipway_plane_api::v1;
use slipway_switch::ports::TapPort;
use slipway_switch::{
    Handle, Learning, LearningOptions, LinkSetting, Owner, PortConfig, PortIndex, Switch, VlanMode,
};

use crate::endpoint::check_id;
use crate::{Error, Plane};

/// The control thread's handle to a switch. Clones refer to the same switch.
#[derive(Clone)]
pub struct Fabric {
    /// The means to reach the switch.
    pub handle: Handle,
    /// The number of the switch's reactor.
    pub reactor: usize,
    /// The switch was made by a request. Otherwise it exists because an endpoint needs it.
    made: bool,
}

/// All switches of a plane.
#[derive(Default)]
pub struct Switches(Mutex<BTreeMap<String, Fabric>>);

impl Switches {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Fabric>> {
        // The map is changed in single calls: a panic leaves it consistent.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Plane {
    /// Returns the switch `name`.
    ///
    /// # Errors
    /// [`Error::UnknownSwitch`].
    pub(crate) fn switch(&self, name: &str) -> Result<Fabric, Error> {
        let found = self.switches().lock().get(name).cloned();
        found.ok_or_else(|| Error::UnknownSwitch(name.to_owned()))
    }

    /// Returns the switch `name`, which is made if it does not exist: for an endpoint that outlived
    /// the last process, before the switch is requested.
    ///
    /// # Errors
    /// [`Error::Resources`].
    pub(crate) fn switch_or_new(&self, name: &str) -> Result<Fabric, Error> {
        let mut switches = self.switches().lock();
        if let Some(fabric) = switches.get(name) {
            return Ok(fabric.clone());
        }
        // Switches are assigned to the reactors in turn.
        let reactor = switches.len() % self.reactors();
        let mut secret = [0; 8];
        // Cannot fail for so few bytes once the system has started.
        let _ = rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty());
        let options = LearningOptions::default();
        let table = Learning::new(options, u64::from_ne_bytes(secret));
        let switch = Switch::new(Box::new(table));
        let handle = slipway_switch::spawn(&self.reactor(reactor), switch);
        let handle = handle.map_err(|_| Error::Resources("the reactor has ended".to_owned()))?;
        let fabric = Fabric { handle, reactor, made: false };
        switches.insert(name.to_owned(), fabric.clone());
        Ok(fabric)
    }

    /// Makes a switch; blocks.
    ///
    /// # Errors
    /// [`Error`]; nothing is left then.
    pub fn create_switch(&self, request: &v1::CreateSwitchRequest) -> Result<v1::Switch, Error> {
        let name = &request.name;
        check_id(name)?;
        if self.switch(name).is_ok_and(|fabric| fabric.made) {
            return Err(Error::ExistingSwitch(name.clone()));
        }
        let is_new = self.switch(name).is_err();
        let fabric = self.switch_or_new(name)?;
        if !request.tap.is_empty()
            && let Err(error) = self.attach_tap(&fabric, &request.tap)
        {
            // If the switch existed before, functions have ports at it, so it stays.
            if is_new {
                let _ = self.remove_switch(name);
            }
            return Err(error);
        }
        if let Some(there) = self.switches().lock().get_mut(name) {
            there.made = true;
        }
        Ok(self.describe(name, &fabric.handle))
    }

    /// Attaches a TAP interface to a switch. If endpoints outlive this process, so does the
    /// interface, so that its addresses and routes stay. The interface does not if it gets no port.
    fn attach_tap(&self, fabric: &Fabric, name: &str) -> Result<(), Error> {
        let failed = |source| Error::Tap { name: name.to_owned(), source };
        let tap = TapPort::open(name).map_err(failed)?;
        let same = tap.keep().and_then(|file| TapPort::of(file, name)).map_err(failed)?;
        // The host is trusted: it forwards frames for others.
        let config =
            PortConfig { name: format!("tap:{name}"), trust: true, ..PortConfig::default() };
        let attached = fabric.handle.call(move |owner| owner.attach(Box::new(tap), config));
        attached.map_err(|_| Error::Resources("the switch has ended".to_owned()))??;
        same.set_persistent(self.keep().is_some()).map_err(failed)
    }

    /// Removes a switch; blocks until its ports are gone.
    ///
    /// # Errors
    /// [`Error::UnknownSwitch`].
    pub fn remove_switch(&self, name: &str) -> Result<(), Error> {
        let removed = self.switches().lock().remove(name);
        let fabric = removed.ok_or_else(|| Error::UnknownSwitch(name.to_owned()))?;
        self.memory_ports().remove_of(name);
        fabric.handle.stop();
        // A stopped switch answers nothing, so the result does not matter.
        let _ = fabric.handle.call(|_| ());
        // Functions that had a port at the switch tell their drivers that the carrier is gone.
        self.each_endpoint(|_, served| served.look_at_link());
        Ok(())
    }

    /// Returns the handle of every switch, by name.
    pub(crate) fn fabrics(&self) -> BTreeMap<String, Fabric> {
        self.switches().lock().clone()
    }

    /// Returns all switches, by name.
    pub fn list_switches(&self) -> Vec<v1::Switch> {
        let all = self.fabrics();
        all.iter().map(|(name, fabric)| self.describe(name, &fabric.handle)).collect()
    }

    fn describe(&self, name: &str, handle: &Handle) -> v1::Switch {
        let ports = handle.call(|owner| {
            let indices: Vec<PortIndex> = owner.switch().ports().collect();
            indices.into_iter().filter_map(|index| port(owner, index)).collect()
        });
        // A switch that has ended has no ports.
        let mut ports: Vec<v1::SwitchPort> = ports.unwrap_or_default();
        let mut sockets = self.memory_ports().sockets(name);
        for port in &mut ports {
            let socket = PortIndex::try_from(port.index).ok().and_then(|at| sockets.remove(&at));
            port.socket_path = socket.unwrap_or_default();
        }
        v1::Switch { name: name.to_owned(), ports }
    }
}

/// Returns a port with its settings and counters, or `None` if there is no such port.
pub(crate) fn port(owner: &mut Owner<'_, '_>, index: PortIndex) -> Option<v1::SwitchPort> {
    let switch = owner.switch();
    let config = switch.config(index)?.clone();
    let impairment = switch.impairment(index).map(crate::ports::impairment_of);
    let up = switch.port_mut(index).is_some_and(|port| port.is_up());
    let stats = switch.stats(index)?;
    let named = |(cause, count): (&str, u64)| (cause.to_owned(), count);
    Some(v1::SwitchPort {
        index: index.into(),
        name: config.name,
        mac: config.mac.map(|mac| mac.to_string()).unwrap_or_default(),
        addresses: config.addresses.iter().map(ToString::to_string).collect(),
        spoof_check: config.spoof_check,
        up: up && config.link != LinkSetting::Down,
        frames_in: stats.frames_in,
        bytes_in: stats.bytes_in,
        frames_out: stats.frames_out,
        bytes_out: stats.bytes_out,
        dropped_in: stats.causes_in().map(named).collect(),
        dropped_out: stats.causes_out().map(named).collect(),
        impairment,
        socket_path: String::new(),
        trust: config.trust,
        vlan: match config.vlans {
            VlanMode::Access(vlan) => vlan.into(),
            VlanMode::Trunk { .. } => 0,
        },
        link: match config.link {
            LinkSetting::Auto => v1::PortLink::Auto,
            LinkSetting::Up => v1::PortLink::On,
            LinkSetting::Down => v1::PortLink::Off,
        }
        .into(),
        max_rate: config.max_rate.map_or(0, |rate| rate.per_second),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switches_come_and_go() {
        let plane = Plane::new(crate::Settings { reactors: 2, ..Default::default() }).unwrap();
        let named =
            |name: &str| v1::CreateSwitchRequest { name: name.to_owned(), ..Default::default() };
        for name in ["blue", "green", "red"] {
            assert!(plane.create_switch(&named(name)).unwrap().ports.is_empty());
        }
        assert!(matches!(plane.create_switch(&named("red")), Err(Error::ExistingSwitch(_))));
        assert!(matches!(plane.create_switch(&named("a/b")), Err(Error::Invalid(_))));
        assert_eq!(plane.list_switches().len(), 3);
        let red = plane.switch("red").unwrap();
        plane.remove_switch("red").unwrap();
        assert!(red.handle.call(|_| ()).is_err());
        assert!(matches!(plane.remove_switch("red"), Err(Error::UnknownSwitch(_))));
        // A switch that an endpoint needs exists before it is requested.
        let kept = plane.switch_or_new("red").unwrap();
        plane.create_switch(&named("red")).unwrap();
        assert!(kept.handle.call(|_| ()).is_ok());
        assert!(plane.create_switch(&named("red")).is_err());
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
            let plane = Plane::new(crate::Settings::default()).unwrap();
            let request = |name: &str, tap: &str| v1::CreateSwitchRequest {
                name: name.to_owned(),
                tap: tap.to_owned(),
            };
            let bad = plane.create_switch(&request("red", "a/b"));
            assert!(matches!(bad, Err(Error::Tap { .. })), "{bad:?}");
            assert!(plane.list_switches().is_empty());
            // The switch exists already, since functions need it, and is full.
            let fabric = plane.switch_or_new("red").unwrap();
            let full = fabric.handle.call(|owner| {
                let null = || Box::new(slipway_switch::ports::NullPort);
                let all = (0..slipway_switch::MAX_PORTS).map(|_| null());
                all.filter_map(|port| owner.attach(port, PortConfig::default()).ok()).count()
            });
            assert_eq!(full.unwrap(), slipway_switch::MAX_PORTS);
            let refused = plane.create_switch(&request("red", "slip0"));
            assert!(matches!(refused, Err(Error::Port(_))), "{refused:?}");
            let devices = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap();
            assert!(!devices.contains("slip0"), "{devices}");
            assert_eq!(plane.list_switches().len(), 1);
            plane.create_switch(&request("blue", "slip0")).unwrap();
        });
        done.join().unwrap();
    }
}
