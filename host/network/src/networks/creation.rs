//! New networks: their names, addresses and interfaces.

use std::net::Ipv4Addr;

use slipway_plane_api::network_v1 as v1;

use super::Networks;
use super::table::NetworkTable;
use crate::host::Surroundings;
use crate::ledger::Network;
use crate::{DEFAULT_NETWORK, Error, MTU, NO_NETWORK, Result, allocate};

impl Networks {
    /// Makes the default network if `name` is its name and it does not exist.
    pub(super) fn make_default(&self, state: &mut NetworkTable, name: &str) -> Result<()> {
        if name != DEFAULT_NETWORK || state.networks.contains_key(name) {
            return Ok(());
        }
        let default = v1::CreateNetworkRequest { name: name.to_owned(), ..Default::default() };
        self.make(state, &default)
    }

    /// Makes a network of a request, and enters it in the ledger and in `state`. It is not brought
    /// up: its first sandbox, container or port does that.
    ///
    /// # Errors
    /// [`Error::Exists`]; [`Error::Invalid`] for what cannot be had; the error of the ledger.
    pub(super) fn make(
        &self,
        state: &mut NetworkTable,
        request: &v1::CreateNetworkRequest,
    ) -> Result<()> {
        check_name(&request.name)?;
        if state.networks.contains_key(&request.name) {
            return Err(Error::Exists(request.name.clone()));
        }
        let mut around = Surroundings::look("")?;
        state.networks.values().for_each(|network| around.add(network));
        let network = plan(&around, request)?;
        self.ledger.save(&network)?;
        state.networks.insert(network.name.clone(), network);
        Ok(())
    }
}

/// Returns the network of a request, with free addresses and a free interface where the request
/// names none.
fn plan(around: &Surroundings, request: &v1::CreateNetworkRequest) -> Result<Network> {
    let subnet = match request.subnet.as_str() {
        "" => around.free_subnet()?,
        text => allocate::subnet(text)?,
    };
    let prefix = match request.ipv6_subnet.as_str() {
        "" => around.free_prefix()?,
        text => allocate::prefix(text)?,
    };
    around.check(subnet.into())?;
    around.check(prefix.into())?;
    let network = Network::new(request.name.clone(), around.free_device(), subnet, prefix);
    Ok(Network {
        gateway: gateway(&network, &request.gateway)?,
        mtu: mtu(&network, request.mtu)?,
        internal: request.internal,
        ..network
    })
}

/// Returns the gateway that a request asks for; the network's usual one for an empty text.
fn gateway(network: &Network, text: &str) -> Result<Ipv4Addr> {
    if text.is_empty() { Ok(network.gateway) } else { allocate::gateway(text, network.subnet) }
}

/// Returns the MTU in bytes that a request asks for; the network's usual one for 0.
fn mtu(network: &Network, wanted: u32) -> Result<u32> {
    if wanted == 0 {
        return Ok(network.mtu);
    }
    if !MTU.contains(&wanted) {
        let (least, most) = (MTU.start(), MTU.end());
        return Err(Error::Invalid(format!(
            "an MTU of {wanted} is not possible: {least} to {most} bytes"
        )));
    }
    Ok(wanted)
}

/// Checks that a name can be a file name and a DNS label, and is no reserved word of the command
/// line.
pub(super) fn check_name(name: &str) -> Result<()> {
    let bad =
        |why: &str| Err(Error::Invalid(format!("\"{name}\" is no name for a network: {why}")));
    let ordinary = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    let begins = name.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric());
    if !begins || name.len() > 32 || !name.bytes().all(ordinary) {
        return bad("letters, digits, '-' and '_', at most 32, the first a letter or a digit");
    }
    if [NO_NETWORK, "host"].contains(&name) {
        return bad("the word stands for something else");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_networks() {
        for good in ["default", "a", "A_b-9", &"x".repeat(32)] {
            assert!(check_name(good).is_ok(), "{good}");
        }
        for bad in ["", "none", "host", "a.b", "a/b", "-a", "a b", &"x".repeat(33)] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
