//! Socket engines as a subject's helpers: processes of their own, which end with this one.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use super::Net;
use super::links::{Links, NAMES};
use super::peer::Role;
use crate::packet::process::{Running, wait_for};

/// The library that programs preload.
const LIBRARY: &str = "libslipway.so";
/// The longest time that an engine may take until it serves.
const PATIENCE: Duration = Duration::from_secs(20);

/// The build that engines and the library come from.
#[derive(Clone, Debug)]
pub struct Build {
    /// The `slipway` program to run as the engine.
    pub engine: PathBuf,
    /// A program in the folder that has `libslipway.so`.
    pub beside: PathBuf,
}

/// Running engines, and the environment by which programs reach them: one engine for both programs,
/// or one for each side.
pub struct Engines {
    /// The server's engine with its socket, and the client's if it is another.
    running: Vec<(Running, PathBuf)>,
    library: PathBuf,
    directory: TempDir,
}

impl Engines {
    /// Starts one engine, for two programs in this process's network namespace.
    ///
    /// # Errors
    /// If there is no library, or the engine does not begin to serve.
    pub fn here(build: &Build) -> Result<Self> {
        let mut engines = Self::none(build)?;
        engines.start(build, "engine", &[], |_| Ok(()))?;
        Ok(engines)
    }

    /// Starts one engine in this process's network namespace, for programs on both sides of `net`.
    /// Its policy has a tenant for each side, and allows the client to connect to the server.
    ///
    /// # Errors
    /// The errors of [`Engines::here`], or if `net` has no sides.
    pub fn between(build: &Build, net: &Net) -> Result<Self> {
        let mut engines = Self::none(build)?;
        let [server, client] = NAMES;
        let sides = net.sides().context("no network namespaces")?;
        let text = format!(
            "{}{}[[allow]]\nfrom = \"{client}\"\nto = \"{server}\"\n",
            tenant(server, &sides[0]),
            tenant(client, &sides[1])
        );
        let policy = engines.file("policy.toml", &text)?;
        engines.start(build, "engine", &[("--policy", &policy)], |_| Ok(()))?;
        Ok(engines)
    }

    /// Starts one engine on each side of `net`. The two engines carry the programs' bytes encrypted
    /// between them, with certificates of an authority made for this run. The tenant's network
    /// namespace is the server's at one engine and the client's at the other.
    ///
    /// # Errors
    /// The errors of [`Engines::between`], or if `openssl` is not installed.
    pub fn linked(build: &Build, net: &Net) -> Result<Self> {
        let mut engines = Self::none(build)?;
        let sides = net.sides().context("no network namespaces")?;
        let links = Links::make(engines.directory.path(), net)?;
        for (at, role) in [Role::Server, Role::Client].into_iter().enumerate() {
            let name = NAMES[at];
            let policy = engines.file(&format!("{name}.policy"), &tenant("bench", &sides[at]))?;
            let settings = engines.file(&format!("{name}.links"), &links.settings(at))?;
            let options = [("--policy", policy.as_path()), ("--links", &settings)];
            engines.start(build, name, &options, |command| net.enter(role, command))?;
        }
        Ok(engines)
    }

    fn none(build: &Build) -> Result<Self> {
        let library = build.beside.with_file_name(LIBRARY);
        ensure!(library.is_file(), "{} is not there", library.display());
        let directory = tempfile::Builder::new().prefix("slipway-bench").tempdir()?;
        Ok(Self { running: Vec::new(), library, directory })
    }

    fn file(&self, name: &str, text: &str) -> Result<PathBuf> {
        let path = self.directory.path().join(name);
        std::fs::write(&path, text)?;
        Ok(path)
    }

    fn start(
        &mut self,
        build: &Build,
        name: &str,
        options: &[(&str, &Path)],
        enter: impl FnOnce(&mut Command) -> Result<()>,
    ) -> Result<()> {
        let socket = self.directory.path().join(name);
        let mut command = Command::new(&build.engine);
        // The machine's own files must not affect a measurement. A named file that is missing is
        // accepted if its folder of drop-ins exists, even empty.
        let nothing = self.directory.path().join("nothing");
        std::fs::create_dir_all(nothing.with_extension("d"))?;
        let mut files = vec![("--policy", nothing.as_path()), ("--links", &nothing)];
        files.retain(|(name, _)| !options.iter().any(|(own, _)| own == name));
        command.args(["socket", "engine", "--socket"]).arg(&socket).stdin(Stdio::null());
        for (option, value) in files.iter().chain(options) {
            command.arg(option).arg(value);
        }
        // Standard output is the report's; the engine's errors go to standard error.
        command.stdout(Stdio::null()).env("SLIPWAY_LOG", "warn");
        enter(&mut command)?;
        let mut running = Running::start(&mut command)?;
        wait_for(&socket, &mut running, Instant::now() + PATIENCE).context("a socket engine")?;
        self.running.push((running, socket));
        Ok(())
    }

    /// Returns the engines' process ids.
    pub(super) fn ids(&self) -> Vec<u32> {
        self.running.iter().map(|(running, _)| running.id()).collect()
    }

    /// Returns the environment variables for the program on a side.
    pub(super) fn environment(&self, role: Role) -> Vec<(&'static str, OsString)> {
        let at = if role == Role::Server { 0 } else { self.running.len() - 1 };
        let socket = self.running.get(at).map(|(_, socket)| socket.clone().into());
        let library = ("LD_PRELOAD", self.library.clone().into());
        socket.map(|socket| vec![library, ("SLIPWAY_SOCKET", socket)]).unwrap_or_default()
    }
}

/// Formats a tenant of a policy.
fn tenant(name: &str, netns: &Path) -> String {
    format!("[[tenant]]\nname = \"{name}\"\nnetns = \"{}\"\n", netns.display())
}
