//! `slipway template create --image`: a sandbox starts, its container becomes ready, both are saved
//! as a snapshot, and the sandbox is removed, whatever becomes of the snapshot.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use slipway_runtime::v1::{self, run_in};
use slipway_runtime::{Config, Error, SandboxClient, check_template_name, name};
use tokio::time::{sleep, timeout};
use tonic::Code;

use crate::args::{
    LazyArg, NodeArgs, ProcessArgs, Pull, RunArgs, SecurityArgs, TemplateContainerArgs,
    TemplateCreateArgs,
};
use crate::client::{answer, connect, connect_templates, next_daemon, record, refused};
use crate::fork::{EndSignals, save_to_end};
use crate::session::{Plain, SessionSettings, Sink, carry, requests};
use crate::{keeper, progress, run, snapshot, spec, volume};

/// The pause between two attempts of a probe.
const AGAIN: Duration = Duration::from_millis(100);
/// The bytes of a command's output that are kept for its last line.
const LAST_BYTES: usize = 4096;
/// The program of the image that runs the commands.
const SHELL: &str = "/bin/sh";
/// A command's session: nothing is forwarded to it.
const WISHES: SessionSettings = SessionSettings { stdin: false, tty: false };

/// Makes a template with a container of `image`, and prints its name.
pub async fn create(
    node: &NodeArgs,
    config: &Config,
    args: &TemplateCreateArgs,
    image: &str,
) -> Result<()> {
    check(args)?;
    refuse_taken(node, config, &args.name).await?;
    let mut ends = EndSignals::catch()?;
    let sandbox = format!("template-{}", name::new_id());
    let run = run_of(args, image, &sandbox);
    let ready = tokio::select! {
        ready = start(node, config, args, &run) => ready,
        () = ends.next() => Err(anyhow!("interrupted")),
    };
    let saved = match ready {
        Ok(()) => {
            let name = args.name.clone();
            let request = v1::CreateSnapshotRequest { sandbox: sandbox.clone(), name };
            save_to_end(node, config, request, &mut ends).await
        }
        Err(error) => Err(error),
    };
    // Nothing is printed before: a reader that has left ends this command at once.
    let removed = remove(node, config, &sandbox).await;
    let saved = saved.with_context(|| format!("template {} is not made", args.name));
    match saved {
        Ok(snapshot) => crate::say!("{}", snapshot.name),
        Err(error) => {
            if let Err(left) = &removed {
                crate::complain(left);
            }
            return Err(error);
        }
    }
    removed
}

/// Fails if options name something that no saved sandbox can have.
fn check(args: &TemplateCreateArgs) -> Result<()> {
    let shares = !volume::shares(&args.container.volume).is_empty();
    let options = [
        (shares, "--volume HOST:/PATH"),
        (args.network.sockets, "--sockets"),
        (args.network.network_namespace.is_some(), "--network-namespace"),
    ];
    match options.into_iter().find(|(given, _)| *given) {
        Some((_, option)) => bail!("no template with a container has {option}: leave it out"),
        None => Ok(()),
    }
}

/// Fails if the name cannot be one of a template, or something has it. The daemon looks again when
/// it saves.
async fn refuse_taken(node: &NodeArgs, config: &Config, name: &str) -> Result<()> {
    check_template_name(name)?;
    let mut client = connect_templates(node, config).await?;
    let listed = answer(client.list(v1::Empty {}).await)?;
    let templates = listed.templates.into_iter().map(|one| one.name);
    let snapshots = snapshot::list(node, config).await?.into_iter().map(|one| one.name);
    if templates.chain(snapshots).any(|one| one == name) {
        return Err(Error::TemplateTaken(name.to_owned()).into());
    }
    Ok(())
}

/// Returns the run of the sandbox that is to be saved.
fn run_of(args: &TemplateCreateArgs, image: &str, sandbox: &str) -> RunArgs {
    let TemplateContainerArgs { env, volume, command, .. } = &args.container;
    RunArgs {
        image: Some(image.to_owned()),
        command: command.clone(),
        count: 1,
        name: Some(sandbox.to_owned()),
        pod: None,
        share_processes: false,
        machine: args.machine.clone(),
        // It boots, so that it shares nothing with forks of another template.
        from: Some(spec::NONE.to_owned()),
        process: ProcessArgs {
            env: env.clone(),
            env_file: Vec::new(),
            workdir: None,
            user: None,
            interactive: false,
            tty: false,
            privileged: false,
            security: SecurityArgs::default(),
        },
        network: args.network.clone(),
        hostname: None,
        entrypoint: None,
        detach: true,
        rm: false,
        read_only: false,
        volume: volume.clone(),
        copy: Vec::new(),
        tmpfs: Vec::new(),
        label: Vec::new(),
        ulimit: Vec::new(),
        sysctl: Vec::new(),
        timeline: None,
        pull: Pull::Missing,
        lazy: LazyArg { lazy: None },
    }
}

