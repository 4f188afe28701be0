//! The network configuration, from the input (CNI specification, *Section 1*).
//!
//! A key without a field here is passed over, since it may be another plugin's.
//!
//! A new key is a field of [`Configuration`], or of [`RuntimeConfig`] if it is a capability (rates:
//! `bandwidth`), with its check in `Configuration::check` and a case in the tests below. What the
//! daemon must know of it goes on from here:
//! - `Operation::attach` (`commands`) puts it into `AttachRequest` of `network.proto`
//!   (`host/plane-api`), where its absence stands for what was before;
//! - `Request::of` (`host/network`, `networks/attachment_request.rs`) checks it again;
//! - `Attachment` (`host/network`, `attachment.rs`) has it on disk, with `#[serde(default)]` since
//!   files of earlier builds lack it, if the next daemon needs it;
//! - what the interface itself has, as its MTU, is set by `container::settings` (`host/network`,
//!   `container.rs`), and goes to the plane in `TapSettings` of `plane.proto` (`host/fabric`,
//!   `tap_settings.rs`). `container::check` compares the same settings for CHECK, and
//!   `describe_lease` (`networks/description.rs`) has them for the result;
//! - what its port has is put into `AttachTapRequest` by `make_interface`
//!   (`networks/attachments.rs`); `config` (`host/fabric`, `taps.rs`) makes the port's settings of
//!   it;
//! - with `function` the interface has no port: `claim` and `take` (`networks/namespaces.rs`) give
//!   what the sandbox must know in `Interface` of `network.proto`, and `network/namespace.rs` of
//!   `sandbox/runtime` puts it into the sandbox's record (`record/network.rs`);
//! - settings of a function of hardware are in `HardwareSettings`, and `take_function`
//!   (`networks/functions.rs`) gives them to the pool, which has them in `Client` of `vf.proto`.
//!
//! `fuzz::operation`, the fuzz target `cni-operations`, calls what reads the key. `docs/cni.md` has
//! a row, and a copy of `deploy/cni/10-slipway.conflist`, which lists the capabilities.
//! `docs/walks/attach.md` has the step if there is a new one. `host/network` has its tests in
//! `tests/attachments_as_root.rs`. End-to-end tests are `tests/e2e/76-cni.sh` and
//! `76-cni-pool.sh`, and `69-hardware-nic.sh` for keys of hardware.

use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value;
use slipway_plane_api::attachments;
use slipway_plane_api::network_v1::PortRates;

use crate::bandwidth::Bandwidth;
use crate::environment::{Command, Environment};
use crate::failure::{Code, Failure};

/// The versions of CNI that are spoken, oldest first.
pub const VERSIONS: [&str; 4] = ["0.3.1", "0.4.0", "1.0.0", "1.1.0"];
/// The newest version.
pub const LATEST: &str = "1.1.0";
/// The most attachments of one GC.
const MOST_ATTACHMENTS: usize = 65_536;
/// The most published ports and addresses of a container.
const MOST: usize = 256;

/// The configuration, with the fields that this plugin knows. Others are for other plugins.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Configuration {
    /// The version of CNI.
    #[serde(default)]
    pub cni_version: String,
    /// The configuration's name.
    #[serde(default)]
    pub name: String,
    /// The network of Slipway's.
    #[serde(default = "default_network")]
    pub network: String,
    /// The interface carries settings only, and a sandbox gets the network's port in its place.
    #[serde(default)]
    pub function: bool,
    /// The pool of which ADD takes a function for the attachment; empty: none. A sandbox in the
    /// namespace has that function. One of hardware is for a program at the function's socket.
    #[serde(default)]
    pub pool: String,
    /// The VLAN of a hardware function; 0: that of its pool.
    #[serde(default)]
    pub vlan: u32,
    /// "on" or absent: a hardware function sends from its own MAC address alone; "off": from any.
    #[serde(default)]
    pub spoofchk: Option<String>,
    /// The plugin that chooses addresses.
    #[serde(default)]
    pub ipam: Option<Ipam>,
    /// The runtime's own wishes, beside the administrator's.
    #[serde(default)]
    pub runtime_config: RuntimeConfig,
    /// The result of the plugin before, or of ADD.
    #[serde(default)]
    pub prev_result: Option<Value>,
    /// The attachments that GC leaves alone; absent: none.
    #[serde(default, rename = "cni.dev/valid-attachments")]
    pub valid: Option<Vec<ValidAttachment>>,
    /// The daemon's run directory.
    #[serde(default)]
    pub run_dir: Option<PathBuf>,
    /// The directory of the daemon's state.
    #[serde(default)]
    pub data_dir: Option<PathBuf>,
}

