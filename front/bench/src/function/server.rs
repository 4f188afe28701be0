//! A function's server as a process, and the commands by which it is asked and loaded.

use std::ffi::OsString;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tempfile::NamedTempFile;

/// The time between two looks at the server.
const LOOK: Duration = Duration::from_millis(50);
/// The longest time until sandboxes and replicas are there: guests may be emulated.
const PATIENCE: Duration = Duration::from_secs(3600);
/// The longest time in which the server removes its sandboxes, which itself gives up after two
/// minutes.
const END: Duration = Duration::from_secs(180);
/// The word before a server's URL in what it prints, once it serves.
const SERVING: &str = "Serving ";

/// The settings that all servers of a measurement have in common.
#[derive(Clone, Debug, Default)]
pub struct FunctionSettings {
    /// The program `slipway` with the options of the node.
    pub program: Vec<OsString>,
    /// Further options of `slipway function serve`.
    pub options: Vec<OsString>,
    /// The image of the replicas.
    pub image: String,
    /// The command of an invocation.
    pub command: Vec<String>,
    /// The most replicas in a sandbox where there may be several, 1 to 24.
    pub replicas: u32,
    /// The most sandboxes, 1 to 160.
    pub sandboxes: u32,
}

impl FunctionSettings {
    /// Returns the command of `slipway` with the options of the node.
    fn slipway(&self) -> Result<Command> {
        let (program, options) = self.program.split_first().context("no program is named")?;
        let mut command = Command::new(program);
        command.args(options).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs a command of `slipway`, and returns what it prints.
    fn run(&self, words: &[&str]) -> Result<Output> {
        let output = self.slipway()?.args(words).output();
        output.with_context(|| format!("cannot run slipway {}", words.join(" ")))
    }

    /// Runs a command of `slipway` that prints JSON.
    fn ask<T: DeserializeOwned>(&self, words: &[&str]) -> Result<T> {
        let output = self.run(words)?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "slipway {}: {}", words.join(" "), last_line(&said));
        serde_json::from_slice(&output.stdout)
            .with_context(|| format!("slipway {} has printed no JSON", words.join(" ")))
    }
}

/// The figures of a burst, as `slipway function load` prints them.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Burst {
    sent: u64,
    answered: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub max_ns: u64,
}

/// The figures of a function, as `slipway function ls` prints them.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Status {
    name: String,
    sandboxes: Vec<SandboxStatus>,
    pub replicas: u32,
    pub replicas_made: u64,
    pub sandboxes_made: u64,
}

#[derive(Clone, Debug, Deserialize)]
struct SandboxStatus {
    state: String,
    replicas: u32,
}

impl Status {
    /// Returns whether there are so many sandboxes with a replica each, and nothing else.
    pub fn has_one_in_each(&self, sandboxes: u32) -> bool {
        self.sandboxes.len() == sandboxes as usize
            && self.sandboxes.iter().all(|one| one.replicas == 1)
    }
}

/// A sandbox, as `slipway ps` prints it.
#[derive(Clone, Debug, Deserialize)]
struct Listed {
    name: String,
    vmm_pid: Option<u32>,
    containers: Vec<Container>,
}

#[derive(Clone, Debug, Deserialize)]
struct Container {
    state: String,
}

/// A server, which also ends when this process does. Dropping it kills it if it has not ended; the
/// next one of the same name takes over its sandboxes then.
pub(super) struct Server {
    child: Child,
    settings: FunctionSettings,
    name: String,
    url: String,
    log: NamedTempFile,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts a server with at most `replicas` replicas in a sandbox, and with the least and the
    /// most sandboxes that are given. Returns when it accepts requests.
    ///
    /// # Errors
    /// The last line that the server has printed, if it ends.
    pub fn start(
        settings: &FunctionSettings,
        replicas: u32,
        (least, most): (u32, u32),
    ) -> Result<Self> {
        let name = format!("bench-function-{}", std::process::id());
        let log = NamedTempFile::with_prefix("slipway-bench")?;
        let mut command = settings.slipway()?;
        command
            .args(["function", "serve", "--listen", "127.0.0.1:0", "--queue", "1024"])
            .args(["--keep-alive", "1h", "--queue-time", "1h", "--timeout", "1h"])
            .args(["--replicas-per-sandbox", &replicas.to_string()])
            .args(["--min-sandboxes", &least.to_string()])
            .args(["--max-sandboxes", &most.to_string()])
            .args(&settings.options)
            .args([name.as_str(), settings.image.as_str(), "--"])
            .args(&settings.command)
            .stdout(Stdio::null())
            .stderr(log.reopen()?);
        crate::end_with_this_thread(&mut command);
        let child = command.spawn().context("cannot start a function's server")?;
        let (settings, url) = (settings.clone(), String::new());
        let mut server = Self { child, settings, name, url, log };
        server.url = server.wait("does not serve", Self::serves)?;
        Ok(server)
    }

    /// Returns the URL, once the server has printed it.
    fn serves(&self) -> Result<Option<String>> {
        let text = std::fs::read_to_string(self.log.path())?;
        Ok(url(&text).map(str::to_owned))
    }

