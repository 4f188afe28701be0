//! Settings and certificates by which two engines know each other, made for this run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::Net;
use super::net::ADDRESSES;
use crate::packet::process::find;

/// Names of the two sides' engines and tenants: the server's, the client's.
pub(super) const NAMES: [&str; 2] = ["server", "client"];
/// The port on which engines listen for each other.
const PORT: u16 = 4790;
/// Payload of a record in bytes: the engines' default.
pub(super) const RECORD: usize = 64 << 10;

/// An authority and a certificate for each side, in a folder.
pub(super) struct Links {
    folder: PathBuf,
}

impl Links {
    /// Makes the certificates by the program `openssl`, in `folder`, which must be private.
    ///
    /// # Errors
    /// If `net` has no sides, or `openssl` is not installed or fails.
    pub(super) fn make(folder: &Path, net: &Net) -> Result<Self> {
        ensure!(net.sides().is_some(), "no network namespaces");
        let key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes";
        openssl(
            folder,
            &format!("req -x509 {key} -days 2 -keyout ca.key -out ca.pem -subj /CN=ca"),
        )?;
        for name in NAMES {
            let extensions = format!("subjectAltName=DNS:{name}\nbasicConstraints=CA:FALSE\n");
            std::fs::write(folder.join(format!("{name}.ext")), extensions)?;
            let subject = format!("-subj /CN={name}");
            openssl(
                folder,
                &format!("req -new {key} -keyout {name}.key -out {name}.csr {subject}"),
            )?;
            openssl(
                folder,
                &format!(
                    "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
                     -extfile {name}.ext -out {name}.pem"
                ),
            )?;
        }
        Ok(Self { folder: folder.to_owned() })
    }

    /// Returns the settings of a side's engine: 0 for the server's, 1 for the client's.
    pub(super) fn settings(&self, side: usize) -> String {
        let (name, other, folder) = (NAMES[side], NAMES[1 - side], self.folder.display());
        let (own, there) = (ADDRESSES[side], ADDRESSES[1 - side]);
        format!(
            "name = \"{name}\"\nlisten = \"{own}:{PORT}\"\ncertificate = \"{folder}/{name}.pem\"\n\
             key = \"{folder}/{name}.key\"\nauthority = \"{folder}/ca.pem\"\nrecord = {RECORD}\n\
             [[engine]]\nname = \"{other}\"\nat = \"{there}:{PORT}\"\naddresses = \
             [\"{there}/32\"]\n"
        )
    }
}

fn openssl(folder: &Path, arguments: &str) -> Result<()> {
    let program = find(&["openssl"]).context("`openssl` is not installed")?;
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace()).current_dir(folder).stdin(Stdio::null());
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "openssl made no certificate: {text}");
    Ok(())
}
