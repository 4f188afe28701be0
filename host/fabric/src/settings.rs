//! Changes settings of ports while frames pass.
//!
//! A new setting is a field of `PortConfig` (`backend/switch`, `rules`), checked in its `check`,
//! and is obeyed in `judge` (frames from the port) or `switch` (frames for it). `judge` keeps
//! nothing from frame to frame. The state of a setting, such as the bucket of a rate, is in `Slot`
//! of `switch` (`max_rate`: `Switch::turn` asks it before it takes frames) or in a decorator
//! (`receive_rate`: `pace`). `attach` of `switch/settings.rs` makes the state, and `configure`
//! makes it anew when the setting changes. Frames that a setting drops have a cause of their own
//! (`Drop` of `stats`). The setting comes from
//! - `VirtioNet` of `plane.proto`, for functions (`host/plane`, `network::port_config`);
//! - `AttachTapRequest`, for containers' interfaces by CNI (`taps::config`);
//! - `SetPortRequest`, for ports that are there: here, and in `KeptPlace::set_port` (`host/plane`,
//!   `keep`), or the next daemon has the former value.
//!
//! `SwitchPort` shows it (`port`). On the command line it has an option in `args/port.rs`, and a
//! place in `set`, `settings` and `as_json` of `port.rs`. Settings that containers or sandboxes
//! begin with have a further way: `network.proto`, `host/network` (`attachment`), `front/cni`, and
//! `sandbox/runtime` (`network`, `record/network.rs`), as `PortRates` has. A function of a pool is
//! given them by its taker, as `Client` of `vf.proto` (`host/plane`, `check_client` of
//! `vf::template`, `Binding::bind` of `network`). Tests: `slipway-switch`, and
//! `slipway-plane --test network`, which asks the next plane. `docs/networks.md` has it.

use std::sync::PoisonError;

use slipway_plane_api::v1;
use slipway_switch::{BadConfig, LinkSetting, PortConfig, Rate, VlanMode};

use crate::error::Error;
use crate::fabric::Fabric;
use crate::port::{self, FoundPort, port_text};

/// The changes to a port's settings; `None` leaves a setting as it is.
struct Change {
    spoof_check: Option<bool>,
    trust: Option<bool>,
    vlans: Option<VlanMode>,
    link: Option<v1::PortLink>,
    rate: Option<v1::set_port_request::Rate>,
    receiving: Option<v1::set_port_request::Receiving>,
}

impl Change {
    fn of(request: &v1::SetPortRequest) -> Result<Self, Error> {
        Ok(Self {
            spoof_check: request.spoof_check,
            trust: request.trust,
            vlans: request.vlan.map(vlans).transpose()?,
            link: request.link.map(|_| request.link()),
            rate: request.rate,
            receiving: request.receiving,
        })
    }

    fn apply(self, config: &mut PortConfig) {
        use v1::set_port_request::{Rate, Receiving};
        config.spoof_check = self.spoof_check.unwrap_or(config.spoof_check);
        config.trust = self.trust.unwrap_or(config.trust);
        if let Some(vlans) = self.vlans {
            config.vlans = vlans;
        }
        config.link = self.link.map_or(config.link, link);
        match self.rate {
            // The switch refuses a rate of 0.
            Some(Rate::MaxRate(rate)) => config.max_rate = Some(with_default_burst(rate)),
            Some(Rate::AnyRate(_)) => config.max_rate = None,
            None => {}
        }
        match self.receiving {
            Some(Receiving::ReceiveRate(rate)) => {
                config.receive_rate = Some(with_default_burst(rate));
            }
            Some(Receiving::AnyReceiveRate(_)) => config.receive_rate = None,
            None => {}
        }
    }
}

impl Fabric {
    /// Changes settings of a port; blocks until the switch has adopted them and `store` has stored
    /// them for a successor.
    ///
    /// # Errors
    /// [`Error::UnknownPort`], [`Error::AmbiguousPort`]; [`Error::Port`] if no port can have the
    /// settings; the error of `store`. Nothing has changed then.
    pub fn set_port<E: From<Error>>(
        &self,
        request: &v1::SetPortRequest,
        store: impl Fn(&v1::SwitchPort) -> Result<(), E>,
    ) -> Result<v1::SwitchPort, E> {
        let found = self.find_port(request.port.as_ref())?;
        let change = Change::of(request)?;
        // Held until the settings are stored, so that the stored settings are those that the switch
        // adopted last.
        let _alone = self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let unknown = || Error::UnknownPort(port_text(request.port.as_ref()));
        let (former, port) = match configure(&found, |config| change.apply(config)) {
            None | Some(Err(BadConfig::NoSuchPort)) => return Err(unknown().into()),
            Some(changed) => changed.map_err(Error::Port)?,
        };
        store(&port).inspect_err(|_| {
            // A port that was removed meanwhile has no settings.
            if let Some(Ok((_, port))) = configure(&found, |config| *config = former) {
                // The former settings were stored before, so storing them succeeds.
                let _ = store(&port);
            }
        })?;
        Ok(port)
    }
}

/// Changes a port's settings. Returns the former settings and the changed port, or `None` if the
/// port's switch has ended.
fn configure(
    found: &FoundPort,
    change: impl FnOnce(&mut PortConfig) + Send + 'static,
) -> Option<Result<(PortConfig, v1::SwitchPort), BadConfig>> {
    let (index, name) = (found.index, found.name.clone());
    let changed = found.switch.handle.call(move |owner| {
        // Another port may have got the index meanwhile.
        let former = owner.switch().config(index).filter(|config| config.name == name);
        let former = former.cloned().ok_or(BadConfig::NoSuchPort)?;
        let mut config = former.clone();
        change(&mut config);
        owner.configure(index, config)?;
        let port = port::port(owner, index).ok_or(BadConfig::NoSuchPort)?;
        Ok((former, port))
    });
    changed.ok()
}

/// Returns the VLAN mode of a port: access to `vlan`, or, for 0, the default trunk, whose frames
/// carry tags of their own.
pub fn vlans(vlan: u32) -> Result<VlanMode, Error> {
    let access = || match u16::try_from(vlan) {
        Ok(vlan) => Ok(VlanMode::Access(vlan)),
        Err(_) => Err(BadConfig::Vlan(u16::MAX).into()),
    };
    if vlan == 0 { Ok(VlanMode::default()) } else { access() }
}

/// Converts a link setting to the switch's type.
pub fn link(link: v1::PortLink) -> LinkSetting {
    match link {
        v1::PortLink::Auto => LinkSetting::Auto,
        v1::PortLink::On => LinkSetting::Up,
        v1::PortLink::Off => LinkSetting::Down,
    }
}

/// Returns a rate with the default burst. The switch refuses a rate of 0.
fn with_default_burst(per_second: u64) -> Rate {
    Rate { per_second, burst: 0 }
}
