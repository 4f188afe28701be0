//! Values of options that name disks and targets.

use std::path::PathBuf;
use std::str::FromStr;

use slipway_plane_api::v1;
use slipway_plane_api::v1::disk::Kind;

use crate::size::{parse_size, show};

/// The value of one `--disk`.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskArg(v1::Disk);

impl FromStr for DiskArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "\"{text}\": expected ram:SIZE, null:SIZE, file:PATH, overlay:PATH or disk:NAME"
            )
        };
        // A disk's name contains no colon, so "NAME:ro" is a name with an option.
        let (kind, rest) = match text.split_once(':') {
            Some((name, "ro")) if !name.is_empty() => ("disk", name),
            Some(parts) => parts,
            None => ("disk", text),
        };
        let (plain, read_only) = match text.strip_suffix(":ro") {
            Some(_) => (rest.strip_suffix(":ro").unwrap_or(rest), true),
            None => (rest, false),
        };
        let kind = match kind {
            "ram" => Kind::Ram(v1::RamDisk { size_bytes: parse_size(rest)? }),
            "null" => Kind::Null(v1::NullDisk { size_bytes: parse_size(rest)? }),
            "file" => {
                let (path, pin) =
                    plain.strip_suffix(":pin").map_or((plain, false), |path| (path, true));
                let path = absolute(path)?;
                Kind::File(v1::FileDisk { path, read_only, pin, ..Default::default() })
            }
            "overlay" => {
                Kind::Overlay(v1::OverlayDisk { base_path: absolute(rest)?, limit_bytes: 0 })
            }
            "disk" if !plain.is_empty() => {
                Kind::Named(v1::NamedDiskReference { name: plain.to_owned(), read_only })
            }
            _ => return Err(wrong()),
        };
        Ok(Self(v1::Disk { block_size: 0, kind: Some(kind) }))
    }
}

impl DiskArg {
    /// Returns the disk in the form of the plane's interface.
    pub fn disk(&self) -> v1::Disk {
        self.0.clone()
    }
}

/// Makes a path absolute, since the daemon has another working directory.
fn absolute(path: &str) -> Result<String, String> {
    let full = std::path::absolute(path).map_err(|error| format!("{path}: {error}"))?;
    Ok(full.to_string_lossy().into_owned())
}

/// How a target's clients ring doorbells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Doorbells {
    Trapped,
    Mapped,
}

/// The value of `--disk`: the kind of disk behind every target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskKind {
    Ram(u64),
    Null(u64),
    File(PathBuf, u64),
}

impl FromStr for DiskKind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("\"{text}\": expected ram:SIZE, null:SIZE or file:DIR:SIZE");
        let (kind, rest) = text.split_once(':').ok_or_else(wrong)?;
        let bytes = |size: &str| {
            let bytes = parse_size(size)?;
            let fits = bytes.is_multiple_of(1 << 20) && (1 << 20..=1 << 40).contains(&bytes);
            if fits { Ok(bytes) } else { Err(format!("\"{size}\" is not whole MiB, up to 1T")) }
        };
        match kind {
            "ram" => Ok(Self::Ram(bytes(rest)?)),
            "null" => Ok(Self::Null(bytes(rest)?)),
            "file" => {
                let (dir, size) = rest.rsplit_once(':').ok_or_else(wrong)?;
                Ok(Self::File(PathBuf::from(dir), bytes(size)?))
            }
            _ => Err(wrong()),
        }
    }
}

impl std::fmt::Display for DiskKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ram(bytes) => write!(f, "RAM, {}", show(*bytes)),
            Self::Null(bytes) => write!(f, "null, {}", show(*bytes)),
            Self::File(dir, bytes) => write!(f, "file in {}, {}", dir.display(), show(*bytes)),
        }
    }
}

/// A name and a path, from `NAME=PATH`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPath {
    pub name: String,
    pub path: PathBuf,
}

impl FromStr for NamedPath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((name, path)) if !name.is_empty() && !path.is_empty() => {
                Ok(Self { name: name.to_owned(), path: path.into() })
            }
            _ => Err(format!("\"{text}\": expected NAME=PATH")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn disks_of_endpoints() {
        let kind = |text: &str| text.parse::<DiskArg>().unwrap().0.kind.unwrap();
        assert_eq!(kind("ram:1M"), Kind::Ram(v1::RamDisk { size_bytes: 1 << 20 }));
        let file = v1::FileDisk { path: "/a".into(), read_only: true, ..Default::default() };
        assert_eq!(kind("file:/a:ro"), Kind::File(file));
        let file = v1::FileDisk { path: "/a".into(), pin: true, ..Default::default() };
        assert_eq!(kind("file:/a:pin"), Kind::File(file));
        let named =
            |read_only| Kind::Named(v1::NamedDiskReference { name: "data".into(), read_only });
        for (text, read_only) in
            [("data", false), ("disk:data", false), ("data:ro", true), ("disk:data:ro", true)]
        {
            assert_eq!(kind(text), named(read_only), "{text}");
        }
        for bad in ["", ":", ":ro", "disk:", "disk::ro", "ram:x", "ram:1M:ro", "tape:1", "a:b:ro"] {
            assert!(bad.parse::<DiskArg>().is_err(), "{bad}");
        }
    }

    #[test]
    fn disks_of_targets() {
        assert_eq!("ram:64M".parse(), Ok(DiskKind::Ram(64 << 20)));
        assert_eq!("file:/a:b:1G".parse(), Ok(DiskKind::File("/a:b".into(), 1 << 30)));
        for bad in ["ram", "ram:", "ram:1K", "file:1M", "tape:1M", "null:0", "ram:2T"] {
            assert!(bad.parse::<DiskKind>().is_err(), "{bad}");
        }
    }

    #[test]
    fn names() {
        let named: NamedPath = "spdk=/run/x=y".parse().unwrap();
        assert_eq!((named.name.as_str(), named.path.as_path()), ("spdk", Path::new("/run/x=y")));
        assert!(["", "x", "=x", "x="].iter().all(|bad| bad.parse::<NamedPath>().is_err()));
    }
}
