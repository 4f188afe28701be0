//! Reaching the daemon, and starting one where none runs.

use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use slipway_plane_api::{NetworkClient, PlaneClient};
use slipway_runtime::{Config, SandboxClient, v1};
use tonic::transport::Channel;

use crate::args::NodeArgs;

/// How long a daemon may take to serve.
const START: Duration = Duration::from_secs(20);
/// How long to wait before another start, when the last one left the work to another daemon.
const AGAIN: Duration = Duration::from_millis(200);
/// Between two looks for the daemon that comes after one.
const LOOK: Duration = Duration::from_millis(20);
/// How long a daemon that accepts connections may take to answer; it serves hundreds of starts
/// with one thread.
const ANSWER: Duration = Duration::from_secs(30);
/// A daemon's log of more bytes is moved to `daemon.log.1` when the next daemon starts.
const LARGEST_LOG: u64 = 8 << 20;
/// Largest message either way, bytes.
const LARGEST: usize = 16 << 20;

/// The settings that the command line's options make of the files.
pub fn config(args: &NodeArgs) -> Result<Config> {
    // Without settings of its own a node has the defaults; a file that was asked for is not one.
    let asked = args.config.as_path() != Path::new(slipway_runtime::config::CONFIG_FILE);
    if asked && !args.config.exists() {
        bail!("there is no settings file {}", args.config.display());
    }
    let mut config = Config::load(&args.config)?;
    if let Some(dir) = &args.run_dir {
        config.run_dir = std::path::absolute(dir)?;
    }
    if let Some(dir) = &args.data_dir {
        config.data_dir = std::path::absolute(dir)?;
    }
    if let Some(tools) = std::env::var_os("SLIPWAY_TOOLS") {
        config.tools_dir = tools.into();
    }
    Ok(config)
}

/// Connects to the node's sandboxes; starts a daemon where none runs.
pub async fn connect(args: &NodeArgs, config: &Config) -> Result<SandboxClient> {
    Ok(sandboxes(channel(args, config).await?))
}

/// Connects to the node's plane; starts a daemon where none runs.
pub async fn connect_plane(args: &NodeArgs, config: &Config) -> Result<PlaneClient> {
    Ok(PlaneClient::new(channel(args, config).await?))
}

/// Connects to the node's networks; starts a daemon where none runs.
pub async fn connect_networks(args: &NodeArgs, config: &Config) -> Result<NetworkClient> {
    Ok(NetworkClient::new(channel(args, config).await?))
}

fn sandboxes(channel: Channel) -> SandboxClient {
    SandboxClient::new(channel)
        .max_decoding_message_size(LARGEST)
        .max_encoding_message_size(LARGEST)
}

/// A channel to the node's daemon; starts one that ends when it is idle where none runs.
async fn channel(args: &NodeArgs, config: &Config) -> Result<Channel> {
    if let Some(channel) = try_connect(config).await? {
        return Ok(channel);
    }
    need_root("starting the node's daemon (it makes control groups and runs VMMs as other users)")?;
    let mut starting = Starting::begin(args, config)?;
    let begun = Instant::now();
    while begun.elapsed() < START {
        if let Some(channel) = try_connect(config).await? {
            starting.reap_later();
            return Ok(channel);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        if starting.left_it_to_another()? && try_connect(config).await?.is_none() {
            // The other one still starts, or is on its way out and serves nobody any more.
            tokio::time::sleep(AGAIN).await;
            starting = Starting::begin(args, config)?;
        }
    }
    bail!("the daemon did not serve within {} s; {}", START.as_secs(), starting.last_words())
}

/// None: no daemon answers.
async fn try_connect(config: &Config) -> Result<Option<Channel>> {
    let socket = config.socket();
    if let Err(error) = rustix::fs::access(&socket, rustix::fs::Access::WRITE_OK) {
        return match error {
            rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR => Ok(None),
            rustix::io::Errno::ACCESS => need_root("talking to the node's daemon").map(|()| None),
            other => Err(other).with_context(|| format!("cannot reach {}", socket.display())),
        };
    }
    let Ok(channel) = slipway_plane_api::connect(&socket).await else { return Ok(None) };
    // A daemon that is on its way out still accepts for a moment; asking it something tells.
    let mut client = sandboxes(channel.clone());
    match tokio::time::timeout(ANSWER, client.status(v1::Empty {})).await {
        Ok(Ok(status)) => is_the_one(config, status.get_ref()).map(|()| Some(channel)),
        Ok(Err(_)) => Ok(None),
        Err(_) => {
            let (socket, limit) = (socket.display(), ANSWER.as_secs());
            bail!("the daemon at {socket} does not answer within {limit} s; is it stopped?")
        }
    }
}

/// Fails when the daemon at this socket keeps its things elsewhere: what this command makes would
/// not be where it was asked for.
fn is_the_one(config: &Config, status: &v1::StatusReply) -> Result<()> {
    let (theirs, ours) = (Path::new(&status.data_dir), config.data_dir.as_path());
    let same = theirs == ours
        || theirs.canonicalize().ok().is_some_and(|path| ours.canonicalize().ok() == Some(path));
    if same {
        return Ok(());
    }
    bail!(
        "the daemon at {} (process {}) has its data in {}, not in {}; give each data directory a \
         run directory of its own (--run-dir)",
        config.socket().display(),
        status.pid,
        theirs.display(),
        ours.display()
    )
}

/// Fails with a hint when this user is not root.
pub fn need_root(what: &str) -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    bail!("{what} needs root; try again with sudo")
}

