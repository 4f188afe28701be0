//! Runs `mkfs.erofs`: one tar stream in, one read-only file system image out.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::digest::Digest;
use crate::root::tree::Tree;
use crate::root::write;
use crate::{Error, Result};

/// The position and value of the superblock's magic number (Linux, `fs/erofs/erofs_fs.h`).
const SUPERBLOCK: u64 = 1024;
const MAGIC: u32 = 0xe0f5_e1e2;
/// The most bytes that are kept of the error output of mkfs.erofs.
const MAX_STDERR: u64 = 64 << 10;

/// The programs that images are built with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tools {
    /// The command and leading arguments of `mkfs.erofs`, version 1.7 or newer (the first that
    /// reads tar archives from its standard input). The command has more than one word if it runs
    /// through the dynamic loader of a private tool root.
    pub mkfs_erofs: Vec<OsString>,
}

impl Default for Tools {
    /// Returns the tools in `PATH`.
    fn default() -> Self {
        Self { mkfs_erofs: vec!["mkfs.erofs".into()] }
    }
}

/// The optional features of a `mkfs.erofs`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Features {
    /// Support for `--mkfs-time` (1.8): `-T` then sets the time of the file system only, not of its
    /// files.
    mkfs_time: bool,
}

impl Tools {
    /// Returns the programs of a tool root, as set-up makes it: commands in its `bin`, which run
    /// another distribution's programs. Returns `None` if `mkfs.erofs` is not in it.
    pub fn in_root(root: &Path) -> Option<Self> {
        Some(Self { mkfs_erofs: command_in_root(root, "mkfs.erofs")? })
    }

    fn command(&self) -> Result<Command> {
        let (program, arguments) =
            self.mkfs_erofs.split_first().ok_or_else(|| self.error("no command is set"))?;
        let mut command = Command::new(program);
        command.args(arguments).env("LC_ALL", "C");
        Ok(command)
    }

    fn error(&self, reason: impl ToString) -> Error {
        let command = self.mkfs_erofs.join(" ".as_ref()).to_string_lossy().into_owned();
        Error::Tool { command, reason: reason.to_string() }
    }

    /// Checks that the program exists and is new enough, and returns its features.
    pub(crate) fn probe(&self) -> Result<Features> {
        let output = self.command()?.arg("--help").stdin(Stdio::null()).output();
        let output = output.map_err(|e| self.error(e))?;
        let help = [output.stdout, output.stderr].concat();
        let help = String::from_utf8_lossy(&help);
        match help.contains("--tar=") {
            true => Ok(Features { mkfs_time: help.contains("--mkfs-time") }),
            false => Err(self.error("cannot read tar archives")),
        }
    }

    /// Checks that images can be built: `mkfs.erofs` exists and is new enough.
    ///
    /// # Errors
    /// [`Error::Tool`] with the reason.
    pub fn check(&self) -> Result<()> {
        self.probe().map(|_| ())
    }

    /// Builds `tree` into a file system image at `out`, which is on disk when this returns. Returns
    /// its size in bytes.
    pub(crate) fn build(
        &self,
        tree: &Tree,
        layers: &[File],
        id: &Digest,
        out: &Path,
        progress: &mut dyn FnMut(u64),
    ) -> Result<u64> {
        let features = self.probe()?;
        let mut child = self.spawn(features, id, out)?;
        let stderr = child.stderr.take().map(|pipe| std::thread::spawn(move || read_some(pipe)));
        let written = match child.stdin.take() {
            Some(pipe) => {
                write::write_tree(tree, layers, BufWriter::with_capacity(1 << 20, pipe), progress)
            }
            None => Err(io::Error::other("no pipe to mkfs.erofs")),
        };
        // The pipe is closed now, even in mid-stream, so mkfs.erofs ends in any case.
        let status = child.wait().map_err(|e| Error::io("wait for", "mkfs.erofs".as_ref(), e))?;
        let stderr = stderr.and_then(|thread| thread.join().ok()).unwrap_or_default();
        if !status.success() {
            return Err(failure(status.to_string(), &stderr, out));
        }
        written.map_err(|e| Error::io("read layers for", out, e))?;
        seal(out)
    }

    fn spawn(&self, features: Features, id: &Digest, out: &Path) -> Result<Child> {
        let mut command = self.command()?;
        // Uncompressed, with blocks of 4 KiB, and no end of a file beside its inode: a guest reads
        // each page in place where it is (DAX). An older image, with such ends, serves as well; the
        // guest keeps those files in its page cache. A fixed UUID and time make the same bytes of
        // the same image.
        command.args(["--tar=f", "-b4096", "-Enoinline_data", "-U", &id.uuid()]);
        if features.mkfs_time {
            command.args(["-T0", "--mkfs-time"]);
        }
        command.arg(out);
        // mkfs.erofs spools its input from a pipe. TMPDIR makes it do so beside the image instead
        // of in /tmp.
        if let Some(dir) = out.parent() {
            command.env("TMPDIR", dir);
        }
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().map_err(|e| self.error(e))
    }
}

/// Returns the command that runs `name` of a tool root. Returns `None` if the root has no such
/// command.
pub(crate) fn command_in_root(root: &Path, name: &str) -> Option<Vec<OsString>> {
    let command = root.join("bin").join(name);
    command.exists().then(|| vec![command.into()])
}

fn read_some(mut pipe: impl Read) -> String {
    let mut bytes = Vec::new();
    // A read error cannot be handled, so the text read so far is used.
    let _ = pipe.by_ref().take(MAX_STDERR).read_to_end(&mut bytes);
    let _ = io::copy(&mut pipe, &mut io::sink());
    String::from_utf8_lossy(&bytes).into_owned()
}

fn failure(status: String, stderr: &str, out: &Path) -> Error {
    let dir = out.parent().unwrap_or(out);
    let full =
        rustix::fs::statvfs(dir).is_ok_and(|s| s.f_bavail.saturating_mul(s.f_frsize) < 1 << 20);
    if full || stderr.contains("No space left") {
        return Error::NoSpace { path: dir.to_owned() };
    }
    let line = stderr.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or("no message");
    Error::Mkfs { status, stderr: line.trim().chars().take(300).collect() }
}

/// Checks that the output is an EROFS image, and syncs it to disk. Returns its size in bytes.
fn seal(out: &Path) -> Result<u64> {
    let failed = |e| Error::io("write", out, e);
    let file = File::options().read(true).write(true).open(out).map_err(failed)?;
    let mut magic = [0; 4];
    file.read_exact_at(&mut magic, SUPERBLOCK).map_err(failed)?;
    if u32::from_le_bytes(magic) != MAGIC {
        return Err(Error::Mkfs { status: "success".into(), stderr: "it wrote no EROFS".into() });
    }
    (&file).flush().map_err(failed)?;
    file.sync_all().map_err(failed)?;
    file.metadata().map(|m| m.len()).map_err(failed)
}
