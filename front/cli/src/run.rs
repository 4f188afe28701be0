//! `slipway run`, `exec` and `attach`.
//!
//! [`run`] starts one sandbox with this terminal ([`one`]), or many with their output behind their
//! names ([`many`], [`Prefixed`]). Each start is a session (`session`) that goes on with the next
//! daemon if it loses its own ([`start_with`], [`rejoin`]).

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, bail};
use futures_util::future::join_all;
use indicatif::ProgressBar;
use slipway_network::publish::Published;
use slipway_plane_api::trace::Caller;
use slipway_runtime::v1::{self, run_in};
use slipway_runtime::{Config, SandboxClient};
use slipway_telemetry::{Timeline, monotonic_ns};

use crate::args::{ExecArgs, NodeArgs, RunArgs};
use crate::client::{Lost, answer, connect, next_daemon, record, refused};
use crate::out::OWN_FAILURE;
use crate::session::{self, Event, Plain, SessionSettings, Sink, carry, requests, terminal_size};
use crate::{image, keeper, progress, report, security, snapshot, spec, tmpfs};

/// Runs `slipway run`. Returns the exit status.
pub async fn run(node: &NodeArgs, config: &Config, args: &RunArgs) -> Result<i32> {
    check(args)?;
    let client = connect(node, config).await?;
    if !args.tmpfs.is_empty() {
        tmpfs::check(&answer(client.clone().status(v1::Empty {}).await)?)?;
    }
    let saved = snapshot::of_run(node, config, args).await?;
    let began = monotonic_ns();
    let (digest, ended) = match &saved {
        Some(_) => (String::new(), began),
        None => (find_image(config, args).await?, monotonic_ns()),
    };
    let fetched = Fetched { began, ended };
    let mut spec = spec::of_run(args, &digest, &config.run_dir)?;
    if let Some(saved) = &saved {
        snapshot::keep_interface(saved, &mut spec);
    }
    if args.count > 1 {
        spec.at_once = args.count;
    }
    if args.count == 1 {
        one(client, config, args, spec, fetched).await
    } else {
        many(client, config, args, spec, fetched).await
    }
}

/// Fails if options of a run do not go together.
fn check(args: &RunArgs) -> Result<()> {
    if args.count > 1 && (args.process.interactive || args.process.tty) {
        bail!("--count and --interactive or --tty do not go together: whose input would it be?");
    }
    if args.process.tty && !std::io::stdin().is_terminal() {
        bail!("--tty needs a terminal at standard input; without one, leave it out");
    }
    if args.count > 1 && (args.network.mac.is_some() || !args.network.ip.is_empty()) {
        bail!("--count and --mac or --ip do not go together: whose address would it be?");
    }
    if args.count > 1 && args.network.network_namespace.is_some() {
        bail!("--count and --network-namespace do not go together: whose interface would it be?");
    }
    if let (None, Some(cpus)) = (&args.pod, args.machine.cpus) {
        // Said before an image is fetched.
        cpus.whole()?;
    }
    check_ports(args.count, &args.network.publish)
}

/// Fails if one of `count` sandboxes would take a port of the host from the others.
pub fn check_ports(count: u32, publish: &[String]) -> Result<()> {
    for text in publish.iter().filter(|_| count > 1) {
        if Published::parse(text)?.iter().any(|port| port.host != 0) {
            bail!(
                "--count and --publish {text} do not go together: whose port of the host would it \
                 be? with the container's port alone, each has one that is free"
            );
        }
    }
    Ok(())
}

/// Returns the digest of the image of a run, which is fetched if need be. Returns an empty one if
/// the run names none.
pub async fn find_image(config: &Config, args: &RunArgs) -> Result<String> {
    // The daemon knows why no snapshot of the name can be used.
    let Some(image) = &args.image else { return Ok(String::new()) };
    let image = match args.lazy.lazy.unwrap_or(config.lazy_pulls) {
        true => image::ensure_lazily(config, image, args.pull).await?,
        false => image::ensure(config, image, args.pull).await?,
    };
    Ok(image.digest.to_string())
}

/// Returns what sandboxes of a run begin with, as the user said it: the image or the snapshot.
fn named(args: &RunArgs) -> &str {
    args.image.as_deref().or(args.from.as_deref()).unwrap_or_default()
}

/// The time in which the image of a run was found or fetched: a stage that all its sandboxes share.
#[derive(Clone, Copy)]
pub struct Fetched {
    /// Start of the stage and of the run's time axis, CLOCK_MONOTONIC in ns.
    pub began: u64,
    /// End of the stage, CLOCK_MONOTONIC in ns.
    pub ended: u64,
}

