//! Bounds on the memory that the volatile layers of containers hold: of each sandbox, and of all.
//! The plane counts the memory and keeps the bounds.

use std::path::Path;

use slipway_plane_api::{PlaneClient, v1 as plane_v1};

use crate::config::Config;
use crate::memory::of_host;
use crate::record::Record;
use crate::{Error, Result};

/// The least bound of a sandbox's layers in bytes, and the unit of the sizes of file systems that
/// are made smaller for a bound, so that there are few sizes.
const LEAST: u64 = 16 << 20;

/// Returns the most bytes that the layers of a new sandbox hold together: what is asked for, or
/// else what the settings say.
///
/// # Errors
/// [`Error::Invalid`] if that is too little for a file system.
pub(crate) fn of_new(asked: u64, config: &Config) -> Result<u64> {
    let said = if asked == 0 { config.layers_bytes } else { asked };
    match said {
        // Twice: a container that fills its root leaves the others of a pod as much.
        0 => Ok(config.volatile_layer_bytes.saturating_mul(2)),
        1..LEAST => Err(Error::Invalid(format!(
            "root layers of {said} bytes are too small for a file system: at least {} MiB",
            LEAST >> 20
        ))),
        said => Ok(said),
    }
}

/// Returns the size in bytes of the file system of one container's layer. It is not larger than
/// the bound of all layers, so that a program in the only container of a sandbox is told by its own
/// file system that there is no space.
pub(crate) fn size(config: &Config, record: &Record) -> u64 {
    match record.layers_bytes {
        0 => config.volatile_layer_bytes,
        most if most >= config.volatile_layer_bytes => config.volatile_layer_bytes,
        most => (most / LEAST).max(1) * LEAST,
    }
}

/// Checks the bound that the settings give to the layers of a sandbox.
///
/// # Errors
/// [`Error::Invalid`] if it is too little for a file system.
pub fn check(config: &Config) -> Result<()> {
    by_default(config).map(drop)
}

/// Returns the most bytes that the settings give to the layers of a sandbox.
///
/// # Errors
/// [`Error::Invalid`] if they are too few for a file system.
pub fn by_default(config: &Config) -> Result<u64> {
    of_new(0, config)
}

/// Returns the most bytes that the layers of all sandboxes hold together. If the settings name no
/// number, that is half of the memory that the daemon may use, as a tmpfs may have half of the
/// machine's.
pub fn of_node(config: &Config) -> u64 {
    if config.node_layers_bytes > 0 {
        return config.node_layers_bytes;
    }
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    of_groups(Path::new("/sys/fs/cgroup"), &groups, of_host()) / 2
}

/// Returns the memory in bytes that a process may use on a machine with `machine` bytes. `groups`
/// is its proc_pid_cgroup(5), and `root` the root of control groups of version 2.
fn of_groups(root: &Path, groups: &str, machine: u64) -> u64 {
    let Some(path) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return machine;
    };
    let group = root.join(path);
    let own = group.ancestors().take_while(|dir| dir.starts_with(root));
    let limit = |dir: &Path| {
        let text = std::fs::read_to_string(dir.join("memory.max")).ok()?;
        text.trim().parse::<u64>().ok()
    };
    own.filter_map(limit).fold(machine, u64::min)
}

/// Returns the figures of a sandbox's layers, or `None` if it has none any more.
pub(crate) async fn figures(plane: &PlaneClient, id: &str) -> Option<plane_v1::OverlayMemory> {
    let request = plane_v1::GetEndpointRequest { id: id.to_owned() };
    plane.clone().get_endpoint(request).await.ok()?.into_inner().overlays
}

