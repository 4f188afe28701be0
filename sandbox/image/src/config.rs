//! The part of an image's configuration that a container runtime needs.

use std::collections::BTreeMap;

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};

use crate::{BadDigest, Digest, Error, Result};

/// The settings with which a container of this image runs (OCI image specification, *Image
/// Configuration*, `config`). Absent fields are empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// The environment, as `NAME=VALUE`.
    pub env: Vec<String>,
    /// The command; the user's arguments replace only [`cmd`](Self::cmd).
    pub entrypoint: Vec<String>,
    /// The default arguments, or the command if there is no entry point.
    pub cmd: Vec<String>,
    /// The working directory; empty means `/`.
    pub working_dir: String,
    /// The user as `USER`, `UID`, `USER:GROUP`, …; empty means root.
    pub user: String,
    /// The stop signal as `SIGTERM`, `15`, …; empty means SIGTERM.
    pub stop_signal: String,
    /// The exposed ports as `80/tcp`, `53/udp`, `8080`; sorted.
    pub exposed_ports: Vec<String>,
    /// The folders that the image wants to keep apart from its root; sorted.
    pub volumes: Vec<String>,
    /// The labels: free text by key.
    pub labels: BTreeMap<String, String>,
}

/// The data that are read from a config document.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub config: ImageConfig,
    /// The platform, such as `linux/amd64`.
    pub platform: String,
    /// The time of creation in the image's words (RFC 3339).
    pub created: Option<String>,
    /// The digests of the uncompressed layers, lowest first.
    pub diff_ids: Vec<Digest>,
}

/// Parses a config document.
pub(crate) fn parse(bytes: &[u8]) -> Result<Parsed> {
    let bad = |reason: String| Error::bad_document("the image's config", reason);
    // Docker writes null where the specification requires a map or nothing.
    let mut json: serde_json::Value =
        serde_json::from_slice(bytes).map_err(|e| bad(e.to_string()))?;
    drop_nulls(&mut json);
    let document: ImageConfiguration =
        serde_json::from_value(json).map_err(|e| bad(e.to_string()))?;
    let diff_ids =
        document.rootfs().diff_ids().iter().map(|d| d.parse()).collect::<Result<_, BadDigest>>()?;
    Ok(Parsed {
        config: document.config().as_ref().map(convert).unwrap_or_default(),
        platform: format!("{}/{}", document.os(), document.architecture()),
        created: document.created().clone(),
        diff_ids,
    })
}

/// Removes nulls. The recursion is bounded, since serde_json refuses documents nested deeper than
/// 128.
fn drop_nulls(json: &mut serde_json::Value) {
    match json {
        serde_json::Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(drop_nulls);
        }
        serde_json::Value::Array(values) => values.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

fn convert(config: &oci_spec::image::Config) -> ImageConfig {
    let list = |values: &Option<Vec<String>>| values.clone().unwrap_or_default();
    let text = |value: &Option<String>| value.clone().unwrap_or_default();
    let sorted = |values: &Option<Vec<String>>| {
        let mut values = list(values);
        values.sort();
        values
    };
    ImageConfig {
        env: list(config.env()),
        entrypoint: list(config.entrypoint()),
        cmd: list(config.cmd()),
        working_dir: text(config.working_dir()),
        user: text(config.user()),
        stop_signal: text(config.stop_signal()),
        exposed_ports: sorted(config.exposed_ports()),
        volumes: sorted(config.volumes()),
        labels: config.labels().iter().flatten().map(|(k, v)| (k.clone(), v.clone())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn docker_config_with_nulls() {
        let json = format!(
            r#"{{"architecture":"amd64","os":"linux","created":"2024-01-01T00:00:00Z",
            "config":{{"Env":["A=b"],"Cmd":null,"Entrypoint":["/x","y"],"Volumes":null,
            "ExposedPorts":{{"80/tcp":{{}},"53/udp":{{}}}},"Labels":{{"k":"v"}},"User":"7:8",
            "WorkingDir":"/w","StopSignal":"SIGINT","OnBuild":null}},
            "rootfs":{{"type":"layers","diff_ids":["{}"]}},"history":null}}"#,
            Digest::of(b"x")
        );
        let parsed = parse(json.as_bytes()).unwrap();
        assert_eq!(parsed.platform, "linux/amd64");
        assert_eq!(parsed.diff_ids, [Digest::of(b"x")]);
        assert_eq!(parsed.created.as_deref(), Some("2024-01-01T00:00:00Z"));
        let config = parsed.config;
        assert_eq!(config.entrypoint, ["/x", "y"]);
        assert_eq!(config.exposed_ports, ["53/udp", "80/tcp"]);
        assert!(config.cmd.is_empty() && config.volumes.is_empty());
        assert_eq!((config.user.as_str(), config.working_dir.as_str()), ("7:8", "/w"));
        assert_eq!((config.stop_signal.as_str(), config.labels["k"].as_str()), ("SIGINT", "v"));
    }

    #[test]
    fn garbage_is_an_error() {
        for bad in ["", "{}", "[]", "null", r#"{"architecture":1}"#] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
