//! Finds a QEMU, and checks that it can run sandboxes.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::cache::{file_identity, read_cached, write_cached};
use crate::{Error, Result};

/// The directory where set-up puts the tools that the distribution lacks, unless `SLIPWAY_TOOLS`
/// names another.
pub const TOOL_ROOT: &str = "/var/lib/slipway/tools";

/// The first QEMU with a vfio-user client.
pub const MINIMUM_VERSION: Version = Version { major: 10, minor: 1, micro: 0 };

const PROGRAM: &str = "qemu-system-x86_64";

/// The version of a QEMU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    /// The first number: one per year.
    pub major: u32,
    /// The second number: the release of that year.
    pub minor: u32,
    /// The third number: the bug-fix release.
    pub micro: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

impl FromStr for Version {
    type Err = ();

    /// Parses the first line of `qemu-system-x86_64 --version`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let line = text.lines().next().ok_or(())?;
        let word = line.strip_prefix("QEMU emulator version ").ok_or(())?;
        let word = word.split_ascii_whitespace().next().ok_or(())?;
        let mut numbers = word.split('.').map(|number| number.parse::<u32>().map_err(drop));
        let mut next = || numbers.next().unwrap_or(Err(()));
        Ok(Self { major: next()?, minor: next()?, micro: next().unwrap_or(0) })
    }
}

/// A QEMU that can run sandboxes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binary {
    pub(super) path: PathBuf,
    version: Version,
    /// The identity of the examined file; see [`file_identity`].
    pub(super) identity: String,
}

impl Binary {
    /// Returns the path of the program.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the version of the program.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Finds the QEMU of `SLIPWAY_QEMU` if that is set, and else the first usable one of
    /// [`candidates`]. See [`Qemu::find`](super::Qemu::find).
    ///
    /// # Errors
    /// [`Error::NoQemu`], with the reason for each file that was examined.
    pub(super) fn find(cache: &Path) -> Result<Self> {
        if let Some(path) = std::env::var_os("SLIPWAY_QEMU").filter(|path| !path.is_empty()) {
            return Self::at(Path::new(&path), cache)
                .map_err(|reason| Error::NoQemu { reason: format!("SLIPWAY_QEMU: {reason}") });
        }
        let mut reasons = Vec::new();
        for path in candidates() {
            match Self::at(&path, cache) {
                Ok(binary) => return Ok(binary),
                Err(reason) => reasons.push(reason),
            }
        }
        if reasons.is_empty() {
            let root = tool_root();
            reasons.push(format!("there is none in {} nor in PATH", root.join("bin").display()));
        }
        Err(Error::NoQemu { reason: reasons.join("; ") })
    }

    /// Examines the QEMU at `path`. The error says what is wrong with it.
    pub(super) fn at(path: &Path, cache: &Path) -> Result<Self, String> {
        let identity =
            file_identity(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let cached = cache.join("qemu.json");
        if let Some(binary) = read_cached::<Self>(&cached).filter(|b| b.identity == identity) {
            return Ok(binary);
        }
        let version = examine(path).map_err(|what| format!("{} {what}", path.display()))?;
        let path = std::path::absolute(path).map_err(|error| error.to_string())?;
        let binary = Self { path, version, identity };
        write_cached(&cached, &binary);
        Ok(binary)
    }
}

/// Runs the program to learn its version and features.
fn examine(path: &Path) -> Result<Version, String> {
    let text = output(path, &["--version"])?;
    let version: Version = text.parse().map_err(|()| "is no QEMU".to_owned())?;
    if version < MINIMUM_VERSION {
        return Err(format!("is version {version}; {MINIMUM_VERSION} is the first that will do"));
    }
    match output(path, &["-device", "vfio-user-pci,help"]) {
        Ok(_) => Ok(version),
        Err(_) => Err(format!("({version}) was built without vfio-user-pci")),
    }
}

/// Runs the program, and returns its standard output. The error is a sentence without its subject,
/// the program.
fn output(path: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(path)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("does not start: {error}"))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        return Err(format!("fails: {}", text.lines().next().unwrap_or("no reason given")));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn tool_root() -> PathBuf {
    std::env::var_os("SLIPWAY_TOOLS").map_or_else(|| TOOL_ROOT.into(), PathBuf::from)
}

/// Returns every file that may be a usable QEMU, best first.
fn candidates() -> impl Iterator<Item = PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let in_path: Vec<_> = std::env::split_paths(&path).filter(|d| d.is_absolute()).collect();
    std::iter::once(tool_root().join("bin"))
        .chain(in_path)
        .map(|directory| directory.join(OsStr::new(PROGRAM)))
        .filter(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a program that runs `body`. Another process writes it: our own descriptor, open for
    /// writing, could be inherited by a child of another test for a moment, and a file that is open
    /// for writing cannot be executed.
    fn script(directory: &Path, body: &str) -> PathBuf {
        let (text, path) = (directory.join("text"), directory.join(PROGRAM));
        fs::write(&text, format!("#!/bin/sh\n{body}\n")).unwrap();
        let copied = std::process::Command::new("cp").args([&text, &path]).status();
        assert!(copied.unwrap().success());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn versions_are_read_and_compared() {
        let parse = |text: &str| text.parse::<Version>();
        let debian =
            parse("QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)\n").unwrap();
        assert_eq!(debian, Version { major: 11, minor: 1, micro: 3 });
        assert!(parse("QEMU emulator version 10.1.0").unwrap() >= MINIMUM_VERSION);
        assert!(parse("QEMU emulator version 10.0.9").unwrap() < MINIMUM_VERSION);
        assert!(parse("QEMU emulator version 7.2").unwrap() < MINIMUM_VERSION);
        for bad in ["", "GNU bash", "QEMU emulator version ", "QEMU emulator version x.1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_binary_is_said() {
        let directory = tempfile::tempdir().unwrap();
        let cache = directory.path().join("cache");
        let reason = |body: &str| Binary::at(&script(directory.path(), body), &cache).unwrap_err();
        assert!(reason("exit 1").contains("fails"));
        assert!(reason("echo hello").contains("is no QEMU"));
        assert!(reason("echo QEMU emulator version 7.2.0").contains("is version 7.2.0; 10.1.0"));
        let without = "[ $1 = --version ] && echo QEMU emulator version 10.2.0";
        assert!(reason(without).contains("built without vfio-user-pci"));
        assert!(Binary::at(&directory.path().join("absent"), &cache).is_err());
    }

    #[test]
    fn a_good_binary_is_examined_once_per_state_of_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let (cache, count) = (directory.path().join("cache"), directory.path().join("count"));
        let body = |version| {
            format!("echo x >> {}; echo QEMU emulator version {version}", count.display())
        };
        let runs = || fs::read_to_string(&count).unwrap().lines().count();
        let path = script(directory.path(), &body("10.1.0"));
        let found = Binary::at(&path, &cache).unwrap();
        assert_eq!((found.version().to_string(), runs()), ("10.1.0".to_owned(), 2));
        assert_eq!(Binary::at(&path, &cache).unwrap(), found);
        assert_eq!(runs(), 2);
        fs::remove_file(&path).unwrap();
        let path = script(directory.path(), &body("11.10.0"));
        assert_eq!(Binary::at(&path, &cache).unwrap().version().to_string(), "11.10.0");
        fs::write(cache.join("qemu.json"), "{damaged").unwrap();
        assert_eq!(Binary::at(&path, &cache).unwrap().version().to_string(), "11.10.0");
    }
}