impl Fetched {
    /// Moves timelines of the run onto its time axis, and adds the common stage.
    pub fn align(self, mut timelines: Vec<Timeline>) -> Vec<Timeline> {
        // Sandboxes that go on with a snapshot have no such stage.
        if self.ended > self.began {
            for timeline in &mut timelines {
                timeline.record("image", self.began, self.ended);
            }
        }
        slipway_bench::aligned(timelines, self.began)
    }
}

async fn one(
    client: SandboxClient,
    config: &Config,
    args: &RunArgs,
    spec: v1::RunSpec,
    fetched: Fetched,
) -> Result<i32> {
    let wishes = SessionSettings { stdin: spec.stdin, tty: spec.terminal };
    let spinner = progress::stage_spinner(1);
    let start = start_with(client, Some(config), spec, wishes, &mut Plain, spinner, |_| {}).await?;
    if let (Some(path), Some(timeline)) = (&args.timeline, start.timeline.clone()) {
        report::write(path, &fetched.align(vec![timeline]), named(args))?;
    }
    if args.detach && start.exit.is_none() {
        crate::say!("{}", start.name);
    }
    Ok(start.exit.map_or(0, |exit| status(&start.name, &exit)))
}

async fn many(
    client: SandboxClient,
    config: &Config,
    args: &RunArgs,
    spec: v1::RunSpec,
    fetched: Fetched,
) -> Result<i32> {
    let outcomes = start_all(&client, config, args.count, &spec).await;
    let (worst, timelines) = tell(outcomes, args.detach);
    let timelines = fetched.align(timelines);
    if !timelines.is_empty() {
        report::show(&slipway_bench::statistics(&timelines), &timelines);
    }
    if let Some(path) = &args.timeline {
        report::write(path, &timelines, named(args))?;
    }
    Ok(worst)
}

/// Starts `count` sandboxes at once and carries the streams of each to their end. With more than
/// one, each has a number behind the name in `spec`, and its name before its lines and its error.
pub async fn start_all(
    client: &SandboxClient,
    config: &Config,
    count: u32,
    spec: &v1::RunSpec,
) -> Vec<Result<Start>> {
    let spinner = progress::stage_spinner(count);
    let runs = (1..=count).map(|number| {
        let mut spec = spec.clone();
        if count > 1 && !spec.name.is_empty() {
            spec.name = format!("{}-{number}", spec.name);
        }
        let (client, spinner) = (client.clone(), spinner.clone());
        async move {
            let mut sink = Prefixed::new(spinner.clone());
            let prefix = sink.prefix.clone();
            let mut named = NamedOutput { sink: &mut sink, prefix };
            let wishes = SessionSettings { stdin: false, tty: false };
            let name = spec.name.clone();
            let outcome = start_named(client, config, spec, wishes, &mut named, spinner).await;
            sink.finish();
            match count {
                1 => outcome,
                _ => outcome.with_context(|| if name.is_empty() { "run".to_owned() } else { name }),
            }
        }
    });
    let outcomes = join_all(runs).await;
    spinner.finish_and_clear();
    outcomes
}

/// Prints the names of sandboxes that run detached, if they were started so, and the errors of
/// others. Returns the first status other than 0, and the timelines of the starts.
pub fn tell(outcomes: Vec<Result<Start>>, detach: bool) -> (i32, Vec<Timeline>) {
    let mut worst = 0;
    let mut timelines = Vec::new();
    for outcome in outcomes {
        match outcome {
            Ok(start) => {
                if detach && start.exit.is_none() {
                    crate::say!("{}", start.name);
                }
                let code = start.exit.map_or(0, |exit| status(&start.name, &exit));
                worst = if worst == 0 { code } else { worst };
                timelines.extend(start.timeline);
            }
            Err(error) => {
                crate::complain(&error);
                worst = OWN_FAILURE;
            }
        }
    }
    (worst, timelines)
}

/// The outcome of one sandbox's run.
pub struct Start {
    /// The sandbox's name.
    pub name: String,
    /// The container's exit, or `None` if the user detached.
    pub exit: Option<v1::Exit>,
    /// The timeline of the start, or `None` if the container never ran.
    pub timeline: Option<Timeline>,
}

/// Prints the output of one of several sandboxes: whole lines, each after the sandbox's name.
pub struct Prefixed {
    prefix: Arc<Mutex<String>>,
    lines: [Vec<u8>; 2],
    /// Hidden while lines are printed.
    spinner: ProgressBar,
}

impl Prefixed {
    fn new(spinner: ProgressBar) -> Self {
        Self { prefix: Arc::default(), lines: Default::default(), spinner }
    }

