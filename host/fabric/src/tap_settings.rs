//! The settings of TAP interfaces in network namespaces, as requests have them.

use std::net::IpAddr;

use slipway_netlink::InterfaceSettings;
use slipway_plane_api::v1;
use slipway_switch::Mac;

use crate::error::Error;

/// Returns the settings that the interface of a request gets, or `None` if it gets none.
///
/// # Errors
/// [`Error::Invalid`].
pub fn settings(
    request: &v1::AttachTapRequest,
    mac: Mac,
) -> Result<Option<InterfaceSettings>, Error> {
    let Some(wanted) = &request.settings else { return Ok(None) };
    let addresses = wanted.addresses.iter().map(|one| net(&one.address, one.prefix));
    let route = |one: &v1::TapRoute| -> Result<_, Error> {
        let gateway = match one.gateway.as_str() {
            "" => None,
            text => Some(ip(text)?),
        };
        Ok((net(&one.destination, one.prefix)?, gateway))
    };
    Ok(Some(InterfaceSettings {
        name: request.interface.clone(),
        mac: mac.0,
        mtu: wanted.mtu,
        addresses: addresses.collect::<Result<_, Error>>()?,
        routes: wanted.routes.iter().map(route).collect::<Result<_, Error>>()?,
    }))
}

/// Parses an IP address.
///
/// # Errors
/// [`Error::Invalid`].
pub fn ip(text: &str) -> Result<IpAddr, Error> {
    text.parse().map_err(|_| Error::Invalid(format!("\"{text}\" is no IP address")))
}

fn net(address: &str, prefix: u32) -> Result<(IpAddr, u8), Error> {
    let address = ip(address)?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    match u8::try_from(prefix) {
        Ok(prefix) if prefix <= most => Ok((address, prefix)),
        _ => Err(Error::Invalid(format!("{address} has no prefix of {prefix} bits"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(address: &str, prefix: u32, gateway: &str) -> v1::AttachTapRequest {
        let (destination, gateway) = ("0.0.0.0".into(), gateway.into());
        let route = v1::TapRoute { destination, prefix: 0, gateway };
        v1::AttachTapRequest {
            interface: "eth0".into(),
            settings: Some(v1::TapSettings {
                mtu: 1400,
                addresses: vec![v1::TapAddress { address: address.into(), prefix }],
                routes: vec![route],
            }),
            ..Default::default()
        }
    }

    #[test]
    fn settings_are_taken_or_refused_with_the_reason() {
        let mac = Mac([2, 0, 0, 0, 0, 1]);
        assert_eq!(settings(&v1::AttachTapRequest::default(), mac).unwrap(), None);
        let any: IpAddr = [0; 4].into();
        for (gateway, next) in [("", None), ("10.1.0.1", Some([10, 1, 0, 1].into()))] {
            let wanted = InterfaceSettings {
                name: "eth0".into(),
                mac: [2, 0, 0, 0, 0, 1],
                mtu: 1400,
                addresses: vec![("fd00:1::2".parse().unwrap(), 64)],
                routes: vec![((any, 0), next)],
            };
            assert_eq!(settings(&request("fd00:1::2", 64, gateway), mac).unwrap(), Some(wanted));
        }
        for (address, prefix, gateway, why) in [
            ("x", 24, "", "\"x\" is no IP address"),
            ("10.1.0.2", 33, "", "10.1.0.2 has no prefix of 33 bits"),
            ("fd00:1::2", 129, "", "fd00:1::2 has no prefix of 129 bits"),
            ("fd00:1::2", 256, "", "fd00:1::2 has no prefix of 256 bits"),
            ("10.1.0.2", 24, "y", "\"y\" is no IP address"),
        ] {
            let error = settings(&request(address, prefix, gateway), mac).unwrap_err();
            assert_eq!(error.to_string(), why);
        }
    }
}
