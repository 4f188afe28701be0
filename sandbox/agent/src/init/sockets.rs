//! Setup of a container whose sockets are devices: the preload library and the engine's socket, in
//! read-only mounts, and the variables that make its programs use them.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::mount::{MountFlags, mount, mount_remount};

use super::{SocketsSpec, environment, files, tree};

/// The name of the engine's socket in its folder.
pub const ENGINE: &str = "engine.sock";
/// The folder of the library and the socket in a container.
const FOLDER: &str = "/run/slipway";
const LIBRARY: &str = "/run/slipway/libslipway.so";
const SOCKETS: &str = "/run/slipway/socket.d";
/// The loaders of dynamic programs, which tell the C library of an image.
const GLIBC: &str = "/lib64/ld-linux-x86-64.so.2";
const MUSL: &str = "/lib/ld-musl-x86_64.so.1";

/// Detached mounts of the libraries and the engine's folder.
pub struct Detached {
    glibc: OwnedFd,
    musl: Option<OwnedFd>,
    engine: OwnedFd,
}

impl Detached {
    /// Clones the mounts. Must be called before the sandbox's root is left.
    pub fn take(spec: &SocketsSpec) -> Result<Self> {
        let libraries = Path::new(&spec.libraries);
        let musl = libraries.join("libslipway-musl.so");
        Ok(Self {
            glibc: tree::clone(&libraries.join("libslipway.so"))?,
            musl: musl.is_file().then(|| tree::clone(&musl)).transpose()?,
            engine: tree::clone(Path::new(&spec.engine))?,
        })
    }

    /// Attaches the mounts. Must be called in the container's root.
    pub fn attach(self) -> Result<()> {
        let musl = Path::new(MUSL).exists() && !Path::new(GLIBC).exists();
        let library = if musl { self.musl } else { Some(self.glibc) };
        files::create_directory("/run")?;
        files::mount_point(FOLDER)?;
        let safe = MountFlags::NOSUID | MountFlags::NODEV;
        mount("tmpfs", FOLDER, "tmpfs", safe, c"mode=0755,size=64k")
            .with_context(|| format!("mounting {FOLDER}"))?;
        std::fs::create_dir(SOCKETS).context(SOCKETS)?;
        attach(&self.engine, SOCKETS)?;
        match library {
            Some(library) => {
                std::fs::write(LIBRARY, "").context(LIBRARY)?;
                attach(&library, LIBRARY)?;
            }
            None => eprintln!(
                "slipway: the image's programs use musl, for which there is no libslipway-musl.so \
                 here: their sockets stay the kernel's"
            ),
        }
        mount_remount(FOLDER, MountFlags::BIND | MountFlags::RDONLY | safe, c"")
            .with_context(|| format!("write-protecting {FOLDER}"))
    }
}

fn attach(tree: &OwnedFd, at: &str) -> Result<()> {
    tree::attach(tree, at)?;
    // Connecting to a socket works through a read-only mount. NOEXEC is not set, since a library is
    // mapped from there.
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    mount_remount(at, flags, c"").with_context(|| format!("write-protecting {at}"))
}

/// Sets the variables if the container has the library. A preload library of the image's own stays,
/// after ours.
pub fn add_environment(environment: &mut Vec<(String, String)>) {
    if Path::new(LIBRARY).is_file() {
        set_variables(environment);
    }
}

fn set_variables(environment: &mut Vec<(String, String)>) {
    let own = environment.iter().find(|(name, value)| name == "LD_PRELOAD" && !value.is_empty());
    let preload = match own {
        Some((_, own)) => format!("{LIBRARY}:{own}"),
        None => LIBRARY.to_owned(),
    };
    environment::set(environment, "LD_PRELOAD", &preload);
    environment::set(environment, "SLIPWAY_SOCKET", &format!("{SOCKETS}/{ENGINE}"));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_of_the_image_stays() {
        let entry = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let socket = entry("SLIPWAY_SOCKET", "/run/slipway/socket.d/engine.sock");
        for (own, preload) in [
            (None, LIBRARY.to_owned()),
            (Some(""), LIBRARY.to_owned()),
            (Some("/lib/a.so"), format!("{LIBRARY}:/lib/a.so")),
        ] {
            let mut environment: Vec<_> =
                own.map(|own| entry("LD_PRELOAD", own)).into_iter().collect();
            set_variables(&mut environment);
            assert_eq!(environment, [entry("LD_PRELOAD", &preload), socket.clone()]);
        }
    }
}