/// Returns a record as JSON, with these figures of its sandbox's layers.
///
/// # Errors
/// The record cannot be written as JSON.
pub(crate) fn described(
    record: &Record,
    figures: Option<&plane_v1::OverlayMemory>,
) -> serde_json::Result<String> {
    let mut json = serde_json::to_value(record)?;
    if let (Some(figures), Some(fields)) = (figures, json.as_object_mut()) {
        let figures = serde_json::json!({
            "held_bytes": figures.held_bytes,
            "limit_bytes": figures.limit_bytes,
            "refused_writes": figures.refused_writes,
        });
        fields.insert("layers".to_owned(), figures);
    }
    serde_json::to_string_pretty(&json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adopt::tests::record_of;
    use crate::record::SandboxState;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_bound_is_asked_for_or_set_or_twice_a_layer() {
        let config = Config::default();
        assert_eq!(of_new(0, &config).unwrap(), 4 * GIB);
        assert_eq!(of_new(64 << 20, &config).unwrap(), 64 << 20);
        let set = Config { layers_bytes: 3 * GIB, ..config };
        assert_eq!(of_new(0, &set).unwrap(), 3 * GIB);
        assert_eq!(of_new(GIB, &set).unwrap(), GIB);
        for small in [1, LEAST - 1] {
            let refused = of_new(small, &set).unwrap_err().to_string();
            assert!(refused.contains("at least 16 MiB"), "{refused}");
        }
    }

    #[test]
    fn the_bound_of_the_node_is_set_or_a_share_of_the_memory() {
        let set = Config { node_layers_bytes: 3 * GIB, ..Config::default() };
        assert_eq!(of_node(&set), 3 * GIB);
        let share = of_node(&Config::default());
        assert!((1..=of_host() / 2).contains(&share), "{share}");
    }

    #[test]
    fn no_file_system_is_larger_than_the_bound_of_all() {
        let config = Config::default();
        let size = |layers_bytes| {
            size(&config, &Record { layers_bytes, ..record_of(SandboxState::Running) })
        };
        // A record of an earlier version has no bound.
        assert_eq!([size(0), size(2 * GIB), size(4 * GIB)], [2 * GIB; 3]);
        assert_eq!(size(GIB), GIB);
        assert_eq!(size(2 * GIB - 1), 2 * GIB - LEAST);
        assert_eq!([size(LEAST), size(2 * LEAST - 1)], [LEAST; 2]);
    }

    #[test]
    fn a_description_has_the_record_and_the_figures() {
        let record = Record { layers_bytes: 7, ..record_of(SandboxState::Running) };
        let figures = plane_v1::OverlayMemory { held_bytes: 5, limit_bytes: 7, refused_writes: 3 };
        let parsed = |figures| -> serde_json::Value {
            serde_json::from_str(&described(&record, figures).unwrap()).unwrap()
        };
        let with = parsed(Some(&figures));
        let expected = serde_json::json!({"held_bytes": 5, "limit_bytes": 7, "refused_writes": 3});
        assert_eq!((&with["layers"], &with["layers_bytes"]), (&expected, &7.into()));
        let back: Record = serde_json::from_value(with).unwrap();
        assert_eq!((back.id, back.layers_bytes), (record.id.clone(), 7));
        assert!(parsed(None).get("layers").is_none());
    }

    #[test]
    fn the_least_limit_of_the_control_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let inner = root.path().join("system.slice/slipway.service");
        std::fs::create_dir_all(&inner).unwrap();
        let of = |groups: &str| of_groups(root.path(), groups, 8 * GIB);
        let groups = "1:name=systemd:/x\n0::/system.slice/slipway.service\n";
        assert_eq!(of(groups), 8 * GIB, "no limits");
        std::fs::write(inner.join("memory.max"), "max\n").unwrap();
        std::fs::write(root.path().join("system.slice/memory.max"), "2147483648\n").unwrap();
        assert_eq!(of(groups), 2 * GIB);
        std::fs::write(inner.join("memory.max"), "1073741824\n").unwrap();
        assert_eq!(of(groups), GIB);
        assert_eq!(of("0::/\n"), 8 * GIB);
        assert_eq!(of("4:memory:/x\n"), 8 * GIB, "version 1");
    }
}
