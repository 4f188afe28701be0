//! Requests for containers' interfaces, checked.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnet::IpNet;
use slipway_netns::Identity;
use slipway_plane_api::network_v1 as v1;

use crate::allocate::AddressRequest;
use crate::attachment::{Attachment, AttachmentKey, HardwareSettings, Rates};
use crate::ledger::{Lease, Network};
use crate::publish::{self, Published};
use crate::{Error, Result};

/// The most routes of an attachment.
const MOST_ROUTES: usize = 256;
/// The longest name of a container, in bytes.
const LONGEST_NAME: usize = 255;

/// A request that was checked.
pub(super) struct Request<'a> {
    pub key: AttachmentKey,
    pub network: &'a str,
    pub name: &'a str,
    pub namespace: PathBuf,
    pub wish: AddressRequest,
    pub publish: Vec<Published>,
    pub pool: &'a str,
    /// The functions of `pool` are hardware.
    pub is_hardware: bool,
    settings: HardwareSettings,
    routes: Option<Vec<(IpNet, Option<IpAddr>)>>,
    function: bool,
    rates: Rates,
}

impl<'a> Request<'a> {
    /// Checks a request.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn of(request: &'a v1::AttachRequest) -> Result<Self> {
        let key = key(request.container.as_ref())?;
        if request.name.len() > LONGEST_NAME {
            return Err(Error::Invalid(format!(
                "a container's name has at most {LONGEST_NAME} bytes"
            )));
        }
        if !request.name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::Invalid(format!(
                "{:?} cannot be a container's name: printable ASCII without blanks",
                request.name
            )));
        }
        Ok(Self {
            key,
            network: &request.network,
            name: &request.name,
            namespace: PathBuf::from(&request.namespace),
            wish: AddressRequest::parse(&request.addresses, &request.mac)?,
            publish: publish::parse_all(&request.publish)?,
            pool: &request.pool,
            is_hardware: false,
            settings: HardwareSettings {
                vlan: request.vlan,
                no_spoof_check: request.no_spoof_check,
            },
            routes: request.routes.as_ref().map(routes).transpose()?,
            function: request.function || !request.pool.is_empty(),
            rates: Rates::of(request.rates.as_ref())?,
        })
    }

    /// Checks that the settings and published ports are those that the functions of `pool` can
    /// have, of which it is known now whether they are hardware.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn check_hardware(&self) -> Result<()> {
        let invalid = |why: &str| Err(Error::Invalid(why.to_owned()));
        if self.is_hardware && !self.publish.is_empty() {
            return invalid(
                "nothing is published at a function of hardware, whose frames pass no switch of \
                 Slipway's: leave out the port mappings, or \"pool\"",
            );
        }
        if !self.is_hardware && self.settings != HardwareSettings::default() {
            return invalid(
                "only functions of hardware have a VLAN and a check of addresses: leave out \
                 \"vlan\" and \"spoofchk\", or name a pool of hardware in \"pool\"",
            );
        }
        Ok(())
    }

    /// Returns the ledger's entry.
    pub fn attachment(&self, network: &Network, identity: Identity, lease: Lease) -> Attachment {
        // The gateways of the network are at its switch, which hardware does not reach.
        let gateways = || if self.is_hardware { Vec::new() } else { default_routes(network) };
        Attachment {
            key: self.key.clone(),
            network: network.name.clone(),
            namespace: self.namespace.clone(),
            device: identity.device,
            inode: identity.inode,
            lease,
            routes: self.routes.clone().unwrap_or_else(gateways),
            function: self.function,
            pool: self.pool.to_owned(),
            hardware: self.is_hardware.then_some(self.settings),
            rates: self.rates,
            trace: None,
        }
    }
}

/// Returns the identity of an attachment.
///
/// # Errors
/// [`Error::Invalid`].
pub(super) fn key(container: Option<&v1::ContainerInterface>) -> Result<AttachmentKey> {
    let missing = || Error::Invalid("the request names no container".to_owned());
    let one = container.ok_or_else(missing)?;
    AttachmentKey::new(&one.configuration, &one.container_id, &one.interface)
}

fn routes(wanted: &v1::AttachmentRoutes) -> Result<Vec<(IpNet, Option<IpAddr>)>> {
    if wanted.routes.len() > MOST_ROUTES {
        return Err(Error::Invalid(format!("an interface gets at most {MOST_ROUTES} routes")));
    }
    let bad = |one: &v1::InterfaceRoute| {
        let v1::InterfaceRoute { destination, prefix, gateway, .. } = one;
        Error::Invalid(format!("there is no route to {destination}/{prefix} by {gateway:?}"))
    };
    let route = |one: &v1::InterfaceRoute| {
        let address: IpAddr = one.destination.parse().ok()?;
        let to = IpNet::new(address, u8::try_from(one.prefix).ok()?).ok()?.trunc();
        let gateway: Option<IpAddr> = match one.gateway.as_str() {
            "" => None,
            text => Some(text.parse().ok()?),
        };
        let fits = gateway.is_none_or(|gateway| gateway.is_ipv4() == address.is_ipv4());
        fits.then_some((to, gateway))
    };
    wanted.routes.iter().map(|one| route(one).ok_or_else(|| bad(one))).collect()
}

/// Returns the routes by a network's gateways to everywhere.
fn default_routes(network: &Network) -> Vec<(IpNet, Option<IpAddr>)> {
    let gateways = [IpAddr::V4(network.gateway), IpAddr::V6(network.gateway6())];
    let everywhere = |gateway: IpAddr| {
        let any: IpAddr = if gateway.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
        Some((IpNet::new(any, 0).ok()?, Some(gateway)))
    };
    gateways.into_iter().filter_map(everywhere).collect()
}
