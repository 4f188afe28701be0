//! Network functions: a virtio-net device or an e1000 on a socket, whose port is attached to a
//! switch.

use std::net::IpAddr;
use std::time::Duration;

use slipway_pci::{Function, Interrupt};
use slipway_plane_api::{v1, vf_v1};
use slipway_switch::{BadConfig, Handle, Mac, Port, PortConfig, PortIndex};
use slipway_vfio_user::{DoorbellMode, EndpointParts};
use slipway_virtio_net::{Device, Parts, Settings, vectors};

use slipway_fabric::{SwitchHandle, link, rate, vlans};

use crate::Error;
use crate::keep::KeptPlace;

/// The MTU of a function whose request has none.
const MTU: u16 = 1500;

/// The port of a network function. Dropping this detaches it from its switch.
pub struct Attached {
    switch: Handle,
    port: PortIndex,
    device: DeviceControl,
}

/// The handle of a device, by its kind.
#[derive(Clone)]
enum DeviceControl {
    Virtio(slipway_virtio_net::Control),
    E1000(slipway_e1000::Control),
}

impl Attached {
    /// Returns the counters of an e1000, or `None` for another device.
    pub fn e1000(&self) -> Option<v1::E1000Counters> {
        match &self.device {
            DeviceControl::E1000(device) => Some(e1000_counters(&device.counters())),
            DeviceControl::Virtio(_) => None,
        }
    }

    /// Returns the MAC address of a virtio device, which its driver finds when it resets the
    /// device. Returns `None` for another device, whose address does not change.
    pub fn mac(&self) -> Option<Mac> {
        match &self.device {
            DeviceControl::Virtio(device) => Some(device.mac()),
            DeviceControl::E1000(_) => None,
        }
    }
}

fn e1000_counters(counters: &slipway_e1000::Counters) -> v1::E1000Counters {
    let named = slipway_e1000::COUNTED.iter().map(|(_, name)| *name).zip(counters.registers);
    let all = named.chain([("other", counters.other_registers)]);
    let used = all.filter(|(_, accesses)| *accesses != slipway_e1000::Accesses::default());
    let registers = used.map(|(name, slipway_e1000::Accesses { reads, writes })| {
        v1::RegisterAccesses { register: name.to_owned(), reads, writes }
    });
    v1::E1000Counters {
        registers: registers.collect(),
        kicks: counters.kicks,
        announced: counters.announced,
        interrupts: counters.interrupts,
        frames_sent: counters.sent,
        frames_received: counters.received,
    }
}

impl Attached {
    /// Returns the means to bind the port, which has the name of endpoint `id`, to other addresses.
    /// They outlive a lock on this.
    pub fn binding(&self, id: &str) -> Binding {
        let (switch, device) = (self.switch.clone(), self.device.clone());
        Binding { switch, port: self.port, name: id.to_owned(), device }
    }
}

/// A port that is to be bound to other addresses.
pub struct Binding {
    switch: Handle,
    port: PortIndex,
    name: String,
    device: DeviceControl,
}

impl Binding {
    /// Binds the port to a client's MAC address, if it has one, and IP addresses, and gives it the
    /// client's rates, if it has some. A virtio device has the MAC address, too, as soon as its
    /// driver resets it: a driver that begins has none to set. Waits for the reactor of the switch.
    ///
    /// # Errors
    /// [`Error::Invalid`] for text that is no address; [`Error::Fabric`] for an address that
    /// another port has; [`Error::Resources`] if the switch has ended. Nothing has changed then.
    pub fn bind(self, client: &vf_v1::Client) -> Result<(), Error> {
        let mac = &client.mac;
        let mac = (!mac.is_empty()).then(|| parse_mac(mac)).transpose()?;
        let addresses = parse_addresses(&client.addresses)?;
        let max_rate = rate(client.max_rate, client.max_burst);
        let receive_rate = rate(client.receive_rate, client.receive_burst);
        let Self { switch, port, name, device } = self;
        let bound = switch.call(move |owner| {
            // The endpoint may have ended meanwhile, and another port have its index.
            let config = owner.switch().config(port).filter(|config| config.name == name);
            let config = config.cloned().ok_or(BadConfig::NoSuchPort)?;
            let mac = mac.or(config.mac);
            let max_rate = max_rate.or(config.max_rate);
            let receive_rate = receive_rate.or(config.receive_rate);
            owner.configure(port, PortConfig { mac, addresses, max_rate, receive_rate, ..config })
        });
        let bound = bound.map_err(|_| Error::Resources("the switch has ended".to_owned()))?;
        bound.map_err(slipway_fabric::Error::Port)?;
        if let (DeviceControl::Virtio(device), Some(mac)) = (&device, mac) {
            device.set_mac(mac);
        }
        Ok(())
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let port = self.port;
        // An error means that the switch is gone, and its ports with it. Later calls find the port
        // detached: jobs keep their order.
        let _ = self.switch.run(move |owner| drop(owner.detach(port)));
    }
}

/// Returns the way in which the function's doorbells are rung. Only an e1000 has some: its tails.
pub fn doorbells(wanted: &v1::VirtioNet) -> DoorbellMode {
    match wanted.model() {
        v1::NetworkModel::Virtio => DoorbellMode::Trapped,
        v1::NetworkModel::E1000 | v1::NetworkModel::E1000Csb => DoorbellMode::Rung,
    }
}