/// Starts the sandbox, and waits until its container is ready.
async fn start(
    node: &NodeArgs,
    config: &Config,
    args: &TemplateCreateArgs,
    run: &RunArgs,
) -> Result<()> {
    let digest = run::find_image(config, run).await?;
    let spec = spec::of_run(run, &digest, &config.run_dir)?;
    let client = connect(node, config).await?;
    let spinner = progress::stage_spinner(1);
    let started = run::start(client.clone(), spec, WISHES, &mut Plain, spinner).await?;
    if let Some(exit) = started.exit {
        bail!("its container did not start: {}", why(&exit, &Last::default()));
    }
    let spinner = progress::waiting("waiting until the container is ready");
    let ready = Guest { client, sandbox: started.name }.ready(&args.container).await;
    spinner.finish_and_clear();
    ready
}

/// Removes the sandbox, which may not have been made. Where sandboxes outlive their daemon, the
/// next daemon removes it if need be.
async fn remove(node: &NodeArgs, config: &Config, sandbox: &str) -> Result<()> {
    let removed = remove_now(node, config, sandbox).await;
    removed.with_context(|| format!("sandbox {sandbox} is left (`slipway rm -f {sandbox}`)"))
}

async fn remove_now(node: &NodeArgs, config: &Config, sandbox: &str) -> Result<()> {
    if keeper::waits(config) {
        next_daemon(config).await?;
    }
    let mut client = connect(node, config).await?;
    let request = v1::RemoveRequest { name: sandbox.to_owned(), force: true, ..Default::default() };
    match client.remove(request).await {
        Err(status) if status.code() == Code::NotFound => Ok(()),
        removed => removed.map(drop).map_err(refused),
    }
}

/// The container that is to become ready.
struct Guest {
    client: SandboxClient,
    /// The name of its sandbox.
    sandbox: String,
}

impl Guest {
    /// Waits until the container is ready as the options say: at once without any.
    ///
    /// # Errors
    /// The command fails or does not end in time, or the container ends.
    async fn ready(&self, args: &TemplateContainerArgs) -> Result<()> {
        match (&args.after, &args.probe) {
            (Some(command), _) => self.after(command, args.timeout).await,
            (None, Some(command)) => self.probe(command, args.timeout).await,
            (None, None) => Ok(()),
        }
    }

    async fn after(&self, command: &str, limit: Duration) -> Result<()> {
        match timeout(limit, self.attempt(command)).await {
            Ok(attempted) => match attempted? {
                None => Ok(()),
                Some(why) => bail!("the command of --after failed: {why}"),
            },
            Err(_) => bail!(
                "the command of --after has not ended within {limit:?}; --timeout gives it longer"
            ),
        }
    }

    async fn probe(&self, command: &str, limit: Duration) -> Result<()> {
        let begun = Instant::now();
        let mut last = "it has not ended once".to_owned();
        loop {
            let left = limit.saturating_sub(begun.elapsed());
            match timeout(left, self.attempt(command)).await {
                Ok(attempted) => match attempted? {
                    None => return Ok(()),
                    Some(why) => last = why,
                },
                Err(_) => bail!("the probe has not succeeded within {limit:?}: {last}"),
            }
            sleep(AGAIN).await;
        }
    }

    /// Runs a command line in the container. Returns `None` if it succeeds, or why it does not.
    ///
    /// # Errors
    /// The container has ended, or the daemon does not answer.
    async fn attempt(&self, command: &str) -> Result<Option<String>> {
        let why = match self.exec(command).await {
            Ok(None) => return Ok(None),
            Ok(Some(why)) => why,
            // The container may be about to end.
            Err(error) => format!("{error:#}"),
        };
        self.check_runs().await?;
        Ok(Some(why))
    }

    /// Runs a command line in the container to its end.
    ///
    /// # Errors
    /// The daemon's, which has not run it.
    async fn exec(&self, command: &str) -> Result<Option<String>> {
        let spec = v1::ExecSpec {
            name: self.sandbox.clone(),
            command: [SHELL, "-c", command].map(str::to_owned).to_vec(),
            ..v1::ExecSpec::default()
        };
        let (sender, stream) = requests(run_in::Kind::Exec(spec));
        let replies = answer(self.client.clone().exec(stream).await)?;
        let mut last = Last::default();
        let exit = carry(replies, sender, WISHES, &mut last, |_| {}).await?;
        let exit = exit.context("the daemon closed the session")?;
        Ok((exit.status != 0).then(|| why(&exit, &last)))
    }

