//! The policy: who may connect to whom across network namespaces, and how much a tenant may have.
//! It is read from a file and drop-ins.
//!
//! ```toml
//! [[tenant]]
//! name = "web"
//! netns = "web"          # a name under /run/netns, or a path such as /proc/123/ns/net
//! sockets = 10000        # endpoints at a time
//! memory = "1GiB"        # of streams' buffers; at the limit new connections fail
//! weight = 2             # of the scheduler's shares
//! rate = "10Gbit"        # most that it sends a second to other nodes
//!
//! [[allow]]
//! from = "web"           # a tenant, "network:NAME" for the guests of that network, or "*"
//! to = "db"              # one of these, or a network such as 10.1.0.0/16
//! ports = "5432"         # "*", or ports and ranges: "80,443,8000-8099"
//!
//! [limits]               # of what the engine holds; without: a share of what is free (`accounts`)
//! # One user in a network namespace:
//! user = { descriptors = 5000, mappings = 1000, sockets = 100000 }
//! # All users of a network namespace:
//! namespace = { descriptors = 20000 }
//! ```
//!
//! Without a rule a program reaches its own namespace only; the kernel serves everything else, as
//! without an engine. A rule does not give anyone an address: the listener's namespace must really
//! have it.
//!
//! A tenant with CAP_NET_ADMIN in its namespace can give itself any address. While no program
//! listens at that address through the engine in another namespace, the tenant gets the connections
//! to it that a rule lets through, also those meant for a listener of the kernel's elsewhere. A
//! rule to a tenant lets that tenant alone do so; a rule to a network or to `"*"` lets everybody.
//!
//! A new key is a field of `WrittenTenant` or `WrittenRule`, with its check where that becomes a
//! [`Tenant`] or a rule, or one of `AllLimits` (`accounts`). A key that an engine does not know is
//! an error there, so files with it are for later engines. The broker asks the policy in
//! `broker/route.rs` (who may reach whom) and `broker/tenant_limits.rs`; a reload gives it the next
//! one (`Broker::renew`), and guests' engines get it by `Guests::renew_policy`. A key about streams
//! to other nodes, as `weight`, goes to `slipway_link` by `node_carrier`. Tests are below, in
//! `broker/tenant_limits.rs` and in `tests/namespaces_as_root.rs`; `docs/sockets.md`, "Tenants and
//! policy", has each key.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use ipnet::IpNet;
use serde::Deserialize;
use slipway_sgiov_spec::Address;

use crate::accounts::AllLimits;
use crate::address::ip;
use crate::peer::NamespaceId;

/// The prefix of the tenant's name for the guests of a Slipway network.
const NETWORK: &str = "network:";
/// The folder with the names of network namespaces (ip-netns(8)).
const NAMES: &str = "/run/netns";

/// The reason why a policy cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// The file cannot be read.
    #[error("{}: {why}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        why: std::io::Error,
    },
    /// A file's content is wrong.
    #[error("{}:{line}: {text}", path.display())]
    Wrong {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1.
        line: usize,
        /// The description of the error.
        text: String,
    },
}

/// Returns the line, counted from 1, of the byte at offset `at` of a text.
pub(crate) fn line(text: &str, at: usize) -> usize {
    text.get(..at).unwrap_or_default().matches('\n').count() + 1
}

/// A tenant's name and limits.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// The tenant's name.
    pub name: String,
    /// The file of the tenant's network namespace.
    pub netns: PathBuf,
    /// The most endpoints at a time.
    pub sockets: Option<u32>,
    /// The bytes of streams' buffers at which new connections fail.
    pub memory: Option<u64>,
    /// The weight of the tenant's shares, 1 by default.
    pub weight: f64,
    /// The most bits a second to other nodes.
    pub rate: Option<u64>,
}

/// A rule: who may reach what.
#[derive(Clone, Debug, PartialEq)]
struct Rule {
    /// The tenant that connects, or `None` for everybody.
    from: Option<String>,
    to: Target,
    ports: Vec<RangeInclusive<u16>>,
}

#[derive(Clone, Debug, PartialEq)]
enum Target {
    Any,
    Tenant(String),
    Network(IpNet),
}

