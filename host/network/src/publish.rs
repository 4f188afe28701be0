//! Published ports: `[ADDRESS:]HOST[-HOST]:CONTAINER[-CONTAINER][/tcp|/udp]`, as docker has them. A
//! port of the container alone is published at any free port of the host.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The most ports that one sandbox publishes: each is a socket of the daemon.
pub const MAX_PORTS: usize = 1024;

/// A transport protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Protocol {
    /// Returns the protocol's name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
        }
    }
}

/// Parses the ports that one sandbox publishes.
///
/// # Errors
/// [`Error::Invalid`], also for more than [`MAX_PORTS`] ports.
pub(crate) fn parse_all(texts: &[String]) -> Result<Vec<Published>> {
    let mut all = Vec::new();
    for text in texts {
        all.extend(Published::parse(text)?);
    }
    if all.len() > MAX_PORTS {
        return Err(Error::Invalid(format!("a sandbox publishes at most {MAX_PORTS} ports")));
    }
    Ok(all)
}

/// A port of the host that leads to a port of a sandbox.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Published {
    /// The only address of the host at which the port is published; `None` for all addresses.
    pub address: Option<IpAddr>,
    /// The port on the host; 0 for any free one.
    pub host: u16,
    /// The port in the sandbox.
    pub container: u16,
    /// The protocol of both ports.
    pub protocol: Protocol,
}

impl Published {
    /// Parses `text` into every port that it stands for.
    ///
    /// # Errors
    /// [`Error::Invalid`].
    pub fn parse(text: &str) -> Result<Vec<Self>> {
        Self::parse_ports(text).map_err(|why| {
            Error::Invalid(format!(
                "\"{text}\" cannot be published: {why}; write [ADDRESS:]HOST:CONTAINER[/udp], as \
                 8080:80"
            ))
        })
    }

    /// Parses `text` like [`Published::parse`]. An error is the reason alone.
    fn parse_ports(text: &str) -> Result<Vec<Self>, String> {
        let (ports, protocol) = split_protocol(text)?;
        let (rest, container) = match ports.rsplit_once(':') {
            Some((rest, container)) => (Some(rest), container),
            None => (None, ports),
        };
        let container = range(container)?;
        let (address, host) = rest.map_or(Ok((None, None)), parse_host)?;
        let count = container.1 - container.0;
        if host.is_some_and(|(first, last)| last - first != count) {
            return Err("the two ranges have different lengths".to_owned());
        }
        if usize::from(count) >= MAX_PORTS {
            return Err(format!("more than {MAX_PORTS} ports"));
        }
        let one = |offset| Self {
            // The unspecified address of one family stands for all addresses.
            address: address.filter(|address| !address.is_unspecified()),
            host: host.map_or(0, |(first, _)| first + offset),
            container: container.0 + offset,
            protocol,
        };
        Ok((0..=count).map(one).collect())
    }

    /// Returns the addresses at which the host listens: the published one, or the unspecified
    /// address of each family, which stands for all of that family.
    pub fn listens_on(&self) -> Vec<IpAddr> {
        match self.address {
            Some(address) => vec![address],
            None => vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()],
        }
    }
}

impl fmt::Display for Published {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.address {
            Some(IpAddr::V6(address)) => write!(formatter, "[{address}]:")?,
            Some(address) => write!(formatter, "{address}:")?,
            None => {}
        }
        match (self.host, self.address) {
            (0, None) => {}
            (0, Some(_)) => write!(formatter, ":")?,
            (host, _) => write!(formatter, "{host}:")?,
        }
        write!(formatter, "{}/{}", self.container, self.protocol.as_str())
    }
}

impl fmt::Debug for Published {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// Splits `80:80/udp` into ports and protocol, which is TCP if none is named.
fn split_protocol(text: &str) -> Result<(&str, Protocol), String> {
    match text.rsplit_once('/') {
        None => Ok((text, Protocol::Tcp)),
        Some((ports, "tcp")) => Ok((ports, Protocol::Tcp)),
        Some((ports, "udp")) => Ok((ports, Protocol::Udp)),
        Some((_, other)) => Err(format!("\"{other}\" is neither tcp nor udp")),
    }
}

/// The first and the last port of a range.
type PortRange = (u16, u16);

/// Parses the host's part, `[ADDRESS:]HOST[-HOST]`. The address is `None` if none is named; the
/// ports are `None` for as many free ones as there are container ports.
fn parse_host(text: &str) -> Result<(Option<IpAddr>, Option<PortRange>), String> {
    let (address, ports) = match split_address(text) {
        Some((address, ports)) => (Some(parse_address(address)?), ports),
        None => (None, text),
    };
    let ports = if ports.is_empty() { None } else { Some(range(ports)?) };
    Ok((address, ports))
}

/// Splits `127.0.0.1:80` and `[::1]:80` into address and port.
fn split_address(text: &str) -> Option<(&str, &str)> {
    match text.strip_prefix('[') {
        Some(rest) => rest.split_once("]:"),
        None => text.rsplit_once(':'),
    }
}

/// Parses an address without brackets.
fn parse_address(text: &str) -> Result<IpAddr, String> {
    text.parse().map_err(|_| format!("\"{text}\" is no IP address"))
}

/// Parses a port or a range of ports: `80` or `80-82`.
fn range(text: &str) -> Result<PortRange, String> {
    let port = |text: &str| match text.parse::<u16>() {
        Ok(port) if port > 0 && text.bytes().all(|byte| byte.is_ascii_digit()) => Ok(port),
        _ => Err(format!("\"{text}\" is no port from 1 to 65535")),
    };
    let (first, last) = match text.split_once('-') {
        Some((first, last)) => (port(first)?, port(last)?),
        None => (port(text)?, port(text)?),
    };
    if last < first {
        return Err(format!("the range \"{text}\" ends before it begins"));
    }
    Ok((first, last))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn show(text: &str) -> String {
        Published::parse(text).unwrap().iter().map(|one| format!("{one} ")).collect()
    }

    #[test]
    fn forms_of_docker_are_parsed() {
        assert_eq!(show("8080:80"), "8080:80/tcp ");
        assert_eq!(show("80"), "80/tcp ");
        assert_eq!(show("53:53/udp"), "53:53/udp ");
        assert_eq!(show("127.0.0.1:8080:80"), "127.0.0.1:8080:80/tcp ");
        assert_eq!(show("127.0.0.1::80"), "127.0.0.1::80/tcp ");
        assert_eq!(show("[::1]:8080:80/tcp"), "[::1]:8080:80/tcp ");
        assert_eq!(show("0.0.0.0:8080:80"), "8080:80/tcp ");
        assert_eq!(show("7000-7002:80-82"), "7000:80/tcp 7001:81/tcp 7002:82/tcp ");
        assert_eq!(Published::parse("1-1024:1-1024").unwrap().len(), 1024);
        assert_eq!(Published::parse("65535:65535").unwrap()[0].host, 65535);
    }

    #[test]
    fn texts_in_other_forms_are_refused_in_one_line() {
        for bad in [
            "",
            ":",
            "a",
            "0:80",
            "80:0",
            "80:65536",
            "80:+1",
            "80:80/sctp",
            "1.2.3:80:80",
            "1-2:80",
            "2-1:80-81",
            "::80",
            "[::1:80:80",
            "-1:80",
            "80:80:80:80",
            "1-1025:1-1025",
            "80:80/",
            " 80:80",
        ] {
            let error = Published::parse(bad).unwrap_err().to_string();
            assert!(
                error.contains("cannot be published") && !error.contains('\n'),
                "{bad}: {error}"
            );
        }
    }
}
