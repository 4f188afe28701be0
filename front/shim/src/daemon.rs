//! The node's daemon, as the shim calls it.

use std::error::Error as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use slipway_sandbox_api::{SandboxClient, SnapshotClient, TemplateClient, functions, v1};
use tonic::transport::Channel;
use tonic::{Code, Status};

use crate::ttrpc::Failure;

/// The environment variable with the daemon's run directory.
const RUN_DIR: &str = "SLIPWAY_RUN_DIR";
/// The environment variable that names the program `slipway`.
pub const PROGRAM: &str = "SLIPWAY_PROGRAM";
/// The daemon's run directory without [`RUN_DIR`].
const DEFAULT_RUN_DIR: &str = "/run/slipway";
/// The environment variable with the socket of the node's socket engine.
const ENGINE: &str = "SLIPWAY_SOCKET";
/// The name of that socket in the run directory without [`ENGINE`].
const DEFAULT_ENGINE: &str = "socket.sock";
/// The longest time that a call waits for the next daemon. containerd waits 5 s for some calls.
pub const REPLACEMENT: Duration = Duration::from_secs(4);
/// The time between two attempts to reach the next daemon.
const AGAIN: Duration = Duration::from_millis(100);
/// The size of the largest message of the daemon's, bytes.
const LARGEST: usize = 4 << 20;

/// The node's daemon, by its run directory.
#[derive(Clone, Debug)]
pub struct Daemon {
    run_dir: PathBuf,
    program: PathBuf,
    engine: PathBuf,
}

impl Daemon {
    /// Finds the run directory and the program from the environment.
    pub fn from_environment() -> Self {
        let named = std::env::var_os(RUN_DIR).filter(|dir| !dir.is_empty());
        let run_dir = named.map_or_else(|| DEFAULT_RUN_DIR.into(), PathBuf::from);
        let named = std::env::var_os(ENGINE).filter(|socket| !socket.is_empty());
        let engine = named.map_or_else(|| run_dir.join(DEFAULT_ENGINE), PathBuf::from);
        Self { run_dir, program: program(), engine }
    }

    /// Makes the daemon with this run directory, in which the program is too.
    #[cfg(test)]
    pub fn at(run_dir: &std::path::Path) -> Self {
        let (program, engine) = (run_dir.join("slipway"), run_dir.join(DEFAULT_ENGINE));
        Self { run_dir: run_dir.to_owned(), program, engine }
    }

    /// Returns the run directory.
    pub fn run_dir(&self) -> &std::path::Path {
        &self.run_dir
    }

    /// Returns the program `slipway`, which makes images.
    pub fn program(&self) -> &std::path::Path {
        &self.program
    }

    /// Returns the socket of the node's socket engine.
    pub fn socket_engine(&self) -> &std::path::Path {
        &self.engine
    }

    /// Returns the directory of the files that stand for functions of pools.
    pub fn functions(&self) -> String {
        functions::files(&self.run_dir).to_string_lossy().into_owned()
    }

    /// Returns the daemon's socket.
    pub fn socket(&self) -> PathBuf {
        self.run_dir.join("slipway.sock")
    }

    /// Returns whether a keeper waits for the next daemon, so that sandboxes go on without one.
    pub fn is_kept(&self) -> bool {
        slipway_keeper::Keeper::is_there(&self.run_dir.join("keeper.sock"))
    }

    /// Connects to the daemon. If it has died, the next one is waited for, for at most
    /// [`REPLACEMENT`].
    ///
    /// # Errors
    /// [`Code::Unavailable`] if none serves; the message says how to start one.
    pub async fn connect(&self) -> Result<SandboxClient, Failure> {
        self.connect_within(REPLACEMENT).await
    }

    async fn connect_within(&self, patience: Duration) -> Result<SandboxClient, Failure> {
        let channel = self.channel(patience).await?;
        Ok(SandboxClient::new(channel).max_decoding_message_size(LARGEST))
    }