/// Tenants, rules and limits: the whole policy.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Policy {
    tenants: Vec<Tenant>,
    rules: Vec<Rule>,
    limits: Option<AllLimits>,
}

/// The content of a file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    #[serde(default)]
    tenant: Vec<toml::Spanned<WrittenTenant>>,
    #[serde(default)]
    allow: Vec<toml::Spanned<WrittenRule>>,
    limits: Option<toml::Spanned<AllLimits>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenTenant {
    name: toml::Spanned<String>,
    netns: toml::Spanned<String>,
    sockets: Option<u32>,
    memory: Option<toml::Spanned<String>>,
    weight: Option<toml::Spanned<f64>>,
    rate: Option<toml::Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenRule {
    from: toml::Spanned<String>,
    to: toml::Spanned<String>,
    ports: Option<toml::Spanned<String>>,
}

/// An error in a file: the offset in its text, and the description.
type Complaint = (usize, String);

impl Policy {
    /// Reads `file`, then the files that end with `.toml` in the folder beside it, sorted by name.
    /// The folder's name is the file's with `.d` in place of the ending. `file` and the folder may
    /// be missing.
    ///
    /// # Errors
    /// [`PolicyError`], with the line.
    pub fn read(file: &Path) -> Result<Self, PolicyError> {
        let mut policy = Self::default();
        let mut files: Vec<PathBuf> =
            if file.exists() { vec![file.to_owned()] } else { Vec::new() };
        let mut folder = file.with_extension("").into_os_string();
        folder.push(".d");
        let read = |why| PolicyError::Read { path: folder.clone().into(), why };
        match std::fs::read_dir(&folder) {
            Ok(entries) => {
                let all = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>, _>>();
                let mut all = all.map_err(read)?;
                all.retain(|path| path.extension().is_some_and(|end| end == "toml"));
                all.sort();
                files.extend(all);
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(read(error)),
        }
        for path in files {
            policy.add_file(&path)?;
        }
        Ok(policy)
    }

    /// Adds the content of one file.
    ///
    /// # Errors
    /// [`PolicyError`].
    pub fn add_file(&mut self, path: &Path) -> Result<(), PolicyError> {
        let text = std::fs::read_to_string(path)
            .map_err(|why| PolicyError::Read { path: path.to_owned(), why })?;
        self.add(&text).map_err(|(at, what)| PolicyError::Wrong {
            path: path.to_owned(),
            line: line(&text, at),
            text: what,
        })
    }

    fn add(&mut self, text: &str) -> Result<(), Complaint> {
        let written: Written = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            (at, error.message().replace('\n', " "))
        })?;
        for tenant in written.tenant {
            let tenant = self.tenant(tenant.into_inner())?;
            self.tenants.push(tenant);
        }
        for rule in written.allow {
            self.rules.push(self.rule(rule.into_inner())?);
        }
        if let Some(limits) = written.limits {
            if self.limits.is_some() {
                return Err((limits.span().start, "limits are there already".into()));
            }
            self.limits = Some(limits.into_inner());
        }
        Ok(())
    }

    fn tenant(&self, written: WrittenTenant) -> Result<Tenant, Complaint> {
        let at = written.name.span().start;
        let (name, netns) = (written.name.into_inner(), written.netns.into_inner());
        let odd = |letter: char| !letter.is_ascii_alphanumeric() && !"-_.".contains(letter);
        if name.is_empty() || name.len() > 64 || name.contains(odd) {
            let text = "a tenant's name has 1 to 64 letters, digits, and -_.";
            return Err((at, format!("\"{name}\": {text}")));
        }
        let netns =
            if netns.starts_with('/') { netns.into() } else { Path::new(NAMES).join(netns) };
        if self.tenants.iter().any(|other| other.name == name || other.netns == netns) {
            return Err((
                at,
                format!("tenant \"{name}\" or its network namespace is there already"),
            ));
        }
        let weight = match written.weight {
            Some(weight) if !(0.001..=1000.0).contains(weight.get_ref()) => {
                return Err((weight.span().start, "a weight is 0.001 to 1000".into()));
            }
            weight => weight.map_or(1.0, toml::Spanned::into_inner),
        };
        let amount = |written: Option<toml::Spanned<String>>, units: &[(&str, u64)]| {
            written
                .map(|text| amount(text.get_ref(), units).map_err(|what| (text.span().start, what)))
                .transpose()
        };
        Ok(Tenant {
            name,
            netns,
            sockets: written.sockets,
            memory: amount(written.memory, &BYTES)?,
            weight,
            rate: amount(written.rate, &BITS)?,
        })
    }

    fn rule(&self, written: WrittenRule) -> Result<Rule, Complaint> {
        // The tenant of a Slipway network's guests needs no entry.
        let known = |name: &str| {
            name.starts_with(NETWORK) || self.tenants.iter().any(|tenant| tenant.name == name)
        };
        let from = match written.from.get_ref().as_str() {
            "*" => None,
            name if known(name) => Some(name.to_owned()),
            name => {
                return Err((
                    written.from.span().start,
                    format!("no tenant \"{name}\" before this line"),
                ));
            }
        };
        let to = match written.to.get_ref().as_str() {
            "*" => Target::Any,
            name if known(name) => Target::Tenant(name.to_owned()),
            network => Target::Network(
                network
                    .parse()
                    .or_else(|_| network.parse::<std::net::IpAddr>().map(IpNet::from))
                    .map_err(|_| {
                    let text =
                        format!("\"{network}\" is neither a tenant before this line nor a network");
                    (written.to.span().start, text)
                })?,
            ),
        };
        let ports = written.ports.map_or(Ok(vec![0..=u16::MAX]), |text| {
            ports(text.get_ref()).map_err(|what| (text.span().start, what))
        })?;
        Ok(Rule { from, to, ports })
    }

    /// Returns the tenant of a network namespace, by the file that the tenant's entry names now.
    pub(crate) fn tenant_of(&self, id: NamespaceId) -> Option<&Tenant> {
        let is = |tenant: &&Tenant| {
            std::fs::File::open(&tenant.netns).and_then(NamespaceId::of).is_ok_and(|own| own == id)
        };
        self.tenants.iter().find(is)
    }

    /// Returns whether a rule lets tenant `from` connect to `to`, an address of tenant `owner`.
    /// `None` stands for a namespace without a tenant's entry.
    pub fn allows(&self, from: Option<&str>, owner: Option<&str>, to: &Address) -> bool {
        self.rules.iter().any(|rule| {
            rule.from.as_deref().is_none_or(|name| Some(name) == from)
                && rule.ports.iter().any(|ports| ports.contains(&to.port))
                && match &rule.to {
                    Target::Any => true,
                    Target::Tenant(name) => Some(name.as_str()) == owner,
                    Target::Network(network) => network.contains(&ip(to)),
                }
        })
    }

    /// Returns the limits of what the engine holds for users and network namespaces.
    pub fn limits(&self) -> AllLimits {
        self.limits.unwrap_or_default()
    }

    /// Returns the policy's tenants.
    pub fn tenants(&self) -> &[Tenant] {
        &self.tenants
    }

    /// Returns the number of rules.
    pub fn rules(&self) -> usize {
        self.rules.len()
    }
}