/// Makes the function that `wanted` describes, for a client behind `parts`, and attaches its port
/// under the name `id`. In a `place` that a predecessor with a client left, the function continues
/// where the predecessor was, at once or when the client has come back.
///
/// # Errors
/// [`Error::Invalid`] for settings that no function can have; [`Error::Fabric`] for an address that
/// another port has. Nothing is attached then.
pub fn make(
    id: &str,
    wanted: &v1::VirtioNet,
    parts: &mut EndpointParts,
    switch: &SwitchHandle,
    place: Option<&KeptPlace>,
) -> Result<(Box<dyn Function>, Attached), Error> {
    let config = port_config(id, wanted)?;
    let mac = config.peer_mac.or(config.mac).unwrap_or_default();
    let Made { mut device, port, control } = match wanted.model() {
        v1::NetworkModel::Virtio => virtio(wanted, mac, parts, place)?,
        model => e1000(wanted, mac, parts, model == v1::NetworkModel::E1000Csb)?,
    };
    let handed = parts.hand_down(&mut *device);
    handed.map_err(|error| Error::Resources(error.to_string()))?;
    let (switch, port) = attach(port, config, switch)?;
    Ok((device, Attached { switch, port, device: control }))
}

/// A function, its end at the switch, and its handle.
struct Made {
    device: Box<dyn Function>,
    port: Box<dyn Port>,
    control: DeviceControl,
}

fn virtio(
    wanted: &v1::VirtioNet,
    mac: Mac,
    parts: &EndpointParts,
    place: Option<&KeptPlace>,
) -> Result<Made, Error> {
    if wanted.interrupt_interval_ns != 0 {
        return Err(Error::Invalid("only an e1000 has an interval between interrupts".into()));
    }
    let settings = settings(wanted, mac)?;
    let sink = parts.interrupts();
    let interrupt = |vector| Interrupt::new(sink.clone(), vector);
    let made = Device::new(Parts {
        memory: parts.memory(),
        interrupts: (0..vectors(settings.pairs)).map(interrupt).collect(),
        clock: parts.clock(),
        settings,
        journal: place.map(|place| place.journal.clone()),
    });
    let (device, port) = made.map_err(|error| Error::Invalid(error.to_string()))?;
    let control = DeviceControl::Virtio(device.control());
    Ok(Made { device: Box::new(device), port: Box::new(port), control })
}

/// Makes an e1000. It has one queue pair, and its driver chooses the MTU.
fn e1000(
    wanted: &v1::VirtioNet,
    mac: Mac,
    parts: &mut EndpointParts,
    csb: bool,
) -> Result<Made, Error> {
    let interval = Duration::from_nanos(wanted.interrupt_interval_ns);
    let doorbells = parts.doorbells_of_reset(slipway_e1000::DOORBELLS);
    let made = slipway_e1000::Device::new(slipway_e1000::Parts {
        memory: parts.memory(),
        interrupt: Interrupt::new(parts.interrupts(), 0),
        doorbells: doorbells.map_err(|error| Error::Resources(error.to_string()))?,
        clock: parts.clock(),
        settings: slipway_e1000::Settings { mac, csb, interval },
    });
    let (device, port) = made.map_err(|error| Error::Invalid(error.to_string()))?;
    let control = DeviceControl::E1000(device.control());
    Ok(Made { device: Box::new(device), port: Box::new(port), control })
}

fn attach(
    port: Box<dyn Port>,
    config: PortConfig,
    switch: &SwitchHandle,
) -> Result<(Handle, PortIndex), Error> {
    let switch = switch.handle.clone();
    let attached = switch.call(move |owner| owner.attach(port, config));
    let attached = attached.map_err(|_| Error::Resources("the switch has ended".to_owned()))?;
    let port = attached.map_err(slipway_fabric::Error::from)?;
    Ok((switch, port))
}

fn parse_mac(text: &str) -> Result<Mac, Error> {
    text.parse().map_err(|error| Error::Invalid(format!("\"{text}\" is no MAC address: {error}")))
}

fn parse_addresses(texts: &[String]) -> Result<Vec<IpAddr>, Error> {
    let address = |text: &String| {
        text.parse::<IpAddr>().map_err(|_| Error::Invalid(format!("\"{text}\" is no IP address")))
    };
    texts.iter().map(address).collect()
}

fn settings(wanted: &v1::VirtioNet, mac: Mac) -> Result<Settings, Error> {
    let fits = |value: u32, what: &str| {
        u16::try_from(value).map_err(|_| Error::Invalid(format!("{value} is too much for {what}")))
    };
    Ok(Settings {
        mtu: if wanted.mtu == 0 { MTU } else { fits(wanted.mtu, "an MTU")? },
        pairs: fits(wanted.queue_pairs.max(1), "queue pairs")?,
        ..Settings::new(mac)
    })
}

fn port_config(id: &str, wanted: &v1::VirtioNet) -> Result<PortConfig, Error> {
    let peer_mac = Some(&wanted.peer_mac).filter(|text| !text.is_empty());
    Ok(PortConfig {
        name: id.to_owned(),
        mac: Some(parse_mac(&wanted.mac)?),
        peer_mac: peer_mac.map(|text| parse_mac(text)).transpose()?,
        addresses: parse_addresses(&wanted.addresses)?,
        spoof_check: wanted.spoof_check,
        trust: wanted.trust,
        vlans: vlans(wanted.vlan)?,
        link: link(wanted.link()),
        max_rate: rate(wanted.max_rate, wanted.max_burst),
        receive_rate: rate(wanted.receive_rate, wanted.receive_burst),
        // The function itself refuses frames longer than its MTU that are not to be segmented.
        ..PortConfig::default()
    })
}