/// The part of the configuration that is the IPAM plugin's.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Ipam {
    /// The plugin's name; empty: none.
    #[serde(default, rename = "type")]
    pub kind: String,
}

/// The values of capabilities.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RuntimeConfig {
    /// The MAC address.
    #[serde(default)]
    pub mac: Option<String>,
    /// IP addresses, with or without the length of the prefix.
    #[serde(default)]
    pub ips: Option<Vec<String>>,
    /// Ports of the host that lead to the container.
    #[serde(default)]
    pub port_mappings: Option<Vec<PortMapping>>,
    /// How fast the container may send and receive.
    #[serde(default)]
    pub bandwidth: Option<Bandwidth>,
}

/// A port of the host that leads to the container. containerd's names begin with a capital letter,
/// as those of [`Bandwidth`] do.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PortMapping {
    /// The port on the host; 0 or absent: the container is not published there.
    #[serde(default, alias = "HostPort")]
    pub host_port: u16,
    /// The container's port.
    #[serde(alias = "ContainerPort")]
    pub container_port: u16,
    /// "tcp" or "udp".
    #[serde(default, alias = "Protocol")]
    pub protocol: Option<String>,
    /// The host's address; absent: all of them.
    #[serde(default, rename = "hostIP", alias = "HostIP")]
    pub host_ip: Option<String>,
}

/// An attachment that is in use.
#[derive(Clone, Debug, Deserialize)]
pub struct ValidAttachment {
    /// The container's id.
    #[serde(rename = "containerID")]
    pub container: String,
    /// The interface's name.
    #[serde(rename = "ifname")]
    pub interface: String,
}

fn default_network() -> String {
    "default".to_owned()
}

/// Returns the version that `input` is written in, or the latest if it is not known.
pub fn version(input: &[u8]) -> &'static str {
    #[derive(Deserialize)]
    struct Versioned {
        #[serde(rename = "cniVersion")]
        version: String,
    }
    let found = serde_json::from_slice::<Versioned>(input).map(|one| one.version);
    let known = |found: String| VERSIONS.into_iter().find(|version| *version == found);
    found.ok().and_then(known).unwrap_or(LATEST)
}

impl Configuration {
    /// Parses and checks a configuration for an operation.
    ///
    /// # Errors
    /// [`Failure`] with the codes 1, 2, 6 and 7.
    pub fn parse(input: &[u8], environment: &Environment) -> Result<Self, Failure> {
        let parsed: Result<Self, _> = serde_json::from_slice(input);
        let parsed = parsed.map_err(|error| {
            Failure::new(
                Code::Undecodable,
                format!("the network configuration cannot be understood: {error}"),
            )
        })?;
        if environment.command != Command::Version {
            parsed.check(environment.command)?;
        }
        Ok(parsed)
    }

    fn check(&self, command: Command) -> Result<(), Failure> {
        let invalid = |text: String| Err(Failure::new(Code::Invalid, text));
        if !VERSIONS.contains(&self.cni_version.as_str()) {
            let text = format!(
                "CNI version {:?} is not supported; \"cniVersion\" is one of {}",
                self.cni_version,
                VERSIONS.join(", ")
            );
            return Err(Failure::new(Code::Version, text));
        }
        attachments::check_configuration(&self.name)
            .map_err(|text| Failure::new(Code::Invalid, text))?;
        if self.network.is_empty() || self.network.len() > 64 {
            return invalid(format!(
                "{:?} is no name of a network; `slipway network ls` lists networks",
                self.network
            ));
        }
        if self.pool.len() > 64 {
            let pool = &self.pool;
            return invalid(format!("{pool:?} is no name of a pool; `slipway vf ls` lists pools"));
        }
        if command == Command::Add && self.prev_result.is_some() {
            return invalid(format!(
                "the network \"{}\" has a plugin before slipway-cni; it makes the interface, so \
                 it comes first",
                self.name
            ));
        }
        if self.valid.as_ref().is_some_and(|valid| valid.len() > MOST_ATTACHMENTS) {
            return invalid(format!(
                "\"cni.dev/valid-attachments\" has more than {MOST_ATTACHMENTS} attachments"
            ));
        }
        let RuntimeConfig { ips, port_mappings, .. } = &self.runtime_config;
        if ips.as_ref().map_or(0, Vec::len) > MOST
            || port_mappings.as_ref().map_or(0, Vec::len) > MOST
        {
            return invalid(format!("a container has at most {MOST} addresses and ports"));
        }
        if command == Command::Add {
            self.rates()?;
            self.checks_addresses()?;
        }
        self.ipam().map(drop)
    }

