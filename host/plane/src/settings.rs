//! Changes settings of ports while frames pass.

use slipway_plane_api::v1;
use slipway_switch::{BadConfig, PortConfig, VlanMode};

use crate::network::{link, max_rate, vlans};
use crate::ports::{FoundPort, port_text};
use crate::{Error, Plane, switches};

/// The changes to a port's settings; `None` leaves a setting as it is.
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
    /// Changes settings of a port; blocks until the switch has adopted them and they are stored for
    /// a successor.
    ///
    /// # Errors
    /// [`Error::UnknownPort`], [`Error::AmbiguousPort`]; [`Error::Port`] if no port can have the
    /// settings; [`Error::Invalid`] if the settings cannot be kept. Nothing has changed then.
    pub fn set_port(&self, request: &v1::SetPortRequest) -> Result<v1::SwitchPort, Error> {
        let found = self.find_port(request.port.as_ref())?;
        let change = Change::of(request)?;
        // Held until the settings are stored, so that the stored settings are those that the switch
        // adopted last.
        let _alone = self.port_settings_change();
        let unknown = || Error::UnknownPort(port_text(request.port.as_ref()));
        let (former, port) = match configure(&found, |config| change.apply(config)) {
            None | Some(Err(BadConfig::NoSuchPort)) => return Err(unknown()),
            Some(changed) => changed?,
        };
        self.store_port(&port).inspect_err(|_| {
            // A port that was removed meanwhile has no settings.
            if let Some(Ok((_, port))) = configure(&found, |config| *config = former) {
                // The former settings were stored before, so storing them succeeds.
                let _ = self.store_port(&port);
            }
        })?;
        Ok(port)
    }

    /// Stores the settings for the port of a successor.
    fn store_port(&self, port: &v1::SwitchPort) -> Result<(), Error> {
        match self.with_endpoint(&port.name, |served| served.port_changed(port)) {
            // Ports of no function are not stored: the creator of their switch makes them anew.
            Err(Error::Unknown(_)) => Ok(()),
            kept => kept?,
        }
    }
}

/// Changes a port's settings. Returns the former settings and the changed port, or `None` if the
/// port's switch has ended.
fn configure(
    found: &FoundPort,
    change: impl FnOnce(&mut PortConfig) + Send + 'static,
) -> Option<Result<(PortConfig, v1::SwitchPort), BadConfig>> {
    let (index, name) = (found.index, found.name.clone());
    let changed = found.fabric.handle.call(move |owner| {
        // Another port may have got the index meanwhile.
        let former = owner.switch().config(index).filter(|config| config.name == name);
        let former = former.cloned().ok_or(BadConfig::NoSuchPort)?;
        let mut config = former.clone();
        change(&mut config);
        owner.configure(index, config)?;
        let port = switches::port(owner, index).ok_or(BadConfig::NoSuchPort)?;
        Ok((former, port))
    });
    changed.ok()
}
