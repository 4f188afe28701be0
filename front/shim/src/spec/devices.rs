//! Block devices of the host in a container, as of Kubernetes' `volumeDevices`. A container has
//! each as a namespace of its sandbox's NVMe function.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use slipway_sandbox_api::v1::{self, volume_spec::Source};

use super::oci::{Device, DeviceRule, Linux};

const BLOCK: &str = "b";
/// The directory with the block devices that the host's kernel knows, by their numbers.
const DEVICES: &str = "/sys/dev/block";
/// The directory with their device nodes.
const NODES: &str = "/dev";

/// Returns the volumes that stand for the devices of a container.
///
/// A privileged container may have all devices of the host in its configuration (containerd without
/// `privileged_without_host_devices`): if it has any that is no block device, it gets none of them,
/// but its guest's.
///
/// # Errors
/// One line: a device that no microVM can have, or that the host does not have.
pub fn volumes(linux: &Linux, privileged: bool) -> Result<Vec<v1::VolumeSpec>, String> {
    let devices = &linux.devices;
    match devices.iter().find(|device| device.kind != BLOCK) {
        Some(_) if privileged => return Ok(Vec::new()),
        Some(other) => {
            return Err(format!(
                "the host's device {} cannot be given to a microVM, which takes block devices \
                 only: leave it out",
                other.path
            ));
        }
        None => {}
    }
    devices.iter().enumerate().map(|(number, device)| volume(linux, device, number)).collect()
}

fn volume(linux: &Linux, device: &Device, number: usize) -> Result<v1::VolumeSpec, String> {
    let (devices, nodes) = (Path::new(DEVICES), Path::new(NODES));
    let host = on_host(devices, nodes, (device.major, device.minor)).map_err(|why| {
        format!("the host's device for {}: {why}: attach it, or leave it out", device.path)
    })?;
    Ok(v1::VolumeSpec {
        // With a dot, which no pool's name has: functions are called POOL-N.
        name: format!("device.{number}"),
        source: Some(Source::Path(host.to_string_lossy().into_owned())),
        read_only: is_read_only(linux, device),
        device_path: device.path.clone(),
        ..v1::VolumeSpec::default()
    })
}

/// Returns whether no rule of a container lets it write a device. The last rule that concerns the
/// device and writing decides, as for runc, which lets a container without such a rule do nothing.
fn is_read_only(linux: &Linux, device: &Device) -> bool {
    let rules = linux.resources.devices.iter().filter(|rule| concerns(rule, device));
    // A denial without letters is one of everything.
    let mut writing =
        rules.filter(|rule| rule.access.contains('w') || (!rule.allow && rule.access.is_empty()));
    writing.next_back().is_none_or(|rule| !rule.allow)
}

/// Returns whether a rule is for a block device, or for all of its kind, or for all devices.
fn concerns(rule: &DeviceRule, device: &Device) -> bool {
    let is = |wanted: Option<i64>, number| wanted.is_none_or(|one| one == -1 || one == number);
    let kind = ["", "a", BLOCK].contains(&rule.kind.as_str());
    kind && is(rule.major, device.major) && is(rule.minor, device.minor)
}

