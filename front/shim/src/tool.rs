//! The program `slipway`, which finds, pulls, makes and removes images.
//!
//! Each command is a process, which is killed if it takes too long: a device or a network file
//! system that does not answer would keep it for ever.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use crate::containerd::Mount;
use crate::daemon::{Daemon, PROGRAM};
use crate::mount::{Import, Reader};
use crate::network;

/// The longest run of one `slipway` command. The largest images take minutes.
pub const LIMIT: Duration = Duration::from_secs(1800);
/// The most that is read of what `slipway` prints, bytes.
const MOST_PRINTED: u64 = 16 << 20;
/// The longest message of `slipway` that is passed on, bytes.
const MOST_MESSAGE: usize = 1024;

/// The files that an image is made of.
#[derive(Debug)]
pub enum Input<'a> {
    /// Files that the importer reads where they are, in the words of its argument.
    Named(String),
    /// Folders of layers, the uppermost first, which are mounted as an overlay with these options.
    Overlay(&'a [PathBuf], &'a [String]),
    /// A file system, which is mounted.
    Device(&'a Mount),
}

/// The program `slipway`, as it is called for one daemon.
pub struct Tool {
    program: PathBuf,
    run_dir: PathBuf,
    data_dir: String,
}

impl Tool {
    /// Returns the program for the images in `data_dir`.
    pub fn new(daemon: &Daemon, data_dir: &str) -> Self {
        let (program, run_dir) = (daemon.program().into(), daemon.run_dir().into());
        Self { program, run_dir, data_dir: data_dir.into() }
    }

    /// Returns a program that stands in for `slipway`.
    #[cfg(test)]
    pub fn stand_in(program: &str) -> Self {
        Self { program: program.into(), run_dir: "/run/x".into(), data_dir: "/data".into() }
    }

    /// Returns the digest of the image with this name, which counts as used now. Returns `None` if
    /// there is none.
    ///
    /// # Errors
    /// `slipway` failed.
    pub async fn find(&self, image: &str) -> Result<Option<String>, String> {
        let printed = self.run(self.command(&["image", "touch", image]), &[]).await?;
        Ok(last_line(&printed).ok())
    }

    /// Pulls an image lazily, and returns its digest.
    ///
    /// # Errors
    /// `slipway` failed.
    pub async fn pull_lazily(&self, reference: &str) -> Result<String, String> {
        let command = self.command(&["image", "pull", "--lazy", reference]);
        let pulled = self.run_within(LIMIT, command, &[], network::spawn_on_host).await?;
        last_line(&pulled)
    }

    /// Removes an image.
    ///
    /// # Errors
    /// `slipway` failed.
    pub async fn remove(&self, image: &str) -> Result<(), String> {
        self.run(self.command(&["image", "rm", image]), &[]).await.map(drop)
    }

    /// Makes the image called `image`, and returns its digest. What is to be mounted for it is
    /// mounted in the bundle, where only the importer sees it.
    ///
    /// # Errors
    /// The files cannot be read, or `slipway` failed.
    pub async fn import(
        &self,
        input: &Input<'_>,
        image: &str,
        bundle: &Path,
    ) -> Result<String, String> {
        let target = bundle.join("rootfs");
        let import = match input {
            Input::Named(source) => {
                let command = self.command(&["image", "import", source, image, "--replace"]);
                return last_line(&self.run(command, &[]).await?);
            }
            Input::Overlay(layers, options) => {
                let reader = self.reader(&target, image)?;
                Import::overlay(target, layers, options, reader)
            }
            Input::Device(mount) => {
                let reader = self.reader(&target, image)?;
                Import::device(target, mount, reader)
            }
        };
        let this = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(this);
        command.arg("import");
        let import = serde_json::to_vec(&import).map_err(|error| error.to_string())?;
        last_line(&self.run(command, &import).await?)
    }

    /// Returns the command that makes the image called `image` of the folder `target`.
    fn reader(&self, target: &Path, image: &str) -> Result<Reader, String> {
        let words = ["image", "import", &folder_source(target)?, image, "--replace"];
        Ok(Reader { program: self.program.clone(), arguments: self.arguments(&words) })
    }

