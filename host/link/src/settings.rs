//! Settings: the name of this engine, and which addresses are at which other engine.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use serde::Deserialize;
use slipway_sgiov_spec::link::{MAX_WINDOW, Name, PAYLOAD};

/// The cipher of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Default)]
pub enum Cipher {
    /// AES-128-GCM.
    #[default]
    #[serde(rename = "aes-128-gcm")]
    Aes128Gcm,
    /// AES-256-GCM.
    #[serde(rename = "aes-256-gcm")]
    Aes256Gcm,
}

/// Another engine: a table `[[engine]]` of the settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// The engine's name, which its certificate has as a DNS name.
    pub name: String,
    /// The address where the engine listens.
    pub at: SocketAddr,
    /// The addresses of programs there.
    #[serde(default)]
    pub addresses: Vec<IpNet>,
    /// The tenants that have streams to this engine; empty for every tenant.
    #[serde(default)]
    pub tenants: Vec<String>,
    /// Megabits per second that the way to this engine carries, which tenants share by their
    /// weights; `None` for whatever the kernel takes.
    #[serde(default)]
    pub rate_mbit: Option<u64>,
}

impl Peer {
    /// Returns whether streams of `tenant` may go to this engine and come from it.
    pub fn serves(&self, tenant: &str) -> bool {
        self.tenants.is_empty() || self.tenants.iter().any(|name| name == tenant)
    }

    /// Returns the bytes per second that the way to this engine carries, if the settings say.
    pub(crate) fn bytes_per_second(&self) -> Option<u64> {
        self.rate_mbit.map(|rate| rate.saturating_mul(125_000))
    }
}

/// The settings of a [`Links`](crate::Links).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// This engine's name, which its certificate has as a DNS name.
    pub name: String,
    /// The address where this engine listens for others; `None` if only this one connects.
    #[serde(default)]
    pub listen: Option<SocketAddr>,
    /// The certificate and the intermediate ones up to the authority, PEM.
    pub certificate: PathBuf,
    /// The private key of the certificate, PEM.
    pub key: PathBuf,
    /// The authorities that issue the other engines' certificates, PEM.
    pub authority: PathBuf,
    /// The cipher of connections that this engine begins.
    #[serde(default)]
    pub cipher: Cipher,
    /// The most bytes of a record's payload: 4,096 to 131,072.
    #[serde(default = "record")]
    pub record: usize,
    /// Bytes of a stream that may come before its program has read any: 4,096 to 4,194,304. The
    /// window of a stream that it slows grows up to `fifo`.
    #[serde(default = "window")]
    pub window: u32,
    /// The most bytes of a FIFO: 4,096 to 4,194,304.
    #[serde(default = "fifo")]
    pub fifo: usize,
    /// The most bytes that are sealed under one key.
    #[serde(default = "rekey")]
    pub rekey: u64,
    /// Milliseconds without a frame from an engine after which its connection is broken: at least
    /// 30.
    #[serde(default = "silence")]
    pub silence_ms: u64,
    /// Milliseconds that connecting and the handshake may take.
    #[serde(default = "handshake")]
    pub handshake_ms: u64,
    /// Milliseconds after which a connection without streams is closed.
    #[serde(default = "linger")]
    pub linger_ms: u64,
    /// The most streams of a connection.
    #[serde(default = "streams")]
    pub streams: usize,
    /// The other engines.
    #[serde(default)]
    pub engine: Vec<Peer>,
}

fn record() -> usize {
    64 << 10
}

fn window() -> u32 {
    64 << 10
}

fn fifo() -> usize {
    2 << 20
}

fn rekey() -> u64 {
    1 << 38
}

fn silence() -> u64 {
    3000
}

fn handshake() -> u64 {
    5000
}

fn linger() -> u64 {
    30_000
}

fn streams() -> usize {
    1 << 17
}

/// The reason why settings are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// A name that is empty, too long, or has characters other than printable ASCII.
    #[error("'{0}' is no name for an engine or a tenant")]
    Name(String),
    /// Two engines with one name, or one with this engine's.
    #[error("engine '{0}' is there twice")]
    Twice(String),
    /// A number out of its range.
    #[error("{what} is {value}: out of range")]
    Range {
        /// The setting.
        what: &'static str,
        /// The value of the setting.
        value: u64,
    },
    /// A setting that cannot change while links run, since existing connections depend on it.
    #[error("{0} changes when the engine is started anew, and not before")]
    Fixed(&'static str),
}

