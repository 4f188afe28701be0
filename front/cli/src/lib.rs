//! The command lines of `slipway` and of `slipway-bench`, for people.
//!
//! `args` is the command line as data; every other file is one group of commands. `daemon`,
//! `keeper`, `fetch`, `function serve`, `socket engine` and `device-plugin` serve. The other
//! commands are clients of the daemon's socket (`client`), except `image`, `doctor`, `function`,
//! `pktgen`, `socket`, `completions`, `man` and benchmarks without guests, which need no daemon.
//!
//! Benchmarks are a program of their own, `slipway-bench`, which is installed beside `slipway` and
//! which `slipway bench` becomes: the program that runs containers carries none of them.
//!
//! Dependencies: `clap` (parser, help), `clap_complete` and `clap_mangen` (completions and man
//! pages from the same definition), `indicatif` (progress), `anyhow` (errors that are shown and
//! never matched on), `tokio`, `tokio-stream` and `tonic` (gRPC), `futures-util` (many starts at
//! once), `rustix` (terminals, locks), `libc` (signal numbers, `_exit`), `tempfile` (sockets and
//! files of benchmarks), `hyper` with `hyper-util` and `http-body-util` (servers of metrics and of
//! functions, and a client of the latter; tonic has them already), `prometheus-client` (the text
//! format of metrics), `serde_json` (`--json`), `tracing` with its subscriber (the daemon's log).

mod args;
mod bench;
mod client;
mod copy;
mod cp;
mod daemon;
mod device_plugin;
mod disk;
mod doctor;
mod endpoint;
mod fetch;
mod fork;
mod forward;
mod function;
mod image;
mod import_memory;
mod keeper;
mod live;
mod manage;
mod metrics;
mod network;
mod out;
mod pci;
mod pktgen;
mod pod;
mod pool;
mod port;
mod port_tools;
mod progress;
mod report;
mod run;
mod security;
mod session;
mod size;
mod snapshot;
mod snoop;
mod socket;
mod spec;
mod stats;
mod systemd;
mod table;
mod target;
mod template;
mod tmpfs;
mod vf;
mod vmm;
mod volume;

use std::ffi::OsString;

use anyhow::{Context, Result};
use clap::{CommandFactory, Parser};
use slipway_runtime::Config;

use crate::args::{BenchCli, BenchCommand, Cli, Command, PodCommand, SocketCommand};
use crate::out::{FAILURE, OWN_FAILURE, complain, draw};

/// Runs the program `slipway`, and ends it.
pub fn slipway() -> ! {
    let cli = Cli::try_parse().unwrap_or_else(|error| end_usage(&error));
    end(dispatch(&cli), failure(&cli.command))
}

/// Runs the program `slipway-bench`, and ends it.
pub fn slipway_bench() -> ! {
    let cli = BenchCli::try_parse().unwrap_or_else(|error| end_usage(&error));
    end(measure(&cli), FAILURE)
}

/// Returns the exit status of a command that failed. One whose status is otherwise that of what it
/// runs has a status of its own for that, as docker has.
fn failure(command: &Command) -> i32 {
    match command {
        Command::Run(_) | Command::Exec(_) | Command::Attach(_) | Command::Fork(_) => OWN_FAILURE,
        Command::Pod(PodCommand::Create(_) | PodCommand::Run(_) | PodCommand::Exec(_)) => {
            OWN_FAILURE
        }
        Command::Socket(SocketCommand::Run(_)) => OWN_FAILURE,
        _ => FAILURE,
    }
}

/// Ends the program after its command, with status `failure` if that has failed.
fn end(outcome: Result<i32>, failure: i32) -> ! {
    let status = outcome.unwrap_or_else(|error| {
        complain(&error);
        failure
    });
    // A normal return would wait for threads that read a terminal.
    std::process::exit(status);
}

/// Has the program write its log to standard error.
fn log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("SLIPWAY_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .init();
}

/// Prints help and version as clap does, and a usage error as one line, with the usual status 2.
fn end_usage(error: &clap::Error) -> ! {
    let help = clap::error::ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand;
    if !error.use_stderr() || error.kind() == help {
        error.exit();
    }
    eprintln!("slipway: {}; --help tells more", usage_line(&error.to_string()));
    std::process::exit(2);
}

/// Returns clap's text of a usage error as one line: the error, and its tips behind semicolons.
fn usage_line(text: &str) -> String {
    let told = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let told = told.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more"));
    // Behind `--` an option that was mistyped would be taken for an image, a name or a command.
    let told = told.filter(|line| !line.starts_with("tip: to pass "));
    let parts = told.flat_map(|line| match line.strip_prefix("tip: ") {
        Some(tip) => ["; ", tip],
        None => [" ", line],
    });
    let line = parts.collect::<String>();
    let line = line.trim_start();
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

fn dispatch(cli: &Cli) -> Result<i32> {
    log();
    match &cli.command {
        Command::Completions { shell } => {
            // The generator panics if it cannot write, as to a pipe whose reader has left.
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut Cli::command(), "slipway", &mut script);
            draw(format_args!("{}", String::from_utf8_lossy(&script)));
            return Ok(0);
        }
        Command::Man { dir } => {
            std::fs::create_dir_all(dir)?;
            clap_mangen::generate_to(Cli::command(), dir)?;
            return Ok(0);
        }
        // These commands read the settings themselves, if they need them.
        Command::Socket(args) => return socket::command(&cli.node, args),
        Command::Bench(_) => return becomes_bench(),
        _ => {}
    }
    let config = client::config(&cli.node)?;
    if matches!(cli.command, Command::Keeper) {
        return keeper::serve(&config);
    }
    block_on(command(cli, config))
}