    /// Looks at the server until `look` returns something. `what` is the complaint when it takes
    /// too long.
    fn wait<T>(&mut self, what: &str, look: impl Fn(&Self) -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(found) = look(self)? {
                return Ok(found);
            }
            if self.child.try_wait()?.is_some() {
                bail!("the function's server has ended: {}", self.last_words());
            }
            ensure!(Instant::now() < deadline, "the function {what}: {}", self.last_words());
            std::thread::sleep(LOOK);
        }
    }

    fn last_words(&self) -> String {
        let text = std::fs::read(self.log.path()).unwrap_or_default();
        last_line(&String::from_utf8_lossy(&text)).to_owned()
    }

    /// Waits until so many sandboxes are ready.
    pub fn wait_for_sandboxes(&mut self, count: u32) -> Result<()> {
        self.wait("has too few sandboxes", |server| {
            let all = server.status()?.sandboxes;
            let ready = all.iter().filter(|one| one.state == "ready").count();
            Ok((ready >= count as usize).then_some(()))
        })
    }

    /// Waits until so many replicas run.
    pub fn wait_for_replicas(&mut self, count: u32) -> Result<()> {
        self.wait("has too few replicas", |server| {
            let all = server.listed()?;
            let containers = all.iter().flat_map(|one| &one.containers);
            let running = containers.filter(|one| one.state == "running").count();
            Ok((running >= count as usize).then_some(()))
        })
    }

    /// Returns the figures.
    pub fn status(&self) -> Result<Status> {
        let all: Vec<Status> = self.settings.ask(&["function", "ls", "--json"])?;
        let own = all.into_iter().find(|one| one.name == self.name);
        own.with_context(|| format!("no function {} is served", self.name))
    }

    /// Returns the processes of the VMMs of the function's sandboxes.
    pub fn vmms(&self) -> Result<Vec<u32>> {
        Ok(self.listed()?.iter().filter_map(|one| one.vmm_pid).collect())
    }

    /// Returns the function's sandboxes.
    fn listed(&self) -> Result<Vec<Listed>> {
        let mut all: Vec<Listed> = self.settings.ask(&["ps", "--json"])?;
        let beginning = format!("{}-", self.name);
        all.retain(|one| one.name.starts_with(&beginning));
        Ok(all)
    }

    /// Sends so many requests at once, and waits for all answers.
    ///
    /// # Errors
    /// A request has no answer of the function.
    pub fn burst(&self, requests: u32) -> Result<Burst> {
        let count = requests.to_string();
        let url = self.url.as_str();
        let words = ["function", "load", url, "--bursts", &count, "--timeout", "1h", "--json"];
        let output = self.settings.run(&words)?;
        let said = String::from_utf8_lossy(&output.stderr);
        let bursts: Vec<Burst> = serde_json::from_slice(&output.stdout)
            .with_context(|| format!("slipway function load: {}", last_line(&said)))?;
        let burst = bursts.into_iter().next().context("slipway function load tells nothing")?;
        let lost = u64::from(requests).saturating_sub(burst.sent.min(burst.answered));
        ensure!(lost == 0, "{lost} of {count} requests failed: {}", self.last_words());
        Ok(burst)
    }

    /// Ends the server, which removes its sandboxes.
    ///
    /// # Errors
    /// It does not end in time, or says that something is left.
    pub fn end(mut self) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let deadline = Instant::now() + END;
        loop {
            if let Some(status) = self.child.try_wait()? {
                ensure!(status.success(), "the function's end: {}", self.last_words());
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "the function does not end: {}", self.last_words());
            std::thread::sleep(LOOK);
        }
    }
}

/// Returns the URL in what a server has printed.
fn url(text: &str) -> Option<&str> {
    let mut complete = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
    complete.find_map(|line| line.strip_prefix(SERVING)?.split_once(" at ").map(|(_, url)| url))
}

/// Returns the last line of a program's errors.
fn last_line(text: &str) -> &str {
    text.lines().next_back().unwrap_or("it has said nothing")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_found_by_the_line_that_it_prints() {
        let text = "slipway: a word\nServing f at http://127.0.0.1:4242/\nmore";
        assert_eq!(url(text), Some("http://127.0.0.1:4242/"));
        assert_eq!(url("Serving f at http://127.0.0.1:42"), None, "the line has not ended");
        assert_eq!((url(""), last_line("a\nb\n")), (None, "b"));
        assert_eq!(last_line(""), "it has said nothing");
    }

    #[test]
    fn figures_are_parsed_and_further_ones_are_left() {
        let burst = r#"[{"load":"burst of 2","sent":2,"answered":1,"p50_ns":3,"p99_ns":4,
            "max_ns":5,"replicas":1,"sandboxes":1,"errors":{"503":1}}]"#;
        let burst: Vec<Burst> = serde_json::from_str(burst).unwrap();
        assert_eq!((burst[0].sent, burst[0].answered, burst[0].max_ns), (2, 1, 5));
        let status = r#"{"name":"f","sandboxes":[{"state":"ready","replicas":1,"busy":0}],
            "replicas":1,"replicas_made":1,"sandboxes_made":1}"#;
        let mut status: Status = serde_json::from_str(status).unwrap();
        assert!(status.has_one_in_each(1) && !status.has_one_in_each(2));
        status.sandboxes[0].replicas = 2;
        assert!(!status.has_one_in_each(1));
        let listed = r#"[{"name":"f-1","vmm_pid":null,"containers":[{"state":"running"}]}]"#;
        let listed: Vec<Listed> = serde_json::from_str(listed).unwrap();
        assert_eq!((listed[0].vmm_pid, listed[0].containers.len()), (None, 1));
    }

    #[test]
    fn a_server_that_does_not_start_is_an_error() {
        let settings = FunctionSettings { program: vec!["false".into()], ..Default::default() };
        let error = Server::start(&settings, 1, (1, 1)).err().unwrap().to_string();
        assert!(error.contains("has ended: it has said nothing"), "{error}");
        assert!(Server::start(&FunctionSettings::default(), 1, (1, 1)).is_err());
    }
}
