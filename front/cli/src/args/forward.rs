//! Arguments of `slipway port-forward`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::Args;

#[derive(Debug, Args)]
pub struct ForwardArgs {
    /// Sandbox or pod: name, id, or the beginning of an id
    pub name: String,
    /// Ports: that of the sandbox, or LOCAL:SANDBOX, or ADDRESS:LOCAL:SANDBOX; 0 as LOCAL takes one
    /// that is free
    #[arg(required = true, value_name = "[[ADDRESS:]LOCAL:]PORT")]
    pub ports: Vec<Forward>,
}

/// A port of the host that leads to one of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    /// The address on the host at which connections are accepted.
    pub local: SocketAddr,
    /// The port of 127.0.0.1 or ::1 in the sandbox.
    pub port: u16,
}

impl std::str::FromStr for Forward {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is no port, LOCAL:PORT or ADDRESS:LOCAL:PORT");
        let (before, port) = text.rsplit_once(':').unwrap_or(("", text));
        let port: u16 = port.parse().ok().filter(|port| *port > 0).ok_or_else(bad)?;
        let (address, local) = before.rsplit_once(':').unwrap_or(("", before));
        let local = if before.is_empty() { port } else { local.parse().map_err(|_| bad())? };
        let address = address.trim_start_matches('[').trim_end_matches(']');
        let address = match address {
            "" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            address => address.parse().map_err(|_| bad())?,
        };
        Ok(Self { local: (address, local).into(), port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_as_kubectl_writes_them_and_addresses() {
        for (text, local, port) in [
            ("80", "127.0.0.1:80", 80),
            ("8080:80", "127.0.0.1:8080", 80),
            ("0:80", "127.0.0.1:0", 80),
            ("10.0.0.1:8080:80", "10.0.0.1:8080", 80),
            ("[::1]:8080:80", "[::1]:8080", 80),
        ] {
            assert_eq!(text.parse(), Ok(Forward { local: local.parse().unwrap(), port }), "{text}");
        }
        for bad in ["", "0", "x", "80:", ":", "80:0", "a:80:80", "65536", "1:2:3:4"] {
            assert!(bad.parse::<Forward>().is_err(), "{bad}");
        }
    }
}
