//! The programs and libraries that come with the daemon.

use std::path::{Path, PathBuf};

use super::Config;
use crate::{Error, Result};

impl Config {
    /// Returns the path of Slipway's own VMM: `SLIPWAY_VMM_PROGRAM` if it is set, else the static
    /// program `slipway-vmm` that comes with this one.
    ///
    /// # Errors
    /// The errors of [`Config::find_program`].
    pub fn find_vmm(&self) -> Result<PathBuf> {
        match std::env::var_os("SLIPWAY_VMM_PROGRAM").filter(|path| !path.is_empty()) {
            Some(path) => Ok(std::path::absolute(&path).unwrap_or_else(|_| path.into())),
            None => self.find_program("slipway-vmm"),
        }
    }

    /// Returns the path of the static agent. A dynamic one, which a build for tests leaves beside
    /// its programs, is skipped.
    ///
    /// # Errors
    /// The errors of [`Config::find_program`].
    pub fn find_agent(&self) -> Result<PathBuf> {
        match &self.agent {
            Some(path) => static_among("slipway-agent", std::slice::from_ref(path)),
            None => self.find_program("slipway-agent"),
        }
    }

    /// Returns the path of a static program that comes with this one: a guest's or a VMM. Searches
    /// beside this program, in a freshly built tree, and where Slipway is installed.
    ///
    /// # Errors
    /// [`Error::NoProgram`] with the paths that were tried; [`Error::Initramfs`] if a program was
    /// found that cannot run in every guest.
    pub fn find_program(&self, name: &str) -> Result<PathBuf> {
        let beside = std::env::current_exe().ok().and_then(|exe| {
            // A freshly built tree keeps static programs under their own target and profile.
            let dir = exe.parent()?;
            let built = dir.parent()?.join("x86_64-unknown-linux-gnu/agent").join(name);
            Some([dir.join(name), built])
        });
        let installed = Path::new("/usr/libexec/slipway").join(name);
        let places: Vec<PathBuf> = beside.into_iter().flatten().chain([installed]).collect();
        static_among(name, &places)
    }
}

/// Returns the path of a preload library. Searches beside the running program, in `../lib` and
/// `../lib/slipway` of its folder, and where Slipway is installed.
///
/// # Errors
/// [`Error::NoLibrary`] with the paths that were tried.
pub fn find_library(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().ok();
    let dir = own.as_deref().and_then(Path::parent).unwrap_or(Path::new("/"));
    let dirs =
        [dir, &dir.join("../lib"), &dir.join("../lib/slipway"), Path::new("/usr/lib/slipway")];
    let places = dirs.map(|dir| dir.join(name));
    let found = places.iter().find(|path| path.is_file());
    let found = found.map(|path| std::fs::canonicalize(path).unwrap_or_else(|_| path.clone()));
    found.ok_or_else(|| Error::NoLibrary { name: name.to_owned(), places: places.to_vec() })
}

fn static_among(name: &str, places: &[PathBuf]) -> Result<PathBuf> {
    let mut refused = None;
    for path in places.iter().filter(|path| path.is_file()) {
        match slipway_initramfs::check_program(path) {
            Ok(()) => return Ok(path.clone()),
            Err(error) => _ = refused.get_or_insert(error),
        }
    }
    Err(refused.map_or_else(
        || Error::NoProgram { name: name.to_owned(), places: places.to_vec() },
        Error::from,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dynamic_agent_is_passed_over() {
        let dir = tempfile::tempdir().unwrap();
        let [dynamic, absent, fixed] =
            ["dynamic", "absent", "fixed"].map(|name| dir.path().join(name));
        // The smallest x86-64 ELF file: a header without segments.
        let mut elf = vec![0; 64];
        elf[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
        elf[18] = 62;
        std::fs::write(&fixed, &elf).unwrap();
        // With one segment of 56 bytes behind the header, which names a loader (PT_INTERP).
        (elf[32], elf[54], elf[56]) = (64, 56, 1);
        elf.resize(64 + 56, 0);
        elf[64] = 3;
        std::fs::write(&dynamic, elf).unwrap();
        let found = static_among("x", &[absent.clone(), dynamic.clone(), fixed.clone()]).unwrap();
        assert_eq!(found, fixed);
        let refused = static_among("x", &[absent.clone(), dynamic]).unwrap_err().to_string();
        assert!(refused.contains("not static"), "{refused}");
        assert!(matches!(static_among("x", &[absent]), Err(Error::NoProgram { .. })));
    }
}
