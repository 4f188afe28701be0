//! Settings of ports, changed while frames pass.

use slipway_plane_api::v1;
use slipway_switch::{BadConfig, Owner, PortConfig, PortIndex, VlanMode};

use crate::network::{link, max_rate, vlans};
use crate::ports::{Found, port_text};
use crate::{Error, Plane, switches};

/// What of a port's settings changes.
struct Change {
    spoof_check: Option<bool>,
    trust: Option<bool>,
    vlans: Option<VlanMode>,
    link: Option<v1::PortLink>,
    rate: Option<v1::set_port_request::Rate>,
}

impl Change {
    fn of(request: &v1::SetPortRequest) -> Result<Self, Error> {
        Ok(Self {
            spoof_check: request.spoof_check,
            trust: request.trust,
            vlans: request.vlan.map(vlans).transpose()?,
            link: request.link.map(|_| request.link()),
            rate: request.rate,
        })
    }

    fn apply(self, config: &mut PortConfig) {
        use v1::set_port_request::Rate;
        config.spoof_check = self.spoof_check.unwrap_or(config.spoof_check);
        config.trust = self.trust.unwrap_or(config.trust);
        if let Some(vlans) = self.vlans {
            config.vlans = vlans;
        }
        config.link = self.link.map_or(config.link, link);
        match self.rate {
            // The switch refuses a rate of 0.
            Some(Rate::MaxRate(rate)) => config.max_rate = Some(max_rate(rate)),
            Some(Rate::AnyRate(_)) => config.max_rate = None,
            None => {}
        }
    }
}

impl Plane {
    /// Changes settings of a port; blocks until the switch goes by them.
    ///
    /// # Errors
    /// [`Error::UnknownPort`], [`Error::AmbiguousPort`]; [`Error::Port`] for settings that no port can have. It is as it was then.
    pub fn set_port(&self, request: &v1::SetPortRequest) -> Result<v1::SwitchPort, Error> {
        let Found { fabric, index, name } = self.find_port(request.port.as_ref())?;
        let change = Change::of(request)?;
        let changed = fabric.handle.call(move |owner| configure(owner, index, &name, change));
        let unknown = || Error::UnknownPort(port_text(request.port.as_ref()));
        let port = match changed.map_err(|_| unknown())? {
            Err(BadConfig::NoSuchPort) => return Err(unknown()),
            changed => changed?,
        };
        // Others than functions' are made anew by whoever makes their switch.
        match self.with_endpoint(&port.name, |served| served.port_changed(&port)) {
            Err(Error::Unknown(_)) => Ok(port),
            kept => kept?.map(|()| port),
        }
    }
}

fn configure(
    owner: &mut Owner<'_, '_>,
    index: PortIndex,
    name: &str,
    change: Change,
) -> Result<v1::SwitchPort, BadConfig> {
    // Another port may have its index by now.
    let config = owner.switch().config(index).filter(|config| config.name == name);
    let mut config = config.cloned().ok_or(BadConfig::NoSuchPort)?;
    change.apply(&mut config);
    owner.configure(index, config)?;
    switches::port(owner, index).ok_or(BadConfig::NoSuchPort)
}