/// Runs a command to its end.
fn block_on(command: impl Future<Output = Result<i32>>) -> Result<i32> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(command);
    // A blocked helper thread must not delay the end of the command.
    runtime.shutdown_background();
    outcome
}

/// Replaces this program by that of the benchmarks, with the same arguments.
fn becomes_bench() -> Result<i32> {
    use std::os::unix::process::CommandExt;
    let program = slipway_bench::slipway()?.with_file_name(slipway_bench::BENCH);
    let error = std::process::Command::new(&program)
        .arg0("slipway bench")
        .args(bench_arguments(std::env::args_os().skip(1)))
        .exec();
    Err(error)
        .with_context(|| format!("cannot run {}: `make install` brings it", program.display()))
}

/// Returns the arguments of `slipway` without the word `bench`. Only options of the node, each with
/// a value, may come before that word.
fn bench_arguments(all: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let (mut kept, mut value, mut found) = (Vec::new(), false, false);
    for argument in all {
        let is_word = !found && !value && !argument.as_encoded_bytes().starts_with(b"--");
        value = !found && !value && !is_word && !argument.as_encoded_bytes().contains(&b'=');
        found |= is_word;
        if !is_word {
            kept.push(argument);
        }
    }
    kept
}

/// Runs a benchmark.
fn measure(cli: &BenchCli) -> Result<i32> {
    log();
    match &cli.command {
        BenchCommand::Block(args) => bench::block(&cli.node, args),
        BenchCommand::Packet(args) => bench::packet(&cli.node, args),
        BenchCommand::Socket(args) => bench::socket(args),
        BenchCommand::Vmm(args) => bench::vmm(args),
        BenchCommand::Attach(args) => bench::attach(args),
        BenchCommand::Roots(args) => bench::roots(args),
        BenchCommand::Memory(args) => bench::memory(args),
        BenchCommand::Cgroups(args) => bench::cgroups(args),
        BenchCommand::Function(args) => bench::function(&cli.node, args),
        BenchCommand::MemoryUser(args) => bench::memory_user(args),
        BenchCommand::SocketLoad(args) => bench::socket_load(args),
        BenchCommand::Target(args) => bench::target(args),
        BenchCommand::PacketTarget(args) => bench::packet_target(args),
        BenchCommand::Startup(args) => {
            let config = client::config(&cli.node)?;
            bench::startup(&cli.node, &config, args)
        }
        BenchCommand::Density(args) => {
            let config = client::config(&cli.node)?;
            bench::density(&cli.node, &config, args)
        }
    }
}

