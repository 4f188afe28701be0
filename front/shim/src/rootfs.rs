//! A container's root as an image of Slipway's.
//!
//! containerd gives a root as mounts: most often an overlay of read-only layers below an empty
//! writable one, which no guest needs, since each sandbox has a writable layer of its own. So an
//! image is made of the layers alone, once for each chain of layers, and found again by a key of
//! their identities ([`crate::content`]). A root with content of its own becomes an image for its
//! container alone, which goes with it. Layers of a lazily pulled image, which are not here, are an
//! image already ([`crate::lazy`]).
//!
//! The program `slipway` makes the images. What must be mounted for it is mounted read-only in a
//! mount namespace of the importer's own ([`crate::mount`]), which goes with that process: nothing
//! stays mounted, whoever is killed.

use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use sha2::{Digest, Sha256};
use slipway_lock::Lock;
use slipway_sandbox_api::{images, v1};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use crate::containerd::Mount;
use crate::content::content;
use crate::daemon::{Daemon, failure};
use crate::layers::Source;
use crate::lazy::{self, Image};
use crate::mount::Import;
use crate::ttrpc::Failure;

/// The environment variable that names the program `slipway`.
const PROGRAM: &str = "SLIPWAY_PROGRAM";
/// The file in a bundle with the name of the image that is its container's alone.
const PRIVATE: &str = "slipway-image";
/// The longest time that a program may take to make an image, or to do anything else: a device that
/// does not answer would keep it for ever. The largest images take minutes.
const LIMIT: Duration = Duration::from_secs(1800);
/// The longest time that a root waits for another container's import of the same layers: longer
/// than [`LIMIT`], after which the next one tries.
const PATIENCE: Duration = Duration::from_secs(1860);
/// The most that is read of what `slipway` prints, bytes.
const MOST_PRINTED: u64 = 16 << 20;
/// The longest message of `slipway` that is passed on, bytes.
const MOST_MESSAGE: usize = 1024;

/// A root that is wanted.
pub struct Wanted<'a> {
    /// Its mounts.
    pub mounts: &'a [Mount],
    /// Its path in the container's configuration, which counts without mounts.
    pub path: Option<&'a str>,
    /// The bundle.
    pub bundle: &'a Path,
    /// A name that no other container of the node has.
    pub owner: &'a str,
    /// The name of the container's image, as CRI tells it.
    pub image_name: Option<&'a str>,
}

/// A root that is in the cache of images.
#[derive(Debug)]
pub struct Root {
    /// The image's name.
    pub image: String,
    /// The image's digest.
    pub digest: String,
    /// Set if it is this container's alone.
    pub is_private: bool,
}

/// Makes an image of a root, or finds it.
///
/// # Errors
/// The root is of a kind that cannot be read, or `slipway` failed.
pub async fn prepare(daemon: &Daemon, wanted: &Wanted<'_>) -> Result<Root, Failure> {
    let path = wanted.path.filter(|path| !path.is_empty());
    let content = content(wanted.mounts, path.map(|path| wanted.bundle.join(path)))?;
    let mut client = daemon.connect().await?;
    let status = client.status(v1::Empty {}).await.map_err(|status| failure(&status))?;
    let tool = Tool::new(daemon, &status.get_ref().data_dir);
    if let Source::Lazy(layers) = &content.source {
        let (image, digest) = tool.lazy(layers, wanted.image_name).await?;
        return Ok(Root { image, digest, is_private: false });
    }
    let Some(key) = &content.key else {
        let image = images::of_container(&short_digest(wanted.owner));
        std::fs::write(wanted.bundle.join(PRIVATE), &image).map_err(|error| error.to_string())?;
        let digest = tool.import(&content.source, &image, wanted.bundle).await?;
        return Ok(Root { image, digest, is_private: true });
    };
    let image = images::of_layers(key);
    let lock = daemon.run_dir().join("containerd").join(format!("{key}.lock"));
    let digest = tool.find_or_import(&content.source, &image, wanted.bundle, lock).await?;
    Ok(Root { image, digest, is_private: false })
}

