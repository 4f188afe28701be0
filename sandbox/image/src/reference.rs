//! Image references, parsed as docker parses them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Digest, Error};

const DEFAULT_REGISTRY: &str = "docker.io";
const DEFAULT_TAG: &str = "latest";

/// The name of an image in a registry: `debian:12`, `localhost:5000/team/app:tag`, `name@sha256:…`.
///
/// Short names mean the same as in docker. The default registry is `docker.io`, where a name
/// without a folder is in `library/`. The default tag is `latest`, unless a digest is given.
/// [`Display`](fmt::Display) writes the full form, [`familiar`](Self::familiar) the short one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Reference {
    registry: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
}

impl Reference {
    /// Returns the host and port of the registry, `docker.io` by default.
    pub fn registry(&self) -> &str {
        &self.registry
    }

    /// Returns the path within the registry, `library/debian` for `debian`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// Returns the tag. Returns `None` only if there is a digest and no tag.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// Returns the digest of a manifest or an index. Returns `None` if the reference has none.
    pub fn digest(&self) -> Option<&Digest> {
        self.digest.as_ref()
    }

    /// Returns the shortest form with the same meaning: `debian:12` for
    /// `docker.io/library/debian:12`.
    pub fn familiar(&self) -> String {
        let full = self.to_string();
        match full.strip_prefix("docker.io/library/").filter(|rest| !rest.contains('/')) {
            Some(short) => short.to_owned(),
            None => full.strip_prefix("docker.io/").map_or(full.clone(), str::to_owned),
        }
    }

    /// Returns whether the registry is on this machine (`localhost`, 127.0.0.0/8 or `[::1]`, any
    /// port). Such a registry is accessed without TLS.
    pub fn is_loopback(&self) -> bool {
        let host = match self.registry.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or(rest),
            None => self.registry.split(':').next().unwrap_or(&self.registry),
        };
        host == "localhost"
            || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.registry, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

impl From<Reference> for String {
    fn from(reference: Reference) -> Self {
        reference.to_string()
    }
}

impl TryFrom<String> for Reference {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        text.parse()
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).map_err(|reason| Error::BadReference {
            text: text.chars().take(200).collect(),
            reason,
        })
    }
}

fn parse(text: &str) -> Result<Reference, &'static str> {
    let (rest, digest) = match text.split_once('@') {
        Some((rest, digest)) => {
            (rest, Some(digest.parse().map_err(|_| "the digest is not sha256: and 64 digits")?))
        }
        None => (text, None),
    };
    // A colon after the last slash begins the tag; one before it belongs to the registry's port.
    let (name, tag) = match rest.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, Some(tag)),
        _ => (rest, None),
    };
    let (registry, repository) = split_registry(name);
    check_registry(registry)?;
    let repository = match (registry, repository.contains('/')) {
        (DEFAULT_REGISTRY, false) => format!("library/{repository}"),
        _ => repository.to_owned(),
    };
    check_repository(&repository)?;
    if let Some(tag) = tag {
        check_tag(tag)?;
    }
    let tag = match (tag, &digest) {
        (None, None) => Some(DEFAULT_TAG.to_owned()),
        (tag, _) => tag.map(str::to_owned),
    };
    Ok(Reference { registry: registry.to_owned(), repository, tag, digest })
}

/// Splits a name into registry and repository. The first part is a registry if it cannot be a
/// folder: it has a dot or a port, is `localhost`, or has capitals.
fn split_registry(name: &str) -> (&str, &str) {
    match name.split_once('/') {
        Some(("index.docker.io", rest)) => (DEFAULT_REGISTRY, rest),
        Some((first, rest))
            if first.contains(['.', ':'])
                || first == "localhost"
                || first.bytes().any(|b| b.is_ascii_uppercase()) =>
        {
            (first, rest)
        }
        _ => (DEFAULT_REGISTRY, name),
    }
}

fn check_registry(registry: &str) -> Result<(), &'static str> {
    let (host, port) = match registry.strip_prefix('[') {
        Some(rest) => {
            let (address, after) = rest.split_once(']').ok_or("the registry lacks a ']'")?;
            if address.parse::<std::net::Ipv6Addr>().is_err() {
                return Err("the registry is no IPv6 address");
            }
            let port = match after {
                "" => None,
                _ => Some(after.strip_prefix(':').ok_or("the registry's port is no number")?),
            };
            ("v6", port)
        }
        None => match registry.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (registry, None),
        },
    };
    let label_ok = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    if !host.split('.').all(label_ok) {
        return Err("the registry is no host name");
    }
    match port.map(str::parse::<u16>) {
        None => Ok(()),
        Some(Ok(port)) if port != 0 => Ok(()),
        Some(_) => Err("the registry's port is no number from 1 to 65535"),
    }
}

