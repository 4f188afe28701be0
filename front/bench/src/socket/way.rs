//! The ways from one program to another.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};

use super::peer::{PeerSpec, Role};
use super::{Engines, Net, memory_file, path_of};
use crate::Times;
use crate::block::native::Cpus;
use crate::packet::process::find;

/// A way from one program to another: a subject.
pub struct Way {
    /// The name in tables.
    pub name: &'static str,
    /// Describes the way in a sentence.
    pub about: String,
    /// The network between the two programs.
    pub net: Rc<Net>,
    /// The server's certificate for TLS, or `None` without encryption.
    pub tls: Option<Certificate>,
    /// The engines that introduce the programs or carry their bytes, or `None` for the kernel's
    /// sockets. With engines the programs preload the library, and the engines' time is part of the
    /// cost.
    pub engines: Option<Engines>,
    /// The program that runs a [`peer`](super::peer), and its arguments before the specification.
    pub program: Vec<OsString>,
    /// Processors: `target` for the server, `client` for the client.
    pub cpus: Cpus,
    /// The times of its turns.
    pub times: Times,
}

impl Way {
    /// Returns the command for a side of a load.
    pub(super) fn command(&self, spec: &PeerSpec) -> Result<Command> {
        let (program, arguments) = self.program.split_first().context("no program for loads")?;
        let mut command = Command::new(program);
        command.args(arguments).arg(serde_json::to_string(spec)?);
        self.put(spec.role, &mut command)?;
        Ok(command)
    }

    /// Makes `command` run on a side of this way, with the environment of its programs.
    pub(super) fn put(&self, role: Role, command: &mut Command) -> Result<()> {
        command.envs(self.engines.iter().flat_map(|engines| engines.environment(role)));
        self.net.enter(role, command)
    }
}

/// A server's key and certificate for this run, in memory.
#[derive(Clone)]
pub struct Certificate(Rc<File>);

impl Certificate {
    /// Makes the certificate by the program `openssl`.
    ///
    /// # Errors
    /// If `openssl` is not installed or fails.
    pub fn make() -> Result<Self> {
        let program = find(&["openssl"]).context("`openssl` is not installed")?;
        let arguments = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
                         -subj /CN=slipway-bench -keyout /dev/stdout -out /dev/stdout";
        let output = Command::new(program).args(arguments.split_whitespace()).output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let both = text.contains("PRIVATE KEY") && text.contains("BEGIN CERTIFICATE");
        ensure!(both, "openssl made no certificate: {}", String::from_utf8_lossy(&output.stderr));
        let mut file = memory_file("certificate")?;
        file.write_all(&output.stdout)?;
        Ok(Self(Rc::new(file)))
    }

    /// Returns the path by which other processes can open the file.
    pub(super) fn path(&self) -> PathBuf {
        path_of(&*self.0)
    }
}