    /// Fails if the container has ended.
    async fn check_runs(&self) -> Result<()> {
        let record = record(&mut self.client.clone(), &self.sandbox).await?;
        if record.state.is_live() {
            return Ok(());
        }
        let exit = v1::Exit {
            status: record.run.exit_status.unwrap_or_default(),
            reason: record.run.reason,
            ..v1::Exit::default()
        };
        let why = why(&exit, &Last::default());
        bail!("its container has ended ({why}): name a command that goes on, after `--`")
    }
}

/// Returns how a command ended: its status, and the reason or the last line that it wrote.
fn why(exit: &v1::Exit, last: &Last) -> String {
    let status = exit.status;
    let said = if exit.reason.is_empty() { last.line() } else { exit.reason.clone() };
    match slipway_printable::line(&said, slipway_printable::MESSAGE).as_str() {
        "" => format!("status {status}"),
        said => format!("status {status}: {said}"),
    }
}

/// Keeps the end of what a command writes.
#[derive(Default)]
struct Last(Vec<u8>);

impl Last {
    /// Returns the last line with text, or an empty one.
    fn line(&self) -> String {
        let text = String::from_utf8_lossy(&self.0);
        let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
        line.unwrap_or_default().to_owned()
    }
}

impl Sink for Last {
    fn write(&mut self, _error: bool, data: &[u8]) -> std::io::Result<()> {
        self.0.extend(data);
        self.0.drain(..self.0.len().saturating_sub(LAST_BYTES));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command, TemplateCommand};

    /// Returns the arguments of `slipway template create web` with these further words.
    fn create_with(words: &[&str]) -> Result<TemplateCreateArgs, clap::Error> {
        let all = [&["slipway", "template", "create", "web"][..], words].concat();
        match Cli::try_parse_from(all)?.command {
            Command::Template(TemplateCommand::Create(args)) => Ok(*args),
            _ => panic!("{words:?}"),
        }
    }

    #[test]
    fn a_template_with_a_container_is_a_detached_run_that_is_saved() {
        let words = ["--image", "debian:12", "--probe", "test -e /ready", "--timeout", "5s"];
        let more = ["-e", "A=1", "-v", "data:1M", "--memory", "64M", "--", "server", "--port", "1"];
        let args = create_with(&[&words[..], &more[..]].concat()).unwrap();
        assert_eq!(args.container.timeout, Duration::from_secs(5));
        check(&args).unwrap();
        let run = run_of(&args, "debian:12", "template-1");
        let spec = spec::of_run(&run, "sha256:ab", std::path::Path::new("/run/slipway")).unwrap();
        assert_eq!((spec.name.as_str(), spec.image.as_str()), ("template-1", "debian:12"));
        assert_eq!(
            (spec.command, spec.env),
            (vec!["server".into(), "--port".into(), "1".into()], vec!["A=1".into()])
        );
        assert!(spec.detach && !spec.remove && !spec.stdin);
        assert!(spec.boots && spec.template.is_empty());
        assert_eq!((spec.volumes.len(), spec.memory_bytes), (1, 64 << 20));
    }

    #[test]
    fn options_of_a_container_need_an_image() {
        for words in [
            &["--after", "true"][..],
            &["--probe", "true"],
            &["--env", "A=1"],
            &["--volume", "data:1M"],
            &["--", "true"],
            &["--image", "i", "--after", "true", "--probe", "true"],
            &["--image", "i", "--mtu", "1400"],
            &["--image", "i", "--bind-memory", "64M"],
        ] {
            assert!(create_with(words).is_err(), "{words:?}");
        }
        let args = create_with(&[]).unwrap();
        assert!(args.container.image.is_none());
    }

    #[test]
    fn what_no_saved_sandbox_has_is_refused_before_anything_starts() {
        for words in [&["--sockets"][..], &["--volume", "/srv:/srv"]] {
            let args = create_with(&[&["--image", "i"][..], words].concat()).unwrap();
            let error = check(&args).unwrap_err().to_string();
            assert!(error.contains(words[0]) && error.ends_with("leave it out"), "{error}");
        }
    }

    #[test]
    fn a_failed_command_is_told_by_its_status_and_its_last_line() {
        let mut last = Last::default();
        last.write(false, &[b'x'; 2 * LAST_BYTES]).unwrap();
        last.write(true, b"\nno such\x1b file\n  \n").unwrap();
        assert_eq!(last.0.len(), LAST_BYTES);
        let exit = |status, reason: &str| v1::Exit {
            status,
            reason: reason.to_owned(),
            ..v1::Exit::default()
        };
        assert_eq!(why(&exit(3, ""), &last), "status 3: no such\\u001b file");
        assert_eq!(why(&exit(127, "/bin/sh: not found"), &last), "status 127: /bin/sh: not found");
        assert_eq!(why(&exit(1, ""), &Last::default()), "status 1");
    }
}
