//! `slipway function serve`: the server of one function, from its start to its end.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use slipway_runtime::{BOUND_CONTAINERS, Config, v1};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::dispatcher::Dispatcher;
use super::fleet::{Fleet, Plan};
use super::http::{Bounds, Front};
use super::place::{self, FunctionSocket};
use super::scheduler::Limits;
use super::status::About;
use crate::args::{FunctionServeArgs, NetworkArgs, NodeArgs};
use crate::client::connect;
use crate::daemon::raise_descriptor_limit;
use crate::{image, spec};

/// The most processes that a pod's agent serves at once: containers that run and commands in them.
const MOST_PROCESSES: u32 = 48;
/// The most invocations of a function at once, those that wait left out. The daemon carries no more
/// sessions on one connection.
const MOST_INVOCATIONS: u32 = 160;
/// Connections beyond those of invocations that run and wait.
const MORE_CONNECTIONS: usize = 128;
/// The time in which clients take their last answers when the server ends.
const FAREWELL: Duration = Duration::from_secs(5);

/// Serves a function until the process is told to end. Returns the exit status.
///
/// # Errors
/// A setting is wrong, the image is not there, another process serves the function, or the daemon
/// fails.
pub async fn serve(node: &NodeArgs, config: &Config, args: &FunctionServeArgs) -> Result<i32> {
    // The bounds of connections may be above the usual soft limit of 1024 descriptors.
    raise_descriptor_limit();
    let limits = limits(args)?;
    place::check_name(&args.name)?;
    let client = connect(node, config).await?;
    let image = image::ensure(config, &args.image, args.pull).await?;
    let place = FunctionSocket::take(config, &args.name)?;
    let listener = TcpListener::bind(args.listen).await;
    let listener = listener.with_context(|| format!("cannot listen at {}", args.listen))?;
    let address = listener.local_addr()?;
    let mut signals = Signals::catch()?;
    let fleet = Arc::new(Fleet::new(client, plan(config, args, &image.digest.to_string())?));
    let adopted = fleet.adopt(limits.sandboxes as usize).await?;
    let about = About {
        name: args.name.clone(),
        image: args.image.clone(),
        command: args.command.clone(),
        address: address.to_string(),
        pid: std::process::id(),
    };
    let (mut dispatcher, handle) = Dispatcher::new(about, Arc::clone(&fleet), limits, &adopted);
    let front = Arc::new(Front::new(handle, bounds(args, limits)));
    let root = tokio::spawn(Arc::clone(&front).accept_root(place.listen()?));
    let clients = tokio::spawn(Arc::clone(&front).accept(listener));
    eprintln!("Serving {} at http://{address}/", args.name);
    dispatcher.serve(signals.next()).await;
    eprintln!("slipway: function {} ends; a second signal ends what runs", args.name);
    clients.abort();
    dispatcher.drain(signals.next()).await;
    root.abort();
    dispatcher.refuse(tokio::time::timeout(FAREWELL, front.idle())).await;
    dispatcher.clean_up().await?;
    Ok(0)
}

/// Returns the bounds of the function.
///
/// # Errors
/// If they do not go together.
fn limits(args: &FunctionServeArgs) -> Result<Limits> {
    check_bound(args)?;
    let (concurrency, replicas) = (args.concurrency, args.replicas_per_sandbox);
    if replicas * (1 + concurrency) > MOST_PROCESSES {
        bail!(
            "{replicas} replicas with {concurrency} invocations each are more than a sandbox can \
             have: replicas and their invocations are at most {MOST_PROCESSES} together"
        );
    }
    if args.min_sandboxes > args.max_sandboxes {
        bail!("--min-sandboxes {} is more than {}", args.min_sandboxes, args.max_sandboxes);
    }
    if args.max_sandboxes * replicas * concurrency > MOST_INVOCATIONS {
        bail!(
            "{} sandboxes with {replicas} replicas have {} places for invocations: at most \
             {MOST_INVOCATIONS}",
            args.max_sandboxes,
            args.max_sandboxes * replicas * concurrency
        );
    }
    Ok(Limits {
        concurrency,
        replicas,
        least_sandboxes: args.min_sandboxes,
        sandboxes: args.max_sandboxes,
        queue: args.queue as usize,
        wait: args.queue_time,
        keep_alive: args.keep_alive,
    })
}

/// Checks settings beside memory of the replicas' own.
///
/// # Errors
/// If sandboxes with such replicas cannot have them.
fn check_bound(args: &FunctionServeArgs) -> Result<()> {
    let Some(bytes) = args.bind_memory else { return Ok(()) };
    let replicas = args.replicas_per_sandbox;
    if bytes == 0 {
        bail!("--bind-memory 0 is no memory; leave it out");
    }
    if replicas as usize > BOUND_CONTAINERS {
        bail!(
            "{replicas} replicas with memory of their own are too many for a sandbox: with \
             --bind-memory, --replicas-per-sandbox is at most {BOUND_CONTAINERS}"
        );
    }
    Ok(())
}

fn bounds(args: &FunctionServeArgs, limits: Limits) -> Bounds {
    let places = limits.sandboxes * limits.replicas * limits.concurrency;
    // A client that is alone has four fifths of the connections (`seats`).
    let invocations = (places as usize + limits.queue) * 5 / 4;
    Bounds {
        largest_body: usize::try_from(args.max_body).unwrap_or(usize::MAX),
        connections: invocations + MORE_CONNECTIONS,
        outcome: args.queue_time + args.timeout,
    }
}