async fn command(cli: &Cli, config: Config) -> Result<i32> {
    match &cli.command {
        Command::Run(args) => return run::run(&cli.node, &config, args).await,
        Command::Cp(args) => return cp::cp(&cli.node, &config, args).await,
        Command::Exec(args) => return run::exec(&cli.node, &config, args).await,
        Command::Attach(args) => return run::attach(&cli.node, &config, &args.name).await,
        Command::Pod(command) => return pod::command(&cli.node, &config, command).await,
        Command::Template(command) => {
            return template::command(&cli.node, &config, command).await;
        }
        Command::Snapshot(command) => {
            return snapshot::command(&cli.node, &config, command).await;
        }
        Command::Fork(args) => return fork::fork(&cli.node, &config, args).await,
        Command::Function(command) => return function::command(&cli.node, &config, command).await,
        Command::PortForward(args) => return forward::forward(&cli.node, &config, args).await,
        Command::Image(command) => return image::command(&config, command).await,
        Command::Fetch => return fetch::serve(&config).await,
        Command::Endpoint(command) => {
            return endpoint::command(&cli.node, &config, command).await;
        }
        Command::Inspect(args) if args.live => {
            return live::inspect(&cli.node, &config, args).await;
        }
        Command::Snoop(args) => return snoop::snoop(&cli.node, &config, args).await,
        Command::Disk(command) => return disk::command(&cli.node, &config, command).await,
        Command::Vf(command) => return vf::command(&cli.node, &config, command).await,
        Command::DevicePlugin(args) => return device_plugin::device_plugin(&config, args).await,
        Command::Pool(args) => return pool::pool(&cli.node, &config, args).await,
        Command::Metrics(args) => return metrics::metrics(&config, args).await,
        Command::Network(command) => return network::command(&cli.node, &config, command).await,
        Command::Port(command) => return port::command(&cli.node, &config, command).await,
        Command::Pktgen(command) => return pktgen::command(&config, command).await,
        Command::Doctor(args) => return doctor::doctor(&config, args).await,
        Command::Daemon(args) => return daemon::serve(config, args).await,
        Command::Completions { .. } | Command::Man { .. } => return Ok(0),
        _ => {}
    }
    let client = client::connect(&cli.node, &config).await?;
    match &cli.command {
        Command::Ps(args) => manage::ps(client, args).await,
        Command::Logs(args) => manage::logs(client, &config, args).await,
        Command::Wait(args) => manage::wait(client, &config, args).await,
        Command::Stop(args) => manage::stop(client, args).await,
        Command::Kill(args) => manage::kill(client, args).await,
        Command::Pause(args) => manage::pause(client, args).await,
        Command::Resume(args) => manage::resume(client, args).await,
        Command::Rm(args) => manage::rm(client, args).await,
        Command::Update(args) => manage::update(client, args).await,
        Command::Inspect(args) => manage::inspect(client, args).await,
        Command::Stats(args) => stats::stats(client, args).await,
        _ => Ok(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_lines_are_consistent() {
        Cli::command().debug_assert();
        BenchCli::command().debug_assert();
    }

    /// Returns the line that a usage error of these words becomes.
    fn usage_error(words: &str) -> String {
        usage_line(&Cli::try_parse_from(words.split(' ')).unwrap_err().to_string())
    }

    #[test]
    fn a_usage_error_is_a_line_that_names_what_was_meant() {
        let line = usage_error("slipway run --gpus /x image");
        assert!(line.starts_with("unexpected argument '--gpus' found"), "{line}");
        let line = usage_error("slipway run --tmpfs /x:size=y image");
        assert!(line.contains("--tmpfs") && line.contains("is no size"), "{line}");
        let line = usage_error("slipway iamge ls");
        assert!(line.contains("; some similar") || line.contains("; a similar"), "{line}");
        assert!(!line.contains("tip:") && !line.contains('\n'), "{line}");
        let line = usage_error("slipway update web");
        assert!(line.contains("--cpus") && line.contains("--memory"), "{line}");
    }

    #[test]
    fn a_container_of_a_pod_is_asked_for_in_two_ways() {
        for ways in ["run --pod p", "pod run p"] {
            let words = format!("slipway {ways} --share-processes image");
            assert!(Cli::try_parse_from(words.split(' ')).is_ok(), "{words}");
            for other in ["--count 2", "--from t"] {
                let words = format!("slipway {ways} {other} image");
                assert!(usage_error(&words).contains("cannot be used with"), "{words}");
            }
        }
        assert!(usage_error("slipway pod run p --pod q image").contains("cannot be used with"));
        assert!(usage_error("slipway run --share-processes image").contains("--pod"));
    }

    #[test]
    fn only_what_runs_something_has_a_failure_of_its_own() {
        let of = |words: &str| failure(&Cli::try_parse_from(words.split(' ')).unwrap().command);
        for words in ["run image", "exec web true", "attach web", "fork web", "pod exec p/a true"] {
            assert_eq!(of(&format!("slipway {words}")), 125, "{words}");
        }
        for words in ["ps", "inspect web", "logs web", "stats web", "update web --cpus 2", "pod ps"]
        {
            assert_eq!(of(&format!("slipway {words}")), 1, "{words}");
        }
    }

    /// Returns the commands below `command` that show something and have no flag `--json`.
    fn without_json(command: &clap::Command, path: &str) -> Vec<String> {
        let show = ["doctor", "inspect", "ls", "pool", "ps", "stats"];
        let mut all = Vec::new();
        for one in command.get_subcommands() {
            let path = format!("{path} {}", one.get_name());
            let has_json = one.get_arguments().any(|argument| argument.get_long() == Some("json"));
            if show.contains(&one.get_name()) && !has_json {
                all.push(path.clone());
            }
            all.extend(without_json(one, &path));
        }
        all
    }

    #[test]
    fn what_is_shown_can_be_had_as_json() {
        assert_eq!(without_json(&Cli::command(), "slipway"), Vec::<String>::new());
        let words = ["slipway", "inspect", "--json", "web"];
        let Command::Inspect(args) = Cli::try_parse_from(words).unwrap().command else {
            panic!("{words:?}")
        };
        assert_eq!((args.names, args.json, args.live), (vec!["web".to_owned()], true, false));
        let parsed = |words: &[&str]| Cli::try_parse_from(words).map(|cli| cli.command);
        assert!(parsed(&["slipway", "inspect"]).is_err(), "a name is needed");
        assert!(parsed(&["slipway", "inspect", "--live"]).is_ok(), "but for everything");
    }

    #[test]
    fn the_arguments_of_a_benchmark_are_those_of_slipway_without_a_word() {
        let kept = |all: &[&str]| bench_arguments(all.iter().map(OsString::from));
        assert_eq!(kept(&["bench", "block", "--quick"]), ["block", "--quick"]);
        let before = ["--run-dir", "bench", "--config=bench", "bench", "socket", "bench"];
        assert_eq!(kept(&before), ["--run-dir", "bench", "--config=bench", "socket", "bench"]);
    }
}