/// Finds the node of a block device of the host by its numbers, major and minor.
fn on_host(devices: &Path, nodes: &Path, (major, minor): (i64, i64)) -> Result<PathBuf, String> {
    let none = |why: String| format!("no block device {major}:{minor} ({why})");
    let known = std::fs::read_to_string(devices.join(format!("{major}:{minor}/uevent")));
    let known = known.map_err(|error| none(error.to_string()))?;
    let name = known.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    let path = nodes.join(name.ok_or_else(|| none("it has no name".to_owned()))?);
    let found = std::fs::metadata(&path);
    let found = found.map_err(|error| none(format!("{}: {error}", path.display())))?;
    let number =
        rustix::fs::makedev(u32::try_from(major).unwrap_or(0), u32::try_from(minor).unwrap_or(0));
    match found.file_type().is_block_device() && found.rdev() == number {
        true => Ok(path),
        false => Err(none(format!("{} is another one", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn linux(devices: serde_json::Value, rules: serde_json::Value) -> Linux {
        let linux = json!({"devices": devices, "resources": {"devices": rules}});
        serde_json::from_value(linux).unwrap()
    }

    #[test]
    fn what_is_no_block_device_is_refused_or_left_to_a_privileged_guest() {
        let zero = json!({"path": "/dev/null", "type": "c", "major": 1, "minor": 3});
        let disk = json!({"path": "/dev/xvda", "type": "b", "major": 4095, "minor": 1});
        let both = linux(json!([disk, zero]), json!([]));
        assert!(volumes(&both, false).unwrap_err().contains("device /dev/null cannot be given"));
        assert_eq!(volumes(&both, true), Ok(Vec::new()));
        let missing = volumes(&linux(json!([disk]), json!([])), true).unwrap_err();
        assert!(missing.starts_with("the host's device for /dev/xvda: no block device 4095:1"));
    }

    #[test]
    fn a_device_that_is_not_there_is_named_in_one_line() {
        for (major, minor) in [(4095, 1), (0, 0), (-1, 0), (8, -1), (i64::MAX, i64::MIN)] {
            let all = json!([{"allow": true, "access": "rwm"}]);
            let disk = json!([{"path": "/dev/xvdb", "type": "b", "major": major,
                               "minor": minor}]);
            let error = volumes(&linux(disk, all), false).unwrap_err();
            let wanted =
                format!("the host's device for /dev/xvdb: no block device {major}:{minor} (");
            assert!(error.starts_with(&wanted), "{error}");
            assert!(error.ends_with("): attach it, or leave it out"), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn a_device_without_its_node_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let (devices, nodes) = (dir.path().join("block"), dir.path().join("dev"));
        std::fs::create_dir_all(devices.join("8:16")).unwrap();
        std::fs::create_dir(&nodes).unwrap();
        let event = |text: &str| std::fs::write(devices.join("8:16/uevent"), text).unwrap();
        let refusal = || on_host(&devices, &nodes, (8, 16)).unwrap_err();
        event("MAJOR=8\nMINOR=16\n");
        assert_eq!(refusal(), "no block device 8:16 (it has no name)");
        event("MAJOR=8\nMINOR=16\nDEVNAME=sdb\nDEVTYPE=disk\n");
        let node = nodes.join("sdb");
        assert!(refusal().starts_with(&format!("no block device 8:16 ({}: ", node.display())));
        // Neither a file nor another device stands for it.
        std::fs::write(&node, "").unwrap();
        let another = format!("no block device 8:16 ({} is another one)", node.display());
        assert_eq!(refusal(), another);
        std::fs::remove_file(&node).unwrap();
        std::os::unix::fs::symlink("/dev/null", &node).unwrap();
        assert_eq!(refusal(), another);
    }

    #[test]
    fn a_device_is_writable_if_the_last_rule_about_writing_allows_it() {
        let device = Device { kind: BLOCK.into(), major: 8, minor: 16, ..Device::default() };
        let all = json!({"allow": true, "access": "rwm"});
        let none = json!({"allow": false, "access": "rwm"});
        let own = |access: &str| {
            json!({"allow": true, "type": "b", "major": 8, "minor": 16,
                   "access": access})
        };
        let denied = json!({"allow": false, "type": "b", "major": 8, "access": "w"});
        let (wild, other) = (
            json!({"allow": true, "type": "b", "major": 8, "minor": -1, "access": "rw"}),
            json!({"allow": true, "type": "b", "major": 9, "minor": 16, "access": "rwm"}),
        );
        let char = json!({"allow": true, "type": "c", "major": 8, "minor": 16, "access": "rwm"});
        for (rules, writable) in [
            (json!([]), false),
            (json!([none]), false),
            (json!([none, own("rwm")]), true),
            (json!([none, own("rm")]), false),
            (json!([none, own("rwm"), denied]), false),
            (json!([all]), true),
            (json!([all, {"allow": false}]), false),
            (json!([none, wild]), true),
            (json!([none, other, char]), false),
            (json!([none, own("")]), false),
        ] {
            let linux = linux(json!([]), rules.clone());
            assert_eq!(!is_read_only(&linux, &device), writable, "{rules}");
        }
    }

    #[test]
    fn a_block_device_is_a_volume_at_its_path() {
        let numbers = std::fs::read_dir("/sys/dev/block").ok().and_then(|mut all| all.next());
        let Some(Ok(entry)) = numbers else {
            println!("SKIPPED: a_block_device_is_a_volume_at_its_path: needs a block device");
            return;
        };
        let name = entry.file_name().into_string().unwrap();
        let (major, minor) = name.split_once(':').unwrap();
        let (major, minor): (i64, i64) = (major.parse().unwrap(), minor.parse().unwrap());
        let device = json!([{"path": "/dev/xvda", "type": "b", "major": major, "minor": minor}]);
        for (access, read_only) in [("rwm", false), ("rm", true)] {
            let rule = json!([{"allow": true, "type": "b", "major": major, "minor": minor,
                               "access": access}]);
            let volumes = volumes(&linux(device.clone(), rule), false).unwrap();
            let [volume] = volumes.as_slice() else { panic!("{volumes:?}") };
            let path = |volume: &v1::VolumeSpec| match &volume.source {
                Some(Source::Path(path)) => path.clone(),
                other => panic!("{other:?}"),
            };
            assert!(path(volume).starts_with("/dev/"), "{volume:?}");
            assert_eq!((volume.device_path.as_str(), volume.read_only), ("/dev/xvda", read_only));
        }
    }
}