    fn print(&mut self, error: bool, upto: usize) -> std::io::Result<()> {
        let prefix = self.prefix.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        let buffer = &mut self.lines[usize::from(error)];
        let mut text = Vec::new();
        for line in buffer.drain(..upto).as_slice().split_inclusive(|byte| *byte == b'\n') {
            text.extend(prefix.as_bytes());
            text.extend(b" | ");
            text.extend(line);
        }
        if !text.ends_with(b"\n") {
            text.push(b'\n');
        }
        self.spinner.suspend(|| Plain.write(error, &text))
    }

    /// Prints the rest of unfinished lines.
    fn finish(&mut self) {
        for error in [false, true] {
            let left = self.lines[usize::from(error)].len();
            if left > 0 {
                // Fails if the reader has left, and then nothing is to be done.
                let _ = self.print(error, left);
            }
        }
    }
}

impl Sink for Prefixed {
    fn write(&mut self, error: bool, data: &[u8]) -> std::io::Result<()> {
        const LONGEST_LINE: usize = 64 << 10;
        let buffer = &mut self.lines[usize::from(error)];
        buffer.extend(data);
        let end = match buffer.iter().rposition(|byte| *byte == b'\n') {
            Some(newline) => newline + 1,
            None if buffer.len() >= LONGEST_LINE => buffer.len(),
            None => return Ok(()),
        };
        self.print(error, end)
    }
}

struct NamedOutput<'a> {
    sink: &'a mut Prefixed,
    prefix: Arc<Mutex<String>>,
}

async fn start_named(
    client: SandboxClient,
    config: &Config,
    spec: v1::RunSpec,
    wishes: SessionSettings,
    named: &mut NamedOutput<'_>,
    spinner: ProgressBar,
) -> Result<Start> {
    let prefix = named.prefix.clone();
    start_with(client, Some(config), spec, wishes, named.sink, spinner, move |event| {
        if let Event::Created(name) = event {
            name.clone_into(&mut prefix.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        }
    })
    .await
}

/// Starts one sandbox and carries its streams to the end, as [`start_with`] without options.
pub async fn start(
    client: SandboxClient,
    spec: v1::RunSpec,
    wishes: SessionSettings,
    sink: &mut (dyn Sink + Send),
    spinner: ProgressBar,
) -> Result<Start> {
    start_with(client, None, spec, wishes, sink, spinner, |_| {}).await
}

/// Starts one sandbox and carries its streams to the end. With `config`, the session continues with
/// the next daemon where sandboxes outlive theirs. Calls `tell` with each event.
pub async fn start_with(
    mut client: SandboxClient,
    config: Option<&Config>,
    spec: v1::RunSpec,
    wishes: SessionSettings,
    sink: &mut (dyn Sink + Send),
    spinner: ProgressBar,
    tell: impl Fn(&Event),
) -> Result<Start> {
    let detach = spec.detach;
    let (sender, stream) = requests(run_in::Kind::Run(spec));
    let request = Caller::of_environment().request(stream);
    let replies = answer(client.run(request).await)?;
    let mut name = String::new();
    let mut timeline = None;
    let mut sink = Counting { sink, bytes: 0 };
    let mut exit = carry(replies, sender, wishes, &mut sink, |event| {
        tell(&event);
        match event {
            Event::Created(given) => name = given,
            Event::Stage(stage) => spinner.set_message(stage),
            Event::Started(stages) => {
                count_started(&spinner);
                timeline = Some(timeline_of(&name, stages));
            }
        }
    })
    .await;
    spinner.inc(0);
    if let (Some(config), Err(error)) = (config, &exit)
        && error.is::<Lost>()
        && keeper::waits(config)
        && !detach
        && !name.is_empty()
    {
        exit = rejoin(config, &name, wishes, &mut sink).await;
    }
    let exit = exit.inspect_err(|_| spinner.finish_and_clear())?;
    if exit.is_none() && !detach {
        bail!(
            "the daemon closed the session of sandbox {name}; `slipway ps` tells what became of it"
        );
    }
    if exit.is_some() && timeline.is_none() {
        spinner.finish_and_clear();
    }
    Ok(Start { name, exit, timeline })
}

/// Counts one more sandbox that runs. The last one ends the display.
fn count_started(spinner: &ProgressBar) {
    spinner.inc(1);
    if spinner.length().is_none_or(|all| spinner.position() >= all) {
        spinner.finish_and_clear();
    }
}

/// Makes the timeline of a sandbox of its stages.
fn timeline_of(name: &str, stages: Vec<v1::Stage>) -> Timeline {
    let mut made = Timeline::new(name.to_owned());
    for stage in stages {
        made.record(stage.name, stage.start_ns, stage.end_ns);
    }
    made
}

/// Counts the bytes written, which is the position where a session continues after it lost its
/// daemon.
struct Counting<'a> {
    sink: &'a mut (dyn Sink + Send),
    bytes: u64,
}

