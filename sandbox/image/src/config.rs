//! The part of an image's configuration that a container runtime needs.
//!
//! A new setting is a field of `ImageConfig`, which `convert` fills in; the cache's index has it
//! (`cache/index.rs`), and images that were made before lack it until they are pulled anew.
//! `process::process` of `sandbox/runtime` makes a container's process of it, together with the
//! user's request, and `pod/request.rs` reads the rest. The shim does not: containerd gives it the
//! finished configuration. The settings of one image are bounded together (`MOST`). Tests: below,
//! and those of `process`; `docs/images.md` or `docs/sandboxes.md` has it.

use std::collections::BTreeMap;

use oci_spec::image::ImageConfiguration;
use serde::{Deserialize, Serialize};

use crate::{BadDigest, Digest, Error, Result};

/// The most bytes of an image's settings, as JSON. They are kept for each image in the cache's
/// index, which is read as a whole. One argument of a program may have as many (`MAX_ARG_STRLEN` of
/// Linux).
const MOST: usize = 128 << 10;
/// The most characters of the time of creation that are kept.
const MOST_CREATED: usize = 64;

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
    /// The labels: free text by key. Empty if all settings with them have more than 128 KiB.
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
        config: bounded(document.config().as_ref().map(convert).unwrap_or_default())?,
        platform: format!("{}/{}", document.os(), document.architecture()),
        created: document.created().as_ref().map(|time| time.chars().take(MOST_CREATED).collect()),
        diff_ids,
    })
}

/// Leaves the labels out if the settings are too large with them: no program of the container sees
/// them.
///
/// # Errors
/// [`Error::TooLarge`] if they are too large without labels.
fn bounded(mut config: ImageConfig) -> Result<ImageConfig> {
    if is_large(&config) {
        config.labels.clear();
    }
    match is_large(&config) {
        true => {
            let reason = format!("it has more than {MOST} bytes of settings beside labels");
            Err(Error::too_large("the image's config", reason))
        }
        false => Ok(config),
    }
}

fn is_large(config: &ImageConfig) -> bool {
    !serde_json::to_vec(config).is_ok_and(|json| json.len() <= MOST)
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

    /// Returns a config document with these settings.
    fn document(config: &str, created: &str) -> String {
        format!(
            r#"{{"architecture":"amd64","os":"linux","created":"{created}","config":{config},
            "rootfs":{{"type":"layers","diff_ids":["{}"]}}}}"#,
            Digest::of(b"x")
        )
    }

    #[test]
    fn large_labels_are_left_out_and_other_large_settings_are_refused() {
        let parsed = |label: usize, cmd: usize| {
            let (label, cmd) = ("l".repeat(label), "c".repeat(cmd));
            let config = format!(r#"{{"Cmd":["{cmd}"],"Labels":{{"k":"{label}"}}}}"#);
            parse(document(&config, "").as_bytes()).map(|parsed| parsed.config)
        };
        let config = parsed(MOST - 1000, 10).unwrap();
        assert_eq!((config.labels.len(), config.cmd[0].len()), (1, 10));
        for (label, cmd) in [(MOST, 10), (1000, MOST - 1000), (4 << 20, MOST - 1000)] {
            let config = parsed(label, cmd).unwrap();
            assert_eq!((config.labels.len(), config.cmd[0].len()), (0, cmd));
        }
        let error = parsed(1, MOST).unwrap_err();
        assert!(matches!(&error, Error::TooLarge { .. }), "{error}");
        assert!(error.to_string().contains("131072 bytes of settings"), "{error}");
    }

    #[test]
    fn the_time_of_creation_is_short() {
        let created = "2024-01-01T00:00:00Z".repeat(100_000);
        let parsed = parse(document("{}", &created).as_bytes()).unwrap();
        assert_eq!(parsed.created.as_deref(), Some(&created[..64]));
    }

    #[test]
    fn garbage_is_an_error() {
        for bad in ["", "{}", "[]", "null", r#"{"architecture":1}"#] {
            assert!(parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }
}
