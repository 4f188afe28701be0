//! Parses `--volume`: `NAME:SIZE[:4k][:/DIR]`, `file:PATH[:ro][:4k][:/DIR]` or
//! `HOST:/PATH[:ro][,rslave]`.
//!
//! The first character decides: a source that begins with `/` or `.` is a directory or a file of
//! the host that the container has at a path of its own. A disk image is named by `file:`, so that
//! a path never stands for two things.

use std::path::Path;
use std::str::FromStr;

use slipway_runtime::v1::{Share, VolumeSpec, volume_spec::Source};

use crate::size::parse_size;

/// The value of one `--volume`.
#[derive(Clone, Debug, PartialEq)]
pub enum VolumeArg {
    /// A block device.
    Disk(VolumeSpec),
    /// A directory or a file of the host.
    Share(Share),
}

/// Returns the block devices among the volumes.
pub fn disks(volumes: &[VolumeArg]) -> Vec<VolumeSpec> {
    let disk = |volume: &VolumeArg| match volume {
        VolumeArg::Disk(spec) => Some(spec.clone()),
        VolumeArg::Share(_) => None,
    };
    volumes.iter().filter_map(disk).collect()
}

/// Returns the directories and files of the host among the volumes.
pub fn shares(volumes: &[VolumeArg]) -> Vec<Share> {
    let share = |volume: &VolumeArg| match volume {
        VolumeArg::Disk(_) => None,
        VolumeArg::Share(share) => Some(share.clone()),
    };
    volumes.iter().filter_map(share).collect()
}

impl FromStr for VolumeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("file:") {
            Some(rest) => file(rest).map(Self::Disk),
            None if text.starts_with(['/', '.']) => share(text).map(Self::Share),
            None => scratch(text).map(Self::Disk),
        }
    }
}

fn share(text: &str) -> Result<Share, String> {
    let expected = || {
        format!(
            "\"{text}\": expected HOST:/PATH[:ro][,rslave], a directory or file of the host and \
             its place in the container; file:PATH takes a disk image"
        )
    };
    let (host, rest) = text.rsplit_once(":/").ok_or_else(expected)?;
    let (path, options) = rest.split_once(':').unwrap_or((rest, ""));
    let (mut read_only, mut later) = (false, false);
    for option in options.split(',') {
        match option {
            "" | "rw" | "rprivate" => {}
            "ro" => read_only = true,
            "rslave" => later = true,
            _ => return Err(expected()),
        }
    }
    // The daemon has another working directory.
    let full = std::path::absolute(host).map_err(|error| format!("{host}: {error}"))?;
    let found = std::fs::metadata(&full).map_err(|error| format!("{host}: {error}"))?;
    if !found.is_dir() && !found.is_file() {
        return Err(format!("{host}: neither a directory nor a file; file:PATH takes a disk"));
    }
    let full = full.to_str().ok_or_else(|| format!("{host}: a path that is not UTF-8"))?;
    // As docker does: with what is mounted below, and read-only all the way.
    Ok(Share {
        source: full.to_owned(),
        path: format!("/{path}"),
        read_only,
        below: true,
        below_read_only: read_only,
        later,
    })
}

fn scratch(text: &str) -> Result<VolumeSpec, String> {
    let (name, rest) = text
        .split_once(':')
        .ok_or_else(|| format!("\"{text}\": expected NAME:SIZE or file:PATH[:ro]"))?;
    let (size, rest) = rest.split_once(':').map_or((rest, None), |(size, rest)| (size, Some(rest)));
    let (block_size, mount) = match rest {
        Some("4k") => (4096, None),
        Some(rest) => rest.strip_prefix("4k:").map_or((0, Some(rest)), |rest| (4096, Some(rest))),
        None => (0, None),
    };
    let mount_point = mount.map_or(Ok(String::new()), mounted)?;
    let source = Some(Source::SizeBytes(parse_size(size)?));
    Ok(VolumeSpec {
        name: name.into(),
        source,
        read_only: false,
        mount_point,
        block_size,
        ..VolumeSpec::default()
    })
}