    /// Returns the name of the plugin that chooses addresses, or `None` if the network does.
    ///
    /// # Errors
    /// [`Code::Field`]: a path instead of a name.
    pub fn ipam(&self) -> Result<Option<&str>, Failure> {
        let kind = self.ipam.as_ref().map_or("", |ipam| &ipam.kind);
        if kind.contains(['/', '\0']) || [".", ".."].contains(&kind) {
            return Err(Failure::new(
                Code::Field,
                format!("the IPAM plugin's \"type\" is {kind:?}; it is a name without a path"),
            ));
        }
        Ok((!kind.is_empty()).then_some(kind))
    }

    /// Returns the ports to publish, as the daemon writes them.
    ///
    /// # Errors
    /// [`Code::Field`].
    pub fn publish(&self) -> Result<Vec<String>, Failure> {
        let all = self.runtime_config.port_mappings.iter().flatten();
        all.filter(|one| one.host_port != 0).map(PortMapping::publish).collect()
    }

    /// Returns the rates of the container's port, or `None` if it has none.
    ///
    /// # Errors
    /// [`Code::Invalid`].
    pub fn rates(&self) -> Result<Option<PortRates>, Failure> {
        self.runtime_config.bandwidth.as_ref().map(Bandwidth::rates).transpose()
    }

    /// Returns whether a hardware function sends from its own MAC address alone.
    ///
    /// # Errors
    /// [`Code::Invalid`].
    pub fn checks_addresses(&self) -> Result<bool, Failure> {
        match self.spoofchk.as_deref() {
            None | Some("on") => Ok(true),
            Some("off") => Ok(false),
            Some(other) => Err(Failure::new(
                Code::Invalid,
                format!("\"spoofchk\" is {other:?}; it is \"on\" or \"off\""),
            )),
        }
    }

    /// Returns the addresses that the runtime asks for, without the lengths of their prefixes: the
    /// network has these.
    pub fn addresses(&self) -> Vec<String> {
        let all = self.runtime_config.ips.iter().flatten();
        all.map(|one| one.split('/').next().unwrap_or_default().to_owned()).collect()
    }
}

