//! Connects to the daemon, and starts one if none runs.

use std::fs::OpenOptions;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use indicatif::ProgressBar;
use slipway_plane_api::{NetworkClient, PlaneClient, VfClient};
use slipway_runtime::host_copies::LARGEST_REQUEST;
use slipway_runtime::record::Record;
use slipway_runtime::{Config, SandboxClient, SnapshotClient, TemplateClient, v1};
use tonic::transport::Channel;

use crate::args::NodeArgs;
use crate::progress;

/// The longest time that a daemon which runs may take until it serves.
const START: Duration = Duration::from_secs(600);
/// The longest wait for a daemon while none runs, and none that this command starts may serve.
const ABSENCE: Duration = Duration::from_secs(20);
/// The time after which a command shows on a terminal that it waits for a daemon.
const SHOWN: Duration = Duration::from_secs(2);
/// The time before another daemon is started, if the last one ended in favour of another.
const AGAIN: Duration = Duration::from_millis(200);
/// The time between two attempts to reach the next daemon.
const LOOK: Duration = Duration::from_millis(20);
/// The longest time that a daemon which accepts connections may take to answer; it serves hundreds
/// of starts with one thread.
const ANSWER: Duration = Duration::from_secs(30);
/// The size of the daemon's log in bytes above which the next daemon's start moves it to
/// `daemon.log.1`.
const LARGEST_LOG: u64 = 8 << 20;
/// The size of the largest message of the daemon, bytes.
const LARGEST: usize = 16 << 20;

/// Reads the settings and applies the command line's options to them.
pub fn config(args: &NodeArgs) -> Result<Config> {
    // The default file may be missing, but not one that the user named.
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
    if let Some(vmm) = std::env::var("SLIPWAY_VMM").ok().filter(|vmm| !vmm.is_empty()) {
        config.vmm = vmm;
    }
    Ok(config)
}

/// Connects to the node's sandboxes. Starts a daemon if none runs.
pub async fn connect(args: &NodeArgs, config: &Config) -> Result<SandboxClient> {
    Ok(sandboxes(channel(args, config).await?))
}

/// Connects to the node's plane. Starts a daemon if none runs.
pub async fn connect_plane(args: &NodeArgs, config: &Config) -> Result<PlaneClient> {
    Ok(PlaneClient::new(channel(args, config).await?))
}

/// Connects to the node's networks. Starts a daemon if none runs.
pub async fn connect_networks(args: &NodeArgs, config: &Config) -> Result<NetworkClient> {
    Ok(NetworkClient::new(channel(args, config).await?))
}

/// Connects to the node's virtual functions. Starts a daemon if none runs.
pub async fn connect_functions(args: &NodeArgs, config: &Config) -> Result<VfClient> {
    Ok(VfClient::new(channel(args, config).await?))
}

/// Connects to the node's templates. Starts a daemon if none runs.
pub async fn connect_templates(args: &NodeArgs, config: &Config) -> Result<TemplateClient> {
    Ok(TemplateClient::new(channel(args, config).await?))
}

/// Connects to the node's snapshots. Starts a daemon if none runs.
pub async fn connect_snapshots(args: &NodeArgs, config: &Config) -> Result<SnapshotClient> {
    Ok(SnapshotClient::new(channel(args, config).await?))
}

fn sandboxes(channel: Channel) -> SandboxClient {
    SandboxClient::new(channel)
        .max_decoding_message_size(LARGEST)
        .max_encoding_message_size(LARGEST_REQUEST)
}

/// Returns a channel to the node's daemon. If none runs, starts one that ends when it is idle.
async fn channel(args: &NodeArgs, config: &Config) -> Result<Channel> {
    if let Some(channel) = try_connect(config).await? {
        return Ok(channel);
    }
    need_root("starting the node's daemon (it makes control groups and runs VMMs as other users)")?;
    let mut shown = None;
    let started = start(args, config, &mut shown).await;
    if let Some(bar) = shown {
        bar.finish_and_clear();
    }
    started
}