fn file(rest: &str) -> Result<VolumeSpec, String> {
    let (rest, mount_point) = match rest.rsplit_once(":/") {
        Some((path, mount)) if !path.is_empty() => (path, format!("/{mount}")),
        _ => (rest, String::new()),
    };
    let (rest, block_size) = rest.strip_suffix(":4k").map_or((rest, 0), |rest| (rest, 4096));
    let (path, read_only) = rest.strip_suffix(":ro").map_or((rest, false), |path| (path, true));
    // The daemon has another working directory.
    let full = std::path::absolute(path).map_err(|error| format!("file:{path}: {error}"))?;
    let name = Path::new(path).file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let (name, source) = (name.to_owned(), Source::Path(full.to_string_lossy().into_owned()));
    Ok(VolumeSpec {
        name,
        source: Some(source),
        read_only,
        mount_point,
        block_size,
        ..VolumeSpec::default()
    })
}

fn mounted(mount: &str) -> Result<String, String> {
    if mount.starts_with('/') {
        return Ok(mount.to_owned());
    }
    Err(format!("\"{mount}\" is no place to mount: an absolute path in the container"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> VolumeSpec {
        match text.parse::<VolumeArg>().unwrap() {
            VolumeArg::Disk(spec) => spec,
            VolumeArg::Share(share) => panic!("{share:?}"),
        }
    }

    #[test]
    fn a_path_of_the_host_is_a_share() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().to_str().unwrap();
        for (tail, path, read_only) in [
            ("/data", "/data", false),
            ("/data:ro", "/data", true),
            ("/data:rw", "/data", false),
            ("/data:rslave,ro", "/data", true),
            ("/a/b c", "/a/b c", false),
        ] {
            let text = format!("{host}:{tail}");
            let expected = Share {
                source: host.to_owned(),
                path: path.to_owned(),
                read_only,
                below: true,
                below_read_only: read_only,
                later: tail.contains("rslave"),
            };
            assert_eq!(text.parse(), Ok(VolumeArg::Share(expected)), "{text}");
        }
        let Ok(VolumeArg::Share(here)) = ".:/x".parse() else { panic!("a relative path") };
        assert!(here.source.starts_with('/'), "{here:?}");
        let volumes = ["data:1G".parse().unwrap(), VolumeArg::Share(here.clone())];
        assert_eq!(disks(&volumes), [parse("data:1G")]);
        assert_eq!(shares(&volumes), [here]);
        for (text, said) in [
            ("/srv", "expected HOST:/PATH"),
            ("/tmp:data", "expected HOST:/PATH"),
            ("/tmp:/data:rshared", "expected HOST:/PATH"),
            ("/no/such:/data", "/no/such: No such file"),
            ("/dev/null:/data", "neither a directory nor a file"),
        ] {
            let refused = text.parse::<VolumeArg>().unwrap_err();
            assert!(refused.contains(said), "{refused}");
        }
    }

    #[test]
    fn scratch_volumes() {
        let volume = parse("data:256M");
        assert_eq!(
            (volume.name.as_str(), volume.source),
            ("data", Some(Source::SizeBytes(256 << 20)))
        );
        assert_eq!(parse("data:1G:/srv").mount_point, "/srv");
        assert!("data".parse::<VolumeArg>().is_err());
        assert!("data:x".parse::<VolumeArg>().is_err());
        assert!("data:1G:srv".parse::<VolumeArg>().is_err());
    }

    #[test]
    fn file_volumes() {
        let volume = parse("file:/a/disk.img:ro");
        assert_eq!(volume.name, "disk.img");
        assert_eq!(volume.source, Some(Source::Path("/a/disk.img".into())));
        assert!(volume.read_only);
        assert_eq!(parse("file:/a/b:/srv").mount_point, "/srv");
        assert_eq!(parse("file:/a/b:ro:/srv").mount_point, "/srv");
        assert!(parse("file:/a/b:ro:/srv").read_only);
    }

    #[test]
    fn blocks_of_4_kib() {
        for (text, block_size, mount) in [
            ("data:1G", 0, ""),
            ("data:1G:4k", 4096, ""),
            ("data:1G:4k:/srv", 4096, "/srv"),
            ("file:/a/b", 0, ""),
            ("file:/a/b:4k", 4096, ""),
            ("file:/a/b:ro:4k:/srv", 4096, "/srv"),
        ] {
            let volume = parse(text);
            assert_eq!((volume.block_size, volume.mount_point.as_str()), (block_size, mount));
        }
        assert!(parse("file:/a/b:ro:4k").read_only);
        assert!("data:1G:4k:srv".parse::<VolumeArg>().is_err());
    }
}