impl PortMapping {
    fn publish(&self) -> Result<String, Failure> {
        let protocol = self.protocol.as_deref().unwrap_or("tcp").to_ascii_lowercase();
        if !["tcp", "udp"].contains(&protocol.as_str()) {
            return Err(Failure::new(
                Code::Field,
                format!("the protocol of a port mapping is {protocol:?}; it is tcp or udp"),
            ));
        }
        let (host, container) = (self.host_port, self.container_port);
        let address = match self.host_ip.as_deref() {
            // Any address of either family, as the daemon does without one.
            None | Some("" | "0.0.0.0" | "::") => String::new(),
            Some(address) if address.contains(':') => format!("[{address}]:"),
            Some(address) => format!("{address}:"),
        };
        Ok(format!("{address}{host}:{container}/{protocol}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(command: &str) -> Environment {
        let pairs = [
            ("CNI_COMMAND", command),
            ("CNI_CONTAINERID", "c1"),
            ("CNI_IFNAME", "eth0"),
            ("CNI_NETNS", "/run/netns/c1"),
        ];
        Environment::of(pairs.into_iter().map(|(name, value)| (name.into(), value.into()))).unwrap()
    }

    fn parse(input: &str, command: &str) -> Result<Configuration, Failure> {
        Configuration::parse(input.as_bytes(), &environment(command))
    }

    #[test]
    fn fields_are_found_and_others_left_alone() {
        let found = parse(
            r#"{"cniVersion": "1.1.0", "name": "blue", "type": "slipway-cni", "network": "n",
                "bridge": [1], "ipam": {"type": "host-local", "subnet": "10.1.0.0/24"},
                "runtimeConfig": {"mac": "5a:11:00:00:00:01", "ips": ["10.1.0.7/24"],
                "portMappings": [{"hostPort": 80, "containerPort": 8080, "protocol": "TCP"},
                                 {"hostPort": 53, "containerPort": 53, "protocol": "udp",
                                  "hostIP": "::1"}, {"containerPort": 9},
                                 {"HostPort": 81, "ContainerPort": 8081, "Protocol": "tcp",
                                  "HostIP": ""}],
                "bandwidth": {"ingressRate": 8000000, "egressRate": 16000000}}}"#,
            "ADD",
        )
        .unwrap();
        assert_eq!((found.network.as_str(), found.ipam().unwrap()), ("n", Some("host-local")));
        assert!(found.pool.is_empty());
        let pooled = parse(r#"{"cniVersion": "1.1.0", "name": "blue", "pool": "nics"}"#, "STATUS");
        let pooled = pooled.unwrap();
        assert_eq!((pooled.pool.as_str(), pooled.vlan), ("nics", 0));
        assert!(pooled.checks_addresses().unwrap());
        let hardware = r#"{"cniVersion": "1.1.0", "name": "blue", "vlan": 5, "spoofchk": "off"}"#;
        let hardware = parse(hardware, "ADD").unwrap();
        assert_eq!((hardware.vlan, hardware.checks_addresses().unwrap()), (5, false));
        let published = ["80:8080/tcp", "[::1]:53:53/udp", "81:8081/tcp"];
        assert_eq!(found.publish().unwrap(), published);
        let rates = found.rates().unwrap().unwrap();
        assert_eq!((rates.receive_rate, rates.max_rate), (1_000_000, 2_000_000));
        assert_eq!(found.addresses(), ["10.1.0.7"]);
        let least = parse(r#"{"cniVersion": "0.3.1", "name": "blue", "ipam": {}}"#, "DEL").unwrap();
        assert_eq!((least.network.as_str(), least.ipam().unwrap()), ("default", None));
    }

    #[test]
    fn each_mistake_has_its_code() {
        let good = r#""cniVersion": "1.0.0", "name": "blue""#;
        let bad_rate = r#""runtimeConfig": {"bandwidth": {"ingressRate": -1}}"#;
        for (input, code) in [
            ("", 6),
            ("7", 6),
            (r#"{"cniVersion": 1}"#, 6),
            (r#"{"name": "blue"}"#, 1),
            (r#"{"cniVersion": "0.2.0", "name": "blue"}"#, 1),
            (r#"{"cniVersion": "1.0.0"}"#, 7),
            (r#"{"cniVersion": "1.0.0", "name": "a/b"}"#, 7),
            (&format!(r#"{{{good}, "network": ""}}"#), 7),
            (&format!(r#"{{{good}, "pool": "{}"}}"#, "x".repeat(65)), 7),
            (&format!(r#"{{{good}, "pool": 7}}"#), 6),
            (&format!(r#"{{{good}, "vlan": -1}}"#), 6),
            (&format!(r#"{{{good}, "spoofchk": "yes"}}"#), 7),
            (&format!(r#"{{{good}, "prevResult": {{}}}}"#), 7),
            (&format!(r#"{{{good}, "ipam": {{"type": "../x"}}}}"#), 2),
            (&format!(r#"{{{good}, "runtimeConfig": 7}}"#), 6),
            (&format!(r#"{{{good}, "runtimeConfig": {{"bandwidth": 7}}}}"#), 6),
            (&format!(r#"{{{good}, {bad_rate}}}"#), 7),
        ] {
            let failure = parse(input, "ADD").unwrap_err();
            assert_eq!(failure.code(), code, "{input}: {}", failure.message());
        }
        let sctp = r#""runtimeConfig":
            {"portMappings": [{"hostPort": 1, "containerPort": 1, "protocol": "sctp"}]}"#;
        let sctp = parse(&format!("{{{good}, {sctp}}}"), "ADD").unwrap();
        assert_eq!(sctp.publish().unwrap_err().code(), 2);
        // An invalid rate refuses ADD alone: DEL succeeds without an attachment.
        parse(&format!("{{{good}, {bad_rate}}}"), "DEL").unwrap();
        // VERSION is asked by runtimes of any version.
        parse(r#"{"cniVersion": "9.0.0"}"#, "VERSION").unwrap();
    }

    #[test]
    fn an_error_is_in_the_version_of_the_configuration() {
        assert_eq!(version(br#"{"cniVersion": "0.4.0", "name": 7}"#), "0.4.0");
        for unknown in [&b""[..], b"{}", br#"{"cniVersion": "7"}"#] {
            assert_eq!(version(unknown), LATEST);
        }
    }
}