/// Checks a repository (OCI distribution specification): parts of lower-case letters and digits,
/// joined within a part by `.`, `_`, `__` or dashes.
fn check_repository(repository: &str) -> Result<(), &'static str> {
    if repository.bytes().any(|b| b.is_ascii_uppercase()) {
        return Err("the name must be in lower case");
    }
    if repository.len() > 255 {
        return Err("the name is longer than 255 characters");
    }
    if repository.split('/').all(part_ok) {
        Ok(())
    } else {
        Err("the name has a part that is empty or has a character which is not allowed")
    }
}

fn part_ok(part: &str) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let bytes = part.as_bytes();
    let (Some(&first), Some(&last)) = (bytes.first(), bytes.last()) else { return false };
    alphanumeric(first)
        && alphanumeric(last)
        && bytes.split(|&b| alphanumeric(b)).all(|joint| {
            matches!(joint, b"" | b"." | b"_" | b"__") || joint.iter().all(|&b| b == b'-')
        })
}

fn check_tag(tag: &str) -> Result<(), &'static str> {
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let bytes = tag.as_bytes();
    match bytes.first() {
        Some(&first)
            if word(first)
                && bytes.len() <= 128
                && bytes.iter().all(|&b| word(b) || b == b'.' || b == b'-') =>
        {
            Ok(())
        }
        _ => Err("the tag is not 1 to 128 letters, digits, '_', '.' and '-'"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    fn full(text: &str) -> String {
        text.parse::<Reference>().unwrap().to_string()
    }

    #[test]
    fn short_names_mean_what_docker_means() {
        for (short, long) in [
            ("debian", "docker.io/library/debian:latest"),
            ("debian:12", "docker.io/library/debian:12"),
            ("grafana/loki:3", "docker.io/grafana/loki:3"),
            ("docker.io/debian", "docker.io/library/debian:latest"),
            ("index.docker.io/debian", "docker.io/library/debian:latest"),
            ("localhost/x", "localhost/x:latest"),
            ("localhost:5000/x/y:tag", "localhost:5000/x/y:tag"),
            ("ghcr.io/a/b-c__d.e:V1.0_x", "ghcr.io/a/b-c__d.e:V1.0_x"),
            ("Host/x", "Host/x:latest"),
            ("[::1]:5000/x", "[::1]:5000/x:latest"),
            ("a---b", "docker.io/library/a---b:latest"),
        ] {
            assert_eq!(full(short), long, "{short}");
        }
        assert_eq!(full(&format!("debian@{D}")), format!("docker.io/library/debian@{D}"));
        assert_eq!(full(&format!("debian:1@{D}")), format!("docker.io/library/debian:1@{D}"));
    }

    #[test]
    fn familiar_is_the_way_back() {
        for name in ["debian:12", "grafana/loki:3", "localhost:5000/x/y:tag", "q.io/library/x:1"] {
            assert_eq!(name.parse::<Reference>().unwrap().familiar(), name);
        }
    }

    #[test]
    fn refuses_what_is_none() {
        for bad in [
            "",
            ":",
            "a:",
            "/a",
            "a/",
            "a//b",
            "A",
            "a/B",
            "a..b",
            "a___b",
            "-a",
            "a_",
            "../x",
            "a b",
            "a:-x",
            "a:b:c",
            "a@sha256:12",
            "a@",
            "x:99999/a",
            "h:0/a",
            "ho_st:1/a",
            "[::1/a",
            "a:ü",
            "[::1]x/a",
            "a\0b",
            "a\n",
        ] {
            assert!(bad.parse::<Reference>().is_err(), "{bad:?}");
        }
        assert!(format!("a:{}", "x".repeat(129)).parse::<Reference>().is_err());
        assert!("x".repeat(300).parse::<Reference>().is_err());
    }

    #[test]
    fn loopback() {
        for (name, is) in [
            ("localhost/a", true),
            ("localhost:5000/a", true),
            ("127.0.0.1:5000/a", true),
            ("127.9.9.9/a", true),
            ("[::1]:5000/a", true),
            ("debian", false),
            ("localhost.example.org/a", false),
            ("10.0.0.1:5000/a", false),
        ] {
            assert_eq!(name.parse::<Reference>().unwrap().is_loopback(), is, "{name}");
        }
    }

    #[test]
    fn serde_writes_the_full_form() {
        let reference: Reference = "debian".parse().unwrap();
        let json = serde_json::to_string(&reference).unwrap();
        assert_eq!(json, "\"docker.io/library/debian:latest\"");
        assert_eq!(serde_json::from_str::<Reference>(&json).unwrap(), reference);
    }
}