/// A daemon that was started and is to outlive this command.
struct Starting {
    child: Child,
    log: PathBuf,
    /// Where in the log this daemon's words begin.
    from: u64,
}

impl Starting {
    fn begin(args: &NodeArgs, config: &Config) -> Result<Self> {
        let log = config.daemon_log();
        std::fs::create_dir_all(&config.data_dir)
            .with_context(|| format!("cannot create {}", config.data_dir.display()))?;
        rotate(&log);
        let file = OpenOptions::new().create(true).append(true).open(&log);
        let file = file.with_context(|| format!("cannot write {}", log.display()))?;
        let from = file.metadata()?.len();
        let child = Command::new(std::env::current_exe()?)
            .args(["daemon", "--ends-when-idle", "--config"])
            .arg(std::path::absolute(&args.config)?)
            .arg("--run-dir")
            .arg(&config.run_dir)
            .arg("--data-dir")
            .arg(&config.data_dir)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            // A group of its own: ^C at this terminal is not for it.
            .process_group(0)
            .spawn()
            .context("cannot start the daemon")?;
        Ok(Self { child, log, from })
    }

    /// Fails with the daemon's own words when it has given up. Of two that start at once, one
    /// leaves the work to the other and ends well: true then.
    fn left_it_to_another(&mut self) -> Result<bool> {
        match self.child.try_wait() {
            Ok(Some(status)) if !status.success() => Err(anyhow!("{}", self.last_words())),
            Ok(Some(_)) => Ok(true),
            _ => Ok(false),
        }
    }

    fn last_words(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let own = text.get(self.from as usize..).unwrap_or_default();
        let own = String::from_utf8_lossy(own);
        match own.lines().rev().find_map(|line| line.strip_prefix("slipway: ")) {
            Some(line) => line.to_owned(),
            None => format!("{} tells more", self.log.display()),
        }
    }

    /// Reaped when it ends before this command does; otherwise init does it.
    fn reap_later(mut self) {
        std::thread::spawn(move || self.child.wait());
    }
}

/// Moves a log that has grown beyond [`LARGEST_LOG`] aside. A daemon that still writes to it goes on
/// there. If it cannot be moved it is appended to.
fn rotate(log: &Path) {
    if log.metadata().is_ok_and(|log| log.len() > LARGEST_LOG) {
        let _ = std::fs::rename(log, log.with_extension("log.1"));
    }
}

/// The daemon went away in the middle of a call.
#[derive(Debug)]
pub struct Lost(String);

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the connection to the daemon broke; its log tells why ({})", self.0)
    }
}

impl std::error::Error for Lost {}

/// The daemon that comes after one that went away, where sandboxes outlive it.
///
/// # Errors
/// None serves in time.
pub async fn next_daemon(config: &Config) -> Result<SandboxClient> {
    let begun = Instant::now();
    while begun.elapsed() < slipway_runtime::RETURN {
        if let Some(channel) = try_connect(config).await? {
            return Ok(sandboxes(channel));
        }
        tokio::time::sleep(LOOK).await;
    }
    bail!(
        "the daemon went away and none came back within {} s; the node's sandboxes go on without it",
        slipway_runtime::RETURN.as_secs()
    )
}

/// A refusal of the daemon's, without the transport's wrapping; [`Lost`] if it is none.
pub fn refused(status: &tonic::Status) -> anyhow::Error {
    // Only what the transport itself says has a source; what the daemon says has none.
    if std::error::Error::source(status).is_some() {
        return Lost(status.message().to_owned()).into();
    }
    match status.message() {
        "" => anyhow!("the daemon: {}", status.code()),
        message => anyhow!("{message}"),
    }
}