/// Starts a daemon and waits until it, or another one, serves. Puts what it shows of a long wait
/// into `shown`.
async fn start(
    args: &NodeArgs,
    config: &Config,
    shown: &mut Option<ProgressBar>,
) -> Result<Channel> {
    let mut starting = Starting::begin(args, config)?;
    let mut patience = Patience::begin(Instant::now());
    loop {
        if let Some(channel) = try_connect(config).await? {
            starting.reap_later();
            return Ok(channel);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
        if patience.begun.elapsed() >= SHOWN {
            shown.get_or_insert_with(|| progress::waiting("the node's daemon starts"));
        }
        if starting.left_it_to_another()? && try_connect(config).await?.is_none() {
            // The other daemon is still starting, or is ending and does not serve any more.
            if let Some(limit) = patience.left(Instant::now(), daemon_runs(config)) {
                return Err(starting.too_late(limit));
            }
            tokio::time::sleep(AGAIN).await;
            starting = Starting::begin(args, config)?;
        }
        if let Some(limit) = patience.is_over(Instant::now()) {
            return Err(starting.too_late(limit));
        }
    }
}

/// Returns whether a daemon has the data directory, whether it serves or not. Where the kernel does
/// not show who has a lock ([`slipway_lock::holders`]), it seems that none has.
fn daemon_runs(config: &Config) -> bool {
    !slipway_lock::holders(&config.lock()).0.is_empty()
}

/// The time that a command waits for a daemon. A daemon may take long to serve on a busy machine,
/// and is waited for while it runs.
struct Patience {
    begun: Instant,
    /// The time since which daemons of this command end in favour of another, and none runs.
    absent: Option<Instant>,
}

impl Patience {
    fn begin(now: Instant) -> Self {
        Self { begun: now, absent: None }
    }

    /// Notes that this command's daemon has ended in favour of another one, and whether one runs.
    /// Returns the limit that has passed, or `None` if the command starts one more.
    fn left(&mut self, now: Instant, runs: bool) -> Option<Duration> {
        self.absent = (!runs).then(|| self.absent.unwrap_or(now));
        self.absent.is_some_and(|since| now - since >= ABSENCE).then_some(ABSENCE)
    }

    /// Returns the limit that has passed while this command's daemon lives, which may be the one
    /// that will serve. Returns `None` if the command still waits.
    fn is_over(&self, now: Instant) -> Option<Duration> {
        (now - self.begun >= START).then_some(START)
    }
}

/// Connects to the daemon. Returns `None` if no daemon answers.
pub async fn try_connect(config: &Config) -> Result<Option<Channel>> {
    let found = connect_any(config).await?;
    found.map(|(channel, status)| is_the_one(config, &status).map(|()| channel)).transpose()
}

/// Connects to the daemon at the socket, whatever its data directory. Returns it with its status,
/// or `None` if no daemon answers.
pub async fn connect_any(config: &Config) -> Result<Option<(Channel, v1::StatusReply)>> {
    let socket = config.socket();
    if let Err(error) = rustix::fs::access(&socket, rustix::fs::Access::WRITE_OK) {
        return match error {
            rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR => Ok(None),
            rustix::io::Errno::ACCESS => need_root("talking to the node's daemon").map(|()| None),
            other => Err(other).with_context(|| format!("cannot reach {}", socket.display())),
        };
    }
    let answer = async {
        let channel = slipway_plane_api::connect(&socket).await.ok()?;
        // A daemon that is ending accepts connections for a moment, so a request is the only sure
        // test.
        let status = sandboxes(channel.clone()).status(v1::Empty {}).await.ok()?;
        Some((channel, status.into_inner()))
    };
    match tokio::time::timeout(ANSWER, answer).await {
        Ok(answered) => Ok(answered),
        Err(_) => {
            let (socket, limit) = (socket.display(), ANSWER.as_secs());
            bail!("the daemon at {socket} does not answer within {limit} s; is it stopped?")
        }
    }
}

/// Fails if the daemon at this socket has another data directory: this command's results would be
/// elsewhere than the user expects.
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

/// Fails with a hint if this user is not root.
pub fn need_root(what: &str) -> Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    bail!("{what} needs root; try again with sudo")
}

