//! The host itself as a subject: fio and RocksDB without any guest.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use slipway_bench::Own;
use slipway_bench::block::{
    Measured, RocksJob, RocksMeasured, RocksPlace, RocksPlan, RocksSubject, Subject, Workload,
    fio_arguments, fio_measured, rocks_measured, rocks_script,
};

/// Debian's package for each program that a load needs.
const PACKAGES: [(&str, &str); 3] =
    [("fio", "fio"), ("db_bench", "rocksdb-tools"), ("ethtool", "ethtool")];

/// Returns the package that contains `program`.
pub fn package(program: &str) -> &'static str {
    PACKAGES.iter().find(|(known, _)| *known == program).map_or("", |(_, package)| package)
}

/// Fails with the package's name if `wanted` is set and the host lacks `program`.
pub fn need(program: &str, wanted: bool) -> Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if !wanted || std::env::split_paths(&path).any(|dir| dir.join(program).is_file()) {
        return Ok(());
    }
    let package = package(program);
    bail!(
        "the host has no {program}: `apt-get install {package}` brings it, --only leaves the \
         configuration host out"
    )
}

pub struct Host {
    file: PathBuf,
    /// The folder for databases, beside the file.
    dir: PathBuf,
}

impl Host {
    /// Makes the folder `dir` for databases.
    pub fn new(file: PathBuf, dir: PathBuf) -> Result<Self> {
        std::fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
        Ok(Self { file, dir })
    }
}

impl Subject for Host {
    fn name(&self) -> &str {
        "host"
    }

    fn about(&self) -> String {
        super::about("host").to_owned()
    }

    fn own(&self) -> Own {
        Own::Node
    }

    fn run(&mut self, workload: &Workload, warm_up: Duration, time: Duration) -> Result<Measured> {
        let file = self.file.to_string_lossy();
        let mut command = Command::new("fio");
        command.args(fio_arguments(workload, &file, warm_up, time));
        fio_measured(&output(command)?)
    }
}

impl RocksSubject for Host {
    fn name(&self) -> &str {
        "host"
    }

    fn about(&self) -> String {
        "no guest: a directory beside the file that the guests' disks are".to_owned()
    }

    fn run(&mut self, plan: &RocksPlan, job: RocksJob) -> Result<RocksMeasured> {
        let dir = self.dir.to_string_lossy();
        let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
        ensure!(dir.chars().all(plain), "{dir}: a script needs a path without special characters");
        let mut command = Command::new("sh");
        command.arg("-c").arg(rocks_script(plan, job, RocksPlace::Directory(&dir)));
        rocks_measured(&output(command)?, job.load)
    }
}

/// Returns the standard output of a command, or an error if the command fails.
fn output(mut command: Command) -> Result<String> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start {program}"))?;
    let (out, errors) = (&output.stdout, String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{program} ended with {}: {}", output.status, errors.trim());
    Ok(String::from_utf8_lossy(out).into_owned())
}
