//! Ways from one program to another.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};

use super::peer::{PeerSpec, Role};
use super::{Engines, Net, SocketLoad, Traffic, memory_file, path_of};
use crate::block::native::Cpus;
use crate::packet::process::find;

/// A way from one program to another: what is measured.
pub struct Way {
    /// Its name in tables.
    pub name: &'static str,
    /// What it is, in a sentence.
    pub about: String,
    /// Where the two programs are.
    pub net: Rc<Net>,
    /// TLS, with the server's certificate; None: in the clear.
    pub tls: Option<Certificate>,
    /// The engines that introduce the programs or carry what is between them; the programs have the library
    /// loaded then, and the engines' time is part of the cost. None: the kernel's sockets.
    pub engines: Option<Engines>,
    /// The program that runs a [`peer`](super::peer), and its arguments before the specification.
    pub program: Vec<OsString>,
    /// The server's processor is the first one's, the client's the other's.
    pub cpus: Cpus,
}

impl Way {
    /// Whether it can carry the load.
    pub fn takes(&self, load: &SocketLoad) -> bool {
        // Nobody asks what idle sessions cost, and the handshakes would take longer than anything else.
        self.tls.is_none() || load.traffic != Traffic::Idle
    }

    /// The command for a side of a load.
    pub(super) fn command(&self, spec: &PeerSpec) -> Result<Command> {
        let (program, arguments) = self.program.split_first().context("no program for loads")?;
        let mut command = Command::new(program);
        command.args(arguments).arg(serde_json::to_string(spec)?);
        self.put(spec.role, &mut command)?;
        Ok(command)
    }

    /// Has `command` run on a side of this way, with what its programs have in their environment.
    pub(super) fn put(&self, role: Role, command: &mut Command) -> Result<()> {
        command.envs(self.engines.iter().flat_map(|engines| engines.environment(role)));
        self.net.enter(role, command)
    }
}

/// A server's key and certificate for this run, in memory.
#[derive(Clone)]
pub struct Certificate(Rc<File>);

impl Certificate {
    /// Made by the program `openssl`.
    ///
    /// # Errors
    /// It is not installed, or makes none.
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

    /// Where other processes find it.
    pub(super) fn path(&self) -> PathBuf {
        path_of(&*self.0)
    }
}