/// Returns the name of the image that is a container's alone, from its bundle.
pub fn private_of(bundle: &Path) -> Option<String> {
    std::fs::read_to_string(bundle.join(PRIVATE)).ok().filter(|name| !name.is_empty())
}

/// Removes an image that was a container's alone.
///
/// # Errors
/// `slipway` failed. That there is no such image is no error.
pub async fn remove_private(daemon: &Daemon, image: &str) -> Result<(), String> {
    let mut client = daemon.connect().await.map_err(|failure| failure.message)?;
    let status = client.status(v1::Empty {}).await.map_err(|s| s.message().to_owned())?;
    let tool = Tool::new(daemon, &status.get_ref().data_dir);
    if tool.find(image).await?.is_some() {
        tool.run(tool.command(&["image", "rm", image]), &[]).await?;
    }
    Ok(())
}

fn short_digest(text: impl AsRef<[u8]>) -> String {
    hex::encode(&Sha256::digest(text)[..16])
}

/// The lock of the image of one key. Its file is removed when the image is there, or could not be
/// made.
struct ImageLock {
    path: PathBuf,
    /// Released after the file was removed: who waits for it finds that it is not at its path any
    /// more, and makes another one.
    _lock: Lock,
}

impl ImageLock {
    /// Takes the lock at `path`, whose directory is made if it is missing.
    async fn take(path: PathBuf) -> Result<Self, String> {
        let taken = tokio::task::spawn_blocking(move || -> Result<Self, String> {
            let dir = path.parent().unwrap_or(Path::new("/"));
            std::fs::create_dir_all(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
            let lock = Lock::within(&path, PATIENCE).map_err(|error| error.to_string())?;
            Ok(Self { path, _lock: lock })
        });
        taken.await.map_err(|error| error.to_string())?
    }
}

impl Drop for ImageLock {
    fn drop(&mut self) {
        // A lock file that cannot be removed is used by the next import of the image.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The program `slipway`.
struct Tool {
    program: PathBuf,
    run_dir: PathBuf,
    data_dir: String,
}

impl Tool {
    fn new(daemon: &Daemon, data_dir: &str) -> Self {
        Self { program: program(), run_dir: daemon.run_dir().into(), data_dir: data_dir.into() }
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

    /// Returns the digest of the image with this name, which counts as used now. Returns `None` if
    /// there is none.
    async fn find(&self, image: &str) -> Result<Option<String>, String> {
        let printed = self.run(self.command(&["image", "touch", image]), &[]).await?;
        Ok(last_line(&printed).ok())
    }

    /// Returns the digest of an image. One that is not there is made, under the lock at `lock`.
    async fn find_or_import(
        &self,
        source: &Source,
        image: &str,
        bundle: &Path,
        lock: PathBuf,
    ) -> Result<String, String> {
        if let Some(digest) = self.find(image).await? {
            return Ok(digest);
        }
        let _lock = ImageLock::take(lock).await?;
        match self.find(image).await? {
            Some(digest) => Ok(digest),
            None => self.import(source, image, bundle).await,
        }
    }

    /// Finds the image of layers that are not on the host, or has it pulled. Returns its name and
    /// its digest.
    async fn lazy(&self, layers: &Image, name: Option<&str>) -> Result<(String, String), String> {
        let reference = lazy::reference(layers, name)?;
        // A tag is asked for again: the node's image by this name may be an earlier one.
        if reference.contains('@')
            && let Some(digest) = self.find(reference).await?
        {
            return Ok((reference.to_owned(), digest));
        }
        let words = ["image", "pull", "--lazy", reference];
        let digest = last_line(&self.run(self.command(&words), &[]).await?)?;
        lazy::check_pulled(layers, reference, &digest)?;
        Ok((reference.to_owned(), digest))
    }

    /// Makes an image, and returns its digest.
    async fn import(&self, source: &Source, image: &str, bundle: &Path) -> Result<String, String> {
        let target = bundle.join("rootfs");
        let import = |layers: &[PathBuf], kind: &str, device: &str, options: &[String]| {
            let words = ["image", "import", &from(&target)?, image, "--replace"];
            Ok::<_, String>(Import {
                target: target.clone(),
                layers: layers.to_vec(),
                kind: kind.to_owned(),
                device: device.to_owned(),
                options: options.to_vec(),
                program: self.program.clone(),
                arguments: self.arguments(&words),
            })
        };
        let import = match source {
            Source::Folder(path) => {
                let words = ["image", "import", &from(path)?, image, "--replace"];
                return last_line(&self.run(self.command(&words), &[]).await?);
            }
            Source::Erofs(layers) => {
                let words = ["image", "import", &of_files(layers)?, image, "--replace"];
                return last_line(&self.run(self.command(&words), &[]).await?);
            }
            Source::Layers(layers, options) => import(layers, "overlay", "overlay", options)?,
            Source::Device(mount) => import(&[], &mount.r#type, &mount.source, &mount.options)?,
            Source::Lazy(image) => {
                return Err(format!("{} is pulled, not imported", image.reference));
            }
        };
        let this = std::env::current_exe().map_err(|error| error.to_string())?;
        let mut command = Command::new(this);
        command.arg("import");
        let input = serde_json::to_vec(&import).map_err(|error| error.to_string())?;
        last_line(&self.run(command, &input).await?)
    }

    /// Runs a command with `input`, and returns what it prints.
    async fn run(&self, command: Command, input: &[u8]) -> Result<String, String> {
        self.run_within(LIMIT, command, input).await
    }

    /// Runs a command as [`Tool::run`] does. It is killed if it takes longer than `limit`.
    async fn run_within(
        &self,
        limit: Duration,
        mut command: Command,
        input: &[u8],
    ) -> Result<String, String> {
        let program = PathBuf::from(command.as_std().get_program());
        let shown = program.display();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.kill_on_drop(true).spawn().map_err(|error| {
            let is_tool = program == self.program;
            let hint =
                if is_tool { format!("; {PROGRAM} names another one") } else { String::new() };
            format!("cannot run {shown}: {error}{hint}")
        })?;
        // The child is killed when it goes with this future.
        let Ok(ended) = tokio::time::timeout(limit, end(child, input)).await else {
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
async fn end(mut child: Child, input: &[u8]) -> std::io::Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    if let Some(mut stdin) = child.stdin.take() {
        // A program that reads no input says itself what is wrong.
        let _ = stdin.write_all(input).await;
    }
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let (Some(stdout), Some(stderr)) = (stdout, stderr) else {
        return Err(std::io::Error::other("it has no pipes"));
    };
    let (printed, complaint) = tokio::try_join!(read(stdout), read(stderr))?;
    Ok((child.wait().await?, printed, complaint))
}

/// Reads a pipe up to [`MOST_PRINTED`] and closes it, so that a program which prints more ends and
/// does not wait.
async fn read(pipe: impl AsyncRead + Unpin) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    pipe.take(MOST_PRINTED).read_to_end(&mut bytes).await?;
    Ok(bytes)
}

/// Names a folder for the importer.
fn from(path: &Path) -> Result<String, String> {
    Ok(format!("dir:{}", utf8(path)?))
}

/// Returns a path as text, as the importer's arguments have it.
fn utf8(path: &Path) -> Result<&str, String> {
    path.to_str().ok_or_else(|| format!("a layer's path is not UTF-8: {}", path.display()))
}

/// Names layers for the importer, which reads them without mounting them.
fn of_files(layers: &[PathBuf]) -> Result<String, String> {
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

/// Returns the program `slipway`: the one that is named, the one beside this program, or the one
/// in the path.
fn program() -> PathBuf {
    if let Some(named) = std::env::var_os(PROGRAM).filter(|named| !named.is_empty()) {
        return named.into();
    }
    let beside = std::env::current_exe().ok().map(|this| this.with_file_name("slipway"));
    beside.filter(|path| path.exists()).unwrap_or_else(|| "slipway".into())
}

fn last_line(printed: &str) -> Result<String, String> {
    let line = printed.trim().lines().last();
    line.map(str::to_owned).ok_or_else(|| "`slipway image` printed no digest".to_owned())
}

#[cfg(test)]
#[path = "tests/rootfs.rs"]
mod tests;