impl Sink for Counting<'_> {
    fn write(&mut self, error: bool, data: &[u8]) -> std::io::Result<()> {
        self.sink.write(error, data)?;
        self.bytes += data.len() as u64;
        Ok(())
    }
}

/// Continues a session that lost its daemon, with the next daemon, and with those after it.
async fn rejoin(
    config: &Config,
    name: &str,
    wishes: SessionSettings,
    sink: &mut Counting<'_>,
) -> Result<Option<v1::Exit>> {
    if wishes.stdin {
        // Input in flight to the process may be lost.
        bail!("the daemon went away; sandbox {name} goes on: `slipway attach {name}` joins it");
    }
    loop {
        let mut client = tokio::select! {
            client = next_daemon(config) => client?,
            _ = tokio::signal::ctrl_c() => bail!("interrupted; sandbox {name} goes on"),
        };
        let rejoin = v1::Rejoin { name: name.to_owned(), position: sink.bytes };
        let (sender, stream) = requests(run_in::Kind::Rejoin(rejoin));
        let outcome = match client.attach(stream).await {
            Ok(replies) => carry(replies.into_inner(), sender, wishes, sink, |_| {}).await,
            Err(status) => Err(refused(status)),
        };
        match outcome {
            Err(error) if error.is::<Lost>() => {}
            outcome => return outcome,
        }
    }
}

/// Returns the exit status, and prints the reason if the status is not the container's own.
pub fn status(name: &str, exit: &v1::Exit) -> i32 {
    if !exit.reason.is_empty() {
        eprintln!("slipway: {name}: {}", crate::table::printable(&exit.reason));
    }
    i32::try_from(exit.status).unwrap_or(OWN_FAILURE)
}

/// Runs `slipway exec`. Returns the exit status.
pub async fn exec(node: &NodeArgs, config: &Config, args: &ExecArgs) -> Result<i32> {
    if args.process.tty && !std::io::stdin().is_terminal() {
        bail!("--tty needs a terminal at standard input; without one, leave it out");
    }
    let (rows, columns) = terminal_size();
    let mut client = connect(node, config).await?;
    let spec = v1::ExecSpec {
        name: args.name.clone(),
        command: args.command.clone(),
        env: spec::environment(&args.process)?,
        cwd: args.process.workdir.clone().unwrap_or_default(),
        user: args.process.user.clone().unwrap_or_default(),
        terminal: args.process.tty,
        rows,
        columns,
        stdin: args.process.interactive,
        detach: args.detach,
        privileged: args.process.privileged,
        security: security::asked_by_exec(&mut client, args).await?,
        zygote: None,
    };
    let wishes = SessionSettings { stdin: spec.stdin, tty: spec.terminal };
    let (sender, stream) = requests(run_in::Kind::Exec(spec));
    let request = Caller::of_environment().request(stream);
    let replies = answer(client.exec(request).await)?;
    let exit = carry(replies, sender, wishes, &mut Plain, |_| {}).await?;
    Ok(exit.map_or(OWN_FAILURE, |exit| status(&args.name, &exit)))
}

/// Runs `slipway attach`. Returns the exit status.
pub async fn attach(node: &NodeArgs, config: &Config, name: &str) -> Result<i32> {
    let mut client = connect(node, config).await?;
    let request = v1::Name { name: name.to_owned() };
    let record = record(&mut client, name).await?;
    let process = &record.settings_of(name).process;
    let wishes = session::SessionSettings { stdin: process.stdin, tty: process.terminal };
    let (sender, stream) = requests(run_in::Kind::Attach(request));
    let replies = answer(client.attach(stream).await)?;
    let exit = carry(replies, sender, wishes, &mut Plain, |_| {}).await?;
    let _ = std::io::stdout().flush();
    Ok(exit.map_or(OWN_FAILURE, |exit| status(name, &exit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_sandboxes_have_no_port_of_the_host_in_common() {
        let ports = |count, text: &str| check_ports(count, &["80".to_owned(), text.to_owned()]);
        for one in ["19000:80", "127.0.0.1:53:53/udp", "8000-8009:8000-8009"] {
            ports(1, one).unwrap();
            let error = ports(2, one).unwrap_err().to_string();
            assert!(error.contains(one) && error.contains("do not go together"), "{error}");
        }
        ports(2, "127.0.0.1::80").unwrap();
        ports(2, "81/udp").unwrap();
        assert!(ports(2, "80:x").unwrap_err().to_string().contains("cannot be published"));
    }
}