/// A daemon that this command started and that is to outlive it.
struct Starting {
    child: Child,
    log: PathBuf,
    /// The position in the log where this daemon's output begins.
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
        let child = Command::new(slipway_bench::slipway()?)
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
            // Its own process group: ^C at this terminal does not reach it.
            .process_group(0)
            .spawn()
            .context("cannot start the daemon")?;
        Ok(Self { child, log, from })
    }

    /// Returns whether the daemon ended in favour of another one that started at the same time.
    /// Fails with the daemon's own message if the daemon failed.
    fn left_it_to_another(&mut self) -> Result<bool> {
        match self.child.try_wait() {
            Ok(Some(status)) if !status.success() => Err(anyhow!("{}", self.last_words())),
            Ok(Some(_)) => Ok(true),
            _ => Ok(false),
        }
    }

    /// Returns the error of a command that has waited for `limit`.
    fn too_late(&self, limit: Duration) -> anyhow::Error {
        anyhow!("the daemon did not serve within {} s; {}", limit.as_secs(), self.last_words())
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

    /// Waits for the daemon in a thread, which reaps it if it ends before this command. Otherwise
    /// init reaps it.
    fn reap_later(mut self) {
        std::thread::spawn(move || self.child.wait());
    }
}

/// Moves a log that has grown beyond [`LARGEST_LOG`] aside. A running daemon keeps writing to the
/// moved file. If the move fails, the log stays and grows.
fn rotate(log: &Path) {
    if log.metadata().is_ok_and(|log| log.len() > LARGEST_LOG) {
        let _ = std::fs::rename(log, log.with_extension("log.1"));
    }
}

/// The error of a call during which the daemon went away.
#[derive(Debug)]
pub struct Lost(String);

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the connection to the daemon broke; its log tells why ({})", self.0)
    }
}

impl std::error::Error for Lost {}

/// Waits for the daemon that follows one that went away, where sandboxes outlive their daemon.
///
/// # Errors
/// If no daemon serves in time.
pub async fn next_daemon(config: &Config) -> Result<SandboxClient> {
    let begun = Instant::now();
    while begun.elapsed() < slipway_runtime::RETURN {
        if let Some(channel) = try_connect(config).await? {
            return Ok(sandboxes(channel));
        }
        tokio::time::sleep(LOOK).await;
    }
    bail!(
        "the daemon went away and none came back within {} s; the node's sandboxes go on without \
         it",
        slipway_runtime::RETURN.as_secs()
    )
}

/// Converts a status to the daemon's refusal, without the transport's wrapping, or to [`Lost`] if
/// it is none.
pub fn refused(status: tonic::Status) -> anyhow::Error {
    // The transport's own errors have a source; the daemon's have none.
    if std::error::Error::source(&status).is_some() {
        return Lost(status.message().to_owned()).into();
    }
    match status.message() {
        "" => anyhow!("the daemon: {}", status.code()),
        message => anyhow!("{message}"),
    }
}

/// Returns the daemon's answer to a call.
///
/// # Errors
/// The daemon refused, or went away ([`refused`]).
pub fn answer<T>(reply: Result<tonic::Response<T>, tonic::Status>) -> Result<T> {
    reply.map(tonic::Response::into_inner).map_err(refused)
}

/// Returns the record of a sandbox, by its name or id.
pub async fn record(client: &mut SandboxClient, name: &str) -> Result<Record> {
    let request = v1::Name { name: name.to_owned() };
    Ok(serde_json::from_str(&answer(client.inspect(request).await)?.json)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_waited_for_while_it_runs() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut patience = Patience::begin(begun);
        assert_eq!(patience.is_over(at(599)), None);
        assert_eq!(patience.is_over(at(600)), Some(START));
        // Another command's daemon runs, and then no daemon.
        assert_eq!(patience.left(at(5), true), None);
        assert_eq!(patience.is_over(at(300)), None);
        assert_eq!(patience.left(at(300), false), None);
        assert_eq!(patience.left(at(319), false), None);
        assert_eq!(patience.left(at(320), false), Some(ABSENCE));
        assert_eq!(patience.left(at(320), true), None);
    }

    #[test]
    fn a_daemon_of_the_command_is_waited_for_after_one_that_left() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut patience = Patience::begin(begun);
        // The first one leaves to a daemon that ends. The second one takes long to serve.
        assert_eq!(patience.left(at(1), false), None);
        assert_eq!(patience.is_over(at(100)), None);
        assert_eq!(patience.is_over(at(600)), Some(START));
    }
}