    /// Checks that the daemon gives containers functions of pools. An earlier version, which was
    /// not started again since the shim was installed, would run a container without them.
    ///
    /// # Errors
    /// [`Code::FailedPrecondition`]; those of [`connect`](Self::connect).
    pub async fn check_functions(&self) -> Result<(), Failure> {
        self.check("functions of pools", |node| node.gives_functions).await
    }

    /// Checks that the daemon gives containers huge pages of their guests. An earlier version would
    /// run a container without them.
    ///
    /// # Errors
    /// The errors of [`check_functions`](Self::check_functions).
    pub async fn check_huge_pages(&self) -> Result<(), Failure> {
        self.check("limits of huge pages", |node| node.gives_huge_pages).await
    }

    /// Returns what the daemon says of itself and of its node.
    ///
    /// # Errors
    /// The errors of [`connect`](Self::connect).
    pub async fn status(&self) -> Result<v1::StatusReply, Failure> {
        let reply = self.connect().await?.status(v1::Empty {}).await;
        Ok(reply.map_err(|status| failure(&status))?.into_inner())
    }

    /// Checks that the daemon knows `what`.
    async fn check(&self, what: &str, knows: fn(&v1::StatusReply) -> bool) -> Result<(), Failure> {
        let node = self.status().await?;
        if knows(&node) {
            return Ok(());
        }
        let message = format!(
            "the daemon is of version {} and knows no {what}: start the daemon again",
            node.version
        );
        Err(Failure::new(Code::FailedPrecondition, message))
    }

    /// Returns whether the daemon gives containers of pods directories of the guest. An earlier one
    /// would run them without.
    ///
    /// # Errors
    /// The errors of [`connect`](Self::connect).
    pub async fn makes_empty_dirs(&self) -> Result<bool, Failure> {
        Ok(self.status().await?.makes_empty_dirs)
    }

    /// Returns whether the daemon gives containers directories of their own for copies of the
    /// host's files. An earlier one would put the files into their roots.
    ///
    /// # Errors
    /// The errors of [`connect`](Self::connect).
    pub async fn makes_file_dirs(&self) -> Result<bool, Failure> {
        Ok(self.status().await?.makes_file_dirs)
    }

    /// Returns the template with this name.
    ///
    /// # Errors
    /// [`Code::NotFound`], with the command that makes one; those of [`connect`](Self::connect).
    pub async fn template(&self, name: &str) -> Result<v1::Template, Failure> {
        let mut client = TemplateClient::new(self.channel(REPLACEMENT).await?);
        let list = client.list(v1::Empty {}).await.map_err(|status| failure(&status))?;
        let found = list.into_inner().templates.into_iter().find(|one| one.name == name);
        found.ok_or_else(|| {
            let message = format!(
                "there is no template {name:?}: `slipway template create` makes one on the node"
            );
            Failure::new(Code::NotFound, message)
        })
    }

    /// Connects to the daemon's service for snapshots.
    ///
    /// # Errors
    /// The errors of [`connect`](Self::connect).
    pub async fn snapshots(&self) -> Result<SnapshotClient, Failure> {
        Ok(SnapshotClient::new(self.channel(REPLACEMENT).await?))
    }

    async fn channel(&self, patience: Duration) -> Result<Channel, Failure> {
        let (begun, at) = (Instant::now(), self.socket());
        loop {
            // A daemon with a full queue of connections is waited for, too.
            let limit = patience.saturating_sub(begun.elapsed()).max(AGAIN);
            match tokio::time::timeout(limit, slipway_sandbox_api::connect(&at)).await {
                Ok(Ok(channel)) => return Ok(channel),
                Ok(Err(_)) if begun.elapsed() < patience && self.is_between_lives() => {
                    tokio::time::sleep(AGAIN).await;
                }
                _ => {
                    let message = format!(
                        "no Slipway daemon serves at {}: start it with `systemctl start slipway` \
                         or `slipway daemon`",
                        at.display()
                    );
                    return Err(Failure::new(Code::Unavailable, message));
                }
            }
        }
    }