impl Settings {
    /// Checks names and ranges.
    ///
    /// # Errors
    /// The first problem found.
    pub fn check(&self) -> Result<(), SettingsError> {
        let mut names = vec![self.name.as_str()];
        for peer in &self.engine {
            if names.contains(&peer.name.as_str()) {
                return Err(SettingsError::Twice(peer.name.clone()));
            }
            names.push(&peer.name);
        }
        let tenants = self.engine.iter().flat_map(|peer| &peer.tenants).map(String::as_str);
        let bad = names.into_iter().chain(tenants).find(|name| Name::new(name).is_none());
        if let Some(bad) = bad {
            return Err(SettingsError::Name(bad.into()));
        }
        let within = |what, value: u64, least: u64, most: u64| {
            let fits = (least..=most).contains(&value);
            fits.then_some(()).ok_or(SettingsError::Range { what, value })
        };
        within("record", self.record as u64, 4096, PAYLOAD as u64)?;
        within("window", self.window.into(), 4096, MAX_WINDOW.into())?;
        within("fifo", self.fifo as u64, 4096, 4 << 20)?;
        within("rekey", self.rekey, 1 << 16, u64::MAX)?;
        within("silence_ms", self.silence_ms, 30, 3_600_000)?;
        within("handshake_ms", self.handshake_ms, 10, 3_600_000)?;
        for rate in self.engine.iter().filter_map(|peer| peer.rate_mbit) {
            within("rate_mbit", rate, 1, 10_000_000)?;
        }
        within("streams", self.streams as u64, 1, 1 << 20)
    }

    /// Returns the number of the engine that `address` is at, for `tenant`: among the engines with
    /// a network that contains it, the one with the smallest network.
    pub fn engine_of(&self, tenant: &str, address: [u8; 16]) -> Option<usize> {
        let address = Ipv6Addr::from(address);
        let address = address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4);
        let length = |peer: &Peer| {
            let having = peer.addresses.iter().filter(|network| network.contains(&address));
            having.map(IpNet::prefix_len).max()
        };
        let serving = self.engine.iter().enumerate().filter(|(_, peer)| peer.serves(tenant));
        let having = serving.filter_map(|(number, peer)| Some((length(peer)?, number)));
        having
            .max_by_key(|(length, number)| (*length, usize::MAX - number))
            .map(|(_, number)| number)
    }

    /// Returns the number of the engine called `name`.
    pub fn engine_named(&self, name: &str) -> Option<usize> {
        self.engine.iter().position(|peer| peer.name == name)
    }

    /// Returns the settings of an engine that knows no other.
    #[cfg(any(test, feature = "fuzz"))]
    pub(crate) fn for_tests() -> Self {
        let file = PathBuf::new;
        Self {
            name: "here".into(),
            listen: None,
            certificate: file(),
            key: file(),
            authority: file(),
            cipher: Cipher::default(),
            record: record(),
            window: window(),
            fifo: fifo(),
            rekey: rekey(),
            silence_ms: silence(),
            handshake_ms: handshake(),
            linger_ms: linger(),
            streams: 100,
            engine: Vec::new(),
        }
    }

    pub(crate) fn silence(&self) -> Duration {
        Duration::from_millis(self.silence_ms)
    }

    pub(crate) fn handshake(&self) -> Duration {
        Duration::from_millis(self.handshake_ms)
    }

    pub(crate) fn linger(&self) -> Duration {
        Duration::from_millis(self.linger_ms)
    }
}

#[cfg(test)]
mod tests {
    use slipway_sgiov_spec::Address;

    use super::*;

    const TEXT: &str = r#"
        name = "left"
        listen = "0.0.0.0:4790"
        certificate = "/etc/slipway/left.pem"
        key = "/etc/slipway/left.key"
        authority = "/etc/slipway/ca.pem"
        [[engine]]
        name = "right"
        at = "192.0.2.2:4790"
        addresses = ["10.2.0.0/16", "fd00:2::/32"]
        [[engine]]
        name = "third"
        at = "192.0.2.3:4790"
        addresses = ["10.2.3.0/24", "10.3.0.0/16"]
        tenants = ["blue"]
    "#;

    fn settings() -> Settings {
        toml::from_str(TEXT).unwrap()
    }

    #[test]
    fn the_smallest_network_of_the_tenant_decides() {
        let settings = settings();
        assert_eq!(settings.check(), Ok(()));
        let of = |tenant, ip| settings.engine_of(tenant, Address::v4(ip, 0).ip);
        assert_eq!(of("blue", [10, 2, 3, 4]), Some(1));
        assert_eq!(of("red", [10, 2, 3, 4]), Some(0));
        assert_eq!(of("blue", [10, 2, 4, 4]), Some(0));
        assert_eq!(of("red", [10, 3, 0, 1]), None);
        assert_eq!(of("blue", [10, 4, 0, 1]), None);
        let six: Ipv6Addr = "fd00:2::1".parse().unwrap();
        assert_eq!(settings.engine_of("red", six.octets()), Some(0));
        assert_eq!(settings.engine_named("third"), Some(1));
    }

    #[test]
    fn what_cannot_be_is_said() {
        let with = |change: fn(&mut Settings)| {
            let mut settings = settings();
            change(&mut settings);
            settings.check().unwrap_err().to_string()
        };
        assert_eq!(with(|s| s.record = 1), "record is 1: out of range");
        assert_eq!(with(|s| s.window = 5 << 20), "window is 5242880: out of range");
        assert_eq!(with(|s| s.engine[0].name = "left".into()), "engine 'left' is there twice");
        assert_eq!(
            with(|s| s.engine[1].tenants[0] = "a b".into()),
            "'a b' is no name for an engine or a tenant"
        );
        assert!(toml::from_str::<Settings>(&format!("nonsense = 1\n{TEXT}")).is_err());
    }
}