const BYTES: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("", 1)];
const BITS: [(&str, u64); 4] =
    [("Kbit", 1000), ("Mbit", 1_000_000), ("Gbit", 1_000_000_000), ("", 1)];

fn amount(text: &str, units: &[(&str, u64)]) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = units.iter().find(|(unit, _)| *unit == &text[digits.len()..]);
    let number = digits.trim().parse::<u64>().ok();
    let value = number.zip(unit).and_then(|(number, (_, unit))| number.checked_mul(*unit));
    let names = units.iter().map(|(unit, _)| *unit).filter(|unit| !unit.is_empty());
    value.filter(|value| *value > 0).ok_or_else(|| {
        format!("\"{text}\" is no amount: a number and {}", names.collect::<Vec<_>>().join(", "))
    })
}

fn ports(text: &str) -> Result<Vec<RangeInclusive<u16>>, String> {
    if text == "*" {
        return Ok(vec![0..=u16::MAX]);
    }
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = first.trim().parse::<u16>().ok()?..=last.trim().parse::<u16>().ok()?;
        (!range.is_empty() && *range.start() > 0).then_some(range)
    };
    let wrong =
        || format!("\"{text}\" are no ports: as 80, 8000-8099, or both with commas between");
    text.split(',').map(|part| range(part).ok_or_else(wrong)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
[[tenant]]
name = "web"
netns = "web"
sockets = 100
memory = "1GiB"
rate = "10Gbit"

[[tenant]]
name = "db"
netns = "/proc/1/ns/net"
weight = 2.5

[[allow]]
from = "web"
to = "db"
ports = "5432,6000-6010"

[[allow]]
from = "*"
to = "10.9.0.0/16"
"#;

    fn to(ip: [u8; 4], port: u16) -> Address {
        Address::v4(ip, port)
    }

    #[test]
    fn rules_are_kept() {
        let mut policy = Policy::default();
        policy.add(GOOD).unwrap();
        let web = &policy.tenants()[0];
        assert_eq!(
            (web.sockets, web.memory, web.rate),
            (Some(100), Some(1 << 30), Some(10_000_000_000))
        );
        assert_eq!(web.netns, Path::new("/run/netns/web"));
        let (web, db) = (Some("web"), Some("db"));
        let there = to([10, 1, 0, 1], 5432);
        assert!(policy.allows(web, db, &there));
        assert!(!policy.allows(db, web, &there) && !policy.allows(None, db, &there));
        assert!(!policy.allows(web, None, &there));
        assert!(!policy.allows(web, db, &to([10, 1, 0, 1], 5433)));
        assert!(policy.allows(web, db, &to([10, 1, 0, 1], 6010)));
        assert!(policy.allows(None, None, &to([10, 9, 8, 7], 1)));
        assert!(!Policy::default().allows(web, web, &there));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket.toml");
        for (wrong, line, part) in [
            ("sockets = 100", 5, "sockets"),
            ("memory = \"1GiB\"", 6, "amount"),
            ("ports = \"5432,6000-6010\"", 17, "ports"),
            ("to = \"10.9.0.0/16\"", 21, "neither a tenant"),
            ("weight = 2.5", 12, "weight"),
            ("name = \"db\"", 10, "name"),
        ] {
            let key = wrong.split(' ').next().unwrap();
            let bad = match key {
                "sockets" => "socket = 100".to_owned(),
                "weight" => "weight = -1.0".to_owned(),
                "name" => "name = \"d b\"".to_owned(),
                _ => format!("{key} = \"x\""),
            };
            std::fs::write(&path, GOOD.replacen(wrong, &bad, 1)).unwrap();
            let error = Policy::read(&path).unwrap_err().to_string();
            assert!(
                error.contains(&format!("socket.toml:{line}: ")) && error.contains(part),
                "{error}"
            );
        }
        std::fs::write(&path, GOOD).unwrap();
        assert_eq!(Policy::read(&path).unwrap().rules(), 2);
        let limits = "[limits]\nuser = { descriptors = 7 }\nnamespace = { sockets = 9 }\n";
        std::fs::write(&path, format!("{GOOD}{limits}")).unwrap();
        let told = Policy::read(&path).unwrap().limits();
        assert_eq!((told.user.descriptors, told.user.sockets), (Some(7), None));
        assert_eq!((told.namespace.descriptors, told.namespace.sockets), (None, Some(9)));
        std::fs::write(&path, format!("{GOOD}[limits]\nusers = {{ sockets = 1 }}\n")).unwrap();
        let error = Policy::read(&path).unwrap_err().to_string();
        assert!(error.contains("socket.toml:23: ") && error.contains("users"), "{error}");
        std::fs::write(&path, GOOD).unwrap();
        std::fs::create_dir(dir.path().join("socket.d")).unwrap();
        std::fs::write(dir.path().join("socket.d/1.toml"), "[[allow]]\nfrom='web'\nto='*'\n")
            .unwrap();
        assert_eq!(Policy::read(&path).unwrap().rules(), 3);
        assert_eq!(Policy::read(&dir.path().join("none.toml")).unwrap(), Policy::default());
    }
}