    /// Removes a sandbox with all that is left of it, running or not. That there is none is no
    /// error. If the daemon has died, the next one is waited for, for at most `patience`.
    ///
    /// # Errors
    /// The daemon does not serve, or refuses.
    pub async fn remove(&self, name: &str, patience: Duration) -> Result<(), Failure> {
        let begun = Instant::now();
        loop {
            let left = patience.saturating_sub(begun.elapsed());
            match self.remove_now(name, left).await {
                // The daemon died during the call.
                Err(failed)
                    if failed.code == Code::Unavailable
                        && begun.elapsed() < patience
                        && self.is_between_lives() =>
                {
                    tokio::time::sleep(AGAIN).await;
                }
                removed => return removed,
            }
        }
    }

    async fn remove_now(&self, name: &str, patience: Duration) -> Result<(), Failure> {
        let request =
            v1::RemoveRequest { name: name.to_owned(), force: true, ..Default::default() };
        match self.connect_within(patience).await?.remove(request).await {
            Err(status) if status.code() != Code::NotFound => Err(failure(&status)),
            _ => Ok(()),
        }
    }

    /// Returns whether a daemon served and was not stopped: one that is stopped removes its socket,
    /// and a keeper waits for the next one.
    pub fn is_between_lives(&self) -> bool {
        self.socket().exists() || self.is_kept()
    }
}

/// Returns whether the call failed because the daemon went away. The transport's own errors have a
/// source, the daemon's have none.
pub fn is_lost(status: &Status) -> bool {
    status.source().is_some()
}

/// Converts the daemon's refusal.
pub fn failure(status: &Status) -> Failure {
    if is_lost(status) {
        let message = format!("the connection to Slipway's daemon broke: {}", status.message());
        return Failure::new(Code::Unavailable, message);
    }
    Failure::new(status.code(), status.message())
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::fake::Fake;

    /// A long time, in which every attempt is made.
    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn a_removal_waits_for_the_next_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::at(dir.path());
        // The socket of a daemon that was killed stays.
        drop(std::os::unix::net::UnixListener::bind(daemon.socket()).unwrap());
        let early = daemon.remove("one", Duration::ZERO).await;
        assert_eq!(early.unwrap_err().code, Code::Unavailable);
        let waits = daemon.clone();
        let removal = tokio::spawn(async move { waits.remove("one", LONG).await });
        std::fs::remove_file(daemon.socket()).unwrap();
        let next = Fake::serve(dir.path());
        removal.await.unwrap().unwrap();
        assert_eq!(next.calls(), ["remove one"]);
    }

    #[tokio::test]
    async fn a_call_waits_for_the_next_daemon_too() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::at(dir.path());
        drop(std::os::unix::net::UnixListener::bind(daemon.socket()).unwrap());
        assert_eq!(
            daemon.connect_within(Duration::ZERO).await.unwrap_err().code,
            Code::Unavailable
        );
        let waits = daemon.clone();
        let call = tokio::spawn(async move { waits.connect_within(LONG).await });
        std::fs::remove_file(daemon.socket()).unwrap();
        let _next = Fake::serve(dir.path());
        call.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn where_a_keeper_listens_the_next_daemon_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let daemon = Daemon::at(dir.path());
        assert!(!daemon.is_kept());
        let keeper = dir.path().join("keeper.sock");
        // Never joined: it serves until it holds nothing after a request, and none is made here.
        std::thread::spawn(move || slipway_keeper::serve(&keeper));
        while !daemon.is_kept() {
            tokio::time::sleep(AGAIN).await;
        }
        let waits = daemon.clone();
        let removal = tokio::spawn(async move { waits.remove("one", LONG).await });
        let next = Fake::serve(dir.path());
        removal.await.unwrap().unwrap();
        assert_eq!(next.calls(), ["remove one"]);
    }

    #[tokio::test]
    async fn where_no_daemon_served_none_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let removed = Daemon::at(dir.path()).remove("one", LONG).await;
        assert_eq!(removed.unwrap_err().code, Code::Unavailable);
    }
}
