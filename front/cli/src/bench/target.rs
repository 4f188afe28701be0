//! Targets of `slipway bench block`: processes of their own that are measured and then ended.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use anyhow::{Context, Result, bail};
use slipway_bench::block::native::{Cpus, pin};
use slipway_plane::{Plane, Settings};
use slipway_plane_api::v1;
use slipway_plane_api::v1::nvme_controller::DoorbellMode;

use super::scratch::Scratch;
use crate::args::{DiskKind, Doorbells, TargetArgs};

/// The line that a target prints once its socket listens.
const READY: &str = "ready";
/// The endpoint's id, and the disk's name if a neighbour shares the disk.
const ID: &str = "bench";
/// The neighbour's endpoint id.
const NEIGHBOUR: &str = "neighbour";

/// The disk for targets: its kind, and the folder for the targets' sockets and files, removed
/// afterwards.
pub struct BenchDisk {
    kind: DiskKind,
    /// The folder for sockets.
    dir: Scratch,
}

impl BenchDisk {
    pub fn prepare(kind: &DiskKind) -> Result<Self> {
        let dir = Scratch::make_in(&std::env::temp_dir()).context("no place for sockets")?;
        Ok(Self { kind: kind.clone(), dir })
    }

    pub fn bytes(&self) -> u64 {
        match self.kind {
            DiskKind::Ram(bytes) | DiskKind::Null(bytes) | DiskKind::File(_, bytes) => bytes,
        }
    }

    /// Returns whether data that was written can be read again.
    pub fn holds_data(&self) -> bool {
        !matches!(self.kind, DiskKind::Null(_))
    }

    pub fn name(&self) -> String {
        self.kind.to_string()
    }

    /// Makes a disk of this kind. Returns its name for `slipway endpoint`, and its file if it has
    /// one.
    fn make(&self) -> Result<(String, Option<tempfile::TempPath>)> {
        Ok(match &self.kind {
            DiskKind::Ram(bytes) => (format!("ram:{bytes}"), None),
            DiskKind::Null(bytes) => (format!("null:{bytes}"), None),
            DiskKind::File(dir, bytes) => {
                let dir = std::path::absolute(dir)?;
                let file = tempfile::Builder::new().prefix("slipway-bench").tempfile_in(&dir);
                let file = file.with_context(|| format!("no file in {}", dir.display()))?;
                file.as_file().set_len(*bytes)?;
                (format!("file:{}", file.path().display()), Some(file.into_temp_path()))
            }
        })
    }
}

/// A running target. Dropping it ends it.
pub struct Target {
    pub socket: PathBuf,
    /// The neighbour's socket, served only if a neighbour was asked for.
    pub neighbour: PathBuf,
    child: Child,
    /// Standard input of the target, which ends when the pipe closes.
    _lifeline: Option<ChildStdin>,
}

impl Target {
    /// Starts a target; `program` is another build of this program.
    pub fn start(
        disk: &BenchDisk,
        doorbells: Doorbells,
        cpus: &Cpus,
        program: Option<&Path>,
    ) -> Result<Self> {
        Self::start_with(disk, doorbells, cpus, program, false)
    }

    /// Starts a target with two controllers of the same disk.
    pub fn start_pair(disk: &BenchDisk, doorbells: Doorbells, cpus: &Cpus) -> Result<Self> {
        Self::start_with(disk, doorbells, cpus, None, true)
    }

    fn start_with(
        disk: &BenchDisk,
        doorbells: Doorbells,
        cpus: &Cpus,
        program: Option<&Path>,
        pair: bool,
    ) -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("t").tempdir_in(disk.dir.path())?;
        // Removed with everything else in the disk's folder.
        let dir = dir.keep();
        let (socket, neighbour) = (dir.join("cntrl"), dir.join(NEIGHBOUR));
        let (name, file) = disk.make()?;
        let program = match program {
            Some(program) => program.to_owned(),
            None => slipway_bench::slipway().context("which program this is")?,
        };
        let mode = if doorbells == Doorbells::Mapped { "mapped" } else { "trapped" };
        let mut command = Command::new(&program);
        command.args(["bench", "target", "--disk", &name, "--doorbells", mode, "--socket"]);
        command.arg(&socket);
        if pair {
            command.arg("--neighbour").arg(&neighbour);
        }
        for cpu in &cpus.target {
            command.args(["--cpu", &cpu.to_string()]);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn();
        let mut child = child.with_context(|| format!("cannot start {}", program.display()))?;
        let lifeline = child.stdin.take();
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        // The target has the file open. Without a name, the file disappears with the target, in
        // whatever way that ends.
        drop(file);
        let target = Self { socket, neighbour, child, _lifeline: lifeline };
        if line.trim() != READY {
            bail!("the target {} did not come up", program.display());
        }
        Ok(target)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // The target holds nothing that needs an orderly end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs `slipway bench target`: serves one endpoint, or two of the same disk, until standard input
/// ends. Only for `bench block`; lasting endpoints are the daemon's (`slipway endpoint create`).
pub fn serve(args: &TargetArgs) -> Result<i32> {
    if !args.cpu.is_empty() {
        pin(&args.cpu)?;
    }
    let plane = Plane::new(Settings { reactors: args.reactors, ..Settings::default() })?;
    let doorbells = match args.doorbells {
        Doorbells::Mapped => DoorbellMode::Mapped,
        Doorbells::Trapped => DoorbellMode::Trapped,
    };
    let mut disk = args.disk.disk();
    if args.neighbour.is_some() {
        let shared = v1::CreateDiskRequest { name: ID.to_owned(), disk: Some(disk) };
        plane.create_disk(&shared)?;
        let named = v1::NamedDiskReference { name: ID.to_owned(), read_only: false };
        disk = v1::Disk { block_size: 0, kind: Some(v1::disk::Kind::Named(named)) };
    }
    plane.create(&endpoint(ID, &args.socket, &disk, doorbells)?)?;
    if let Some(socket) = &args.neighbour {
        plane.create(&endpoint(NEIGHBOUR, socket, &disk, doorbells)?)?;
    }
    println!("{READY}");
    std::io::stdout().flush()?;
    // The process that started this one holds the pipe's other end, which closes when that process
    // ends in any way.
    std::io::copy(&mut std::io::stdin().lock().take(u64::MAX), &mut std::io::sink())?;
    for endpoint in plane.list() {
        plane.remove(&endpoint.id)?;
    }
    Ok(0)
}

fn endpoint(
    id: &str,
    socket: &Path,
    disk: &v1::Disk,
    doorbells: DoorbellMode,
) -> Result<v1::CreateEndpointRequest> {
    Ok(v1::CreateEndpointRequest {
        virtio_net: None,
        memory: None,
        id: id.to_owned(),
        socket_path: std::path::absolute(socket)?.to_string_lossy().into_owned(),
        owner: None,
        nvme: Some(v1::NvmeController {
            namespaces: vec![v1::Namespace {
                nsid: 1,
                disk: Some(disk.clone()),
                ..Default::default()
            }],
            doorbells: doorbells.into(),
            ..Default::default()
        }),
    })
}