    fn arguments(&self, words: &[&str]) -> Vec<String> {
        let run_dir = self.run_dir.to_string_lossy().into_owned();
        let node = ["--run-dir".to_owned(), run_dir, "--data-dir".into(), self.data_dir.clone()];
        words.iter().map(|word| (*word).to_owned()).chain(node).collect()
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(self.arguments(words));
        command
    }

    /// Runs a command with `input`, and returns what it prints.
    async fn run(&self, command: Command, input: &[u8]) -> Result<String, String> {
        self.run_within(LIMIT, command, input, Command::spawn).await
    }

    /// Runs a command, which `spawn` starts, as [`Tool::run`] does. It is killed if it takes longer
    /// than `limit`.
    async fn run_within(
        &self,
        limit: Duration,
        mut command: Command,
        input: &[u8],
        spawn: impl FnOnce(&mut Command) -> std::io::Result<Child>,
    ) -> Result<String, String> {
        let program = PathBuf::from(command.as_std().get_program());
        let shown = program.display();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = spawn(command.kill_on_drop(true)).map_err(|error| {
            let is_tool = program == self.program;
            let hint =
                if is_tool { format!("; {PROGRAM} names another one") } else { String::new() };
            format!("cannot run {shown}: {error}{hint}")
        })?;
        // The child is killed when it goes with this future.
        let Ok(ended) = tokio::time::timeout(limit, feed_and_wait(child, input)).await else {
            let limit = limit.as_secs();
            return Err(format!(
                "the root becomes no image: {shown} was killed after {limit} s: look whether the \
                 file system of its layers answers"
            ));
        };
        let failed = |error: std::io::Error| {
            format!("the root becomes no image: cannot wait for {shown}: {error}")
        };
        let (status, printed, complaint) = ended.map_err(failed)?;
        if status.success() {
            return Ok(String::from_utf8_lossy(&printed).into_owned());
        }
        let complaint = String::from_utf8_lossy(&complaint);
        let last = complaint.trim().lines().last().unwrap_or("it printed nothing");
        let last = last.strip_prefix("slipway: ").unwrap_or(last);
        Err(format!("the root becomes no image: {}", slipway_printable::line(last, MOST_MESSAGE)))
    }
}

/// Gives a child `input`, and waits for its end. Returns its status, and what it wrote to standard
/// output and to standard error.
async fn feed_and_wait(
    mut child: Child,
    input: &[u8],
) -> std::io::Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    if let Some(mut stdin) = child.stdin.take() {
        // A program that reads no input says itself what is wrong.
        let _ = stdin.write_all(input).await;
    }
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (Some(stdout), Some(stderr)) = (stdout, stderr) else {
        return Err(std::io::Error::other("it has no pipes"));
    };
    let (printed, complaint) = tokio::try_join!(read_bounded(stdout), read_bounded(stderr))?;
    Ok((child.wait().await?, printed, complaint))
}

/// Reads a pipe up to [`MOST_PRINTED`] and closes it, so that a program which prints more ends and
/// does not wait.
async fn read_bounded(pipe: impl AsyncRead + Unpin) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    pipe.take(MOST_PRINTED).read_to_end(&mut bytes).await?;
    Ok(bytes)
}

/// Names a folder for the importer.
///
/// # Errors
/// One line: the path is not UTF-8.
pub fn folder_source(path: &Path) -> Result<String, String> {
    Ok(format!("dir:{}", utf8(path)?))
}

/// Names EROFS files of layers for the importer, which reads them without mounting them.
///
/// # Errors
/// One line: a path is not UTF-8, or not absolute, or has a colon.
pub fn layer_source(layers: &[PathBuf]) -> Result<String, String> {
    let mut list = String::from("layers");
    for layer in layers {
        let path = utf8(layer)?;
        if !path.starts_with('/') {
            return Err(format!("a layer's path is not absolute: {path}"));
        }
        if path.contains(':') {
            return Err(format!("a layer's path has a colon, which parts layers: {path}"));
        }
        list.push(':');
        list.push_str(path);
    }
    Ok(list)
}

/// Returns a path as text, as the importer's arguments have it.
fn utf8(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| format!("a layer's path is not UTF-8: {}", path.display()))
}

fn last_line(printed: &str) -> Result<String, String> {
    let line = printed.trim().lines().last();
    line.map(str::to_owned).ok_or_else(|| "`slipway image` printed no digest".to_owned())
}

#[cfg(test)]
#[path = "tests/tool.rs"]
mod tests;
