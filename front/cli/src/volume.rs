//! Parses `--volume`: `NAME:SIZE[:4k][:/DIR]` or `file:PATH[:ro][:4k][:/DIR]`.

use std::path::Path;
use std::str::FromStr;

use slipway_runtime::v1::{VolumeSpec, volume_spec::Source};

use crate::size::parse_size;

/// The value of one `--volume`.
#[derive(Clone, Debug, PartialEq)]
pub struct VolumeArg(pub VolumeSpec);

impl FromStr for VolumeArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let spec = match text.strip_prefix("file:") {
            Some(rest) => file(rest),
            None if text.starts_with(['/', '.']) => Err(format!(
                "\"{text}\": folders of the host cannot be mounted; --copy HOST:/PATH copies \
                 files, file:PATH takes a disk"
            )),
            None => scratch(text),
        };
        spec.map(Self)
    }
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
        text.parse::<VolumeArg>().unwrap().0
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
        let refused = "/srv:/data:ro".parse::<VolumeArg>().unwrap_err();
        assert!(refused.contains("--copy HOST:/PATH"), "{refused}");
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
