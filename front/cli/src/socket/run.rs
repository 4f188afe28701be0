//! `slipway socket run`: runs a program with the library preloaded.

use std::ffi::OsString;
use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::elf::{self, Linkage};
use crate::args::SocketRunArgs;

/// The exit status if there is no such program, as in a shell.
const NOT_FOUND: i32 = 127;
/// The longest time that an engine may take until it serves.
const START: Duration = Duration::from_secs(10);

/// Replaces this process by the program, whose process id and exit status are its own.
pub fn run(args: &SocketRunArgs, socket: &Path) -> Result<i32> {
    let [name, rest @ ..] = &args.program[..] else { bail!("no program") };
    let shown = name.to_string_lossy();
    let Some(file) = elf::find(Path::new(name)) else {
        eprintln!("slipway: there is no program \"{shown}\"");
        return Ok(NOT_FOUND);
    };
    let kind = elf::kind(&file).with_context(|| format!("cannot read {}", file.display()))?;
    match kind {
        Linkage::Static => warn(&shown, "is linked statically"),
        Linkage::Go => warn(&shown, "is a Go program, which calls the kernel by itself"),
        _ => {}
    }
    let library = match &args.library {
        Some(library) if library.is_file() => library.clone(),
        Some(library) => bail!("there is no library {}", library.display()),
        None => library(kind)?,
    };
    let socket = std::path::absolute(socket)?;
    if !slipway_sgiov::is_served(&socket) {
        start(&socket)?;
    }
    let error = Command::new(&file)
        .arg0(name)
        .args(rest)
        .env("LD_PRELOAD", preload(&library))
        .env("SLIPWAY_SOCKET", &socket)
        .exec();
    Err(error).with_context(|| format!("cannot run {}", file.display()))
}

fn warn(program: &str, what: &str) {
    eprintln!(
        "slipway: {program} {what}: no library can take its calls, its sockets stay the kernel's"
    );
}

/// Returns the path of the library for the program's C library.
pub(super) fn library(kind: Linkage) -> Result<PathBuf> {
    let name = if kind == Linkage::Musl { "libslipway-musl.so" } else { "libslipway.so" };
    slipway_runtime::find_library(name).context("--library FILE names another one")
}

/// Returns the value of `LD_PRELOAD`: the library, then what was there before.
fn preload(library: &Path) -> OsString {
    let mut all = library.as_os_str().to_owned();
    if let Some(more) = std::env::var_os("LD_PRELOAD").filter(|more| !more.is_empty()) {
        all.push(":");
        all.push(more);
    }
    all
}

/// Starts an engine that ends after the last program. Its log lies beside its socket.
fn start(socket: &Path) -> Result<()> {
    if let Some(dir) = socket.parent() {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    }
    let log = socket.with_extension("log");
    let file = OpenOptions::new().create(true).append(true).open(&log);
    let file = file.with_context(|| format!("cannot write {}", log.display()))?;
    let mut child = Command::new(slipway_bench::slipway()?)
        .args(["socket", "engine", "--ends-when-idle", "--socket"])
        .arg(socket)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(file)
        // Its own process group: signals to this program's group do not reach it.
        .process_group(0)
        .spawn()
        .context("cannot start a socket engine")?;
    let begun = Instant::now();
    while begun.elapsed() < START {
        if slipway_sgiov::is_served(socket) {
            return Ok(());
        }
        if let Some(status) = child.try_wait()? {
            // Another engine may have been quicker.
            if slipway_sgiov::is_served(socket) {
                return Ok(());
            }
            bail!("the socket engine ended at once ({status}); {} says why", log.display());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    bail!("the socket engine does not serve {}", socket.display())
}