/// Returns the settings of sandboxes and replicas.
///
/// # Errors
/// An argument is malformed.
fn plan(config: &Config, args: &FunctionServeArgs, digest: &str) -> Result<Plan> {
    let network = NetworkArgs { network: args.network.clone(), ..NetworkArgs::default() };
    let template = if args.from == spec::NONE { "" } else { args.from.as_str() };
    let mut holder = args.hold_with.split_whitespace().map(str::to_owned);
    let sandbox = v1::RunSpec {
        template: template.to_owned(),
        detach: true,
        makes_pod: true,
        bound_memory_bytes: args.bind_memory.unwrap_or(0),
        ..spec::machine(&args.machine, &network, &config.run_dir)?
    };
    let replica = v1::RunSpec {
        image: args.image.clone(),
        image_digest: digest.to_owned(),
        entrypoint: holder.next(),
        command: holder.collect(),
        env: spec::variables(&args.env),
        resources: Some(v1::Resources {
            memory_bytes: args.bind_memory.or(args.replica_memory).unwrap_or(0),
            ..v1::Resources::default()
        }),
        detach: true,
        ..v1::RunSpec::default()
    };
    Ok(Plan {
        name: args.name.clone(),
        sandbox,
        replica,
        command: args.command.clone(),
        timeout: args.timeout,
        largest_answer: usize::try_from(args.max_answer).unwrap_or(usize::MAX),
        zygote: args.zygote.then_some(args.ready_timeout),
    })
}

/// The signals that end the server.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn catch() -> Result<Self> {
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Returns when one of the signals comes.
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command, FunctionCommand};

    fn args(options: &[&str]) -> FunctionServeArgs {
        let words = ["slipway", "function", "serve"].iter().chain(options);
        let words = words.chain(&["f", "image", "--", "cat", "-n"]);
        match Cli::try_parse_from(words).unwrap().command {
            Command::Function(FunctionCommand::Serve(args)) => *args,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_is_not_said_is_as_in_the_paper() {
        let args = args(&[]);
        let limits = limits(&args).unwrap();
        assert_eq!((limits.concurrency, limits.replicas, limits.least_sandboxes), (1, 8, 0));
        let plan = plan(&Config::default(), &args, "sha256:0").unwrap();
        assert_eq!((plan.sandbox.template.as_str(), plan.sandbox.makes_pod), ("auto", true));
        assert_eq!(plan.replica.entrypoint.as_deref(), Some("sleep"));
        assert_eq!(plan.command, ["cat", "-n"]);
        assert_eq!(plan.zygote, None);
    }

    #[test]
    fn a_zygote_has_ten_seconds_and_no_limits_of_replicas() {
        let zygote =
            |options: &[&str]| plan(&Config::default(), &args(options), "sha256:0").unwrap().zygote;
        assert_eq!(zygote(&["--zygote"]), Some(Duration::from_secs(10)));
        assert_eq!(zygote(&["--zygote", "--ready-timeout", "1s"]), Some(Duration::from_secs(1)));
        for bad in [&["--zygote", "--replica-memory", "64M"][..], &["--ready-timeout", "1s"]] {
            let words = ["slipway", "function", "serve"].iter().chain(bad);
            assert!(Cli::try_parse_from(words.chain(&["f", "image", "--", "cat"])).is_err());
        }
    }

    #[test]
    fn replicas_with_memory_of_their_own_are_in_forks_unless_they_are_to_boot() {
        const SIZE: u64 = 64 << 20;
        let bound = args(&["--bind-memory", "64M"]);
        limits(&bound).unwrap();
        let plan = plan(&Config::default(), &bound, "sha256:0").unwrap();
        assert_eq!(plan.sandbox.bound_memory_bytes, SIZE);
        assert_eq!(plan.replica.resources.map(|limits| limits.memory_bytes), Some(SIZE));
        assert_eq!(plan.replica.bound_memory_bytes, 0);
        for (from, template) in [("auto", "auto"), ("web", "web"), ("none", "")] {
            let named = args(&["--bind-memory", "64M", "--from", from]);
            limits(&named).unwrap();
            let plan = super::plan(&Config::default(), &named, "sha256:0").unwrap();
            assert_eq!(plan.sandbox.template, template);
        }
        for (more, why) in
            [(["--replicas-per-sandbox", "9"], "at most 8"), (["--bind-memory", "0"], "no memory")]
        {
            let size: &[&str] = if why == "no memory" { &[] } else { &["--bind-memory", "64M"] };
            let error = limits(&args(&[size, &more].concat())).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        for other in [&["--zygote"][..], &["--replica-memory", "64M"], &["--max-memory", "1G"]] {
            let words = ["slipway", "function", "serve", "--bind-memory", "64M"];
            let words = [&words[..], other, &["f", "image", "--", "cat"]].concat();
            assert!(Cli::try_parse_from(words).is_err(), "{other:?}");
        }
    }

    #[test]
    fn bounds_that_do_not_go_together_are_refused() {
        for bad in [
            &["--concurrency", "6"][..],
            &["--min-sandboxes", "5", "--max-sandboxes", "4"],
            &["--max-sandboxes", "21"],
        ] {
            assert!(limits(&args(bad)).is_err(), "{bad:?}");
        }
        limits(&args(&["--concurrency", "5"])).unwrap();
        limits(&args(&["--max-sandboxes", "20"])).unwrap();
    }

    #[test]
    fn a_client_that_is_alone_can_fill_all_places_and_the_queue() {
        let args = args(&["--queue", "4000"]);
        let limits = limits(&args).unwrap();
        let bounds = bounds(&args, limits);
        assert!(bounds.connections * 4 / 5 >= 4000 + 32);
    }
}
