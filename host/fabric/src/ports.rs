//! Finds single ports of switches by name, and impairs them on request.

use slipway_plane_api::v1;
use slipway_switch::PortIndex;

use crate::error::Error;
use crate::fabric::Fabric;
use crate::port::{FoundPort, port, port_text, wanted};
use crate::switch::SwitchHandle;

impl Fabric {
    /// Finds a port by its name or, failing that, its index; blocks.
    ///
    /// # Errors
    /// [`Error::UnknownSwitch`], [`Error::UnknownPort`], [`Error::AmbiguousPort`].
    pub(crate) fn find_port(&self, port: Option<&v1::PortReference>) -> Result<FoundPort, Error> {
        let wanted = port.cloned().unwrap_or_default();
        let candidates = match wanted.switch.as_str() {
            "" => self.switches().into_values().collect(),
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
        Ok(FoundPort { switch: first.switch.clone(), index: first.index, name: first.name.clone() })
    }

    /// Sets or removes the impairment of a port; blocks.
    ///
    /// # Errors
    /// [`Error::UnknownPort`], [`Error::AmbiguousPort`]; [`Error::Port`]: nothing has changed then.
    pub fn impair_port(&self, request: &v1::ImpairPortRequest) -> Result<v1::SwitchPort, Error> {
        let FoundPort { switch, index, name } = self.find_port(request.port.as_ref())?;
        let impairment = request.impairment.as_ref().map(wanted);
        let changed = switch.handle.call(move |owner| {
            // Another port may have got the index meanwhile.
            let same = owner.switch().config(index).is_some_and(|config| config.name == name);
            match same {
                true => owner.switch().impair(index, impairment).map(|()| port(owner, index)),
                false => Ok(None),
            }
        });
        let unknown = || Error::UnknownPort(port_text(request.port.as_ref()));
        changed.map_err(|_| unknown())??.ok_or_else(unknown)
    }
}

/// Returns all ports of a switch, or none if the switch has ended.
fn names(switch: SwitchHandle) -> Vec<FoundPort> {
    let names = switch.handle.call(|owner| {
        let all = owner.switch();
        let named = all
            .ports()
            .filter_map(|index| all.config(index).map(|config| (index, config.name.clone())));
        named.collect::<Vec<_>>()
    });
    let found = |(index, name)| FoundPort { switch: switch.clone(), index, name };
    names.unwrap_or_default().into_iter().map(found).collect()
}
