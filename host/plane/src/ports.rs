//! Finds single ports of switches by name, and impairs them on request.

use std::time::Duration;

use slipway_plane_api::v1;
use slipway_switch::decorators::{Impairment, Ways};
use slipway_switch::{PortIndex, Rate};

use crate::switches::{self, Fabric};
use crate::{Error, Plane};

/// A port that was found. It may be removed before it is used.
pub struct FoundPort {
    /// The switch of the port.
    pub fabric: Fabric,
    /// The port's number at its switch.
    pub index: PortIndex,
    /// The port's name.
    pub name: String,
}

impl Plane {
    /// Finds a port by its name or, failing that, its index; blocks.
    ///
    /// # Errors
    /// [`Error::UnknownSwitch`], [`Error::UnknownPort`], [`Error::AmbiguousPort`].
    pub(crate) fn find_port(&self, port: Option<&v1::PortReference>) -> Result<FoundPort, Error> {
        let wanted = port.cloned().unwrap_or_default();
        let candidates = match wanted.switch.as_str() {
            "" => self.fabrics().into_values().collect(),
            name => vec![self.switch(name)?],
        };
        let unknown = || Error::UnknownPort(wanted.port.clone());
        let all = candidates.into_iter().flat_map(names);
        let all: Vec<_> = all.collect();
        let number: Option<PortIndex> = wanted.port.parse().ok();
        let by_name = |found: &&FoundPort| found.name == wanted.port;
        let by_index = |found: &&FoundPort| Some(found.index) == number;
        let mut found = all.iter().filter(by_name).peekable();
        let first = match found.next() {
            Some(first) if found.next().is_none() => first,
            Some(_) => return Err(Error::AmbiguousPort(wanted.port)),
            None => {
                let mut found = all.iter().filter(by_index);
                match (found.next(), found.next()) {
                    (Some(first), None) => first,
                    (Some(_), Some(_)) => return Err(Error::AmbiguousPort(wanted.port)),
                    (None, _) => return Err(unknown()),
                }
            }
        };
        Ok(FoundPort { fabric: first.fabric.clone(), index: first.index, name: first.name.clone() })
    }

    /// Sets or removes the impairment of a port; blocks.
    ///
    /// # Errors
    /// [`Error::UnknownPort`], [`Error::AmbiguousPort`]; [`Error::Port`]: nothing has changed then.
    pub fn impair_port(&self, request: &v1::ImpairPortRequest) -> Result<v1::SwitchPort, Error> {
        let FoundPort { fabric, index, name } = self.find_port(request.port.as_ref())?;
        let impairment = request.impairment.as_ref().map(wanted);
        let changed = fabric.handle.call(move |owner| {
            // Another port may have got the index meanwhile.
            let same = owner.switch().config(index).is_some_and(|config| config.name == name);
            match same {
                true => {
                    owner.switch().impair(index, impairment).map(|()| switches::port(owner, index))
                }
                false => Ok(None),
            }
        });
        let unknown = || Error::UnknownPort(port_text(request.port.as_ref()));
        changed.map_err(|_| unknown())??.ok_or_else(unknown)
    }
}

/// Returns the port's name as the user wrote it.
pub fn port_text(port: Option<&v1::PortReference>) -> String {
    port.map(|port| port.port.clone()).unwrap_or_default()
}

/// Returns all ports of a switch, or none if the switch has ended.
fn names(fabric: Fabric) -> Vec<FoundPort> {
    let names = fabric.handle.call(|owner| {
        let switch = owner.switch();
        let named = switch
            .ports()
            .filter_map(|index| switch.config(index).map(|config| (index, config.name.clone())));
        named.collect::<Vec<_>>()
    });
    let found = |(index, name)| FoundPort { fabric: fabric.clone(), index, name };
    names.unwrap_or_default().into_iter().map(found).collect()
}

/// Converts a direction, which is given from the peer's view.
pub fn ways(direction: v1::PortDirection) -> Ways {
    Ways {
        inward: direction != v1::PortDirection::Received,
        outward: direction != v1::PortDirection::Sent,
    }
}

fn wanted(wanted: &v1::Impairment) -> Impairment {
    let rate = (wanted.bytes_per_second, wanted.byte_burst);
    Impairment {
        loss: wanted.loss,
        delay: Duration::from_nanos(wanted.delay_ns),
        jitter: Duration::from_nanos(wanted.jitter_ns),
        // A burst without a rate is a rate of 0, which is refused.
        rate: (rate != (0, 0)).then_some(Rate { per_second: rate.0, burst: rate.1 }),
        queue: wanted.queue,
        ways: ways(wanted.direction()),
        seed: if wanted.seed == 0 { random() } else { wanted.seed },
    }
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // Cannot fail for so few bytes once the system has started.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    u64::from_ne_bytes(bytes)
}

/// Converts an impairment for the interface.
pub fn impairment_of(impairment: &Impairment) -> v1::Impairment {
    // The times are at most a minute.
    let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    let direction = match (impairment.ways.inward, impairment.ways.outward) {
        (true, false) => v1::PortDirection::Sent,
        (false, true) => v1::PortDirection::Received,
        _ => v1::PortDirection::Both,
    };
    v1::Impairment {
        loss: impairment.loss,
        delay_ns: nanoseconds(impairment.delay),
        jitter_ns: nanoseconds(impairment.jitter),
        bytes_per_second: impairment.rate.map_or(0, |rate| rate.per_second),
        byte_burst: impairment.rate.map_or(0, |rate| rate.burst),
        queue: impairment.queue,
        direction: direction.into(),
        seed: impairment.seed,
    }
}
